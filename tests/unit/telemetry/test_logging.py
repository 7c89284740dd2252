"""Logging: one form per audience, bound context, foreign records included, and no error that ends the program."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from orchestrator.telemetry.logging import _ForeignHandler, configure_logging, get_logger, log_context

if TYPE_CHECKING:
    from collections.abc import Iterator


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def entries(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_stream_that_is_no_terminal_gets_one_json_object_a_line() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    get_logger("loop").info("gang.rank_lost", reason="signal 9\nkilled")
    (entry,) = entries(stream)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {"logger": "loop", "level": "info", "event": "gang.rank_lost", "reason": "signal 9\nkilled"}


def test_a_terminal_gets_a_line_for_people_and_json_when_asked() -> None:
    terminal = Terminal()
    configure_logging(stream=terminal)
    get_logger("loop").warning("disk.low", free_bytes=3)
    with pytest.raises(json.JSONDecodeError):
        entries(terminal)
    assert "disk.low" in terminal.getvalue()
    terminal = Terminal()
    configure_logging(json=True, stream=terminal)
    get_logger("loop").warning("disk.low", free_bytes=3)
    assert entries(terminal)[0]["free_bytes"] == 3


def test_context_is_bound_for_a_block_and_inherited_by_its_tasks() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    log = get_logger("executor")

    async def child() -> None:
        log.info("inside.task")

    async def work() -> None:
        with log_context(job="digits-k3f9q2", attempt=2, cause="event 7"):
            with log_context(rank=1):
                await asyncio.create_task(child())
            log.info("inside")
        log.info("outside")

    asyncio.run(work())
    task, inside, outside = entries(stream)
    assert (task["job"], task["attempt"], task["rank"], task["cause"]) == ("digits-k3f9q2", 2, 1, "event 7")
    assert "rank" not in inside
    assert inside["job"] == "digits-k3f9q2"
    assert not {"job", "attempt", "rank", "cause"} & set(outside)


def test_the_level_filters_and_an_unknown_one_is_named() -> None:
    stream = io.StringIO()
    configure_logging(level="warning", stream=stream)
    get_logger("x").info("quiet")
    get_logger("x").error("loud")
    assert [entry["event"] for entry in entries(stream)] == ["loud"]
    with pytest.raises(ValueError, match=r"'chatty' does not exist: use one of debug, info"):
        configure_logging(level="chatty")


def test_records_of_libraries_come_out_in_the_same_form() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    with log_context(job="a-222222"):
        logging.getLogger("uvicorn.error").warning("closed %s", "early")
        logging.getLogger("uvicorn.access").info("GET /metrics")
    broken = logging.LogRecord("broken", logging.ERROR, "lib.py", 1, "%d", ("not a number",), None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _ForeignHandler):  # pytest's own handler raises on purpose
            handler.handle(broken)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old call", UserWarning, stacklevel=1)
    first, unprintable, warned = stream.getvalue().splitlines()
    entry = json.loads(first)
    assert (entry["event"], entry["logger"], entry["level"]) == ("closed early", "uvicorn.error", "warning")
    assert entry["job"] == "a-222222"
    assert unprintable.startswith("log.unprintable_record logger=broken")
    assert json.loads(warned)["logger"] == "py.warnings"


def test_an_exception_is_one_json_value_with_its_traceback() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    try:
        raise ZeroDivisionError("none left")
    except ZeroDivisionError:
        get_logger("loop").exception("loop.failed", value=object())
    (entry,) = entries(stream)
    assert "ZeroDivisionError: none left" in entry["exception"]
    assert entry["level"] == "error"
    assert entry["value"].startswith("<object")


def test_a_stream_that_cannot_be_written_ends_nothing() -> None:
    configure_logging(stream=FullDisk())
    get_logger("loop").error("store.commit_failed")
    logging.getLogger("lib").error("too")
    closed = io.StringIO()
    configure_logging(json=True, stream=closed)
    closed.close()
    get_logger("loop").error("store.commit_failed")
    logging.getLogger("lib").error("too")
