"""Directories and files of this user alone, also where other users were first to create them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.private_files import (
    NotPrivateError,
    enter_below,
    enter_private,
    make_private,
    open_private,
    remove_private,
)
from orchestrator.runtime.nodes.directories import (
    clear_pages,
    make_node_directory,
    node_directory,
    page_directory,
    page_name,
    remove_of_jobs,
)
from orchestrator.runtime.spawn.rank_locks import lock_is_free, rank_lock_path
from orchestrator.train.script.agreement import ShmAgreement
from tests.support.pages import BothSides
from tests.support.users import OTHER, as_root, as_user
from tests.support.work import descriptors, descriptors_stay

VICTIM = 54321


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a directory like /tmp, in which every user can create files."""
    directory = Path(tempfile.mkdtemp(prefix="orch-shared-", dir="/tmp"))
    directory.chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("value", [0o000, 0o022, 0o002])
def test_a_directory_and_the_parents_made_for_it_are_private_whatever_the_umask(shared: Path, value: int) -> None:
    with umask(value):
        made = make_private(shared / "a" / "b" / "c")
    assert [mode(path) for path in (made, made.parent, made.parent.parent)] == [0o700] * 3
    assert mode(shared) == 0o1777, "what all users share stays as it is"


def test_a_directory_of_this_user_that_others_could_read_is_closed(tmp_path: Path) -> None:
    for found in (0o755, 0o775, 0o777):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d").chmod(found)
        assert mode(make_private(tmp_path / "d")) == 0o700
    (tmp_path / "d").chmod(0o755)
    assert mode(make_private(tmp_path / "d", traversable=True)) == 0o711


def test_a_directory_that_others_could_have_filled_is_refused(shared: Path) -> None:
    (shared / "d").mkdir()
    (shared / "d").chmod(0o777)
    with pytest.raises(NotPrivateError, match="can be written by other users"):
        make_private(shared / "d")
    with pytest.raises(NotPrivateError, match="can be written by other users"):
        make_private(shared / "d" / "below")


def test_a_directory_that_all_users_share_is_never_closed(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)  # as /dev/shm is for root
    with pytest.raises(NotPrivateError, match="users share"):
        make_private(tmp_path / "tmp")
    remove_private(tmp_path / "tmp" / "nothing")
    assert mode(tmp_path / "tmp") == 0o1777


def test_a_link_where_any_user_can_make_one_is_refused_and_one_of_this_user_s_own_is_followed(
    shared: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (shared / "link").symlink_to(tmp_path / "elsewhere")
    for path in (shared / "link", shared / "link" / "below"):
        with pytest.raises(NotPrivateError, match="link or a file"):
            make_private(path)
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "own").symlink_to("elsewhere")
    make_private(tmp_path / "own" / "below")
    assert (tmp_path / "elsewhere" / "below").is_dir()


def test_a_file_is_opened_only_when_it_is_one_of_this_user(tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("kept")
    (tmp_path / "log").symlink_to(victim)
    with pytest.raises(NotPrivateError, match="symbolic link"):
        open_private(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert victim.read_text() == "kept"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NotPrivateError, match="not a regular file"):
        open_private(tmp_path / "fifo", os.O_RDONLY)
    handle = open_private(tmp_path / "new", os.O_WRONLY | os.O_CREAT)
    os.close(handle)
    assert mode(tmp_path / "new") == 0o600


def test_a_path_below_a_directory_that_a_rank_writes_to_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "out").symlink_to(tmp_path / "elsewhere")
    for relative in ("out", "out/x", "../elsewhere", "/tmp", "a/../../elsewhere"):
        with pytest.raises(ValueError, match=r"leads out|not a directory"):
            enter_below(tmp_path / "base", relative, make=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="not a directory but a link"):
        enter_below(tmp_path / "link", "x", make=True)
    assert not list((tmp_path / "elsewhere").iterdir())
    os.close(enter_below(tmp_path / "base", "a/b", make=True))
    assert mode(tmp_path / "base" / "a" / "b") == 0o700


# -- paths under /tmp and /dev/shm that another user has created first


@pytest.fixture
def places(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use one directory that every user can write to as `/tmp` and `/dev/shm`."""
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    return shared


@as_root
@pytest.mark.parametrize("how", ["directory", "open directory", "link to a directory of the victim"])
def test_what_another_user_has_made_first_is_refused_by_name(places: Path, how: str) -> None:
    own = places / "precious"
    own.mkdir()
    os.chown(own, VICTIM, VICTIM)
    name = places / f"orch-{VICTIM}"

    def attack() -> None:
        if "link" in how:
            name.symlink_to(own)
        else:
            name.mkdir(mode=0o777)
            if how == "open directory":
                name.chmod(0o777)
                (name / "home").mkdir()
                (name / "home").chmod(0o777)

    assert as_user(OTHER, attack) == "None"
    said = as_user(VICTIM, lambda: make_node_directory("orch-home", "local"))
    assert said.startswith("NotPrivateError: ")
    assert str(name) in said
    assert "remove it" in said
    assert not list(own.iterdir())


@as_root
def test_pages_in_a_directory_of_another_user_are_neither_made_nor_removed(places: Path) -> None:
    elsewhere = places / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "job.0.page").write_text("precious")
    (elsewhere / "job.snapshots").mkdir()
    for path in (elsewhere, *elsewhere.iterdir()):
        os.chown(path, VICTIM, VICTIM)
    pages = places / f"orch-{VICTIM}-home"
    as_user(OTHER, lambda: pages.symlink_to(elsewhere))
    node = node_directory("orch-home", "n")

    def victim() -> list[str]:
        assert page_directory("orch-home", shared_memory=places) == pages
        clear_pages(node, (), young_seconds=-1, shared_memory=places)
        remove_of_jobs(pages, {"job"})
        remove_private(pages)
        with contextlib.suppress(NotPrivateError):
            make_private(pages)
            return ["made"]
        return sorted(path.name for path in elsewhere.iterdir())

    assert as_user(VICTIM, victim) == "['job.0.page', 'job.snapshots']"


@as_root
def test_a_lock_in_a_directory_of_another_user_is_not_taken(places: Path) -> None:
    precious = places / "precious"
    precious.write_text("kept")
    os.chown(precious, VICTIM, VICTIM)
    node = places / "node"
    lock = rank_lock_path(node, "job", 0)

    def attack() -> None:
        lock.parent.mkdir(parents=True)
        lock.parent.chmod(0o777)
        node.chmod(0o777)
        lock.symlink_to(precious)

    as_user(OTHER, attack)
    assert "NotPrivateError" in as_user(VICTIM, lambda: open_private(lock, os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    assert as_user(VICTIM, lambda: lock_is_free(lock)) == "True", "no lock of this user is there"
    assert precious.read_text() == "kept"


@as_root
def test_the_ranks_board_is_not_made_in_a_directory_of_another_user(places: Path) -> None:
    board = places / "board"

    def attack() -> None:
        board.mkdir()
        board.chmod(0o777)
        (board / "board-earlier").write_text("")

    as_user(OTHER, attack)
    assert "NotPrivateError" in as_user(VICTIM, lambda: ShmAgreement(board, "run"))
    assert [path.name for path in board.iterdir()] == ["board-earlier"]


def test_a_page_is_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    page = tmp_path / "job.0.page"
    (tmp_path / f"{page.name}.{os.getpid()}.new").symlink_to(precious)
    BothSides.create(page).close()
    assert precious.read_text() == "kept"
    assert page.is_file()
    assert not page.is_symlink()


def test_pages_of_one_job_are_removed_and_no_other_s(places: Path) -> None:
    pages = make_private(page_directory("orch-home", shared_memory=places))
    for name in (page_name("job-a", 0), page_name("job-a", 1), page_name("job-b", 0)):
        (pages / name).write_text("")
    (pages / "job-a.snapshots" / "x").mkdir(parents=True)
    remove_of_jobs(pages, {"job-a"})
    assert [path.name for path in pages.iterdir()] == ["job-b.0.page"]


def test_a_checked_directory_is_one_descriptor_that_is_not_inherited(tmp_path: Path) -> None:
    with descriptors_stay() as before:
        handle = enter_private(tmp_path / "x" / "y", make=True)
        assert len(descriptors()) == len(before) + 1
        assert not os.get_inheritable(handle)
        os.close(handle)
        with pytest.raises(FileNotFoundError):
            enter_private(tmp_path / "absent" / "y")
