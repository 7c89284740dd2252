"""The agreement of client and daemon: version, paths, limits, commands. Every command imports it: it imports nothing but ``enum``."""

from __future__ import annotations

from enum import StrEnum

PROTOCOL_VERSION = 1
"""Raised when an older client or daemon could misread the other; only equal versions may communicate."""

PROTOCOL_HEADER = "X-Orch-Protocol"
API_PREFIX = "/api/v1"

REFERENCE_SEPARATOR = ":"
"""A job of another user, ``user/name``, is ``user:name`` in a path, where a slash would end the part."""

PAGE = 1000
"""Number of jobs or events in one answer by default; a client requests the next page until one is not full."""

MAX_PAGE = 10_000
MAX_SEQUENCE = 2**53
"""No job has as many events; JSON numbers are exact up to here."""

MAX_NUMBER = 2**31 - 1
"""Largest rank, attempt or signal in a request."""

MAX_YAML_BYTES = 1024 * 1024
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_TOGETHER = 256
"""Most submissions in one request."""
"""``MAX_BODY_BYTES`` fits a full job.yaml with its JSON escapes (a line break takes two bytes) and the secrets."""

MAX_PIECE_BYTES = 2 * 1024 * 1024
"""Size of the pieces in which a file of an uploaded working directory is sent; the last one may be shorter."""

MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_ASKED_PIECES = 10_000
"""Most pieces named in one request for the missing ones."""

MAX_WAIT_SECONDS = 60.0
"""Longest time one long poll is held; a client that wants to wait longer repeats it."""

STREAM_HEARTBEAT_SECONDS = 10.0
"""A followed log sends an empty line at least this often, so that a client can tell a silent job from a dead daemon."""

LOG_END_KEY = "end"
"""A log stream that is complete ends with a line ``{"end": "complete"}``; without it, the connection was lost."""

LOG_ERROR_KEY = "error"
"""A log stream that fails half-way ends with ``{"error": PROBLEM}``; its status was sent long before."""

BODY_SECONDS = 30.0
"""Time in which a client must send its request's body."""

SESSION_READ_SECONDS = 5.0
"""A session beside a rank sends data at least this often, so that a client detects a dead daemon."""


class Verb(StrEnum):
    """A command on a job."""

    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    RERUN = "rerun"
    UPDATE = "update"
    HOLD = "hold"
    RELEASE = "release"
