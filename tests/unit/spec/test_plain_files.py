"""Only regular files are read, and only up to the requested size."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from orchestrator.spec.plain_files import NotPlainFileError, open_plain, read_plain


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    """A file is read up to the limit, and not beyond."""
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_plain(tmp_path / "file", 100) == b"x" * 100
    with pytest.raises(NotPlainFileError, match="more than 99 bytes"):
        read_plain(tmp_path / "file", 99)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """A FIFO without a writer would block for ever; a device has no end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    (tmp_path / "target").write_text("elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("fifo", "directory", "link", "socket"):
            with pytest.raises(NotPlainFileError, match="not a regular file"):
                open_plain(tmp_path / name)
    with pytest.raises(NotPlainFileError, match="not a regular file"):
        read_plain(Path("/dev/zero"), 10)
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "none", 10)


def test_a_directory_that_was_replaced_by_a_link_is_not_followed_on_the_way_to_a_job_s_file(tmp_path: Path) -> None:
    """The last part of the path is a plain file in both cases."""
    (tmp_path / "job" / "logs").mkdir(parents=True)
    (tmp_path / "job" / "logs" / "file").write_text("here")
    (tmp_path / "way").symlink_to(tmp_path / "job")
    (tmp_path / "job" / "short").symlink_to(tmp_path / "job" / "logs")
    assert read_plain(tmp_path / "job" / "logs" / "file", 10, real=True) == b"here"
    for path in (tmp_path / "way" / "logs" / "file", tmp_path / "job" / "short" / "file"):
        assert read_plain(path, 10) == b"here"
        with pytest.raises(NotPlainFileError, match="symbolic link, which is not followed"):
            read_plain(path, 10, real=True)


def test_a_link_is_followed_where_that_is_wanted(tmp_path: Path) -> None:
    """A link is followed to a regular file, and to nothing else."""
    (tmp_path / "target").write_text("here")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "to-fifo").symlink_to(tmp_path / "fifo")
    assert read_plain(tmp_path / "link", 10, follow=True) == b"here"
    with pytest.raises(NotPlainFileError):
        read_plain(tmp_path / "to-fifo", 10, follow=True)
