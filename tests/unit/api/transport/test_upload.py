"""Submissions to a daemon on another machine upload their files, and only the files that they name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import (
    BadRequestError,
    DaemonUnreachableError,
    InvalidSpecError,
    MediaTypeError,
    RefusedError,
    UnauthenticatedError,
    WorkdirNeededError,
)
from orchestrator.api.protocol import API_PREFIX, MAX_PIECE_BYTES
from orchestrator.api.server.testing import ServedFake, serve_fake
from orchestrator.api.transport import wire
from orchestrator.api.transport.endpoint import tcp_endpoint
from orchestrator.api.transport.upload import Uploader
from tests.support.stack import PATIENCE_SECONDS
from tests.support.tunnel import tunnel_to

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB = "name: digits\nentrypoint: python train.py\n"


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[ServedFake]:
    with serve_fake(tmp_path / "daemon", owner_uid=os.getuid(), token="t0ken") as fake:
        yield fake


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    (made / "train.py").write_text("print()\n")
    (made / ".gitignore").write_text("keys/\n")
    (made / "keys").mkdir()
    (made / "keys" / "id").write_text("private")
    return made


def client_of(remote: ServedFake) -> Client:
    return Client(remote.tcp_endpoint, environ={"PATH": "/usr/bin"})


def pieces_of(remote: ServedFake) -> dict[str, bytes]:
    found: dict[str, bytes] = remote.do(lambda service: dict(service.pieces))
    return found


def manifest_of(remote: ServedFake) -> dict[str, Any]:
    (request,) = [each for each in remote.do(lambda service: list(service.requests)) if each.upload]
    pieces = pieces_of(remote)
    found: dict[str, Any] = json.loads(b"".join(pieces[digest] for digest in request.upload))
    return found


def test_a_submission_uploads_its_directory(remote: ServedFake, project: Path) -> None:
    reply = client_of(remote).submit_text(JOB, cwd=str(project))
    assert reply.job_id
    assert [entry["path"] for entry in manifest_of(remote)["entries"]] == [".gitignore", "train.py"]
    assert hashlib.sha256(b"print()\n").hexdigest() in pieces_of(remote)
    assert all(hashlib.sha256(data).hexdigest() == digest for digest, data in pieces_of(remote).items())
    assert b"private" not in b"".join(pieces_of(remote).values())


def test_the_directory_is_the_one_of_the_text_and_nothing_else_of_this_machine(
    remote: ServedFake, project: Path, tmp_path: Path
) -> None:
    client_of(remote).submit_text(JOB, cwd=str(tmp_path), overrides=("working_dir=project",))
    assert [entry["path"] for entry in manifest_of(remote)["entries"]] == [".gitignore", "train.py"]
    with pytest.raises(BadRequestError, match="elsewhere is not a directory"):
        client_of(remote).submit_text(JOB, cwd=str(tmp_path), overrides=("working_dir=elsewhere",))
    with pytest.raises(InvalidSpecError):
        client_of(remote).submit_text(JOB + "bogus: 1\n", cwd=str(project))


def test_a_large_file_goes_in_pieces_and_a_second_upload_sends_what_has_changed(
    remote: ServedFake, project: Path
) -> None:
    (project / "big").write_bytes(os.urandom(MAX_PIECE_BYTES) + b"rest")
    told: list[tuple[int, int]] = []
    uploader = Uploader(remote.tcp_endpoint, lambda done, total: told.append((done, total)))
    first = uploader.upload(project)
    assert first.sent_bytes > MAX_PIECE_BYTES
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1] == first.sent_bytes
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert uploader.upload(project)._replace(sent_bytes=0) == first._replace(sent_bytes=0)
    with (project / "big").open("ab") as file:
        file.write(b"more")
    again = uploader.upload(project)
    assert again.sent_bytes < 4096
    assert again.left_out is not None
    assert again.left_out.files == 1


def test_an_upload_that_was_cut_off_goes_on_where_it_was(remote: ServedFake, project: Path) -> None:
    for number in range(5):
        (project / f"data{number}").write_bytes(bytes([number]) * 1000)

    def cut(done: int, _total: int) -> None:
        if done >= 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Uploader(remote.tcp_endpoint, cut).upload(project)
    before = pieces_of(remote)
    assert 0 < len(before) < 6
    found = Uploader(remote.tcp_endpoint, lambda _done, _total: None).upload(project)
    assert found.sent_bytes == sum(map(len, pieces_of(remote).values())) - sum(map(len, before.values()))


def test_a_daemon_that_goes_away_is_told_after_patience(remote: ServedFake, project: Path) -> None:
    def stop(_done: int, _total: int) -> None:
        remote.stop()

    with pytest.raises(DaemonUnreachableError):
        Uploader(remote.tcp_endpoint, stop, patience_seconds=0.2).upload(project)
    remote.start()


def test_a_file_that_changes_meanwhile_is_named(remote: ServedFake, project: Path) -> None:
    def change(_done: int, _total: int) -> None:
        (project / "train.py").write_text("other!!\n")

    with pytest.raises(RefusedError, match=r"train\.py changes while it is read"):
        Uploader(remote.tcp_endpoint, change).upload(project)


def test_a_link_out_of_the_directory_is_sent_as_a_link_and_reported(remote: ServedFake, project: Path) -> None:
    (project.parent / "data").mkdir()
    (project / "data").symlink_to("../data")
    uploaded = Uploader(remote.tcp_endpoint, lambda _done, _total: None).upload(project)
    assert uploaded.left_out is not None
    assert (uploaded.left_out.files, uploaded.left_out.links_out) == (1, 1)
    (text,) = (data for digest, data in pieces_of(remote).items() if digest in uploaded.manifest)
    (link,) = (entry for entry in json.loads(text)["entries"] if entry["type"] == "link")
    assert link == {"path": "data", "type": "link", "target": str(project.parent / "data")}


def test_over_the_socket_nothing_is_uploaded(remote: ServedFake, project: Path) -> None:
    Client(remote.endpoint, environ={"PATH": "/usr/bin"}).submit_text(JOB, cwd=str(project))
    assert pieces_of(remote) == {}


def test_a_client_that_does_not_upload_is_told_so(remote: ServedFake) -> None:
    body = {"yaml": JOB, "idempotency_key": "0123456789", "cwd": "/"}
    with pytest.raises(WorkdirNeededError):
        wire.call(remote.tcp_endpoint, "POST", f"{API_PREFIX}/jobs", body=body)


def test_a_piece_is_bytes_and_needs_the_token(remote: ServedFake) -> None:
    path = f"{API_PREFIX}/pieces/{'0' * 64}"
    with pytest.raises(MediaTypeError):
        wire.call(remote.tcp_endpoint, "POST", path, body={})
    with pytest.raises(UnauthenticatedError):
        wire.send(remote.tcp_endpoint._replace(token="wrong"), path, b"x", deadline_seconds=PATIENCE_SECONDS)
    assert pieces_of(remote) == {}


def test_through_a_tunnel_to_the_socket_a_submission_uploads_its_directory(remote: ServedFake, project: Path) -> None:
    with tunnel_to(remote.endpoint.socket_path) as address:
        client = Client(tcp_endpoint(address), environ={"PATH": "/usr/bin"})
        client.plan(JOB, cwd=str(project))
        client.submit_text(JOB, cwd=str(project))
    assert [entry["path"] for entry in manifest_of(remote)["entries"]] == [".gitignore", "train.py"]
