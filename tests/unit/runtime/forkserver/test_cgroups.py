"""Places where control groups can be made, and the content of their files: trees of files of both versions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.runtime.forkserver import cgroups
from orchestrator.runtime.forkserver.cgroups import CgroupParent, Group, Usage, find_place


def membership(directory: Path, *lines: str) -> str:
    path = directory / "membership"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def group(path: Path, controllers: str = "", passed_on: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.procs").touch()
    (path / "cgroup.controllers").write_text(controllers)
    (path / "cgroup.subtree_control").write_text(passed_on)
    return path


def test_the_first_version_is_found_below_the_processs_own_group(tmp_path: Path) -> None:
    own = tmp_path / "memory" / "system.slice" / "orch"
    own.mkdir(parents=True)
    (own / "cgroup.procs").touch()
    lines = ("9:name=systemd:/", "4:memory:/system.slice/orch", "0::/")
    assert find_place(str(tmp_path), membership(tmp_path, *lines)) == CgroupParent(str(own), 1, has_memory=True)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = group(tmp_path, "cpu memory", "memory")
    assert find_place(str(root), membership(tmp_path, "0::/docker/4711")) == CgroupParent(str(root), 2, has_memory=True)


def test_the_parent_that_was_delegated_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path, "memory")
    unit = group(tmp_path / "system.slice" / "orch.service", "cpu memory", "cpu memory")
    group(unit / "service", "cpu memory")
    lines = membership(tmp_path, "0::/system.slice/orch.service/service")
    monkeypatch.setattr(cgroups, "_is_delegated", lambda directory: directory == str(unit))
    assert find_place(str(tmp_path), lines) == CgroupParent(str(unit), 2, has_memory=True)
    monkeypatch.setattr(cgroups, "_is_delegated", lambda _directory: False)
    place = find_place(str(tmp_path), lines)
    assert place is not None
    assert place.path == str(unit / "service"), "a parent that is somebody else's is left alone"


def test_a_group_that_cannot_pass_memory_on_still_holds_processes_together(tmp_path: Path) -> None:
    group(tmp_path, "cpu")
    assert find_place(str(tmp_path), membership(tmp_path, "0::/")) == CgroupParent(str(tmp_path), 2, has_memory=False)


@pytest.mark.parametrize("lines", [(), ("nonsense",), ("4:cpu:/",)])
def test_no_place_is_found_where_the_kernel_names_none(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert find_place(str(tmp_path), membership(tmp_path, *lines)) is None
    assert find_place(str(tmp_path), str(tmp_path / "absent")) is None


def make(tmp_path: Path, version: int) -> Group:
    made = Group.create(CgroupParent(str(tmp_path), version, has_memory=True))
    assert made is not None
    return made


def test_what_the_second_version_counts(tmp_path: Path) -> None:
    made = make(tmp_path, 2)
    directory = Path(made.path)
    for name, text in {
        "memory.max": "max\n",
        "memory.peak": "4096\n",
        "memory.events": "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n",
    }.items():
        (directory / name).write_text(text)
    assert made.usage() == Usage(peak_bytes=4096, limit_bytes=None, kills=2)
    assert made.limit_memory(8192)
    assert made.usage() == Usage(peak_bytes=4096, limit_bytes=8192, kills=2)
    (directory / "memory.peak").unlink()
    assert made.usage() == Usage(peak_bytes=None, limit_bytes=8192, kills=2), "kernels before 5.19 do not tell"


def test_what_the_first_version_counts(tmp_path: Path) -> None:
    made = make(tmp_path, 1)
    for name, text in {
        "memory.limit_in_bytes": "9223372036854771712\n",
        "memory.max_usage_in_bytes": "4096\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    }.items():
        (Path(made.path) / name).write_text(text)
    assert made.usage() == Usage(peak_bytes=4096, limit_bytes=None, kills=1)


def test_a_group_without_memory_limits_nothing_and_counts_nothing(tmp_path: Path) -> None:
    made = Group.create(CgroupParent(str(tmp_path), 2, has_memory=False))
    assert made is not None
    assert not made.limit_memory(4096)
    assert made.usage() is None


def test_only_a_group_of_orchs_is_opened_by_a_path_that_was_read(tmp_path: Path) -> None:
    made = make(tmp_path, 2)
    (tmp_path / "other").mkdir()
    (tmp_path / "apart").mkdir()
    stray = tmp_path / "apart" / f"{cgroups.PREFIX}1"
    stray.mkdir()
    root = str(tmp_path)
    assert Group.open(made.path, root) is not None
    for path in ("other", f"../{tmp_path.name}/other", f"{cgroups.PREFIX}absent"):
        assert Group.open(f"{root}/{path}", root) is None
    assert Group.open(str(stray), f"{root}/groups") is None
    assert Group.open(f"{root}/groups/../apart/{cgroups.PREFIX}1", f"{root}/groups") is None


def test_an_empty_group_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    made = make(tmp_path, 2)
    Path(made.path, "below").mkdir()
    Path(made.path, "in-use").write_text("what keeps rmdir from succeeding")
    assert not made.remove()
    Path(made.path, "in-use").unlink()
    assert made.remove()
    assert made.remove(), "gone is gone"


def test_groups_of_killed_keepers_are_removed(tmp_path: Path) -> None:
    place = CgroupParent(str(tmp_path), 2, has_memory=True)
    empty, used = make(tmp_path, 2), make(tmp_path, 2)
    Path(used.path, "in-use").touch()
    (tmp_path / "other").mkdir()
    cgroups.remove_empty(place)
    cgroups.remove_empty(None)
    assert not Path(empty.path).exists()
    assert Path(used.path).exists()
    assert (tmp_path / "other").exists()


# -- the kernel's own second version


def unified() -> str:
    """Return the place of a writable hierarchy of the second version on this machine; empty where there is none."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        place = fields.split()[4]
        if kind.startswith("cgroup2 ") and os.access(f"{place}/cgroup.procs", os.W_OK):
            return place
    return ""


FORKS = """
import os, sys, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
        break
os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(600)
"""


@pytest.mark.skipif(not unified(), reason="no writable hierarchy of control groups version 2")
def test_the_kernels_second_version_ends_whatever_a_process_has_started(tmp_path: Path) -> None:
    place = find_place(unified(), membership(tmp_path, "0::/"))
    assert place is not None
    assert place.version == 2
    group = Group.create(place)
    assert group is not None
    waits = "import sys; sys.stdin.readline(); exec(sys.argv[1])"
    rank = subprocess.Popen(
        [sys.executable, "-c", waits, FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert group.members() == []
        assert group.join(rank.pid)
        assert rank.stdin is not None
        assert rank.stdout is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
        started = {int(rank.stdout.readline()) for _ in range(11)}
        assert set(group.members()) == started
        again = Group.open(group.path, place.path)
        assert again is not None
        assert not again.remove(), "processes are in it"
        os.mkdir(f"{group.path}/made-by-the-rank")
        assert place.has_memory == (group.usage() is not None)
        assert place.has_memory == group.limit_memory(1 << 40)
        again.kill()
        assert rank.wait(300) == -signal.SIGKILL
        assert wait_for(lambda: not group.members() and group.remove())
        assert Group.open(group.path, place.path) is None
    finally:
        group.kill()
        rank.wait(300)
        rank.stdout.close()
        wait_for(group.remove)


def wait_for(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 300
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()
