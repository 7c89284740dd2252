"""Names of orch's actors and placement groups in Ray, and directories of a daemon, of its cluster and of each node: sockets, locks, pages, records.

One namespace per ORCH_HOME separates daemons on one cluster. A node's own state is never on a shared filesystem. What an ended node of an
existing cluster leaves on a machine is removed by the other agents there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator import trees
from orchestrator.private_files import check_private, enter_private, make_private, remove_private
from orchestrator.runtime.forkserver import linux
from orchestrator.runtime.forkserver.holder import Identity

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from orchestrator.spec.paths import Paths

LOCAL: Final = "local"
"""The directory of an embedded head's node, whatever id Ray gives it."""

ROUND_SECONDS: Final = 20.0
"""How long one call removes files that are no longer needed: the next call, or the next daemon, continues."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it must be memory


RAYLET_PID: Final = "RAY_RAYLET_PID"
"""The environment variable by which a raylet gives its process id to its workers."""

_NOTE: Final = "raylet"


LONGEST_RAY_DIRECTORY = 40
"""Ray creates Unix sockets below it, whose paths are at most 107 bytes; Ray's part takes about 60 of them."""


@dataclass(frozen=True, slots=True)
class Site:
    """Names and directories of a cluster, derived from the home and the address alone. ``address`` None: an embedded head, on this machine."""

    paths: Paths
    address: str | None
    namespace: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "namespace", namespace(self.paths.home))

    @property
    def embedded(self) -> bool:
        """Whether the cluster is this daemon's own: one node, on this machine."""
        return self.address is None

    def node_dir(self, node_id: str) -> Path:
        """Return a node's directory. The embedded head's is kept: the next head finds fork servers and locks there."""
        return node_directory(self.namespace, LOCAL if self.embedded else node_id)

    @property
    def head_file(self) -> Path:
        """Path of the record of the embedded head's processes."""
        return self.paths.ray / "head.json"

    @property
    def last_seen_file(self) -> Path | None:
        """Path of the record of an existing cluster's nodes as they were last seen; an embedded head's only node needs none."""
        return None if self.embedded else self.paths.ray / "nodes.json"

    @property
    def home_token(self) -> Path:
        """Path of the home's token, in the directory of jobs: only that directory must be shared with other nodes."""
        return self.paths.jobs / ".home-token"

    def ray_directory(self) -> Path:
        """Return the directory where Ray creates its sockets and logs."""
        wanted = self.paths.ray / "s"
        if len(os.fsencode(wanted)) <= LONGEST_RAY_DIRECTORY:
            return wanted
        return make_node_directory(self.namespace, "ray")

    def remove_node_state(self) -> None:
        """Remove sockets, locks and pages of a head that has ended: no process uses them."""
        remove_private(self.node_dir(LOCAL).parent)
        remove_private(page_directory(self.namespace))


def user_directory() -> Path:
    """Return this user's directory, which contains those of all daemons and nodes on this machine."""
    return Path(tempfile.gettempdir()) / f"orch-{os.getuid()}"


def node_directory(namespace: str, node_id: str) -> Path:
    """Return the node's directory; short, because the path of a Unix socket is limited."""
    return user_directory() / namespace.removeprefix("orch-") / node_id[:12]


def make_node_directory(namespace: str, node_id: str) -> Path:
    """Create the node's directory, for this user only like the two above it. Raises NotPrivateError, OSError."""
    directory = node_directory(namespace, node_id)
    for level in (directory.parents[1], directory.parent, directory):
        make_private(level)
    return directory


def check_places(namespace: str, *, shared_memory: Path = SHARED_MEMORY) -> None:
    """Raise NotPrivateError where another user owns a directory of this machine's own node. Creates nothing."""
    check_private(node_directory(namespace, LOCAL))
    check_private(page_directory(namespace, shared_memory=shared_memory))


def fork_socket(node_dir: Path, python: str) -> Path:
    """Return the fork server's socket for an interpreter; ``python`` and ``python3`` of one environment share it."""
    return fork_socket_in(node_dir, fork_socket_name(python))


def fork_socket_in(node_dir: Path, name: str) -> Path:
    """Return the path of the socket ``name`` from ``fork_socket_name``, which is slow: call that once for a gang."""
    return node_dir / "fork" / name


def fork_socket_name(python: str) -> str:
    """Return the name of an interpreter's socket, the same on every node."""
    program = Path(python)
    identity = f"{program.parent}|{os.path.realpath(program)}"
    return f"{hashlib.sha256(identity.encode()).hexdigest()[:12]}.sock"


def page_directory(namespace: str, *, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the directory of progress pages: shared memory where available."""
    base = shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())
    return base / f"orch-{os.getuid()}-{namespace.removeprefix('orch-')}"


def snapshot_directory(pages: Path, job_id: str) -> Path:
    """Return where a job's ranks leave snapshots, beside its progress pages; outlives its actors."""
    return pages / f"{job_id}.snapshots"


def clear_pages(
    node_dir: Path, live: Collection[str], young_seconds: float = 60.0, *, shared_memory: Path = SHARED_MEMORY
) -> None:
    """Remove the pages and snapshots in a node's shared memory of jobs that are not ``live``.

    A file younger than ``young_seconds`` is kept: it may belong to a job that started after the caller read ``live``.
    Nothing is removed where the directory of pages is another user's, or a link.
    """
    now, until = time.time(), time.monotonic() + ROUND_SECONDS
    with _entries(page_directory(node_dir.parent.name, shared_memory=shared_memory)) as (folder, entries):
        for entry in entries:
            job_id = entry.name.split(".", 1)[0]
            with contextlib.suppress(OSError):
                if job_id in live or now - entry.stat(follow_symlinks=False).st_ctime < young_seconds:
                    continue
                trees.remove(entry.name, dir_fd=folder, until=until)


def remove_of_jobs(directory: Path, job_ids: Collection[str]) -> dict[str, str]:
    """Remove the files of these jobs from a node's directory; return by job why a file could not be removed.

    Nothing is removed where the directory is another user's, or a link.
    """
    failed: dict[str, str] = {}
    with _entries(directory) as (folder, entries):
        for entry in entries:
            job_id = entry.name.split(".", 1)[0]
            if job_id not in job_ids:
                continue
            if left := trees.remove(entry.name, dir_fd=folder).left:
                failed[job_id] = f"{entry.name}: {left}"
    return failed


def page_name(job_id: str, rank: int) -> str:
    """Return the file name of a rank's progress page."""
    return f"{job_id}.{rank}.page"


@contextlib.contextmanager
def _entries(directory: Path) -> Iterator[tuple[int, list[os.DirEntry[str]]]]:
    """Return a descriptor and the entries of a directory that is private to this user; nothing for any other."""
    try:
        folder = enter_private(directory)
    except OSError:
        yield -1, []
        return
    try:
        with os.scandir(folder) as found:
            yield folder, list(found)
    finally:
        os.close(folder)


def raylet_of(node_dir: Path) -> int | None:
    """Return the process id of the raylet with which an existing cluster's node ends; note it in the node's directory.

    None for an embedded head's node: its directory, and the fork server there, outlive the head.
    """
    raylet = os.environ.get(RAYLET_PID, "")
    if node_dir.name == LOCAL or not raylet.isdecimal():
        return None
    with contextlib.suppress(OSError):  # the raylet has ended already, and this process ends with it
        (node_dir / _NOTE).write_text(f"{raylet} {linux.start_ticks(int(raylet))}", encoding="ascii")
    return int(raylet)


def clear_ended_nodes(node_dir: Path) -> None:
    """Remove the directories of nodes that have ended on this machine, once their fork servers have too."""
    for other in node_dir.parent.iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid, ticks = map(int, (other / _NOTE).read_text(encoding="ascii").split())
            if other != node_dir and not Identity(pid, ticks).lives() and not any((other / "fork").glob("*.sock")):
                trees.remove(other, until=time.monotonic() + ROUND_SECONDS)


SERVICES: Final = ("agent-", "exporter-")  # prefixes of actors that serve all jobs


def namespace(home: Path) -> str:
    """Return the Ray namespace of a daemon."""
    return f"orch-{hashlib.sha256(str(home).encode()).hexdigest()[:12]}"


def agent_name(node_id: str) -> str:
    """Return the node agent's actor name."""
    return f"agent-{node_id}"


def gang_name(job_id: str, gang: int) -> str:
    """Return a gang's name in orch's own calls and files."""
    return f"{job_id}-g{gang}"


def rank_actor_name(job_id: str, gang: int, rank: int) -> str:
    """Return a rank actor's name."""
    return f"rank-{job_id}-g{gang}-r{rank}"


_RANK_ACTOR: Final = re.compile(r"rank-(?P<job>.+)-g(?P<gang>\d+)-r(?P<rank>\d+)")


def gang_of(actor_name: str) -> tuple[str, int, int] | None:
    """Return the job id, gang and rank of a rank actor's name; None for another actor's."""
    found = _RANK_ACTOR.fullmatch(actor_name)
    return None if found is None else (found["job"], int(found["gang"]), int(found["rank"]))


def placement_group_name(job_id: str, gang: int) -> str:
    """Return a placement group's name; prefixed, because placement groups of all namespaces share their names."""
    return f"gang-{job_id}-g{gang}"


def exporter_name(gpu_uuid: str) -> str:
    """Return the name of a GPU's exporter actor."""
    return f"exporter-{gpu_uuid}"
