"""The Ray cluster under the daemon: an embedded head that outlives it, or somebody's cluster.

Owns the connection, the head's processes, and the node agents. Every blocking call of Ray runs in a thread, with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.cluster import Node
from orchestrator.private_files import make_private, remove_private
from orchestrator.runtime.cluster.gpu_reservations import GpuHolds, still_there
from orchestrator.runtime.cluster.head_processes import (
    Head,
    end_fork_server,
    is_alive,
    kill_session,
    ray_environment,
    read_head,
    write_head,
)
from orchestrator.runtime.cluster.head_start import SYSTEM_CONFIG, ClusterError, launch_head, start_seconds
from orchestrator.runtime.cluster.late_agents import LateAgents
from orchestrator.runtime.cluster.prestart import (
    GUEST_KEEP_ALIVE_SECONDS,
    KEEP_ALIVE_SECONDS,
    idle_workers,
    prestart_workers,
)
from orchestrator.runtime.cluster.serializers import forgo_foreign_serializers
from orchestrator.runtime.cluster.signal_handlers import restore_handlers
from orchestrator.runtime.deadline import within
from orchestrator.runtime.names import SERVICES, agent_name, namespace
from orchestrator.runtime.nodes.directories import (
    check_places,
    fork_socket,
    make_node_directory,
    node_directory,
    page_directory,
)
from orchestrator.runtime.nodes.ray_nodes import NOTHING, Held, answers, held_by_others, list_nodes, token_from
from orchestrator.runtime.own_thread import in_own_thread
from orchestrator.runtime.ranks.actor import FENCE_SECONDS
from orchestrator.runtime.spawn.client import StartedServer, start_fork_server
from orchestrator.spec import token_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from orchestrator.runtime.nodes.agent import NodeGpu, NodeReport
    from orchestrator.runtime.nodes.ray_nodes import RayNode
    from orchestrator.spec.paths import Paths

CALL_SECONDS: Final = 30.0
OBJECT_STORE_BYTES: Final = 80 * 1024 * 1024  # Ray's minimum is 75 MB; nothing large travels through it
MEET_SECONDS: Final = 10.0  # how long a round waits for the agents of new nodes; those that take longer are met later
AGAIN_SECONDS: Final = 5.0  # a driver that hangs must not hold up what is known of other nodes
SETTLE_SECONDS: Final = 0.3  # Ray's own numbers trail what happened by less
LOOPBACK: Final = "127.0.0.1"
RAYLET_PID: Final = "RAY_RAYLET_PID"
RECONNECT_SECONDS: Final = "RAY_gcs_rpc_server_reconnect_timeout_s"
OF_THE_DRIVER: Final = (RAYLET_PID, RECONNECT_SECONDS)
CALLS_AT_ONCE: Final = 8
FOR_EVER_SECONDS: Final = 10**6
LEAVE_SECONDS: Final = 120.0  # it takes 2 s, and up to 23 s were seen with calls to the dead head under way


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """``address`` None: an embedded head. ``simulate_gpus`` per node; None takes the GPUs that are there."""

    address: str | None = None
    simulate_gpus: int = 0
    num_cpus: int | None = None
    warm_workers: int = 2


class Cluster:
    """See the module. ``on_lost`` is called, in the loop's thread, when the embedded head has died.

    ``own_groups`` names the placement groups that this daemon's jobs hold: whatever else is in use is other people's.
    """

    def __init__(
        self,
        paths: Paths,
        options: ClusterOptions,
        *,
        on_lost: Callable[[], None],
        own_groups: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._paths = paths
        self._options = options
        self._on_lost = on_lost
        self._own_groups = own_groups
        self.namespace = namespace(paths.home)
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self._token: str | None = None
        self._head: Head | None = None
        self._beginning: asyncio.Task[StartedServer] | None = None  # of the fork server beside a new head
        self._began_head = False  # by this process: what a start that fails has to take back
        self._connecting: asyncio.Task[None] | None = None
        self._watch: list[int] = []
        self.agents: dict[str, Any] = {}
        self.reports: dict[str, NodeReport] = {}
        self.lost_gpus: dict[str, tuple[NodeGpu, ...]] = {}  # by node: those that were there when it was met
        self.holds = GpuHolds(self)
        self._first_gpus: dict[str, tuple[NodeGpu, ...]] = {}
        self.silent: dict[str, str] = {}  # nodes that do not answer though Ray counts them as alive, and what is wrong
        self._late_agents = LateAgents(self)
        self._meetings: dict[str, asyncio.Task[None]] = {}
        self._others: dict[str, Held] = {}
        self._dead_since: dict[str, float] = {}
        self._home_token = ""
        self._connection = asyncio.Event()
        self.epoch = 0  # heads that have died: what was begun under one must not go on under the next

    async def call(self, function: Callable[..., Any], *args: Any, seconds: float = CALL_SECONDS, **kwargs: Any) -> Any:
        """Run a blocking call of Ray in a thread of its own. Raises TimeoutError; the thread is left to finish.

        A call to a head that has died may never return: it holds up neither other calls nor the end of the process.
        """
        async with asyncio.timeout(seconds), self._turns:
            return await in_own_thread(lambda: function(*args, **kwargs))

    async def start(self) -> None:
        """Find or start the head, connect, and put an agent on every node. Raises ClusterError."""
        try:
            make_private(self._paths.ray)
            if self.embedded:
                check_places(self.namespace)
        except OSError as error:
            raise ClusterError(str(error)) from error
        self._home_token = self._keep_home_token()
        # Ray ends a driver whose raylet has died when its parent is init, as a daemon's is; told of a process to watch
        # in place of the parent, it watches that. This one lives as long as it lives.
        os.environ[RAYLET_PID] = str(os.getpid())
        address = self._options.address
        try:
            address = await self._embedded_address() if address is None else self._guest_address(address)
        except token_file.TokenFileError as error:
            raise ClusterError(f"{error.message}; {error.remedy}" if error.remedy else error.message) from error
        await self._enter(address)
        await self.refresh()
        self._connection.set()
        await self.warm()

    def _guest_address(self, address: str) -> str:
        self._token = token_from(os.environ)
        return address

    async def _embedded_address(self) -> str:
        # Ray ends a driver that was asking a head that has died, a minute later. Here the head is started again.
        os.environ[RECONNECT_SECONDS] = str(FOR_EVER_SECONDS)
        self._prepare_environment()
        self._head = await self._find_head()
        if self._head is None:
            self._began_head = True
            self._head = await self._start_head()
        self._watch_head(self._head)
        return self._head.gcs_address

    async def _enter(self, address: str) -> None:
        seconds = start_seconds()
        self._connecting = asyncio.create_task(self._connect_to(address))
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._connecting)
        except Exception as error:
            reason = f"no answer within {seconds:.0f} s" if isinstance(error, TimeoutError) else str(error)
            where = f"; its logs are below {self._paths.ray}" if self.embedded else ""
            raise ClusterError(f"cannot connect to Ray at {address}: {reason}{where}") from error

    async def _connect_to(self, address: str) -> None:
        try:
            await in_own_thread(lambda: self._connect(address))
        finally:
            restore_handlers()

    async def _end_connecting(self) -> None:
        """Let a connection that is being made come up or fail: Ray aborts the process whose head dies under it."""
        if self._connecting is not None:
            await asyncio.wait({self._connecting}, timeout=start_seconds())

    async def abandon(self) -> None:
        """Take back what a start that failed has begun: the head of this process, and what was forked from beside it.

        A head that was there before is left alone: jobs may run on it.
        """
        self._unwatch_head()
        for task in self._meetings.values():
            task.cancel()
        await asyncio.gather(*self._meetings.values(), return_exceptions=True)
        self._meetings.clear()
        self._connection.clear()
        await self._end_connecting()
        await self._leave(AGAIN_SECONDS)
        began, self._began_head = self._began_head, False
        if not began or not self.embedded:
            return
        await self._end_fork_server()
        head, self._head = read_head(self._paths.ray / "head.json"), None
        if head is not None:
            await asyncio.to_thread(kill_session, head)
        (self._paths.ray / "head.json").unlink(missing_ok=True)
        await asyncio.to_thread(self._remove_node_state)

    def _keep_home_token(self) -> str:
        """What a node reads here if it shares the home; kept, because agents outlive the daemon that told them of it."""
        path = self._home_token_path()
        with contextlib.suppress(FileNotFoundError):
            return path.read_text()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(16))
        return path.read_text()

    def _home_token_path(self) -> Path:
        """Among the jobs: their directory is all of the home that other nodes have to share."""
        return self._paths.jobs / ".home-token"

    def _prepare_environment(self) -> None:
        token = self._paths.ray / "token"
        if not token.exists():
            handle = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.write(handle, secrets.token_hex(32).encode())
            os.close(handle)
        self._token = token_file.read(token)
        os.environ.update(ray_environment(token))

    def _connect(self, address: str) -> None:
        import ray

        forgo_foreign_serializers()
        ray.init(
            address=address,
            namespace=self.namespace,
            log_to_driver=False,
            configure_logging=False,
            ignore_reinit_error=False,
        )

    async def _find_head(self) -> Head | None:
        head = read_head(self._paths.ray / "head.json")
        if head is None or all(is_alive(pid, created) for pid, created in head.pids.values()):
            return head
        await asyncio.to_thread(kill_session, head)
        return None

    async def _start_head(self) -> Head:
        """A new head. What its first jobs are forked from becomes warm meanwhile, and the node's agent finds it."""
        self._beginning = asyncio.create_task(asyncio.to_thread(self._begin_fork_server))
        try:
            head = await self._launch_head()
        except BaseException:
            await self._end_fork_server()
            raise
        await asyncio.wait({self._beginning})
        self._beginning.exception()  # taken note of: the agent tries again, and tells
        return head

    async def _end_fork_server(self) -> None:
        """End the fork server that was begun with the head; one that was there before is left alone."""
        begun, self._beginning = self._beginning, None
        if begun is None:
            return
        await asyncio.wait({begun})  # a thread: it cannot be told to stop, and what it starts has to be known
        server = None if begun.exception() is not None else begun.result()
        if server is not None and not server.already_running:
            self._own_fork_socket().unlink(missing_ok=True)
            await asyncio.to_thread(end_fork_server, server.pid)

    def _own_fork_socket(self) -> Path:
        return fork_socket(self.node_dir("local"), sys.executable)

    def _begin_fork_server(self) -> StartedServer:
        """Raises ForkServerError; the agent tries again, and tells."""
        from orchestrator.runtime.nodes.agent import PRELOAD

        path = self._own_fork_socket()
        env = {name: value for name, value in os.environ.items() if name not in OF_THE_DRIVER}
        return start_fork_server(sys.executable, path, path.with_suffix(".log"), PRELOAD, env=env)

    async def _launch_head(self) -> Head:
        options = {
            "num_cpus": self._options.num_cpus or os.cpu_count() or 1,
            "num_gpus": await asyncio.to_thread(self._count_gpus),
            "resources": {},
            "labels": {},
            "object_store_bytes": OBJECT_STORE_BYTES,
            "address": LOOPBACK,
            "port": 0,
            "temp_dir": str(self._short_temp_dir()),
            "system_config": SYSTEM_CONFIG,
        }
        environ = {name: value for name, value in os.environ.items() if name not in OF_THE_DRIVER}
        head = await launch_head(options, self._short_temp_dir(), environ)
        write_head(self._paths.ray / "head.json", head)
        return head

    def _short_temp_dir(self) -> Path:
        """Where Ray makes Unix sockets, whose paths are at most 107 bytes; about 60 of them are Ray's own. See head.py."""
        wanted = self._paths.ray / "s"
        if len(os.fsencode(wanted)) <= 40:
            return wanted
        return make_node_directory(self.namespace, "ray")

    def _count_gpus(self) -> int:
        from orchestrator.gpu.drivers.inventory import discover

        return self._options.simulate_gpus or len(discover())

    def _watch_head(self, head: Head) -> None:
        loop = asyncio.get_running_loop()
        for pid, _created in head.pids.values():
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                loop.call_soon(self._head_died)
                return
            loop.add_reader(handle, self._head_died)
            self._watch.append(handle)

    def _unwatch_head(self) -> None:
        loop = asyncio.get_running_loop()
        for handle in self._watch:
            loop.remove_reader(handle)
            os.close(handle)
        self._watch = []

    def _head_died(self) -> None:
        self._unwatch_head()
        self._connection.clear()
        self.epoch += 1
        self._on_lost()

    async def restart(self) -> None:
        """After the head's death: clear away what is left of it, start another, connect."""
        self._unwatch_head()
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)  # calls to the dead head may keep theirs
        self.agents, self.reports, self.lost_gpus = {}, {}, {}
        self.holds.forget_all()
        for task in self._meetings.values():
            task.cancel()
        self._meetings.clear()
        head, self._head = self._head, None
        if head is not None:
            await asyncio.to_thread(kill_session, head)
        (self._paths.ray / "head.json").unlink(missing_ok=True)
        # Leaving a dead cluster takes Ray some seconds; the new head starts meanwhile, and start() finds it.
        await asyncio.gather(self._leave(), self._start_head())
        await self.start()

    def _remove_node_state(self) -> None:
        """Sockets, locks and pages of a head that has ended: nothing is left that they could belong to."""
        remove_private(self.node_dir("local").parent)
        remove_private(page_directory(self.namespace))

    async def _leave(self, seconds: float = LEAVE_SECONDS) -> None:
        """Disconnect, without waiting for a turn: calls to a head that is dead or hangs may have them all."""
        with contextlib.suppress(Exception):
            await within(seconds, in_own_thread(_disconnect))

    def node_dir(self, node_id: str) -> Path:
        """A node's directory. The embedded head's outlives it: fork servers and locks are found again by the next one."""
        return node_directory(self.namespace, node_id if self._options.address is not None else "local")

    async def stop(self, *, stop_head: bool) -> None:
        """Disconnect; with ``stop_head`` the embedded head ends too, or, on somebody's cluster, whatever orch has there."""
        self._unwatch_head()
        for task in self._meetings.values():
            task.cancel()
        await asyncio.gather(*self._meetings.values(), return_exceptions=True)
        self._meetings.clear()
        if stop_head:
            await asyncio.gather(*(self._shut_down(agent) for agent in self.agents.values()))
            if not self.embedded:
                with contextlib.suppress(Exception):
                    await self.call(_remove_services, self.namespace)
        await self._leave(CALL_SECONDS)
        self._connection.clear()
        if stop_head and self._head is not None:
            await asyncio.to_thread(kill_session, self._head)
            (self._paths.ray / "head.json").unlink(missing_ok=True)
            self._head = None
            await asyncio.to_thread(self._remove_node_state)

    async def _shut_down(self, agent: Any) -> None:
        with contextlib.suppress(Exception):
            await within(CALL_SECONDS, agent.shut_down.remote(remove=not self.embedded))

    def agent_for(self, node_id: str) -> Any | None:
        """The agent that can answer for a node; an embedded head's node is the same machine under every id."""
        if node_id in self.agents or self._options.address is not None:
            return self.agents.get(node_id)
        return next(iter(self.agents.values()), None)

    def modules(self, job_id: str) -> Path:
        """Where the daemon keeps a job's ``runtime_env.py_modules``."""
        return self._paths.modules(job_id)

    async def until_connected(self) -> None:
        """Return once Ray is there."""
        await self._connection.wait()

    @property
    def embedded(self) -> bool:
        """The cluster is this daemon's own: one node, on this machine."""
        return self._options.address is None

    @property
    def connected(self) -> bool:
        """Ray can be asked."""
        return self._connection.is_set()

    @property
    def address(self) -> str:
        """Where Ray is."""
        if self._options.address is not None:
            return self._options.address
        return self._head.gcs_address if self._head else ""

    async def refresh(self) -> dict[str, Node]:
        """The nodes as they are now; agents are put on new ones and dropped with dead ones.

        On somebody's cluster a node whose agent or raylet does not answer holds nobody else up.
        """
        raw = await self.call(list_nodes)
        alive = {node_id for node_id, node in raw.items() if node.alive}
        self._bury(set(raw) - alive)
        known = set(self.reports)
        await self._meet(alive)
        await asyncio.gather(*(self._ask_again(node_id) for node_id in known & alive))
        if not self.embedded:
            self._others = await self._look_at_others(raw)
            self.silent = await self._find_silent(raw, alive)
        return {node_id: self._node(node) for node_id, node in raw.items()}

    def _bury(self, dead: set[str]) -> None:
        for node_id in dead:
            self._dead_since.setdefault(node_id, time.monotonic())
        for node_id in (set(self.agents) | set(self._meetings)) & dead:
            self.agents.pop(node_id, None)
            self.reports.pop(node_id, None)
            self.lost_gpus.pop(node_id, None)
            if node_id in self._meetings:
                self._meetings.pop(node_id).cancel()

    async def _meet(self, alive: set[str]) -> None:
        """Have the report of every node that is new. Raises what went wrong on an embedded head: there is no other node."""
        for node_id in alive - set(self.reports) - set(self._meetings):
            self._meetings[node_id] = asyncio.create_task(self._greet(node_id), name=f"meet-{node_id[:8]}")
        if not self._meetings:
            return
        limit = CALL_SECONDS * 2 if self.embedded else MEET_SECONDS
        done, _ = await asyncio.wait(self._meetings.values(), timeout=limit)
        for node_id in [n for n, task in self._meetings.items() if task in done]:
            error = self._meetings.pop(node_id).exception()
            if error is not None and self.embedded:
                raise error

    async def _greet(self, node_id: str) -> None:
        try:
            self.agents[node_id] = await self.call(self._ensure_agent, node_id)
            self.reports[node_id] = await within(CALL_SECONDS, self.agents[node_id].report.remote())
            self._first_gpus[node_id] = self.reports[node_id].gpus
            self.lost_gpus.pop(node_id, None)
        except BaseException:
            self.agents.pop(node_id, None)
            raise

    async def _ask_again(self, node_id: str) -> None:
        """The node's newest report; one that does not answer keeps the last: whether it lives is for Ray to say."""
        try:
            report = await within(AGAIN_SECONDS, self.agents[node_id].report.remote())
        except Exception as error:
            if isinstance(error, TimeoutError):
                await self._late_agents.late(node_id)
            return
        self._late_agents.answered(node_id)
        if node_id in self.reports:
            self.reports[node_id], self.lost_gpus[node_id] = still_there(report, self._first_gpus[node_id])

    async def _look_at_others(self, raw: Mapping[str, RayNode]) -> dict[str, Held]:
        """What others hold. A change is believed when it is there again a moment later."""
        others: dict[str, Held] = await self.call(held_by_others, raw, self._own_groups())
        if others == self._others:
            return others
        await asyncio.sleep(SETTLE_SECONDS)
        again: dict[str, Held] = await self.call(held_by_others, raw, self._own_groups())
        return {node_id: held.least(again.get(node_id, NOTHING)) for node_id, held in others.items()}

    async def _find_silent(self, raw: Mapping[str, RayNode], alive: set[str]) -> dict[str, str]:
        wanted = sorted(alive & set(self.agents))
        well = await asyncio.gather(*(self.call(answers, raw[node_id], self._token) for node_id in wanted))
        return {
            node_id: "its raylet does not answer; Ray has not declared it dead yet"
            for node_id, answered in zip(wanted, well, strict=True)
            if not answered
        }

    def _node(self, raw: RayNode) -> Node:
        report, held = self.reports.get(raw.id), self._others.get(raw.id, NOTHING)
        return Node(
            id=raw.id,
            name=report.hostname if report else raw.hostname,
            alive=raw.alive and report is not None,
            reachable=raw.id not in self.silent,
            shares_home=report is None or report.home_shared,
            cpus=raw.total.get("CPU", 0.0),
            gpus=raw.total.get("GPU", 0.0),
            memory_bytes=int(raw.total.get("memory", 0)),
            other_cpus=held.cpus,
            # Those that we sit on ourselves are in Ray's numbers too, where those are looked at.
            other_gpus=max(held.gpus, self.holds.per_node().get(raw.id, 0)) + self._lost_and_free(raw.id),
            other_memory_bytes=held.memory_bytes,
            gpu_models=tuple(sorted({g.model for g in report.gpus})) if report else (),
            simulated=bool(report and any(g.simulated for g in report.gpus)),
        )

    def _lost_and_free(self, node_id: str) -> int:
        return sum(gpu.uuid not in self.holds.held for gpu in self.lost_gpus.get(node_id, ()))

    async def until_fenced(self, node_id: str) -> None:
        """Return once nothing can be left of what ran on a node that Ray has given up: its leases have run out."""
        since = self._dead_since.setdefault(node_id, time.monotonic())
        await asyncio.sleep(max(0.0, since + FENCE_SECONDS - time.monotonic()))

    def _ensure_agent(self, node_id: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from orchestrator.runtime.nodes.agent import NodeAgent

        return (
            ray.remote(NodeAgent)
            .options(
                name=agent_name(node_id),
                namespace=self.namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=64,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            )
            .remote(
                node_id=node_id,
                node_dir=str(self.node_dir(node_id)),
                simulate_gpus=self._options.simulate_gpus,
                home_token=(str(self._home_token_path()), self._home_token),
            )
        )

    async def warm(self, count: int | None = None) -> None:
        """Have ``count`` idle workers on every node, so that the next gang's actors start at once.

        Ray adds what it is asked for to what it has. An embedded node is asked for what it lacks only: a daemon that is
        restarted finds the workers of the one before.
        """
        wanted = self._options.warm_workers if count is None else count
        if wanted and self.connected:
            with contextlib.suppress(Exception):
                await self.call(self._prestart, wanted)

    def _prestart(self, count: int) -> None:
        keep = KEEP_ALIVE_SECONDS if self.embedded else GUEST_KEEP_ALIVE_SECONDS
        if self._head is not None:
            count -= idle_workers(self._head.pids["raylet"][0])
        for node in list_nodes().values():
            if count > 0 and node.alive and node.total.get("CPU"):  # a head that only coordinates takes no ranks
                prestart_workers(node.address, node.port, count, self._token, keep)


def _disconnect() -> None:
    import ray

    ray.shutdown()


def _remove_services(space: str) -> None:
    """End the daemon's own agents and exporters; they are named, and nobody else's are in its namespace."""
    import ray
    from ray.util import list_named_actors

    for name in list_named_actors():
        if name.startswith(SERVICES):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=space), no_restart=True)
