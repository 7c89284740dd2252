"""Trees that a job can leave: deeper than the interpreter's stack and PATH_MAX, unreadable, special, changing."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from orchestrator import trees
from orchestrator.trees import Cause, Problems
from tests.support.deep_trees import MakeDeep
from tests.support.users import OTHER, as_root, as_user


@pytest.mark.parametrize("levels", [100, 101, 5_000])
def test_a_tree_of_any_depth_is_removed(tmp_path: Path, levels: int, make_deep: MakeDeep) -> None:
    make_deep(tmp_path / "tree", levels)
    before = len(os.listdir("/proc/self/fd"))

    removal = trees.remove(tmp_path / "tree")

    assert not removal.left
    assert (removal.files, removal.freed_bytes) == (1, 3)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_tree_with_several_deep_branches_is_removed(tmp_path: Path, make_deep: MakeDeep) -> None:
    for branch in range(5):
        make_deep(tmp_path / "tree" / "same" / str(branch), 350)

    removal = trees.remove(tmp_path / "tree")

    assert (removal.files, bool(removal.left), os.listdir(tmp_path)) == (5, False, [])


def test_a_directory_with_more_directories_than_are_listed_at_once_is_removed(tmp_path: Path) -> None:
    for number in range(1_100):
        (tmp_path / "tree" / str(number)).mkdir(parents=True)

    assert not trees.remove(tmp_path / "tree").left
    assert os.listdir(tmp_path) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("stays")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(other)
    (tmp_path / "root-link").symlink_to(other)

    assert not trees.remove(tree).left
    assert not trees.remove(tmp_path / "root-link").left

    assert sorted(os.listdir(tmp_path)) == ["other"]
    assert (other / "file").read_text() == "stays"


def test_special_files_are_removed_and_measured_as_nothing(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        os.symlink(tree, tmp_path / "t")
        bound.bind(os.path.relpath(tree / "socket"))
    (tree / os.fsdecode(b"not-\xff-utf8\n")).write_bytes(b"12345")

    problems = Problems()
    size = trees.measure(tree, problems)

    assert (size.files, size.bytes, problems.count) == (1, 5, 0)
    assert not trees.remove(tree).left


def test_what_is_absent_is_removed_already(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert not trees.remove(tmp_path / "none").left
    assert not trees.remove(tmp_path / "none" / "below").left
    assert not trees.remove(tmp_path / "file" / "below").left


def test_a_file_with_another_name_elsewhere_frees_nothing(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(b"1234")
    (tree / "b").hardlink_to(tree / "a")
    (tree / "kept").write_bytes(b"123456")
    (tmp_path / "kept").hardlink_to(tree / "kept")

    assert trees.measure(tree, Problems()) == trees.Size(files=2, bytes=10)
    assert trees.remove(tree).freed_bytes == 4


@as_root
@pytest.mark.parametrize("mode", [0o000, 0o400, 0o500, 0o100])
def test_own_directories_without_permissions_are_removed(tmp_path: Path, mode: int, make_deep: MakeDeep) -> None:
    home = _home_of_other(tmp_path)

    def try_it() -> str:
        make_deep(home / "tree" / "closed", 150)
        (home / "tree" / "closed" / "file").touch()
        (home / "tree" / "closed").chmod(mode)
        (home / "tree").chmod(mode)
        return str(trees.remove(home / "tree").left)

    assert as_user(OTHER, try_it) == ""
    assert os.listdir(home) == []


@as_root
def test_what_stays_is_named_and_the_rest_is_removed(tmp_path: Path) -> None:
    home = _home_of_other(tmp_path)
    theirs = home / "tree" / "a" / "of-root"
    theirs.mkdir(parents=True)
    (theirs / "file").touch()
    (home / "tree" / "b").mkdir()
    (home / "tree" / "b" / "file").write_bytes(b"12")
    for path in (home / "tree", home / "tree" / "a", home / "tree" / "b", home / "tree" / "b" / "file"):
        os.chown(path, OTHER, OTHER)

    said = as_user(OTHER, lambda: str(trees.remove(home / "tree").left))

    assert said == "a/of-root/file: Permission denied"
    assert os.listdir(home / "tree") == ["a"]


@as_root
def test_a_directory_that_cannot_be_read_is_a_problem_of_the_walk(tmp_path: Path) -> None:
    home = _home_of_other(tmp_path)
    for name in ("a", "b", "c"):
        (home / name).mkdir()
        (home / name / "file").write_bytes(b"1")
    (home / "b").chmod(0)

    def try_it() -> str:
        problems = Problems()
        return f"{trees.measure(home, problems).files} {problems}"

    assert as_user(OTHER, try_it) == "2 b: Permission denied"


def test_a_walk_is_bounded_in_depth_entries_and_time(tmp_path: Path, make_deep: MakeDeep) -> None:
    make_deep(tmp_path / "deep", 300)
    for number in range(10):
        (tmp_path / str(number)).touch()

    def causes(**limits: float) -> list[Cause]:
        problems = Problems()
        for _ in trees.walk(tmp_path, problems, **limits):  # type: ignore[arg-type]
            pass
        return [problem.cause for problem in problems.first]

    assert causes() == [Cause.DEEP]
    assert causes(most_entries=5) == [Cause.MANY]
    assert causes(until=0.0) == [Cause.SLOW]


def test_a_removal_ends_at_its_time_and_says_so(tmp_path: Path, make_deep: MakeDeep) -> None:
    make_deep(tmp_path / "tree", 10)

    removal = trees.remove(tmp_path / "tree", until=0.0)

    assert [problem.cause for problem in removal.left.first] == [Cause.SLOW]
    assert (tmp_path / "tree").is_dir()


def test_problems_are_counted_beyond_those_that_are_named() -> None:
    problems = Problems()
    for number in range(8):
        problems.add(str(number), PermissionError(13, "no"))

    assert str(problems).endswith("4: Permission denied; and 3 more")
    with pytest.raises(PermissionError, match="0: Permission denied"):
        problems.refuse("/root")


def test_a_copy_has_files_links_and_empty_directories(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "empty").mkdir(parents=True)
    (source / "a" / "run.sh").write_text("echo")
    (source / "a" / "run.sh").chmod(0o751)
    (source / "link").symlink_to("../elsewhere")
    os.mkfifo(source / "fifo")
    problems = Problems()

    trees.copy(source, tmp_path / "copy", problems)
    trees.copy(source, tmp_path / "linked", problems, link=True)

    assert not problems
    copied, linked = (tmp_path / name / "a" / "run.sh" for name in ("copy", "linked"))
    assert (copied.read_text(), stat.S_IMODE(copied.stat().st_mode)) == ("echo", 0o751)
    assert copied.stat().st_mtime_ns == (source / "a" / "run.sh").stat().st_mtime_ns
    assert linked.samefile(source / "a" / "run.sh")
    assert os.readlink(tmp_path / "copy" / "link") == "../elsewhere"
    assert (tmp_path / "copy" / "a" / "empty").is_dir()
    assert not (tmp_path / "copy" / "fifo").exists()


def _home_of_other(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, OTHER, OTHER)
    for place in (tmp_path, *tmp_path.parents):
        if place.owner() == "root" and place != Path("/") and place.stat().st_mode & 0o001 == 0:
            place.chmod(place.stat().st_mode | 0o011)
    return home
