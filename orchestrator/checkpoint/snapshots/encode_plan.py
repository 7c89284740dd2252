"""Prepares the copying of a state, so that the next state of the same structure is copied without re-encoding.

A training state has the same structure at every step: only numbers inside tensors and a few plain values change. The
first state is encoded in full (codec.py); from then on ``update`` walks the state once, compares its structure with the
remembered one, replaces changed plain values in the prepared JSON text, and returns the objects to copy from. A
different structure only causes a new plan, so a plan can be slow but never wrong.
"""

from __future__ import annotations

import operator
import re
import secrets
import sys
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.format import codec, tensorfile
from orchestrator.checkpoint.format.sharded import ShardedLeaf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PLAIN = frozenset({str, int, float, bool, type(None), complex})


class Unplannable(Exception):  # noqa: N818  (a signal, not an error)
    """The structure has something that only the full encoding handles."""


class _Walk:
    """One pass over a state: structure tokens, plain values, and all objects whose bytes go to the tensor file."""

    __slots__ = ("plains", "sources", "tensor", "tokens")

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.plains: list[Any] = []
        self.sources: list[Any] = []
        torch = sys.modules.get("torch")
        self.tensor: Any = _Walk if torch is None else torch.Tensor

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind is dict:
            self._mapping(value)
        elif kind is OrderedDict:
            self._mapping(value)
            extra = getattr(value, "_metadata", None)
            self.tokens.append(extra is None)
            if extra is not None:
                self.tokens.append(extra)  # compared as a whole: it cannot be replaced in the text, and never changes
        elif kind is list or kind is tuple:
            self._sequence(kind, value)
        elif kind is self.tensor:
            self.tokens += (value.shape, value.dtype, value.requires_grad)
            self.sources.append(value)
        elif kind in _PLAIN:
            self.tokens.append(kind)
            self.plains.append(value)
        else:
            self._rest(kind, value)

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        tokens, plains, sources, tensor = self.tokens, self.plains, self.sources, self.tensor
        keys = tuple(value)
        tokens += (type(value), keys, tuple(map(type, keys)))
        for item in value.values():
            kind = type(item)
            if kind is tensor:
                tokens += (item.shape, item.dtype, item.requires_grad)
                sources.append(item)
            elif kind in _PLAIN:
                tokens.append(kind)
                plains.append(item)
            else:
                self.value(item)

    def _sequence(self, kind: type, value: Sequence[Any]) -> None:
        self.tokens += (kind, len(value))
        packed = codec.packed_ints(value)
        if packed is not None:
            self.tokens.append("ints")
            self.sources.append(packed)
            return
        for item in value:
            self.value(item)

    def _rest(self, kind: type, value: Any) -> None:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if kind in (bytes, bytearray):
            self.tokens.append(kind)
            if len(value) <= codec.INLINE_BYTES:
                self.plains.append(value)
            else:
                self.tokens.append(len(value))
                self.sources.append(value)
        elif torch is not None and kind is torch.nn.Parameter:
            self.tokens += (kind, value.shape, value.dtype, value.requires_grad)
            self.sources.append(value)
        elif numpy is not None and kind is numpy.ndarray:
            self.tokens += (kind, value.shape, value.dtype.str)
            self.sources.append(value)
        elif (numpy is not None and isinstance(value, numpy.generic)) or kind is ShardedLeaf:
            self.tokens.append(kind)
            self.plains.append(value)
        else:
            raise Unplannable


class PartPlan:
    """The plan for copying one part of a state: its JSON text, and the tensor file's header and entries.

    ``sources`` after ``__init__`` and ``update`` are the objects to copy, one for each of ``entries``.
    """

    def __init__(self, state: Any) -> None:
        encoded = codec.encode(state)
        leaves = {leaf.name: leaf for leaf in encoded.leaves}
        self.entries = tensorfile.plan([(leaf.name, leaf.dtype, leaf.shape) for leaf in encoded.leaves])
        self.header = tensorfile.header(self.entries, {"format": "pt"}) if self.entries else b""
        self.sources: list[Any] = [leaves[entry.name].source for entry in self.entries]
        self.tree = encoded.text
        self._walk: _Walk | None = None
        try:
            self._remember(state, encoded)
        except Unplannable:
            self._walk = None

    @property
    def data_bytes(self) -> int:
        """The size of all tensors together."""
        return self.entries[-1].end if self.entries else 0

    def update(self, state: Any) -> bool:
        """Take ``state``; return False when its structure differs and a new plan is needed."""
        known = self._walk
        if known is None:
            return False
        walk = _Walk()
        try:
            walk.value(state)
            if not _equal(walk.tokens, known.tokens) or not self._same_sharing(walk.sources):
                return False
        except (Unplannable, RecursionError):
            return False
        if not all(map(operator.is_, walk.plains, known.plains)):
            self._splice(walk.plains, known.plains)
        self._walk = walk
        sources = walk.sources
        self.sources = [sources[index] for index in self._order]
        return True

    def forget(self) -> None:
        """Release the state's objects; the plan stays."""
        if self._walk is not None:
            self._walk.sources = []
        self.sources = []

    def _remember(self, state: Any, encoded: codec.Encoded) -> None:
        walk = _Walk()
        walk.value(state)
        self._order, self._shared = _match(walk.sources, encoded.leaves, [entry.name for entry in self.entries])
        self._pieces = _pieces(state, encoded.tree, len(walk.plains))
        self._walk = walk
        if b"".join(self._pieces) != self.tree:
            raise Unplannable

    def _same_sharing(self, sources: list[Any]) -> bool:
        """Whether tensors that shared memory, and were stored once, still do."""
        return all(_alias(sources[first]) == _alias(sources[second]) for first, second in self._shared)

    def _splice(self, plains: list[Any], known: list[Any]) -> None:
        for index, (new, old) in enumerate(zip(plains, known, strict=True)):
            if new is not old:
                self._pieces[2 * index + 1] = codec.encode(new).text
        self.tree = b"".join(self._pieces)


def _equal(left: list[Any], right: list[Any]) -> bool:
    try:
        return left == right
    except (RuntimeError, ValueError):  # a tensor inside of a value that is compared as a whole
        return False


def _alias(source: Any) -> Any:
    return codec.describe(source, "").alias


def _match(
    sources: Sequence[Any], leaves: Sequence[codec.Leaf], names: Sequence[str]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return for each name the index of its source; and pairs of sources that are stored as one."""
    first_of: dict[Any, int] = {}
    index_of: dict[str, int] = {}
    shared: list[tuple[int, int]] = []
    remaining = iter(leaves)
    for index, source in enumerate(sources):
        alias = None if isinstance(source, array | bytes | bytearray) else _alias(source)
        if alias is not None and alias in first_of:
            shared.append((first_of[alias], index))
            continue
        leaf = next(remaining, None)
        if leaf is None or (leaf.source is not source and not isinstance(source, array)):
            raise Unplannable
        if alias is not None:
            first_of[alias] = index
        index_of[leaf.name] = index
    if next(remaining, None) is not None:
        raise Unplannable
    return [index_of[name] for name in names], shared


def _pieces(state: Any, tree: Any, count: int) -> list[bytes]:
    """Return the JSON text cut around the plain values: even pieces are fixed, odd ones are the values."""
    token = secrets.token_hex(8)
    values: list[Any] = []
    marked = _mark(state, tree, token, values)
    parts = re.split(rf'"{token}"'.encode(), codec.json_text(marked))
    if not len(parts) - 1 == len(values) == count:
        raise Unplannable
    pieces = [parts[0]]
    for value, part in zip(values, parts[1:], strict=True):
        pieces += (codec.json_text(value), part)
    return pieces


def _mark(value: Any, node: Any, token: str, values: list[Any]) -> Any:
    """Return a copy of the tree with a token in place of each plain value, in the order of the walk."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return _mark_mapping(value, node, token, values)
    if (kind is list or kind is tuple) and not (isinstance(node, dict) and node.get(codec.TAG) == "ints"):
        items = node if kind is list else node["v"]
        marked = [_mark(item, child, token, values) for item, child in zip(value, items, strict=True)]
        return marked if kind is list else {**node, "v": marked}
    if isinstance(node, dict) and "n" in node:
        return node  # a tensor, an array, packed numbers, long bytes
    values.append(node)
    return token


def _mark_mapping(value: Mapping[Any, Any], node: Any, token: str, values: list[Any]) -> Any:
    if codec.TAG not in node:
        return {key: _mark(item, node[key], token, values) for key, item in value.items()}
    pairs = [
        [key, _mark(item, child, token, values)] for item, (key, child) in zip(value.values(), node["v"], strict=True)
    ]
    return {**node, "v": pairs}
