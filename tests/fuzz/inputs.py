"""Bytes for a reader: arbitrary ones, and valid inputs with some of their bytes or JSON values changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS: Final = (
    *(
        b"\0",
        b"\xff",
        b"\xc3\x28",
        b"\xed\xa0\x80",
        "²".encode(),
        "٣".encode(),
        "\u2028".encode(),
        b"\x1b[2J",
        b"\r",
        b"\n\n",
    ),
    *(b"NaN", b"Infinity", b"1e999", b"-1", b"-0.0", b"1" * 5000, b"9" * 19, b"18446744073709551616", b"0x10"),
    *(
        b"null",
        b"true",
        b"[]",
        b"{}",
        b"[" * 2000,
        b'{"a":' * 2000,
        b'"\\ud800"',
        b'"\\u0000"',
        b"&a *a",
        b"!!python/object:os.system x",
    ),
    *(
        b"../..",
        b"/etc/passwd",
        b"**/",
        b"[!",
        b"[[:",
        b"\\",
        b"$(",
        b"${",
        b"`",
        b"'",
        b'"',
        b"#",
        b"<<",
        b"%",
        b"x" * 70_000,
    ),
)
VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**40, 2**63, 2**70, 10**400, 0.5, 1e300, -1e300, float("nan"), float("inf")),
    *("", "\0", "\ud800", "x" * 5000, "../../x", "²", "nan", [], {}, [[]], [None], [-1], {"a": {}}, {"$": "tensor"}),
)
MAX_CHANGES: Final = 4
T = TypeVar("T")


def inputs(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for bytes that mostly resemble one of the seeds."""
    ways = [st.binary(max_size=200), st.builds(_changed, _one(seeds), st.lists(_changes(), max_size=MAX_CHANGES))]
    trees = [tree for tree in map(_tree, seeds) if isinstance(tree, dict)]
    if trees:
        ways.append(st.builds(_regrown, _one(trees), st.lists(_grafts(), min_size=1, max_size=MAX_CHANGES)))
    return st.one_of(ways)


def _one(values: Sequence[T]) -> st.SearchStrategy[T]:
    """Return a strategy like ``sampled_from``, without the representation of all values."""
    return st.integers(0, len(values) - 1).map(values.__getitem__)


def _changes() -> st.SearchStrategy[tuple[int, int, bytes]]:
    """Return a strategy for an offset, the number of bytes to remove there, and the bytes to insert."""
    return st.tuples(
        st.integers(0, 2**16),
        st.sampled_from([0, 0, 1, 1, 2, 4, 8, 100, 2**20]),
        st.one_of(st.binary(max_size=8), _one(TOKENS)),
    )


def _changed(seed: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    out = seed
    for where, count, new in changes:
        at = where % (len(out) + 1)
        out = out[:at] + new + out[at + count :]
    return out


def _grafts() -> st.SearchStrategy[tuple[int, Any]]:
    """Return a strategy for the place of a value in a tree, and its replacement."""
    return st.tuples(st.integers(0, 2**16), _one(VALUES))


def _tree(seed: bytes) -> Any:
    try:
        return json.loads(seed)
    except ValueError:
        return None


def _regrown(tree: Any, grafts: list[tuple[int, Any]]) -> bytes:
    for where, value in grafts:
        paths = list(_paths(tree))
        tree = _with(tree, paths[where % len(paths)], value) if paths else value
    return json.dumps(tree).encode()


def _paths(tree: Any, above: tuple[Any, ...] = ()) -> Any:
    """Yield the keys on the way to each value of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*above, key)
        yield from _paths(value, (*above, key))


def _with(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    key, *rest = path
    new = _with(tree[key], tuple(rest), value) if rest else value
    if isinstance(tree, dict):
        return {**tree, key: new}
    return [new if index == key else old for index, old in enumerate(tree)]
