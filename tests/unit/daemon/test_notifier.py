"""Web hooks to a real HTTP server that fails at first: signed, and sent again, also by the next daemon."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import structlog

from orchestrator.clock import ClockReading
from orchestrator.core.facts.reasons import ByUser, Cancelled
from orchestrator.core.states import JobState
from orchestrator.daemon.web_hooks import (
    EACH_AT_ONCE,
    MAX_TRIES,
    HookError,
    Notifier,
    post,
    signing_key,
)
from orchestrator.spec.model import NotifySpec
from orchestrator.store.store import Store
from tests.unit.core.builders import ID, T0, finished, make_spec, submission
from tests.unit.store.lives import write

FOR_EVER = 1e12
"""A time by which every notice is due."""


class Hook(ThreadingHTTPServer):
    """HTTP server that answers with the statuses of ``script`` in turn, then 200, and records the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.script: list[int] = []
        self.came: list[tuple[dict[str, str], bytes]] = []
        self.hold = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook?token=x"


class _Answer(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.came.append((dict(self.headers), body))
        status = self.server.script.pop(0) if self.server.script else 200
        if status == 0:
            self.server.hold.wait()
            return
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.server.url)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    thread.join()
    server.server_close()


def run(path: Path, case: Callable[[Store, Notifier], Awaitable[None]]) -> None:
    """Run ``case`` with a new notifier on the store in ``path``."""

    async def life() -> None:
        store = Store.open(path / "store.db", reserve=None)
        try:
            async with asyncio.timeout(300):
                await case(store, Notifier(store, path / "key", structlog.get_logger(), first_delay=0.05))
        finally:
            store.close()

    asyncio.run(life())


async def submit_and_end(store: Store, url: str, job_id: str = ID) -> None:
    spec = make_spec(notify=(NotifySpec(url=url, on=("FAILED", "CANCELLED")),))
    job, _ = await store.submit(submission(spec, job_id=job_id, at=time.time()))
    await write(store, [finished(job, JobState.CANCELLED, at=time.time(), reason=Cancelled(by=ByUser(name="ada")))])


async def until_told(store: Store, notifier: Notifier) -> None:
    """Run the notifier until no notice waits."""
    running = asyncio.create_task(notifier.run())
    while await store.due_notices(FOR_EVER, 1) != ([], None):  # noqa: ASYNC110 - another task empties it
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_it_is_signed_and_sent_again_until_the_hook_takes_it(tmp_path: Path, hook: Hook) -> None:
    hook.script = [500, 429]
    before = int(time.time())

    async def case(store: Store, notifier: Notifier) -> None:
        await submit_and_end(store, hook.url)
        await until_told(store, notifier)

    run(tmp_path, case)
    assert len(hook.came) == 3
    assert len({headers["X-Orch-Delivery"] for headers, _ in hook.came}) == 1
    headers, body = hook.came[-1]
    message = json.loads(body)
    assert message["text"] == f"{ID} is CANCELLED: cancelled by ada"
    assert (message["job_id"], message["state"], message["was"]) == (ID, "CANCELLED", "PENDING")
    at, mac = (part.partition("=")[2] for part in headers["X-Orch-Signature"].split(","))
    key = (tmp_path / "key").read_text().strip().encode()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert hmac.new(key, at.encode() + b"." + body, hashlib.sha256).hexdigest() == mac
    assert before <= int(at) <= time.time()


def test_the_next_daemon_sends_what_the_last_could_not(tmp_path: Path, hook: Hook) -> None:
    async def first(store: Store, notifier: Notifier) -> None:
        await submit_and_end(store, hook.url)
        hook.script = [503]
        running = asyncio.create_task(notifier.run())
        while not (await store.due_notices(FOR_EVER, 1))[0][0].attempts:  # noqa: ASYNC110 - another task counts
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def second(store: Store, notifier: Notifier) -> None:
        await until_told(store, notifier)

    run(tmp_path, first)
    run(tmp_path, second)
    assert [json.loads(body)["state"] for _, body in hook.came] == ["CANCELLED", "CANCELLED"]


@pytest.mark.parametrize("status", [302, 404, 410])
def test_a_redirect_or_a_refusal_is_final(tmp_path: Path, hook: Hook, status: int) -> None:
    hook.script = [status]

    async def case(store: Store, notifier: Notifier) -> None:
        await submit_and_end(store, hook.url)
        await until_told(store, notifier)
        assert await store.due_notices(FOR_EVER, 10) == ([], None)

    run(tmp_path, case)
    assert len(hook.came) == 1


def test_it_runs_until_cancelled_and_wakes_for_what_is_new(tmp_path: Path, hook: Hook) -> None:
    async def case(store: Store, notifier: Notifier) -> None:
        running = asyncio.create_task(notifier.run())
        await asyncio.sleep(0)
        await submit_and_end(store, hook.url)
        notifier.wake()
        while not hook.came:  # noqa: ASYNC110 - a thread fills it
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(tmp_path, case)


def test_a_hook_that_does_not_answer_holds_up_no_other(tmp_path: Path, hook: Hook) -> None:
    hanging = Hook()
    hanging.script = [0] * 1000
    thread = threading.Thread(target=hanging.serve_forever, args=(0.05,))
    thread.start()

    async def case(store: Store, notifier: Notifier) -> None:
        for number in range(60):
            await submit_and_end(store, hanging.url, job_id=f"stuck-{number:06}")
        await submit_and_end(store, hook.url, job_id="well-aaaaaa")
        running = asyncio.create_task(notifier.run())
        while not hook.came:
            assert len(hanging.came) <= EACH_AT_ONCE, "it waits for the first ones"
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    try:
        run(tmp_path, case)
    finally:
        hanging.hold.set()
        hanging.shutdown()
        thread.join()
        hanging.server_close()


def test_a_hook_that_does_not_answer_is_left_at_the_deadline(hook: Hook) -> None:
    hook.script = [0]
    with pytest.raises(HookError, match="no answer within 200ms"):
        asyncio.run(post(hook.url, b"{}", {}, seconds=0.2))
    assert not hook.hold.is_set(), "it has not answered since"


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest/meta-data", "http://[fe80::1]/x", "http://0.0.0.0/x"])
def test_addresses_that_hand_out_credentials_are_refused(url: str) -> None:
    with pytest.raises(HookError, match="an address that web hooks may not use") as caught:
        asyncio.run(post(url, b"{}", {}))
    assert caught.value.final


def test_nobody_there_is_tried_again() -> None:
    with pytest.raises(HookError) as caught:
        asyncio.run(post("http://127.0.0.1:1/x", b"{}", {}))
    assert not caught.value.final


def test_the_key_is_made_once(tmp_path: Path) -> None:
    first = signing_key(tmp_path / "key")
    assert len(first) == 64
    assert signing_key(tmp_path / "key") == first


def test_it_gives_up_after_a_number_of_tries_whatever_the_clock_shows(tmp_path: Path, hook: Hook) -> None:
    async def case(store: Store, notifier: Notifier) -> None:
        await submit_and_end(store, hook.url)
        hook.script = [503] * MAX_TRIES
        for left in range(MAX_TRIES, 0, -1):
            ((found,), _) = await store.due_notices(FOR_EVER, 10)
            assert found.attempts == MAX_TRIES - left
            reading = ClockReading("boot", 1.0, T0)
            await store.append((), clock=reading, moved=-1e9)  # due now, as after a step of the clock by decades
            await notifier._begin_due()
            await asyncio.gather(*(task for _, task in notifier._sending.values()))
        assert await store.due_notices(FOR_EVER, 10) == ([], None)

    run(tmp_path, case)
    assert len(hook.came) == MAX_TRIES
