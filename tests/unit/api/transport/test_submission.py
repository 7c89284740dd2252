"""A submission is accepted once, whatever happens to its answer, and sends only what the job file requests."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.client import Client
from orchestrator.api.errors import (
    BadRequestError,
    DaemonUnreachableError,
    InvalidSpecError,
    RefusedError,
    RequestTooLargeError,
    SecretMissingError,
)
from orchestrator.api.protocol import MAX_TOGETHER, MAX_YAML_BYTES
from orchestrator.api.transport import submission, wire
from orchestrator.api.transport.endpoint import Endpoint
from orchestrator.api.transport.submission import git_state, read_status
from orchestrator.api.views import SubmitReply
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake

COMMIT = "c" * 40
JOB = "name: digits\nentrypoint: python train.py\n"


@contextmanager
def losing_proxy(directory: Path, target: str, *, lose: int) -> Iterator[tuple[Endpoint, list[bytes]]]:
    """Run a proxy that forwards whole requests and drops the first ``lose`` answers."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(directory / "proxy"))
    listener.listen(8)
    requests: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            with near, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as far:
                far.connect(target)
                head = b""
                while b"\r\n\r\n" not in head:
                    head += near.recv(65536)
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                while len(head) - head.index(b"\r\n\r\n") - 4 < length:
                    head += near.recv(65536)
                far.sendall(head)
                requests.append(head)
                answer = b""
                while part := far.recv(65536):  # once the answer has arrived, the daemon has executed the request
                    answer += part
                if len(requests) > lose:
                    near.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Endpoint(socket_path=str(directory / "proxy")), requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(timeout=PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_a_lost_answer_does_not_submit_twice(served: ServedFake, tmp_path: Path) -> None:
    with losing_proxy(tmp_path, served.endpoint.socket_path, lose=2) as (endpoint, requests):
        reply = Client(endpoint).submit_text(JOB)
    assert len(requests) == 3
    assert not reply.created, "the first delivery made it"
    jobs = Client(served.endpoint).jobs().jobs
    assert [job.id for job in jobs] == [reply.job_id]


def test_when_every_answer_is_lost_the_message_says_that_the_job_may_be_there(
    served: ServedFake, tmp_path: Path
) -> None:
    body = submission.request_body(JOB, "job.yaml", environ={}, cwd="/")
    with (
        losing_proxy(tmp_path, served.endpoint.socket_path, lose=99) as (endpoint, _),
        pytest.raises(DaemonUnreachableError, match="answer was lost") as caught,
    ):
        submission.submit(endpoint, body, environ={}, deadline_seconds=3.0)
    assert "orch status" in caught.value.hint
    assert type(caught.value) is DaemonUnreachableError
    assert len(Client(served.endpoint).jobs().jobs) == 1


def test_submissions_sent_together_are_accepted_or_refused_each_by_itself(served: ServedFake, client: Client) -> None:
    texts = [JOB, "name: digits\n", JOB + "secrets: [HF_TOKEN]\n", JOB + "secrets: [WANDB_KEY]\n", JOB]
    first, invalid, secret, missing, last = client.submit_together(texts, source="my.yaml")
    accepted = [reply.job_id for reply in (first, secret, last) if isinstance(reply, SubmitReply) and reply.created]
    assert sorted(accepted) == sorted(job.id for job in client.jobs().jobs)
    assert len(accepted) == 3
    assert isinstance(invalid, InvalidSpecError)
    assert invalid.problems[0].render() == "my.yaml:1:1: entrypoint: is missing (write it)"
    assert isinstance(missing, SecretMissingError)
    requests = served.do(lambda service: service.requests)
    assert [request.secrets for request in requests if request.secrets] == [{"HF_TOKEN": "hf-secret"}]


def test_a_lost_answer_to_several_submissions_makes_none_twice(served: ServedFake, tmp_path: Path) -> None:
    with losing_proxy(tmp_path, served.endpoint.socket_path, lose=1) as (endpoint, requests):
        replies = Client(endpoint).submit_together([JOB, JOB])
    assert len(requests) == 2
    jobs = {job.id for job in Client(served.endpoint).jobs().jobs}
    assert jobs == {reply.job_id for reply in replies if isinstance(reply, SubmitReply) and not reply.created}
    assert len(jobs) == 2


def test_submissions_are_sent_in_as_many_requests_as_their_size_needs(client: Client, served: ServedFake) -> None:
    large = JOB + "#" * (MAX_YAML_BYTES - len(JOB))
    replies = client.submit_together([large] * 2 + [JOB] * MAX_TOGETHER)
    assert all(isinstance(reply, SubmitReply) and reply.created for reply in replies)
    assert len(served.do(lambda service: service.requests)) == 2 + MAX_TOGETHER


def test_an_absent_daemon_is_told_at_once(tmp_path: Path) -> None:
    body = submission.request_body(JOB, "job.yaml", environ={}, cwd="/")
    with pytest.raises(DaemonUnreachableError) as caught:
        submission.submit(Endpoint(socket_path=str(tmp_path / "none")), body, environ={}, deadline_seconds=300)
    assert not isinstance(caught.value, wire.ConnectionLostError)


def test_the_same_key_with_another_text_is_refused(client: Client) -> None:
    client.submit_text(JOB, key="a-key-of-mine")
    assert not client.submit_text(JOB, key="a-key-of-mine").created
    with pytest.raises(RefusedError, match="used for another"):
        client.submit_text(JOB + "priority: 1\n", key="a-key-of-mine")


def test_only_secrets_that_are_asked_for_leave_the_environment(served: ServedFake, client: Client) -> None:
    client.submit_text(JOB + "secrets: [HF_TOKEN]\n")
    first, second = served.do(lambda service: service.requests)
    assert first.secrets == {}
    assert second.secrets == {"HF_TOKEN": "hf-secret"}
    assert first.idempotency_key == second.idempotency_key


def test_a_missing_secret_is_named_and_nothing_is_stored(client: Client) -> None:
    with pytest.raises(SecretMissingError, match="WANDB_KEY") as caught:
        client.submit_text(JOB + "secrets: [HF_TOKEN, WANDB_KEY]\n")
    assert "export WANDB_KEY" in caught.value.hint
    assert client.jobs().jobs == ()


def test_errors_of_the_text_come_with_their_place(client: Client) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        client.submit_text("name: digits\n", source="my.yaml")
    assert caught.value.problems[0].render() == "my.yaml:1:1: entrypoint: is missing (write it)"
    assert caught.value.exit_code == 2


def test_what_is_sent_with_the_text(served: ServedFake, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "sub" / "job.yaml"
    file.parent.mkdir()
    file.write_text(JOB)
    client.submit(str(file), overrides=["priority=3"], resume_from="old@5")
    (request,) = served.do(lambda service: service.requests)
    assert request.yaml == JOB
    assert request.source == str(file)
    assert request.cwd == str(file.parent)
    assert request.overrides == ("priority=3",)
    assert request.resume_from == "old@5"
    assert request.path == "/usr/bin"
    assert len(request.idempotency_key) == 32


def test_a_text_over_the_bound_is_refused_by_the_daemon_too(client: Client) -> None:
    with pytest.raises(RequestTooLargeError, match="1024 KiB"):
        client.submit_text("#" * (MAX_YAML_BYTES + 1))


def test_python_is_what_the_path_says(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "python").write_text("not executable")
    (tmp_path / "two" / "python").symlink_to("/bin/sh")
    (tmp_path / "three" / "python3").symlink_to("/bin/sh")
    path = os.pathsep.join(str(tmp_path / name) for name in ("one", "two", "three"))
    assert submission.find_python(path) == str(tmp_path / "two" / "python"), "the link itself: a venv's python is one"
    assert submission.find_python(str(tmp_path / "three")) == str(tmp_path / "three" / "python3")
    assert submission.find_python(str(tmp_path / "one")) is None
    assert submission.find_python("relative:") is None


def test_reading_a_file(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(JOB.encode())
    assert submission.read_job_file(str(file)) == JOB
    assert submission.read_job_file("-", io.BytesIO(JOB.encode())) == JOB


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"\xff\xfe", "not UTF-8"), (b"#" * (MAX_YAML_BYTES + 1), "larger than 1024 KiB")],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "job.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadRequestError, match=message) as caught:
        submission.read_job_file(str(file))
    assert caught.value.hint


def test_a_directory_and_an_endless_file_are_no_job_files() -> None:
    with pytest.raises(BadRequestError, match="directory"):
        submission.read_job_file("/")
    with pytest.raises(BadRequestError, match="larger than"):
        submission.read_job_file("/dev/zero")


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (f"# branch.oid {COMMIT}\n# branch.head main\n", {"commit": COMMIT, "branch": "main", "dirty": False}),
        (f"# branch.oid {COMMIT}\n# branch.head (detached)\n? new\n", {"commit": COMMIT, "branch": "", "dirty": True}),
        ("# branch.oid (initial)\n# branch.head main\n", {"commit": "", "branch": "main", "dirty": False}),
        ("# branch.oid nonsense\n", None),
        ("", None),
    ],
)
def test_what_git_says(text: str, state: dict[str, Any] | None) -> None:
    assert read_status(text) == state


def test_the_state_of_a_repository(tmp_path: Path) -> None:
    assert git_state(str(tmp_path)) is None

    def git(*words: str) -> None:
        who = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init", "-q", "-b", "trunk")
    (tmp_path / "train.py").write_text("pass\n")
    fresh = git_state(str(tmp_path))
    assert fresh == {"commit": "", "branch": "trunk", "dirty": True}
    git("add", "train.py")
    git("commit", "-q", "-m", "first")
    clean = git_state(str(tmp_path))
    assert clean is not None
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "train.py").write_text("1\n")
    assert git_state(str(tmp_path)) == {**clean, "dirty": True}


@pytest.mark.parametrize(
    ("text", "overrides", "directory"),
    [
        (JOB, (), "."),
        (JOB + "working_dir: null\n", (), None),
        (JOB + "working_dir: code\n", (), "code"),
        (JOB + "working_dir: 'code'  # quoted\n", (), "code"),
        (JOB + "working_dir: code\n", ("working_dir=.",), "."),
        (JOB + "working_dir: ~\n", (), None),
        (JOB + "working_dir: [code]\n", (), None),
    ],
)
def test_the_git_state_is_that_of_the_working_directory_and_the_submitter_finds_it(
    tmp_path: Path, text: str, overrides: tuple[str, ...], directory: str | None
) -> None:
    for name in (".", "code"):
        subprocess.run(["git", "init", "-q", "-b", f"b{name.strip('.')}", str(tmp_path / name)], check=True)
    body = submission.request_body(text, "job.yaml", environ={}, cwd=str(tmp_path), overrides=overrides)
    found = body.get("git")
    assert (found and found["branch"]) == (None if directory is None else f"b{directory.strip('.')}")
