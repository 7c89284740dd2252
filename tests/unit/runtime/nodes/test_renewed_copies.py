"""Files that no rank has used are laid out again after another boot of the machine, from an archive that is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.daemon.submitting import archives
from orchestrator.durable_files import boot_id
from orchestrator.runtime.nodes.files import renew


@pytest.fixture
def digest(tmp_path: Path) -> str:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text("print('whole')")
    taken = archives.take(tmp_path / "source", lambda name: tmp_path / "blobs" / name, max_bytes=10**6)
    archives.lay_out(taken.digest, lambda name: tmp_path / "blobs" / name, tmp_path / "work")
    (tmp_path / "work" / "train.py").write_text("")
    return taken.digest


@pytest.mark.parametrize("boot", [None, "", "another boot"], ids=["none", "torn", "another"])
def test_after_another_boot_the_copy_is_made_anew(tmp_path: Path, digest: str, boot: str | None) -> None:
    if boot is not None:
        (tmp_path / "laid-out").write_text(boot)
    for _ in range(2):
        renew(digest, lambda name: tmp_path / "blobs" / name, tmp_path / "work", tmp_path / "laid-out")
        assert (tmp_path / "work" / "train.py").read_text() == "print('whole')"
        assert (tmp_path / "laid-out").read_text() == boot_id()


def test_in_the_same_boot_it_is_left_alone(tmp_path: Path, digest: str) -> None:
    (tmp_path / "laid-out").write_text(boot_id())
    renew(digest, lambda name: tmp_path / "blobs" / name, tmp_path / "work", tmp_path / "laid-out")
    assert (tmp_path / "work" / "train.py").read_text() == ""


@pytest.mark.parametrize("content", [b"", b"other", None], ids=["empty", "other", "missing"])
def test_a_damaged_archive_is_told_and_the_copy_stays(tmp_path: Path, digest: str, content: bytes | None) -> None:
    for blob in (tmp_path / "blobs").iterdir():
        if blob.name != digest:
            blob.write_bytes(content) if content is not None else blob.unlink()
    with pytest.raises((ValueError, OSError), match=r"damaged|No such file"):
        renew(digest, lambda name: tmp_path / "blobs" / name, tmp_path / "work", tmp_path / "laid-out")
    assert (tmp_path / "work").exists()
    assert not (tmp_path / "laid-out").exists()


def test_without_an_archive_the_directory_is_there(tmp_path: Path) -> None:
    renew("", lambda name: tmp_path / name, tmp_path / "job" / "work", tmp_path / "job" / "laid-out")
    assert (tmp_path / "job" / "work").is_dir()
