"""Access control: every endpoint and method with every kind of unauthorized request; none may change anything."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.protocol import MAX_BODY_BYTES
from orchestrator.api.server.testing import ServedFake, serve_fake
from tests.support.plain_http import JSON, Answer, ask
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.api.conftest import TOKEN
from tests.unit.api.test_matrix_routes import grid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.api.transport.endpoint import Endpoint

ACTIONS = 14  # five verbs for jobs, tracing one and its stacks, three for nodes, changing one, setting a queue, shutdown, prune
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")
BODIES: dict[str, Any] = {
    "/api/v1/jobs": {"yaml": "entrypoint: python x.py\n", "idempotency_key": "attack-key", "cwd": "/"},
    "/api/v1/plan": {"yaml": "entrypoint: python x.py\n", "idempotency_key": "attack-key", "cwd": "/"},
    "/api/v1/submissions": {
        "submissions": [{"yaml": "entrypoint: python x.py\n", "idempotency_key": "attack-key", "cwd": "/"}]
    },
    "/api/v1/prune": {"older_than_seconds": 0},
    "/api/v1/jobs/{ref}/update": {"priority": 99},
}


def endpoints(served: ServedFake, job_id: str) -> list[tuple[str, str, bytes]]:
    """Return every (method, path, body) of the OpenAPI document, and every other method on those paths."""
    document = ask(served.endpoint, "GET", "/api/v1/openapi.json").json
    found = []
    verbs = ("cancel", "pause", "resume", "rerun", "update")
    for template in [*document["paths"], "/api/v1/openapi.json"]:
        names = (
            verbs if "{ref}/{verb}" in template else ("cordon", "drain", "uncordon") if "{verb}" in template else ("",)
        )
        for name in names:
            named = template.replace("{verb}", name)
            body = json.dumps(BODIES.get(named, {})).encode()
            path = (
                named.replace("{ref}", job_id)
                .replace("{other}", job_id)
                .replace("{node}", "node-a")
                .replace("{name}", "q")
            )
            found += [(method, path, body) for method in METHODS]
    return found


def actions(served: ServedFake, job_id: str) -> list[tuple[str, bytes]]:
    """Return every documented POST that acts on existing objects: all but submitting, its uploads, and planning."""
    document = ask(served.endpoint, "GET", "/api/v1/openapi.json").json
    documented = {path for path, methods in document["paths"].items() if "post" in methods}
    found = []
    for method, path, body in endpoints(served, job_id):
        known = [
            p.replace("{ref}", job_id)
            .replace("{node}", "node-a")
            .replace("{name}", "q")
            .replace("{verb}", path.rpartition("/")[2])
            for p in documented
        ]
        reading = path.endswith(("/events", "/logs", "/checkpoints", "/spec", "/files"))
        everyone_s = {
            "/api/v1/jobs",
            "/api/v1/submissions",
            "/api/v1/plan",
            "/api/v1/page/link",
            "/api/v1/pieces",
            "/api/v1/pieces/{digest}",
        }
        if method == "POST" and path in known and not reading and path not in everyone_s:
            found.append((path, body))
    assert len(found) == ACTIONS
    return found


@pytest.fixture
def job_id(served: ServedFake) -> str:
    return str(served.do(lambda service: service.add(state="RUNNING", uid=os.getuid()).id))


def snapshot(served: ServedFake) -> object:
    return served.do(
        lambda service: (
            service.change_version(),
            list(service.calls),
            list(service.requests),
            dict(service._jobs),
            dict(service._nodes),
        )
    )


def attack(served: ServedFake, endpoint: Endpoint, job_id: str, headers: dict[str, str]) -> list[Answer]:
    before = snapshot(served)
    answers = []
    for method, path, body in endpoints(served, job_id):
        sent = None if method in {"GET", "HEAD", "CONNECT"} else body
        answers.append(ask(endpoint, method, path, headers={**JSON, **headers}, body=sent))
    assert snapshot(served) == before
    assert len(answers) > 150
    return answers


BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer \xff\xfe"},
        {"X-Orch-Protocol": "1", "Cookie": f"token={TOKEN}"},
    ],
    ids=str,
)
def test_tcp_without_the_token(served: ServedFake, job_id: str, headers: dict[str, str]) -> None:
    for answer in attack(served, served.tcp_endpoint, job_id, headers):
        assert answer.status in {401, 405}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": ""},
        {"Host": "localhost.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://localhost"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_web_pages_of_others(served: ServedFake, job_id: str, headers: dict[str, str]) -> None:
    for answer in attack(served, served.tcp_endpoint, job_id, {**BEARER, **headers}):
        assert answer.status in {403, 405}


def test_web_pages_of_others_at_the_socket(served: ServedFake, job_id: str) -> None:
    for answer in attack(served, served.endpoint, job_id, {"Host": "evil.example"}):
        assert answer.status in {403, 405}


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_what_a_form_could_send(served: ServedFake, job_id: str, media_type: str) -> None:
    before = snapshot(served)
    for method, path, body in endpoints(served, job_id):
        if method == "POST":
            answer = ask(served.endpoint, method, path, headers={"Content-Type": media_type}, body=body)
            assert answer.status == 415
    assert snapshot(served) == before


@pytest.mark.parametrize("shape", ["declared", "chunked", "lying"])
@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_too_much(tmp_path: Path, shape: str, door: str) -> None:
    with serve_fake(tmp_path, owner_uid=os.getuid(), token=TOKEN, max_body_bytes=10_000) as served:
        job_id = served.do(lambda service: service.add(uid=os.getuid()).id)
        before = snapshot(served)
        endpoint = served.endpoint if door == "unix" else served.tcp_endpoint
        padding = b" " * 20_000
        for method, path, body in endpoints(served, job_id):
            if method != "POST":
                continue
            headers = {**JSON, **BEARER}
            if shape == "lying":
                headers["Content-Length"] = "999999999999"
                answer = ask(endpoint, method, path, headers=headers, body=body)
            else:
                sent = body + padding if shape == "declared" else (chunk for chunk in (body, padding))
                answer = ask(endpoint, method, path, headers=headers, body=sent)
            assert answer.status == 413
            assert answer.headers["x-orch-protocol"] == "1"
        assert snapshot(served) == before


def raw(served: ServedFake, door: str) -> socket.socket:
    """Return a connection to a listener."""
    if door == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(served.endpoint.socket_path)
    else:
        sock = socket.create_connection((served.tcp_endpoint.host, served.tcp_endpoint.port))
    sock.settimeout(PATIENCE_SECONDS)
    return sock


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(served: ServedFake, door: str) -> None:
    """A proxy that takes the other one would see a second request in the body of this one."""
    with raw(served, door) as sock:
        sock.sendall(
            b"POST /api/v1/prune HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer %s\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\n\r\nGET /api/v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n" % TOKEN.encode()
        )
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"not both" in answer
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("door", ["unix", "tcp"])
@pytest.mark.parametrize("why", ["declared", "chunked", "type"])
def test_a_client_that_is_still_sending_reads_why_its_body_is_refused(served: ServedFake, door: str, why: str) -> None:
    size = MAX_BODY_BYTES * 4
    length = b"Transfer-Encoding: chunked" if why == "chunked" else b"Content-Length: %d" % size
    kind = b"text/plain" if why == "type" else b"application/json"
    with raw(served, door) as sock:
        sock.sendall(
            b"POST /api/v1/prune HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\nAuthorization: Bearer %s\r\n%s\r\n\r\n"
            % (kind, TOKEN.encode(), length)
        )
        sock.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (size, b" " * size) if why == "chunked" else b" " * size)
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 415" if why == "type" else b"HTTP/1.1 413")


ESCAPES = [
    "..",
    ".",
    "%2e%2e",
    "..%2f..%2fetc%2fpasswd",
    "../../etc/passwd",
    "a%00b",
    ".hidden",
    "-x",
    "%20",
    "a%0d%0ab",
    "x" * 200,
]


@pytest.mark.parametrize("ref", ESCAPES)
def test_references_never_become_paths(served: ServedFake, job_id: str, ref: str) -> None:
    before = snapshot(served)
    for prefix in ("/api/v1/jobs/", "/api/v1/nodes/"):
        for rest in ("", "/logs", "/events", "/checkpoints", "/cancel", "/drain"):
            for method in ("GET", "POST"):
                answer = ask(served.endpoint, method, prefix + ref + rest, headers=JSON, body=b"{}")
                assert answer.status in {400, 404, 405}, (method, prefix + ref + rest)
    assert snapshot(served) == before


NUMBERS = {
    "jobs?limit=": "",
    "changes?after=": "",
    "jobs/{}/events?after=": "",
    "jobs/{}/events?limit=": "",
    "jobs/{}/events?tail=": "",
    "jobs/{}/logs?rank=": "&follow=true",
    "jobs/{}/logs?attempt=": "&follow=true",
    "jobs/{}/logs?tail=": "",
    "jobs/{}/files/content?path=out/x&offset=": "",
}


@pytest.mark.parametrize("digits", [18, 4000, 5000])
def test_numbers_are_bounded(served: ServedFake, job_id: str, digits: int) -> None:
    for path, more in NUMBERS.items():
        answer = ask(served.endpoint, "GET", f"/api/v1/{path.format(job_id)}{'9' * digits}{more}")
        assert (answer.status, answer.json["code"]) == (400, "bad_request"), path
    for what in ("stacks", "profile"):
        body = f'{{"rank": {"9" * digits}}}'.encode()
        assert ask(served.endpoint, "POST", f"/api/v1/jobs/{job_id}/{what}", headers=JSON, body=body).status == 400
    length = {**JSON, "Content-Length": "9" * digits}
    assert ask(served.endpoint, "POST", "/api/v1/jobs", headers=length, body=b"").status in {400, 413}


# -- another user of the same machine


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[ServedFake]:
    """Serve a daemon that belongs to another uid: the user who runs the tests is a guest."""
    with serve_fake(tmp_path, owner_uid=os.getuid() + 1, token=TOKEN) as served:
        yield served


def test_a_guest_acts_on_no_job_but_his_own_and_not_on_the_daemon(foreign: ServedFake) -> None:
    theirs = foreign.do(lambda service: service.add("theirs", uid=os.getuid() + 1, user="ada"))
    before = snapshot(foreign)
    for path, body in actions(foreign, theirs.id):
        answer = ask(foreign.endpoint, "POST", path, headers=JSON, body=body)
        assert (answer.status, answer.json["code"]) == (403, "not_permitted"), path
    assert snapshot(foreign) == before


@pytest.mark.parametrize(
    "what", ["checkpoints", "files", "files/digest?path=outputs/a", "files/content?path=outputs/a"]
)
def test_a_guest_reads_no_checkpoint_or_output_but_his_own(foreign: ServedFake, what: str) -> None:
    theirs = foreign.do(lambda service: service.add("theirs", uid=os.getuid() + 1, user="ada"))
    for name in (theirs.id, "ada:theirs"):
        answer = ask(foreign.endpoint, "GET", f"/api/v1/jobs/{name}/{what}")
        assert (answer.status, answer.json["hint"]) == (403, "ask ada")


def test_the_owner_alone_cancels_by_force_and_one_job_at_a_time(foreign: ServedFake) -> None:
    mine = foreign.do(lambda service: service.add("mine", uid=os.getuid()))
    path, body = f"/api/v1/jobs/{mine.id}/cancel", b'{"force": true}'
    refused = ask(foreign.endpoint, "POST", path, headers=JSON, body=body)
    assert (refused.status, refused.json["code"]) == (403, "not_permitted")
    assert ask(foreign.tcp_endpoint, "POST", path, headers={**JSON, **BEARER}, body=body).status == 200
    assert ask(foreign.endpoint, "POST", path.replace("/cancel", "/pause"), headers=JSON, body=body).status == 400
    foreign.do(lambda service: service.matrices.update({"grid-abc234": replace(grid(0), id="grid-abc234")}))
    grid_path = "/api/v1/jobs/grid-abc234/cancel"
    whole = ask(foreign.tcp_endpoint, "POST", grid_path, headers={**JSON, **BEARER}, body=body)
    assert (whole.status, "is a matrix" in whole.json["message"]) == (400, True)


def test_a_guest_s_refusal_names_whom_to_ask(foreign: ServedFake) -> None:
    theirs = foreign.do(lambda service: service.add("theirs", uid=os.getuid() + 1, user="ada"))
    answer = ask(foreign.endpoint, "POST", f"/api/v1/jobs/{theirs.id}/cancel", headers=JSON, body=b"{}")
    assert "belongs to ada" in answer.json["message"]
    assert answer.json["hint"] == "ask ada"


def test_a_guest_submits_looks_and_acts_on_his_own(foreign: ServedFake) -> None:
    mine = foreign.do(lambda service: service.add("mine", uid=os.getuid()))
    assert ask(foreign.endpoint, "POST", f"/api/v1/jobs/{mine.id}/cancel", headers=JSON, body=b"{}").status == 200
    body = json.dumps(BODIES["/api/v1/jobs"]).encode()
    reply = ask(foreign.endpoint, "POST", "/api/v1/jobs", headers=JSON, body=body)
    assert reply.status == 201
    job = ask(foreign.endpoint, "GET", f"/api/v1/jobs/{reply.json['job_id']}").json
    assert job["uid"] == os.getuid()


def test_a_token_makes_its_holder_the_owner(foreign: ServedFake) -> None:
    theirs = foreign.do(lambda service: service.add("theirs", uid=4711))
    path = f"/api/v1/jobs/{theirs.id}/cancel"
    assert ask(foreign.tcp_endpoint, "POST", path, headers={**JSON, **BEARER}, body=b"{}").status == 200


AS_NOBODY = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
answers = []
for path, body in json.loads(sys.argv[2]):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(sys.argv[1])
    except OSError as error:
        answers.append(error.errno)
        continue
    data = body.encode()
    sock.sendall(f"POST {path} HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
                 f"Content-Type: application/json\\r\\nContent-Length: {len(data)}\\r\\n\\r\\n".encode() + data)
    answer = b""
    while part := sock.recv(65536):
        answer += part
    answers.append(int(answer.split()[1]))
print(json.dumps(answers))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_the_kernel_s_word_decides_who_asks(mode: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="orch-", dir="/tmp") as directory,
        serve_fake(Path(directory), owner_uid=os.getuid()) as served,
    ):
        os.chmod(directory, 0o711)
        os.chmod(served.endpoint.socket_path, mode)
        job_id = served.do(lambda service: service.add(state="RUNNING", uid=os.getuid()).id)
        before = snapshot(served)
        calls = [(path, body.decode()) for path, body in actions(served, job_id)]
        done = subprocess.run(
            [sys.executable, "-I", "-c", AS_NOBODY, served.endpoint.socket_path, json.dumps(calls)],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert json.loads(done.stdout) == [errno.EACCES if mode == 0o600 else 403] * ACTIONS
        assert snapshot(served) == before


def test_junk_on_the_wire_is_answered_and_survived(served: ServedFake) -> None:
    for junk in (
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE_SECONDS)
            sock.connect(served.endpoint.socket_path)
            sock.sendall(junk + b"\r\n\r\n")
            answer = b""
            while part := sock.recv(65536):
                answer += part
            assert answer.startswith(b"HTTP/1.1 4")
    assert ask(served.endpoint, "GET", "/api/v1/health").status == 200


def test_a_header_given_twice_counts_as_neither(served: ServedFake) -> None:
    with socket.create_connection((served.tcp_endpoint.host, served.tcp_endpoint.port), timeout=300) as sock:
        sock.sendall(
            f"GET /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Authorization: Bearer wrong\r\nConnection: close\r\n\r\n".encode()
        )
        answer = b""
        while part := sock.recv(65536):
            answer += part
    assert answer.split()[1] == b"401"
