"""Helpers that run whole jobs on a fork server: a rendezvous store, N ranks with orch's environment, their output."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import ErrorRaised, Event, Exited, ForkServerClient, Lifeline, Started
from orchestrator.runtime.spawn.environment import node_environment, rank_environment
from tests.integration.forkserver_fixture import ENVIRONMENT
from tests.support.processes import own_umask
from tests.support.stack import PATIENCE_SECONDS

DEADLINE = timedelta(seconds=PATIENCE_SECONDS)


@dataclass
class Rank:
    """One started rank: its lifeline, keeper, files and events."""

    asked_at: float
    lifeline: Lifeline
    keeper_pid: int
    stdout_path: Path
    stderr_path: Path
    record_path: Path
    events: list[Event] = field(default_factory=list)

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text()

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def event(self, kind: type) -> Any:
        return next((event for event in self.events if isinstance(event, kind)), None)

    @property
    def exited(self) -> Exited:
        found = self.event(Exited)
        assert found is not None, self.events
        return found

    @property
    def started(self) -> Started:
        found = self.event(Started)
        assert found is not None, (self.events, self.stderr)
        return found

    @property
    def error(self) -> ErrorRaised | None:
        return self.event(ErrorRaised)

    async def finish(self) -> Rank:
        async with asyncio.timeout(DEADLINE.total_seconds()):
            self.events += [event async for event in self.lifeline]
        self.lifeline.close()
        return self


async def start_store(client: ForkServerClient, directory: Path) -> tuple[Lifeline, int]:
    """Start a rendezvous store; return its lifeline and its port."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        log = stack.enter_context((directory / "store.log").open("ab"))
        spawned = await client.spawn(
            SpawnRequest(mode="store", cwd=str(directory), env=ENVIRONMENT),
            stdout=log.fileno(),
            stderr=log.fileno(),
            listen=listener.fileno(),
        )
        return spawned.lifeline, int(listener.getsockname()[1])


def environment(
    directory: Path,
    rank: int,
    world_size: int,
    port: int,
    job_env: Mapping[str, str],
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    node = node_environment(
        base=ENVIRONMENT if base is None else base,
        job_env=job_env,
        job_id="parity",
        attempt=1,
        world_size=world_size,
        local_world_size=world_size,
        group_rank=0,
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=port,
        restart_count=0,
        max_restarts=0,
        visible_gpus=(),
        checkpoint_dir=str(directory / "checkpoints"),
        resume_from=None,
    )
    return rank_environment(node, rank=rank, local_rank=rank, progress_path=None)


async def start_rank(client: ForkServerClient, directory: Path, request: SpawnRequest, name: str = "0") -> Rank:
    out, err = directory / f"{name}.out", directory / f"{name}.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        asked_at = time.time()
        spawned = await client.spawn(request, stdout=stdout.fileno(), stderr=stderr.fileno())
    assert request.exit_record is not None
    return Rank(asked_at, spawned.lifeline, spawned.keeper_pid, out, err, Path(request.exit_record))


async def run_ranks(
    client: ForkServerClient,
    directory: Path,
    world_size: int,
    target: str,
    args: Sequence[str] = (),
    *,
    mode: str = "script",
    cold: bool = False,
    cwd: Path | None = None,
    job_env: Mapping[str, str] | None = None,
    base: Mapping[str, str] | None = None,
    store: bool = True,
) -> list[Rank]:
    """Run a job to its end; return its ranks."""
    lifeline, port = await start_store(client, directory) if store else (None, 1)
    try:
        ranks = [
            await start_rank(
                client,
                directory,
                SpawnRequest(
                    mode=mode,
                    target=target,
                    args=tuple(args),
                    cwd=str(cwd or directory),
                    cold=cold,
                    env=environment(directory, rank, world_size, port, job_env or {}, base),
                    exit_record=str(directory / f"{rank}.exit.json"),
                    umask=own_umask(),
                ),
                str(rank),
            )
            for rank in range(world_size)
        ]
        return list(await asyncio.gather(*(rank.finish() for rank in ranks)))
    finally:
        if lifeline is not None:
            lifeline.kill()
            async with asyncio.timeout(DEADLINE.total_seconds()):
                async for _ in lifeline:
                    pass
            lifeline.close()
