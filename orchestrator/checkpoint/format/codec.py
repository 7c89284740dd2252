"""Converts nested training state to a JSON tree and named tensors and back, without pickle.

Defines the meaning of the tree. Plain JSON values stand for themselves; everything else is an object with a "$" key
that names its type (docs/checkpoints.md lists them). A value that cannot be restored to the same type is refused with
its path and the conversion to write instead.

Neither torch nor numpy is imported unless a state holds their values.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import MALFORMED, CorruptCheckpointError, UnsupportedStateError
from orchestrator.checkpoint.format import foreign_values as foreign
from orchestrator.checkpoint.format.tensorfile import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.checkpoint.format.tensorfile import TensorEntry

TAG = "$"
INLINE_BYTES = 1024  # longer byte strings go to the tensor file instead of base64
_PACK_INTS = 64  # sequences of this many 64-bit integers (random states) are stored as one tensor
_MAX_INT_BITS = 4096  # Python refuses to parse much longer decimal numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Bytes for the tensor file: name, safetensors type, stored shape, and the object that holds them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: Any

    @property
    def total_bytes(self) -> int:
        """The size in the tensor file."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def memory(self) -> memoryview:
        """Return the contiguous little-endian bytes; keep the leaf's owner alive and unchanged while using them."""
        return foreign.memory(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A state as a JSON tree and its leaves."""

    tree: Any
    leaves: tuple[Leaf, ...]

    def tree_bytes(self) -> bytes:
        """Return the tree as JSON text."""
        return json.dumps(self.tree, separators=(",", ":"), allow_nan=False).encode()


def encode(state: Any) -> Encoded:
    """Encode ``state``. Tensors are referred to, not copied.

    Raises UnsupportedStateError, with the path, for values that only pickle could store.
    """
    encoder = _Encoder()
    try:
        tree = encoder.value(state, "")
    except RecursionError as error:
        raise UnsupportedStateError("state is nested too deeply to store; flatten it") from error
    return Encoded(tree=tree, leaves=tuple(encoder.leaves))


def decode(tree: Any, entries: Sequence[TensorEntry], data: memoryview) -> Any:
    """Decode a state. Tensors and arrays share the writable memory of ``data``; tensors are on the CPU.

    Raises CorruptCheckpointError when tree and tensors do not match.
    """
    try:
        return _Decoder({entry.name: entry for entry in entries}, data).value(tree)
    except MALFORMED as error:
        raise CorruptCheckpointError(f"state tree cannot be restored: {type(error).__name__}: {error}") from error


def packed_ints(value: Sequence[Any]) -> array[int] | None:
    """Return a long sequence of 64-bit integers as an array; None for any other sequence."""
    if len(value) < _PACK_INTS or set(map(type, value)) != {int}:
        return None
    try:
        return array("q", value)
    except OverflowError:
        return None


class _Encoder:
    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._taken: set[str] = set()
        self._aliases: dict[Any, str] = {}
        self._open: set[int] = set()

    def value(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        encode_one = _ENCODERS.get(kind)
        return self._foreign(value, path) if encode_one is None else encode_one(self, value, path)

    def encode_dict(self, value: dict[Any, Any], path: str) -> Any:
        self._enter(value, path)
        if TAG not in value and all(type(key) is str for key in value):
            node: Any = {key: self.value(item, f"{path}.{key}" if path else key) for key, item in value.items()}
        else:
            node = {TAG: "dict", "v": self._pairs(value, path)}
        self._open.discard(id(value))
        return node

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        for key in value:
            if not _is_plain_key(key):
                raise UnsupportedStateError(
                    f"{path or 'state'}: a dictionary key of type {type(key).__name__} cannot be stored; use text or numbers"
                )
        return [
            [self.value(key, path), self.value(item, f"{path}.{key}" if path else str(key))]
            for key, item in value.items()
        ]

    def encode_ordered_dict(self, value: OrderedDict[Any, Any], path: str) -> Any:
        self._enter(value, path)
        node = {TAG: "odict", "v": self._pairs(value, path)}
        extra = getattr(value, "_metadata", None)  # the versions that Module.state_dict() stores in an attribute
        if extra is not None:
            node["m"] = self.value(extra, f"{path}._metadata")
        self._open.discard(id(value))
        return node

    def encode_list(self, value: list[Any], path: str) -> Any:
        self._enter(value, path)
        packed = self._pack(value, path, "list")
        node = (
            [self.value(item, f"{path}.{n}" if path else str(n)) for n, item in enumerate(value)]
            if packed is None
            else packed
        )
        self._open.discard(id(value))
        return node

    def encode_tuple(self, value: tuple[Any, ...], path: str) -> Any:
        packed = self._pack(value, path, "tuple")
        if packed is not None:
            return packed
        self._enter(value, path)
        items = [self.value(item, f"{path}.{n}" if path else str(n)) for n, item in enumerate(value)]
        self._open.discard(id(value))
        return {TAG: "tuple", "v": items}

    def _pack(self, value: Sequence[Any], path: str, kind: str) -> Any:
        numbers = packed_ints(value)
        if numbers is None:
            return None
        return {TAG: "ints", "n": self._leaf(path, "I64", (len(numbers),), numbers), "c": kind}

    def encode_set(self, value: set[Any] | frozenset[Any], path: str) -> Any:
        if not all(map(_is_plain_key, value)):
            raise UnsupportedStateError(
                f"{path or 'state'}: a set of other than text and numbers cannot be stored; use a list"
            )
        return {TAG: type(value).__name__, "v": [self.value(item, path) for item in value]}

    def encode_bytes(self, value: bytes | bytearray, path: str) -> Any:
        kind = type(value).__name__
        if len(value) <= INLINE_BYTES:
            return {TAG: kind, "v": base64.b64encode(value).decode()}
        return {TAG: kind, "n": self._leaf(path, "U8", (len(value),), value)}

    def encode_float(self, value: float, _path: str) -> Any:
        return value if math.isfinite(value) else {TAG: "float", "v": struct.pack(">d", value).hex()}

    def encode_int(self, value: int, _path: str) -> Any:
        return value if value.bit_length() <= _MAX_INT_BITS else {TAG: "int", "v": hex(value)}

    def encode_complex(self, value: complex, _path: str) -> Any:
        return {TAG: "complex", "v": struct.pack(">dd", value.real, value.imag).hex()}

    def _foreign(self, value: Any, path: str) -> Any:
        described = foreign.describe(value, path or "state")
        if described.dtype is None:
            return described.node
        name = self._aliases.get(described.alias) if described.alias is not None else None
        if name is None:
            name = self._leaf(path, described.dtype, described.shape, described.source)
            if described.alias is not None:
                self._aliases[described.alias] = name
        return {**described.node, "n": name}

    def _leaf(self, path: str, dtype: str, shape: tuple[int, ...], source: Any) -> str:
        base = name = path.encode(errors="replace").decode() or "value"
        number = 1
        while name in self._taken or name == "__metadata__":
            number += 1
            name = f"{base}#{number}"
        self._taken.add(name)
        self.leaves.append(Leaf(name=name, dtype=dtype, shape=shape, source=source))
        return name

    def _enter(self, value: Any, path: str) -> None:
        if id(value) in self._open:
            raise UnsupportedStateError(f"{path}: the state contains itself; store the parts one by one")
        self._open.add(id(value))


# Not bound methods in __init__: that cycle would keep a state's tensors alive until the next garbage collection.
_ENCODERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    dict: _Encoder.encode_dict,
    list: _Encoder.encode_list,
    tuple: _Encoder.encode_tuple,
    OrderedDict: _Encoder.encode_ordered_dict,
    bytes: _Encoder.encode_bytes,
    bytearray: _Encoder.encode_bytes,
    float: _Encoder.encode_float,
    int: _Encoder.encode_int,
    complex: _Encoder.encode_complex,
    set: _Encoder.encode_set,
    frozenset: _Encoder.encode_set,
}


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple or type(key) is frozenset:
        return all(_is_plain_key(item) for item in key)
    return key is None or type(key) in (str, int, float, bool, bytes)


class _Decoder:
    def __init__(self, entries: Mapping[str, TensorEntry], data: memoryview) -> None:
        self._entries = entries
        self._data = data
        self._shared: dict[Any, Any] = {}

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        kind = node.get(TAG)
        if kind is None:
            return {key: self.value(item) for key, item in node.items()}
        restore = _RESTORERS.get(kind)
        return self._foreign(node) if restore is None else restore(self, node)

    def pairs(self, node: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        return [(self.value(key), self.value(item)) for key, item in node["v"]]

    def ordered_dict(self, node: Mapping[str, Any]) -> OrderedDict[Any, Any]:
        restored: Any = OrderedDict(self.pairs(node))
        if "m" in node:
            restored._metadata = self.value(node["m"])  # noqa: SLF001  (torch's own attribute)
        return restored  # type: ignore[no-any-return]  # it is an OrderedDict

    def raw(self, node: Mapping[str, Any]) -> memoryview:
        entry = self._entries[node["n"]]
        return self._data[entry.begin : entry.end]

    def ints(self, node: Mapping[str, Any]) -> Any:
        numbers = array("q", bytes(self.raw(node)))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist() if node["c"] == "list" else tuple(numbers)

    def bytes(self, node: Mapping[str, Any]) -> bytes:
        return base64.b64decode(node["v"]) if "v" in node else bytes(self.raw(node))

    def _foreign(self, node: Mapping[str, Any]) -> Any:
        if "n" not in node:
            return foreign.restore(node, None, self._data)
        key = tuple(sorted((name, str(item)) for name, item in node.items()))
        if key not in self._shared:
            self._shared[key] = foreign.restore(node, self._entries[node["n"]], self._data)
        return self._shared[key]


_RESTORERS: dict[str, Callable[[_Decoder, Mapping[str, Any]], Any]] = {
    "dict": lambda decoder, node: dict(decoder.pairs(node)),
    "odict": _Decoder.ordered_dict,
    "tuple": lambda decoder, node: tuple(decoder.value(item) for item in node["v"]),
    "set": lambda decoder, node: {decoder.value(item) for item in node["v"]},
    "frozenset": lambda decoder, node: frozenset(decoder.value(item) for item in node["v"]),
    "ints": _Decoder.ints,
    "bytes": _Decoder.bytes,
    "bytearray": lambda decoder, node: bytearray(decoder.bytes(node)),
    "float": lambda _, node: struct.unpack(">d", bytes.fromhex(node["v"]))[0],
    "int": lambda _, node: int(node["v"], 16),
    "complex": lambda _, node: complex(*struct.unpack(">dd", bytes.fromhex(node["v"]))),
}
