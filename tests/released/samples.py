"""One sample of each message and file that is exchanged between versions, as this version makes it."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from orchestrator.checkpoint.repository.persister import StoreSettings
from orchestrator.checkpoint.repository.status import PersisterStatus
from orchestrator.core.diagnosis.observation import ProcessSeen, StorageSeen
from orchestrator.core.events import Exit, MemoryUse
from orchestrator.core.states import OutOf, StopScope
from orchestrator.runtime.exporters.actor import ExporterAccess
from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport
from orchestrator.runtime.nodes.files import LogLocation, LogPart
from orchestrator.runtime.nodes.working_copy import Output, Outputs
from orchestrator.runtime.ranks.actor import RankGreeting
from orchestrator.runtime.ranks.launch_spec import RankPlan, SnapshotPlan
from orchestrator.runtime.ranks.rank_events import PollCursor, PollReply, RankEvent
from orchestrator.train.script.progress_facts import CheckpointFacts, ProgressSnapshot

if TYPE_CHECKING:
    from collections.abc import Mapping

END: Final = Exit(
    rank=1,
    exit_code=None,
    signal=9,
    at=1_700_000_010.5,
    error_type="ValueError",
    error_message="grüße",
    error_at=1_700_000_010.25,
    log_tail=("one", "two"),
    stop_seen_at=1_700_000_009.0,
    stop_scope=StopScope.RANK,
    last_step=41,
    total_steps=100,
    memory=MemoryUse(used_bytes=5, limit_bytes=6, killed=OutOf.LIMIT),
)
EVENT: Final = RankEvent(number=3, kind="exited", at=1_700_000_010.5, pid=77, cold="MALLOC_ARENA_MAX", exit=END)
PROGRESS: Final = ProgressSnapshot(
    writer_pid=77,
    step=41,
    max_step=42,
    total_steps=100,
    phase="train",
    metrics={"loss": 0.5},
    new_step=42,
    new_step_at=1_700_000_008.0,
    recent_step_seconds=(0.1, 0.2),
    checkpoint=CheckpointFacts(saved_step=40, saved_at=1_700_000_007.0, saved_path="/c/step-40", saved_bytes=9),
)
SAVED: Final = PersisterStatus(
    step=40, attempt=2, path="/c/step-000000000040-a2", bytes=9, at=1_700_000_007.0, digest="ab"
)
MESSAGES: Final[tuple[Any, ...]] = (
    RankGreeting(
        node_id="n", pid=7, address="10.0.0.1", gpu_ids=("0", "1"), launched=2, port=29500, highest_step=41, prepared=2
    ),
    END,
    EVENT,
    PROGRESS,
    SAVED,
    PollCursor(event=3, progress=4, persisted=5, processes=6),
    PollReply(
        cursor=PollCursor(event=3, progress=4, persisted=5, processes=6),
        events=(EVENT,),
        progress=PROGRESS,
        persisted=SAVED,
        log_lost="12 lines",
        processes=ProcessSeen(at=5.0, rank=1, cpu_seconds=2.5, resident_bytes=9, looks=4, asleep=1, locked=2),
        storage=StorageSeen(rank=1, failures=2, failing_since=1_700_000_000.0, cause="ENOSPC", said="full"),
    ),
    NodeReport(
        node_id="n",
        hostname="host1",
        agent_pid=8,
        version="0.1.0",
        python="/venv/bin/python",
        node_dir="/tmp/orch-0/a/n",
        simulated_node="n",
        home_shared=True,
        home="/home/a/.orch",
        gpus=(NodeGpu(index=0, uuid="GPU-1", model="H100", simulated=False, vendor="nvidia"),),
        problems=("the driver does not answer",),
    ),
    LogPart(attempt=1, rank=0, place=LogLocation(inode=3, offset=9), data=b"line\n"),
    Outputs(files=(Output(path="out/a", size_bytes=3, mode=0o600),), left_files=1, left_bytes=2),
    ExporterAccess(address="node", ports=(9477, 9599), token="secret", processes=True),
    RankPlan(
        mode="script",
        target="train.py",
        args=("--lr", "0.1"),
        cwd="/work",
        env={"A": "1"},
        threads=2,
        job_id="digits-k3f9q2",
        attempt=2,
        rank=1,
        python="/venv/bin/python",
        fork_socket="/tmp/f.sock",
        log_dir="/logs",
        exit_record="/exits/2.1",
        page="/dev/shm/p",
        previous_step=40,
        snapshots=SnapshotPlan(directory="/dev/shm/s", settings=StoreSettings(root="/c")),
        secrets=("s3cret",),
        umask=0o77,
    ),
)
"""Messages that daemon, rank actors, node agents and exporters pickle for one another."""

REQUEST: Final[Mapping[str, Any]] = {
    "protocol": 1,
    "op": "spawn",
    "mode": "script",
    "target": "train.py",
    "args": ["--lr", "0.1"],
    "python_options": ["-u"],
    "cwd": "/work",
    "env": {"A": "1", "NAME": "gr\udcfc"},
    "threads": 2,
    "cold": False,
    "exit_record": "/exits/2.1",
    "page": "/dev/shm/p",
    "record": {"job": "digits-k3f9q2", "attempt": 2, "rank": 1},
    "memory_bytes": 1 << 30,
    "umask": 63,
    "secrets": ["s3cret"],
    "fds": ["stdout", "stderr", "lifeline"],
}
"""Request of a client to a fork server."""


def plain(value: Any) -> Any:
    """Return a value in JSON's types: records by their fields' names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {
            name: plain(getattr(value, name)) for name in names if hasattr(value, name)
        }  # an earlier version lacks some fields
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def holds(found: Any, told: Any) -> bool:
    """Whether a value read by this version has all that an earlier one wrote; it may have more fields."""
    if isinstance(told, dict) and isinstance(found, dict):
        return all(name in found and holds(found[name], value) for name, value in told.items())
    if isinstance(told, list) and isinstance(found, list):
        return len(found) == len(told) and all(map(holds, found, told))
    return bool(found == told)
