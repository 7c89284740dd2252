"""A spawn request is checked once, completely, where it enters."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.runtime.forkserver.wire import BadRequestError, parse

VALID: dict[str, Any] = {
    "mode": "script",
    "target": "train.py",
    "args": ["--lr", "0.1"],
    "python_options": ["-u"],
    "cwd": "/work",
    "env": {"A": "a"},
    "threads": 2,
    "cold": True,
    "exit_record": "/work/exit.json",
    "record": {"rank": 1},
    "fds": ["stdout", "stderr", "lifeline", "stdin", "lease"],
}
FDS = [10, 11, 12, 13, 14]


def test_complete_request() -> None:
    spawn = parse(VALID, FDS)
    assert (spawn.mode, spawn.target, spawn.args, spawn.python_options) == (
        "script",
        "train.py",
        ("--lr", "0.1"),
        ("-u",),
    )
    assert (spawn.cwd, spawn.env, spawn.threads, spawn.cold) == ("/work", {"A": "a"}, 2, True)
    assert (spawn.exit_record, spawn.record) == ("/work/exit.json", {"rank": 1})
    assert (spawn.stdout, spawn.stderr, spawn.lifeline, spawn.stdin, spawn.lease) == (10, 11, 12, 13, 14)
    assert spawn.listen is None
    assert spawn.descriptors() == set(FDS)


def test_least_request() -> None:
    least = {"mode": "command", "target": "true", "cwd": "/", "env": {}, "fds": ["stderr", "lifeline", "stdout"]}
    spawn = parse(least, [4, 5, 6])
    assert (spawn.stderr, spawn.lifeline, spawn.stdout) == (4, 5, 6)
    assert (spawn.args, spawn.threads, spawn.cold, spawn.exit_record, spawn.record) == ((), None, False, None, {})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mode": "magic"}, "mode 'magic' is none of script, module, command, store"),
        ({"mode": None}, "mode must be text"),
        ({"mode": "store"}, "needs the listening socket"),
        ({"target": 1}, "target must be text"),
        ({"target": "a\0b"}, "without NUL"),
        ({"args": "text"}, "args must be a list of texts"),
        ({"args": ["a", 1]}, "args must be a list of texts"),
        ({"python_options": ["\0"]}, "python_options must be a list"),
        ({"cwd": "relative"}, "is not absolute"),
        ({"env": []}, "env must be an object"),
        ({"env": {"": "x"}}, "env has ''"),
        ({"env": {"A=B": "x"}}, "env has 'A=B'"),
        ({"env": {"A": 1}}, "env has 'A'"),
        ({"env": {"A": "\0"}}, "env has 'A'"),
        ({"threads": 0}, "threads must be a whole number of at least 1"),
        ({"threads": True}, "threads must be a whole number"),
        ({"threads": "2"}, "threads must be a whole number"),
        ({"exit_record": 3}, "exit_record must be text"),
        ({"record": []}, "record must be an object"),
        ({"fds": ["stdout", "stderr"]}, "2 descriptors announced, 5 arrived"),
        ({"fds": ["stdout", "stderr", "lifeline", "door", "lease"]}, "descriptor role 'door'"),
        ({"fds": ["stdout", "lease", "stdin", "listen", "lease"]}, "descriptors missing: stderr, lifeline"),
    ],
)
def test_wrong_field_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadRequestError, match=complaint):
        parse(VALID | change, FDS)
