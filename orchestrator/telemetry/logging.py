"""The program's logging: events with values, not prose; text on a terminal, JSON everywhere else.

A log line is an event name in dotted form (`gang.rank_lost`) and its values. Job, attempt, rank and cause are bound
once for a piece of work (`log_context`) and not repeated at each call. Records of libraries that use the standard
library's logging (uvicorn, asyncio, Ray) are written in the same form.

This module must not decide what is logged, and logging must never end the program: a line that cannot be written (a full
disk, a closed pipe) is dropped and counted.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

import structlog
from structlog import contextvars

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from structlog.typing import FilteringBoundLogger, Processor

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
"""The values of `level`."""


class _Lines:
    """Writes rendered lines to a stream and survives the stream's errors; `dropped` counts unwritten lines."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.dropped = 0

    def msg(self, line: str) -> None:
        try:
            self.stream.write(line + "\n")
            self.stream.flush()
        except (OSError, ValueError):  # no space, broken pipe, closed file: there is nowhere left to report it
            self.dropped += 1

    debug = info = warning = error = critical = exception = fatal = log = msg


class _ForeignHandler(logging.Handler):
    """Renders records of the standard library's logging like our own and writes them to the same stream."""

    def __init__(self, lines: _Lines, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # a library's record whose arguments do not fit its format must not end the caller
            line = f"log.unprintable_record logger={record.name} message={record.msg!r}"
        self._lines.msg(line)


def configure_logging(
    json: bool | None = None,  # noqa: FBT001  # reads well at its few call sites
    level: str = "info",
    stream: TextIO | None = None,
) -> None:
    """Configure logging for the whole process; a second call replaces the configuration.

    `json` None means JSON unless `stream` (None: standard error) is a terminal. `level` is the lowest one that is logged.
    Raises ValueError for an unknown level, with those that exist.
    """
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} does not exist: use one of {', '.join(LEVELS)}")
    target = sys.stderr if stream is None else stream
    as_json = not target.isatty() if json is None else json
    number = logging.getLevelNamesMapping()[level.upper()]
    lines = _Lines(target)
    shared, renderer = _shared_processors(), _renderers(as_json=as_json)
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,  # a second call must affect existing loggers
    )
    _capture_standard_logging(lines, shared, renderer, number)


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a logger whose lines carry `logger=name`. May be called before `configure_logging`, also at import."""
    return cast("FilteringBoundLogger", structlog.get_logger(logger_name=name))


@contextmanager
def log_context(
    *, job: str | None = None, attempt: int | None = None, rank: int | None = None, cause: str | None = None
) -> Iterator[None]:
    """Add the given values (None: unchanged) to every line that this task or thread, and those it starts, log in it."""
    given = {"job": job, "attempt": attempt, "rank": rank, "cause": cause}
    with contextvars.bound_contextvars(**{key: value for key, value in given.items() if value is not None}):
        yield


def _shared_processors() -> list[Processor]:
    return [
        _logger_name,
        contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _renderers(*, as_json: bool) -> list[Processor]:
    if not as_json:
        return [structlog.dev.ConsoleRenderer(colors=True, exception_formatter=structlog.dev.plain_traceback)]
    return [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=repr),
    ]


def _capture_standard_logging(
    lines: _Lines, shared: Sequence[Processor], renderer: Sequence[Processor], number: int
) -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ForeignHandler)]:
        root.removeHandler(handler)
    root.addHandler(_ForeignHandler(lines, formatter))
    # Info records of libraries are about themselves; ours are about jobs.
    root.setLevel(max(number, logging.WARNING) if number > logging.DEBUG else logging.DEBUG)
    logging.captureWarnings(capture=True)


def _logger_name(_: Any, __: str, event: Any) -> Any:
    record = event.get("_record")
    name = event.pop("logger_name", "") if record is None else record.name
    if name:
        event["logger"] = name
    return event
