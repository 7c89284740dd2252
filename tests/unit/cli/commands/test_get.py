"""`orch get`: a job's files arrive whole, interrupted downloads resume, and no file is written elsewhere."""

from __future__ import annotations

import hashlib
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.abandoned import PIECE_BYTES
from orchestrator.api.client import Client
from orchestrator.api.errors import (
    BadRequestError,
    NotFoundError,
    NotPermittedError,
    ProtocolMismatchError,
    RefusedError,
)
from orchestrator.api.files import FileDigest, FileView
from orchestrator.api.server.testing import serve_fake
from orchestrator.api.transport.download import Downloader
from orchestrator.daemon.requests.files import LeftFiles, left_files
from orchestrator.runtime.pools import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.api.server.testing import ServedFake
    from orchestrator.api.views import JobView
    from tests.unit.cli.conftest import Outcome

WEIGHTS = os.urandom(PIECE_BYTES * 2 + 17)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    root = tmp_path / "left"
    (root / "outputs" / "deep").mkdir(parents=True)
    (root / "outputs" / "deep" / "model.pt").write_bytes(WEIGHTS)
    (root / "outputs" / "log.txt").write_text("fine")
    (root / "outputs" / "link").symlink_to("/etc/passwd")
    (root / "outputs" / "directory").symlink_to("/etc")
    os.mkfifo(root / "outputs" / "pipe")
    (root / "secret").write_text("outside")
    return root


@pytest.fixture
def job(served: ServedFake, left: Path) -> Iterator[JobView]:
    pool = Pool("outputs", 2)
    found: JobView = served.do(lambda service: service.add("digits", state="SUCCEEDED"))
    roots = {"outputs": left / "outputs", "checkpoints": left / "checkpoints"}
    served.do(lambda service: service.files_of.update({found.id: LeftFiles(found.id, roots, pool)}))
    yield found
    pool.close()


def test_everything_arrives_and_comes_once(
    orch: Callable[..., Outcome], home: Path, job: JobView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    done = orch("get", "digits", "--json")
    assert done.code == 0, done.err
    assert {file["path"] for file in done.json["files"]} == {"outputs/deep/model.pt", "outputs/log.txt"}
    assert (home / job.id / "outputs" / "deep" / "model.pt").read_bytes() == WEIGHTS
    again = orch("get", "digits", "--json")
    assert {file["received"] for file in again.json["files"]} == {0}


def test_a_pattern_and_a_directory(orch: Callable[..., Outcome], home: Path, job: JobView) -> None:
    done = orch("get", job.id, "*.pt", "-o", str(home / "there" / "new"))
    assert done.code == 0, done.err
    assert done.out.startswith("1 file in ")
    assert sorted(p.name for p in (home / "there").rglob("*") if p.is_file()) == ["model.pt"]
    listed = orch("get", job.id, "--list")
    assert [line.split()[-1] for line in listed.out.splitlines()] == ["outputs/deep/model.pt", "outputs/log.txt"]
    assert orch("get", job.id, "*.ckpt").code == 3


def test_a_download_goes_on_where_it_was_cut_off(client: Client, home: Path, job: JobView) -> None:
    target = home / "target"
    (target / "outputs" / "deep").mkdir(parents=True)
    part = target / "outputs" / "deep" / ".model.pt.orch-part"
    part.write_bytes(WEIGHTS[:1_000_000])
    fetched = Downloader(client, job.id, target, lambda _: None).fetch(view("outputs/deep/model.pt"))
    assert fetched.received == len(WEIGHTS) - 1_000_000
    assert (target / "outputs" / "deep" / "model.pt").read_bytes() == WEIGHTS
    assert not part.exists()


def test_a_part_of_something_else_is_fetched_anew(client: Client, home: Path, job: JobView) -> None:
    target = home / "target"
    (target / "outputs").mkdir(parents=True)
    (target / "outputs" / ".log.txt.orch-part").write_text("of another file")
    Downloader(client, job.id, target, lambda _: None).fetch(view("outputs/log.txt"))
    assert (target / "outputs" / "log.txt").read_text() == "fine"


def test_content_without_its_digest_is_not_kept(client: Client, home: Path, job: JobView) -> None:
    class Wrong(Client):
        def file_digest(self, ref: str, path: str) -> FileDigest:
            return FileDigest(path=path, size_bytes=4, sha256=hashlib.sha256(b"else").hexdigest())

    (home / "target").mkdir()
    wrong = Wrong(client.endpoint, environ={})
    with pytest.raises(RefusedError, match="is not what the daemon has"):
        Downloader(wrong, job.id, home / "target", lambda _: None).fetch(view("outputs/log.txt"))
    assert [p for p in (home / "target").rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "outputs/../../x", "outputs//x", "x", "outputs/a\0b", ""])
def test_a_daemon_cannot_name_a_place_outside(client: Client, home: Path, job: JobView, path: str) -> None:
    with pytest.raises(ProtocolMismatchError, match="nothing was written"):
        Downloader(client, job.id, home / "target", lambda _: None).fetch(view(path))


def test_links_in_the_target_lead_nowhere(client: Client, home: Path, job: JobView) -> None:
    (home / "target").mkdir()
    (home / "elsewhere").mkdir()
    (home / "target" / "outputs").symlink_to(home / "elsewhere")
    with pytest.raises(BadRequestError, match="cannot be written"):
        Downloader(client, job.id, home / "target", lambda _: None).fetch(view("outputs/log.txt"))
    assert list((home / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    "path",
    [
        "outputs/link",
        "outputs/directory/passwd",
        "outputs/pipe",
        "outputs/../secret",
        "outputs/",
        "outputs",
        "work/x",
        "/etc/passwd",
        "outputs/./log.txt/..",
        "outputs/none",
    ],
)
def test_the_daemon_reads_nothing_else(client: Client, job: JobView, path: str) -> None:
    with pytest.raises(NotFoundError, match="has no file"):
        client.file_digest(job.id, path)
    with pytest.raises(NotFoundError, match="has no file"):
        list(client.file_content(job.id, path))


def test_a_link_in_place_of_the_job_s_directory_is_not_followed(
    client: Client, orch: Callable[..., Outcome], left: Path, job: JobView
) -> None:
    left.rename(left.with_name("moved"))
    left.symlink_to(left.with_name("moved"))
    for ask in (client.files, lambda ref: client.file_digest(ref, "outputs/log.txt")):
        with pytest.raises(RefusedError, match="is a symbolic link, which is not followed"):
            ask(job.id)
    assert f"remove {left}" in orch("get", job.id).err


def test_checkpoints_behind_a_url_are_told(tmp_path: Path, served: ServedFake, client: Client, job: JobView) -> None:
    pool = Pool("outputs", 1)
    files = left_files(job.id, tmp_path / "none", "s3://bucket/x", Path, pool)
    served.do(lambda service: service.files_of.update({job.id: files}))
    told = client.files(job.id)
    assert (told.files, told.elsewhere) == ((), "s3://bucket/x")
    pool.close()


def test_files_of_others_are_closed(tmp_path: Path) -> None:
    with serve_fake(tmp_path / "run", owner_uid=os.getuid() + 1) as served:
        theirs = served.do(lambda service: service.add("theirs", uid=os.getuid() + 2, user="bea"))
        client = Client(served.endpoint, environ={})
        for ask in (
            client.files,
            lambda ref: client.file_digest(ref, "outputs/x"),
            lambda ref: list(client.file_content(ref, "x")),
        ):
            with pytest.raises(NotPermittedError, match="belongs to bea"):
                ask(theirs.id)


def view(path: str) -> FileView:
    return FileView(path=path, size_bytes=1)


@pytest.fixture
def client(served: ServedFake) -> Any:
    return Client(served.endpoint, environ={}, deadline_seconds=300)


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [("none", "has left neither outputs nor checkpoints"), ("s3://bucket/x", "has left no outputs")],
)
def test_a_job_that_has_left_nothing_is_told_apart_from_a_pattern_that_fits_nothing(
    orch: Callable[..., Outcome], tmp_path: Path, served: ServedFake, job: JobView, checkpoints: str, said: str
) -> None:
    bare = served.do(lambda service: service.add("bare", state="RUNNING"))
    with closing(Pool("outputs", 1)) as pool:
        nothing = left_files(bare.id, tmp_path / "none", checkpoints, tmp_path.joinpath, pool)
        served.do(lambda service: service.files_of.update({bare.id: nothing}))
        for line in (("get", bare.id), ("get", bare.id, "--list")):
            done = orch(*line)
            assert done.code == 3
            assert said in done.err
            assert "--list" not in done.err
    assert "no file that matches *.ckpt or *.bin" in orch("get", job.id, "*.ckpt", "*.bin").err
