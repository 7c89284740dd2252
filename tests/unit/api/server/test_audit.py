"""The audit log: who has sent which request from where, and with what result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.server.app import create_control_app
from orchestrator.api.server.audit import MAX_REFUSALS, AuditLog
from orchestrator.api.server.gate import GatePolicy, Peer
from orchestrator.api.server.testing import FakeService
from orchestrator.runtime.pools import Pool
from orchestrator.web.app import create_page_app
from orchestrator.web.sign_in import SignIn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from starlette.types import ASGIApp, Message

TOKEN = "a-token-of-the-owner"
FORM = {
    "content-type": "application/x-www-form-urlencoded",
    "origin": "http://127.0.0.1:8270",
    "host": "127.0.0.1:8270",
}


class Daemon:
    """The control application and the page with one audit log, without sockets."""

    def __init__(self, home: Path, pool: Pool, **options: Any) -> None:
        self.path, self.problems, self.now = home / "audit.jsonl", dict[str, str](), 1_790_000_000.0
        self.audit = AuditLog(self.path, pool, self.problems, now=lambda: self.now, **options)
        self.service = FakeService()
        self.sign_in = SignIn(b"k" * 32, lambda: self.now, token=TOKEN, owner_uid=os.getuid())
        policy = GatePolicy(owner_uid=os.getuid(), token=TOKEN)
        self.control = create_control_app(self.service, policy, asyncio.Event(), self.service, self.audit)
        self.page = create_page_app(
            self.service, self.sign_in, asyncio.Event(), owner_uid=os.getuid(), audit=self.audit
        )

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"{}",
        *,
        app: ASGIApp | None = None,
        uid: int | None = None,
        headers: Mapping[str, str] | None = None,
        query: str = "",
    ) -> int:
        sent = {"host": "localhost", "content-type": "application/json", **(headers or {})}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
            "client": ("10.0.0.7", 4711),
            "state": {} if uid is None else {"peer": Peer(pid=77, uid=uid, gid=uid)},
        }
        arrived: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        answers: list[Message] = []

        async def receive() -> Message:
            if not arrived:
                await asyncio.Event().wait()
            return arrived.pop()

        async def send(message: Message) -> None:
            answers.append(message)

        await (app or self.control)(scope, receive, send)
        return int(answers[0]["status"])

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    tmp_path.chmod(0o700)
    with contextlib.closing(Pool("the audit log", 1)) as pool:
        yield Daemon(tmp_path, pool)


OWNER, GUEST = os.getuid(), 54321


def told(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return line["uid"], line["source"], line["action"], line["job"], line["status"], line["result"]


def test_what_changes_something_or_was_to_is_noted_before_the_answer(daemon: Daemon) -> None:
    job = daemon.service.add("digits", uid=GUEST)
    act = f"/api/v1/jobs/{job.id}/cancel"

    async def story() -> None:
        assert await daemon.ask("POST", "/api/v1/jobs/digits/cancel", uid=GUEST) == 200
        assert await daemon.ask("POST", act, uid=GUEST + 1) == 403
        assert await daemon.ask("POST", act, headers={"authorization": f"Bearer {TOKEN}"}) == 200
        assert await daemon.ask("POST", act) == 401
        assert await daemon.ask("POST", act, b"{", uid=GUEST) == 400
        assert await daemon.ask("POST", act, uid=GUEST, headers={"origin": "http://evil.example"}) == 403
        assert await daemon.ask("GET", f"/api/v1/jobs/{job.id}", b"", uid=GUEST) == 200
        assert await daemon.ask("POST", "/api/v1/shutdown", uid=GUEST) == 403

    asyncio.run(story())
    assert [told(line) for line in daemon.lines()] == [
        (GUEST, "unix pid 77", "POST /api/v1/jobs/digits/cancel", job.id, 200, "ok"),
        (GUEST + 1, "unix pid 77", f"POST {act}", job.id, 403, "not_permitted"),
        (OWNER, "tcp 10.0.0.7", f"POST {act}", job.id, 200, "ok"),
        (None, "tcp 10.0.0.7", f"POST {act}", "", 401, "unauthenticated"),
        (GUEST, "unix pid 77", f"POST {act}", job.id, 400, "bad_request"),
        (None, "tcp 10.0.0.7", f"POST {act}", "", 403, "foreign_origin"),
        (GUEST, "unix pid 77", "POST /api/v1/shutdown", "", 403, "not_permitted"),
    ]
    assert daemon.path.stat().st_mode & 0o777 == 0o600


def test_the_page_is_noted_too_and_no_secret_is(daemon: Daemon) -> None:
    job, link = daemon.service.add("digits", uid=GUEST), daemon.sign_in.new_link(GUEST)
    cookie = {"cookie": f"{daemon.sign_in.cookie_name}={daemon.sign_in.redeem(daemon.sign_in.new_link(GUEST))}"}

    async def story() -> None:
        ask = daemon.ask
        assert (
            await ask("GET", "/signin", b"", app=daemon.page, headers={"host": "localhost"}, query=f"link={link}")
            == 303
        )
        assert await ask("POST", "/signin", b"token=a-guess", app=daemon.page, headers=FORM) == 401
        assert await ask("POST", f"/jobs/{job.id}/cancel", b"", app=daemon.page, headers={**FORM, **cookie}) == 303
        assert await ask("POST", "/signout", b"", app=daemon.page, headers={**FORM, **cookie}) == 200

    asyncio.run(story())
    assert [(line["uid"], line["action"], line["job"], line["result"]) for line in daemon.lines()] == [
        (None, "GET /signin", "", "ok"),
        (None, "POST /signin", "", "unauthenticated"),
        (GUEST, f"POST /jobs/{job.id}/cancel", job.id, "ok"),
        (GUEST, "POST /signout", "", "ok"),
    ]
    assert link not in daemon.path.read_text()
    assert "a-guess" not in daemon.path.read_text()


def test_a_line_is_one_line_whatever_is_asked_for(daemon: Daemon) -> None:
    forged = '/api/v1/jobs/x\n{"at": 1, "user": "root"}\r\u2028\x85\x1b[2J' + "y" * 9000

    asyncio.run(daemon.ask("POST", forged, uid=GUEST))
    text = daemon.path.read_bytes()
    assert text.count(b"\n") == 1
    assert text.isascii()
    assert len(text) < 1000
    assert daemon.lines()[0]["action"].startswith('POST /api/v1/jobs/x\n{"at": 1')


def test_the_owner_alone_reads_it(daemon: Daemon) -> None:
    async def story() -> None:
        for number in range(5):
            daemon.now += 1
            await daemon.ask("POST", f"/api/v1/jobs/none-{number}/cancel", uid=GUEST)
        assert await daemon.ask("GET", "/api/v1/audit", b"", uid=GUEST) == 403
        assert await daemon.ask("GET", "/api/v1/audit", b"", uid=OWNER) == 200
        found = await daemon.audit.entries(2)
        assert [one.job for one in found] == ["none-3", "none-4"]
        assert [one.job for one in await daemon.audit.entries(9, since=daemon.now - 2)] == [
            "none-2",
            "none-3",
            "none-4",
        ]
        with daemon.path.open("ab") as file:
            file.write(b'{"at": 17, "us')
        assert await daemon.audit.entries(2) == found, "a line that a power cut has cut is left out"

    asyncio.run(story())


def test_old_files_are_kept_and_their_number_is_bounded(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with contextlib.closing(Pool("the audit log", 1)) as pool:
        daemon = Daemon(tmp_path, pool, max_bytes=1000)

        async def story() -> list[str]:
            for number in range(100):
                await daemon.ask(
                    "POST", f"/api/v1/jobs/{daemon.service.add(f'j{number}', uid=GUEST).id}/cancel", uid=GUEST
                )
            return [one.job for one in await daemon.audit.entries(1000)]

        found = asyncio.run(story())
    names = [f"j{number}-" for number in range(100)]
    assert len(found) > 30
    assert all(job.startswith(name) for job, name in zip(found[::-1], names[::-1], strict=False)), (
        "in order, to the newest"
    )
    assert sorted(path.name for path in tmp_path.glob("audit*")) == [
        "audit.jsonl",
        *(f"audit.jsonl.{n}" for n in range(1, 10)),
    ]


def test_refusals_of_one_user_cannot_fill_it(daemon: Daemon) -> None:
    mine = daemon.service.add("mine", uid=GUEST)

    async def story() -> None:
        for _ in range(3 * MAX_REFUSALS):
            assert await daemon.ask("POST", "/api/v1/shutdown", uid=GUEST) == 403
        assert await daemon.ask("POST", "/api/v1/shutdown", uid=GUEST + 1) == 403
        assert await daemon.ask("POST", f"/api/v1/jobs/{mine.id}/cancel", uid=GUEST) == 200
        daemon.now += 60
        assert await daemon.ask("POST", "/api/v1/shutdown", uid=GUEST) == 403

    asyncio.run(story())
    assert [line["status"] for line in daemon.lines()] == [403] * (MAX_REFUSALS + 1) + [200, 403]


def test_many_at_once_are_written_together_and_a_disk_that_fails_is_a_problem_of_the_daemon(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    free = threading.Event()
    with contextlib.closing(Pool("the audit log", 1)) as pool:
        daemon = Daemon(tmp_path, pool)

        async def story() -> None:
            held = asyncio.create_task(pool.run(free.wait, 300))
            await asyncio.sleep(0)
            asked = [asyncio.create_task(daemon.ask("POST", "/api/v1/jobs/x/cancel", uid=GUEST)) for _ in range(9)]
            await asyncio.wait(asked, timeout=0.1)
            free.set()
            await asyncio.gather(held, *asked)
            assert len(daemon.lines()) == 9
            daemon.path.unlink()
            daemon.path.mkdir()
            assert await daemon.ask("POST", "/api/v1/jobs/x/cancel", uid=GUEST) == 404, (
                "the answer does not depend on it"
            )
            assert "audit log" in daemon.problems["audit"]
            daemon.path.rmdir()
            await daemon.ask("POST", "/api/v1/jobs/x/cancel", uid=GUEST)
            assert daemon.problems == {}

        asyncio.run(story())
