"""Transfer of a job's files between the daemon and another node: none lost, none twice, none outside its directory."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.core.job.record import Job
from orchestrator.daemon.submitting import archives as snapshot
from orchestrator.runtime import remote
from orchestrator.runtime.cluster.nodes import NodeRegistry
from orchestrator.runtime.gangs.errors import NodeFilesError, NodeGoneError
from orchestrator.runtime.gangs.job_files import JobFiles, LogMirror
from orchestrator.runtime.nodes.directories import clear_pages, node_directory, page_directory
from orchestrator.runtime.nodes.files import (
    CHUNK_BYTES,
    FAILURES,
    BlobDamagedError,
    NodeFiles,
    find_outputs,
    keep_output,
    new_output,
)
from orchestrator.runtime.pools import Pool
from orchestrator.runtime.ranks.logs import LogLimits, LogReader, LogWriter, log_path
from orchestrator.runtime.spawn.client import ExitRecordError, read_exit_record
from orchestrator.spec.paths import Paths
from tests.support.deep_trees import MakeDeep
from tests.support.records import replace
from tests.unit.core.builders import changed, make_spec, pending, running

LIMITS = LogLimits(max_bytes=400, keep_files=2)
JOB = "digits-abc234"


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


# -- outputs


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["out/**"], ["out/a", "out/deep/b"]),
        (["out"], ["out/a", "out/deep/b"]),
        (["out/*"], ["out/a", "out/deep/b"]),
        (["log"], ["log"]),
        (["**/b"], ["out/deep/b"]),
        (["none/**"], []),
    ],
)
def test_outputs_are_what_a_pattern_names(tmp_path: Path, patterns: list[str], expected: list[str]) -> None:
    work = write(tmp_path / "work", out__a="1", out__deep__b="22", log="3", other__log="4")
    assert [found.path for found in find_outputs(work, patterns, 100).files] == expected


def test_only_directories_that_a_pattern_can_match_in_are_searched(tmp_path: Path, make_deep: MakeDeep) -> None:
    work = tmp_path / "work"
    make_deep(work / "data", 150)
    make_deep(work / "out", 150)
    (work / "out" / "a.pt").touch()
    (work / "b.pt").touch()

    found = find_outputs(work, ["out/**", "out/sub/*.pt", "none/*.pt"], 100)
    assert [each.path for each in found.files] == ["out/a.pt"]
    assert [each.path.split("/")[0] for each in found.unread.first] == ["out"]
    assert [each.path for each in find_outputs(work, ["b.pt", "out/*.pt"], 100).files] == ["b.pt", "out/a.pt"]
    assert find_outputs(work, ["*.pt"], 100).unread.count == 2


def test_links_are_neither_followed_nor_brought(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", key="k")
    work = write(tmp_path / "work", out__a="1")
    (work / "out" / "file").symlink_to(secret / "key")
    (work / "out" / "directory").symlink_to(secret)
    os.mkfifo(work / "out" / "pipe")
    assert [found.path for found in find_outputs(work, ["**"], 100).files] == ["out/a"]


def test_what_is_too_much_stays_and_is_counted(tmp_path: Path) -> None:
    work = write(tmp_path / "work", a="1" * 6, b="2" * 6, c="3" * 4)
    found = find_outputs(work, ["*"], 10)
    assert [each.path for each in found.files] == ["a", "c"]
    assert (found.left_files, found.left_bytes) == (1, 6)


def test_an_output_is_kept_again_when_it_has_changed(tmp_path: Path) -> None:
    work, target = write(tmp_path / "work", out__a="1"), tmp_path / "outputs"
    for text in ("1", "2"):
        (work / "out" / "a").unlink()
        (work / "out" / "a").write_text(text)
        (found,) = find_outputs(work, ["out/**"], 100).files
        keep_output(work, found, target)
        keep_output(work, found, target)
        assert (target / "out" / "a").read_text() == text
    assert [path.name for path in (target / "out").iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x"])
def test_nothing_is_written_outside_of_the_target(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="leads out of"), new_output(tmp_path / "outputs", name):
        raise AssertionError("a place was given")


def test_nothing_is_written_through_a_link_in_the_target(tmp_path: Path) -> None:
    target = tmp_path / "outputs"
    target.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (target / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="not a directory but a link"), new_output(target, "out/x"):
        raise AssertionError("a place was given")


# -- blobs and working copies


def test_a_blob_arrives_in_pieces_and_is_checked(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    data = os.urandom(1000)
    digest = hashlib.sha256(data).hexdigest()
    files.put_blob(digest, 0, b"of an earlier try, which was longer" * 100, last=False)
    files.put_blob(digest, 0, data[:600], last=False)
    assert files.missing_blobs(JOB, [digest]) == [digest]
    with pytest.raises(BlobDamagedError, match="sent again"):
        files.put_blob(digest, 600, b"something else", last=True)
    files.put_blob(digest, 0, data[:600], last=False)
    files.put_blob(digest, 600, data[600:], last=True)
    assert files.missing_blobs(JOB, [digest]) == []
    assert files.paths.blob(digest).read_bytes() == data


def test_jobs_that_have_ended_are_forgotten_and_the_cache_is_bounded(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path, cache_bytes=100)
    for name in ("live-aaaaaa", "ended-aaaaaa"):
        write(files.paths.work(name), a="1")
    old, new = (hashlib.sha256(data).hexdigest() for data in (b"o" * 60, b"n" * 60))
    files.put_blob(old, 0, b"o" * 60, last=True)
    files.put_blob(new, 0, b"n" * 60, last=True)
    os.utime(files.paths.blob(old), (1, 1))
    assert files.keep_only({"live-aaaaaa"}) == [], "what is young may be a job that the asker does not know yet"
    assert files.keep_only({"live-aaaaaa"}, young_seconds=-1) == ["ended-aaaaaa"]
    assert files.paths.work("live-aaaaaa").exists()
    assert (files.paths.blob(old).exists(), files.paths.blob(new).exists()) == (False, True)


def test_what_goes_while_the_cache_is_listed_is_passed_over(tmp_path: Path) -> None:
    """A draft is renamed, a job's directory removed, between the listing and the stat: dangling links stand for them here."""
    files = NodeFiles(tmp_path, cache_bytes=0)
    digest = hashlib.sha256(b"data").hexdigest()
    files.put_blob(digest, 0, b"data", last=True)
    files.paths.blob(digest).with_name(".draft.sent").symlink_to(tmp_path / "gone")
    files.paths.jobs.mkdir(parents=True)
    (files.paths.jobs / "gone-aaaaaa").symlink_to(tmp_path / "gone")
    assert files.keep_only((), young_seconds=-1) == []
    assert not files.paths.blob(digest).exists()


def test_pages_of_jobs_that_have_ended_are_removed(tmp_path: Path) -> None:
    node = node_directory(f"orch-test{os.getpid()}-{time.monotonic_ns()}", "n")
    pages = page_directory(node.parent.name)
    try:
        write(pages, **{"live-aaaaaa.0.page": "", "ended-aaaaaa.0.page": "", "ended-aaaaaa.snapshots__a": ""})
        clear_pages(node, {"live-aaaaaa"})
        assert len(list(pages.iterdir())) == 3
        clear_pages(node, {"live-aaaaaa"}, young_seconds=-1)
        assert [path.name for path in pages.iterdir()] == ["live-aaaaaa.0.page"]
    finally:
        clear_pages(node, set(), young_seconds=-1)
        pages.rmdir()


def test_only_the_job_s_own_files_are_read(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path / "home")
    work = write(files.paths.work(JOB), a="1")
    (tmp_path / "secret").write_text("s")
    (work / "link").symlink_to(tmp_path / "secret")
    assert files.read_output(JOB, "a", 0) == b"1"
    with pytest.raises(OSError, match="symbolic link"):
        files.read_output(JOB, "link", 0)
    with pytest.raises(PermissionError, match="leads out"):
        files.read_output(JOB, "../../../../secret", 0)


@pytest.mark.parametrize(
    "replaced", ["jobs/{job}", "jobs/{job}/logs", "jobs/{job}/exits", "jobs/{job}/exits/attempt-1"]
)
def test_no_log_and_no_exit_record_is_read_through_a_directory_that_the_job_replaced(
    tmp_path: Path, replaced: str
) -> None:
    """The job's processes run as the owner of the home: a link of theirs could lead to what others may not read."""
    home, other = tmp_path / "home", tmp_path / "other"
    files = NodeFiles(home)
    writer = LogWriter(log_path(files.paths.logs(JOB), 1, 0), limits=LIMITS)
    writer.feed("o", b"a line\n", 1000.0)
    writer.close(1001.0)
    record = files.paths.exit_record(JOB, 1, 0)
    write(record.parent, **{record.name: "{}"})
    assert files.read_logs(JOB, {})
    assert files.exit_records(JOB) == {(1, 0): b"{}"}
    place = home / replaced.format(job=JOB)
    place.rename(other)
    place.symlink_to(other)
    logs, exits = files.read_logs(JOB, {}), files.exit_records(JOB)
    assert not (logs if "exits" not in replaced else exits)
    assert not exits or "logs" in replaced
    if not exits:
        with pytest.raises(ExitRecordError, match="symbolic link"):
            read_exit_record(record)


# -- logs


def test_a_mirror_holds_every_line_once_through_rotation_and_restarts(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path / "node")
    own = Paths(home=tmp_path / "daemon", socket=tmp_path)
    source = log_path(files.paths.logs(JOB), 1, 0)
    target = log_path(own.logs(JOB), 1, 0)
    writer = LogWriter(source, limits=replace(LIMITS, keep_files=100))
    wide = LogLimits(max_bytes=300, keep_files=100)
    mirror, written = LogMirror(target, wide), 0
    for turn in range(30):
        for _ in range(turn % 4):
            writer.feed("o", b"line %d\n" % written, 1000.0 + written)
            written += 1
        if turn % 5 == 0:
            writer.feed("o", b"half a line", 1000.0 + written)
            writer.feed("o", b"\n", 1000.0 + written)
        mirror = LogMirror(target, wide) if turn % 3 == 0 else mirror
        if turn % 7 == 0 and target.exists():
            with target.open("ab") as file:
                file.write(b"9.0 o written by a daemon that died before it noted it\n")
            mirror = LogMirror(target, wide)
        while parts := files.read_logs(JOB, {(1, 0): mirror.place}):
            mirror.take(parts[0])
    writer.close(2000.0)
    mirrored = [entry.text for batch in LogReader(own.logs(JOB)).batches() for entry in batch]
    assert mirrored == [entry.text for batch in LogReader(files.paths.logs(JOB)).batches() for entry in batch]
    assert f"line {written - 1}" in mirrored
    assert len(list(target.parent.glob("*.log.*"))) > 1, "it was rotated"


# -- both sides


class Agent:
    """A node's agent without Ray: its files, and whether it sees the daemon's directory."""

    def __init__(self, home: Path, *, sees: bool = True, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.node = NodeFiles(home, chunk_bytes=chunk_bytes)
        self.calls: list[str] = []
        self.fails: Exception | None = None
        self.handle = SimpleNamespace(answer_files=SimpleNamespace(remote=self._files))
        self._sees = sees

    async def _files(self, method: str, message: bytes) -> bytes:
        self.calls.append(method)
        if self.fails is not None:
            raise self.fails
        return await remote.answer(self.node, method, message, FAILURES)

    async def reads(self, path: str, text: str) -> bool:
        if self.fails is not None:
            raise self.fails
        return self._sees and Path(path).read_text() == text


def two_sides(
    tmp_path: Path, *agents: Agent, limit: int = 1000, chunk_bytes: int = CHUNK_BYTES, gone: tuple[str, ...] = ()
) -> tuple[JobFiles, Paths]:
    """Return the daemon's side: nodes "n0", "n1", ... share nothing, "here" does, and ``gone`` have no agent."""
    known = {name: agent for number, agent in enumerate(agents) if (name := f"n{number}") not in gone}
    reports = {name: SimpleNamespace(home_shared=False) for name in [*known, *gone]} | {
        "here": SimpleNamespace(home_shared=True)
    }
    cluster = cast("NodeRegistry", SimpleNamespace(agents=known, reports=reports))
    paths = Paths(home=tmp_path / "daemon", socket=tmp_path)
    pool = Pool("outputs", 1)
    files = JobFiles(cluster, paths, LIMITS, outputs_max_bytes=limit, pool=pool, chunk_bytes=chunk_bytes)
    return files, paths


def job_on(paths: Paths, *nodes: str, **keys: Any) -> Job:
    job = pending(make_spec(workers=len(nodes), **keys))
    return changed(running(job, nodes=nodes), work_dir=str(paths.work(JOB)))


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def test_a_working_copy_travels_once(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "node")
    ours, paths = two_sides(tmp_path, agent, chunk_bytes=7)
    source = write(tmp_path / "source", **{"train.py": "print('a script')\n", "lib__a.py": "", "lib__b.py": "A = 1\n"})
    (source / "train.py").chmod(0o755)
    taken = snapshot.take(source, paths.blob, max_bytes=10_000)
    job = changed(job_on(paths, "n0", "here", "n0"), snapshot=taken.digest)
    run(ours.ship(job))
    run(ours.ship(job))
    work = agent.node.paths.work(JOB)
    laid_out = {path.relative_to(work).as_posix(): path.read_text() for path in work.rglob("*.py")}
    assert laid_out == {"train.py": "print('a script')\n", "lib/a.py": "", "lib/b.py": "A = 1\n"}
    assert (work / "train.py").stat().st_mode & 0o100
    assert agent.calls.count("put_blob") > 5, "in several pieces"
    assert agent.calls[-2:] == ["missing_blobs", "lay_out"], "the second time nothing was sent"


def test_a_node_that_is_gone_is_told_by_name(tmp_path: Path) -> None:
    ours, paths = two_sides(tmp_path, Agent(tmp_path / "node"), gone=["n0"])
    job = changed(job_on(paths, "n0"), snapshot="")
    with pytest.raises(LookupError, match="node n0 is gone"):
        run(ours.ship(job))


def test_a_disk_of_a_node_that_takes_nothing_is_told_by_its_node(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "node")

    def full(*_args: Any, **_kwargs: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/ada/.orch-node")

    agent.node.lay_out = full  # type: ignore[method-assign]
    ours, paths = two_sides(tmp_path, agent)
    with pytest.raises(NodeFilesError) as caught:
        run(ours.ship(changed(job_on(paths, "n0"), snapshot="")))
    assert (caught.value.node_id, caught.value.reason) == ("n0", "No space left on device: /home/ada/.orch-node")
    for cut_off in (TimeoutError("no answer"), ConnectionResetError("cut off")):
        agent.fails = cut_off
        with pytest.raises(type(cut_off)):
            run(ours.ship(changed(job_on(paths, "n0"), snapshot="")))


def test_a_node_that_does_not_answer_is_not_said_to_see_no_directory(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "node")
    agent.fails = TimeoutError("no answer")
    ours, _ = two_sides(tmp_path, agent)
    with pytest.raises(TimeoutError):
        run(ours.unable_to_read(str(tmp_path / "shared"), ["n0"]))
    with pytest.raises(NodeGoneError):
        run(ours.unable_to_read(str(tmp_path / "shared"), ["n1"]))
    assert list((tmp_path / "shared").iterdir()) == [], "the probe is removed"


def test_a_directory_that_a_node_does_not_share_is_found_out(tmp_path: Path) -> None:
    ours, _ = two_sides(tmp_path, Agent(tmp_path / "a"), Agent(tmp_path / "b", sees=False))
    shared = tmp_path / "shared"
    assert run(ours.unable_to_read(str(shared), ["n0", "n1"])) == ["n1"]
    assert list(shared.iterdir()) == [], "the probe is removed"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        run(ours.unable_to_read(str(tmp_path / "file" / "x"), ["n0"]))


def test_outputs_of_several_nodes_come_together(tmp_path: Path) -> None:
    agents = [Agent(tmp_path / "a", chunk_bytes=3), Agent(tmp_path / "b", chunk_bytes=3)]
    ours, paths = two_sides(tmp_path, *agents, chunk_bytes=3)
    write(paths.work(JOB), out__here="0")
    write(agents[0].node.paths.work(JOB), out__same="from a", out__a="aaaa")
    write(agents[1].node.paths.work(JOB), out__same="from b")
    write(agents[0].node.paths.exits(JOB), **{"attempt-1__rank-0.json": "{}"})
    job = job_on(paths, "n0", "here", "n1", outputs=("out/**",))
    assert run(ours.finish(job)) == ""
    outputs = paths.outputs(JOB) / "out"
    brought = {path.name: path.read_text() for path in outputs.iterdir()}
    assert brought == {"here": "0", "same": "from a", "a": "aaaa", "same.node-1": "from b"}
    assert paths.exit_record(JOB, 1, 0).read_text() == "{}"


def test_outputs_that_stay_behind_are_told(tmp_path: Path) -> None:
    agent = Agent(tmp_path / "a")
    ours, paths = two_sides(tmp_path, agent, limit=5)
    write(paths.work(JOB), out__a="1234")
    write(agent.node.paths.work(JOB), out__b="1234")
    told = run(ours.finish(job_on(paths, "here", "n0", outputs=("out/**",))))
    assert "1 output (4 B) stays in the working copy on node n0" in told
    assert "ORCH_OUTPUTS_MAX_BYTES" in told
    write(paths.work(JOB), **{"out__" + os.fsdecode(b"\xff"): ""})
    told = run(ours.finish(job_on(paths, "here", outputs=("out/**",))))
    assert told == (
        "1 output with a name that is not UTF-8, such as 'out/\\udcff', can be copied on the daemon's machine,"
        " and not by orch get"
    )
    for kept in paths.outputs(JOB).joinpath("out").iterdir():
        kept.unlink()
    paths.outputs(JOB).joinpath("out").rmdir()
    paths.outputs(JOB).joinpath("out").symlink_to(tmp_path)
    told = run(ours.finish(job_on(paths, "here", outputs=("out/**",))))
    assert "outputs could not be kept" in told
    assert str(paths.work(JOB)) in told


@pytest.mark.parametrize("name", ["x" * 255, os.fsdecode(b"\xff" * 255), "\x1b[2J", "a\nb", ".bringing", "-rf"])
def test_an_output_of_any_name_is_kept(tmp_path: Path, name: str) -> None:
    work, target = tmp_path / "work", tmp_path / "outputs"
    (work / "out").mkdir(parents=True)
    (work / "out" / name).write_text("content")
    (found,) = find_outputs(work, ["out/**"], 10_000).files
    keep_output(work, found, target)
    assert (target / "out" / name).read_text() == "content"
    assert os.listdir(target / "out") == [name]
