"""Converts nested training state to a JSON tree and named tensors and back, without pickle.

Defines the meaning of the tree. Plain JSON values stand for themselves; everything else is an object with a "$" key
that names its type (docs/checkpoints.md lists them). A value that cannot be restored to the same type is refused with
its path and the conversion to write instead.

Tensors come back on the CPU, contiguous, with the same type, shape, dtype, values and ``requires_grad``; two views of
the same memory with the same shape come back as one tensor (tied weights stay tied). Overlapping views that differ are
stored one by one. Neither torch nor numpy is imported unless a state holds their values.
"""

from __future__ import annotations

import base64
import ctypes
import json
import math
import re
import struct
import sys
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.checkpoint.errors import MALFORMED, CorruptCheckpointError, UnsupportedStateError
from orchestrator.checkpoint.format.sharded import ShardedLeaf
from orchestrator.checkpoint.format.tensorfile import (
    ITEM_BYTES,
    OTHER_TORCH_TYPES,
    TORCH_TYPES,
    header,
    plan,
    torch_type,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from orchestrator.checkpoint.format.tensorfile import TensorEntry

NUMPY_TYPES: Mapping[str, str] = {
    "<f8": "F64", "<f4": "F32", "<f2": "F16", "<c8": "C64",
    "<i8": "I64", "<i4": "I32", "<i2": "I16", "|i1": "I8",
    "<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|b1": "BOOL",
}  # fmt: skip
_LARGEST_SIZE = 2**63
_STORABLE_NUMPY_KINDS = "biufcSUmM"
_NUMPY_TYPE = re.compile(r"[<>|=][biufcSUmM]\d+(?:\[\w+\])?")


class Described(NamedTuple):
    """A foreign value: its node in the tree and, unless ``dtype`` is None, its data for the tensor file."""

    node: dict[str, Any]
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    source: Any = None
    alias: Hashable | None = None  # equal for values that share all their memory


def describe(value: Any, path: str) -> Described:
    """Describe how to store a value that is neither JSON nor a container. Raises UnsupportedStateError with the remedy."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if type(value) is ShardedLeaf:
        return Described(node={"$": "sharded", "k": value.key, "s": list(value.shape), "d": value.dtype})
    if torch is not None:
        if isinstance(value, torch.Tensor):
            return _describe_tensor(torch, value, path)
        if type(value) is torch.Size:
            return Described(node={"$": "torch.Size", "v": list(value)})
        if isinstance(value, torch.dtype):
            name = str(value).removeprefix("torch.")
            if name not in TORCH_TYPES and name not in OTHER_TORCH_TYPES:
                raise UnsupportedStateError(f"{path}: the type {name} cannot be stored; store its name, as text")
        if isinstance(value, torch.dtype | torch.device):
            return Described(node={"$": f"torch.{type(value).__name__}", "v": str(value).removeprefix("torch.")})
    if numpy is not None:
        if isinstance(value, numpy.ndarray):
            return _describe_array(numpy, value, path)
        if isinstance(value, numpy.generic):
            return _describe_scalar(numpy, value, path)
    raise UnsupportedStateError(f"{path}: {_remedy(value)}")


def memory(source: Any) -> memoryview:
    """Return the contiguous bytes of a tensor, an array or a buffer. Copies from a device, or when not contiguous."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(source, torch.Tensor):
        flat = source.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return _view(flat, flat.data_ptr(), flat.numel() * flat.element_size())
    if numpy is not None and isinstance(source, numpy.ndarray):
        flat = numpy.ascontiguousarray(source)
        return _view(flat, flat.ctypes.data, flat.nbytes)
    return memoryview(source).cast("B")


def restore(node: Mapping[str, Any], entry: TensorEntry | None, data: memoryview) -> Any:
    """Restore a described value. Raises KeyError or ValueError for invalid input."""
    kind = node["$"]
    if kind in ("tensor", "parameter") and entry is not None:
        return _restore_tensor(node, entry, data)
    if kind == "ndarray" and entry is not None:
        return _restore_array(node, entry, data)
    if kind == "sharded":
        key, shape = node["k"], node["s"]
        if not isinstance(key, str) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("a sharded tensor is malformed")
        return ShardedLeaf(key=key, shape=tuple(shape), dtype=node["d"])
    if kind in ("numpy", "numpy.text"):
        return _restore_scalar(node)
    if kind in ("torch.Size", "torch.dtype", "torch.device"):
        import torch

        if kind == "torch.dtype":
            return torch_type(node["v"])
        if kind == "torch.device":
            return torch.device(node["v"])
        if not all(type(size) is int and abs(size) < _LARGEST_SIZE for size in node["v"]):
            raise ValueError("a size is malformed")
        return torch.Size(node["v"])
    raise ValueError(f"unknown type {kind!r}; it was written by a newer version")


def _view(owner: Any, address: int, size: int) -> memoryview:
    """Return a memory view of a foreign object's bytes that keeps the object alive."""
    if size == 0:
        return memoryview(b"")
    box: Any = (ctypes.c_ubyte * size).from_address(address)
    box.owner = owner  # the view keeps the ctypes array, and that keeps the tensor
    return memoryview(box).cast("B")


def _describe_tensor(torch: Any, value: Any, path: str) -> Described:
    kind = type(value)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedStateError(
            f"{path}: a {kind.__name__} cannot be stored as it is; pass a plain tensor (for a DTensor: .full_tensor())"
        )
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise UnsupportedStateError(
            f"{path}: only dense tensors can be stored; use .to_dense(), .dequantize() or materialise it"
        )
    name = _name_of(value.dtype)
    shape = tuple(value.shape)
    node: dict[str, Any] = {"$": "parameter" if kind is torch.nn.Parameter else "tensor"}
    dtype = TORCH_TYPES.get(name)
    stored = shape
    if dtype is None and name not in OTHER_TORCH_TYPES:
        raise UnsupportedStateError(f"{path}: tensors of type {name} cannot be stored; convert it with .to()")
    if dtype is None:  # a type that safetensors lacks is stored as bytes
        node.update(d=name, s=list(shape))
        dtype, stored = "U8", (value.numel() * value.element_size(),)
    if value.requires_grad:
        node["g"] = True
    alias = (value.data_ptr(), value.device, shape, value.stride(), name, value.is_conj(), value.is_neg())
    return Described(node=node, dtype=dtype, shape=stored, source=value, alias=alias if value.numel() else None)


@cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_array(numpy: Any, value: Any, path: str) -> Described:
    if type(value) not in (numpy.ndarray, numpy.memmap):
        raise UnsupportedStateError(
            f"{path}: a {type(value).__name__} cannot be stored; use numpy.asarray() or a dictionary"
        )
    text = _numpy_type(numpy, value.dtype, path)
    dtype = NUMPY_TYPES.get(text)
    node: dict[str, Any] = {"$": "ndarray"}
    stored = tuple(value.shape)
    if dtype is None:
        node.update(d=text, s=list(value.shape))
        dtype, stored = "U8", (value.nbytes,)
    alias = (value.ctypes.data, tuple(value.shape), value.strides, text) if value.nbytes else None
    return Described(node=node, dtype=dtype, shape=stored, source=value, alias=alias)


def _numpy_type(numpy: Any, dtype: Any, path: str) -> str:
    if dtype.kind not in _STORABLE_NUMPY_KINDS or numpy.dtype(dtype.str) != dtype:
        raise UnsupportedStateError(
            f"{path}: arrays of type {dtype} cannot be stored; use numbers, or one array per field"
        )
    return str(dtype.str)


def _describe_scalar(numpy: Any, value: Any, path: str) -> Described:
    if isinstance(value, numpy.str_):
        return Described(node={"$": "numpy.text", "v": str(value)})
    if isinstance(value, numpy.bytes_):
        return Described(node={"$": "numpy.text", "v": bytes(value).hex(), "b": True})
    return Described(node={"$": "numpy", "d": _numpy_type(numpy, value.dtype, path), "v": value.tobytes().hex()})


def _restore_tensor(node: Mapping[str, Any], entry: TensorEntry, data: memoryview) -> Any:
    import torch

    dtype = torch_type(node.get("d") or _TORCH_NAMES[entry.dtype])
    shape = node.get("s", entry.shape)
    if entry.end == entry.begin:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(data[entry.begin : entry.end], dtype=dtype).reshape(shape)
    if node["$"] == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=bool(node.get("g")))
    return tensor.requires_grad_() if node.get("g") else tensor


def _restore_array(node: Mapping[str, Any], entry: TensorEntry, data: memoryview) -> Any:
    import numpy as np

    dtype = _restore_numpy_type(np, node.get("d") or _NUMPY_NAMES[entry.dtype])
    shape = node.get("s", entry.shape)
    if entry.end == entry.begin:
        return np.empty(shape, dtype)
    return np.frombuffer(data[entry.begin : entry.end], dtype).reshape(shape)


def _restore_scalar(node: Mapping[str, Any]) -> Any:
    import numpy as np

    if node["$"] == "numpy.text":
        return np.bytes_(bytes.fromhex(node["v"])) if node.get("b") else np.str_(node["v"])
    return np.frombuffer(bytes.fromhex(node["v"]), _restore_numpy_type(np, node["d"]))[0]


def _restore_numpy_type(numpy: Any, text: Any) -> Any:
    if not isinstance(text, str) or not _NUMPY_TYPE.fullmatch(text):
        raise ValueError(f"{text!r} is not a stored type of array")
    return numpy.dtype(text)


def _remedy(value: Any) -> str:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if callable(getattr(value, "state_dict", None)):
        return f"pass the state of {name}, not the object: .state_dict()"
    if callable(getattr(value, "get_state", None)):
        return f"pass the state of {name}, not the object: .get_state()"
    if hasattr(value, "bit_generator"):
        return f"pass the state of {name}, not the object: .bit_generator.state"
    for base in (int, float, str, dict, list, tuple):
        if isinstance(value, base):
            return f"{name} would come back as {base.__name__}; convert it with {base.__name__}() before saving"
    return f"{name} cannot be stored without pickle; convert it to numbers, text, lists, dictionaries or tensors"


_TORCH_NAMES = {code: name for name, code in TORCH_TYPES.items()}
_NUMPY_NAMES = {code: name for name, code in NUMPY_TYPES.items()}


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
        return memory(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A state as a JSON tree, its ``text``, and its leaves: a part of a checkpoint (see storage.writer.Part)."""

    tree: Any
    text: bytes
    leaves: tuple[Leaf, ...]

    @property
    def total_bytes(self) -> int:
        """The approximate size on storage."""
        return len(self.text) + sum(leaf.total_bytes for leaf in self.leaves)

    def tree_file(self) -> tuple[bytes]:
        """Return the content of its JSON file."""
        return (self.text,)

    def tensor_file(self) -> Iterator[bytes | memoryview] | None:
        """Yield the content of its tensor file, piece by piece; None when it has no tensors."""
        return self._tensor_file() if self.leaves else None

    def _tensor_file(self) -> Iterator[bytes | memoryview]:
        entries = plan([(leaf.name, leaf.dtype, leaf.shape) for leaf in self.leaves])
        by_name = {leaf.name: leaf for leaf in self.leaves}
        yield header(entries, {"format": "pt"})
        for entry in entries:
            yield by_name[entry.name].memory()


def json_text(tree: Any) -> bytes:
    """Return a JSON tree as text."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()


def encode(state: Any) -> Encoded:
    """Encode ``state``. Tensors are referred to, not copied.

    Raises UnsupportedStateError, with the path, for values that only pickle could store.
    """
    encoder = _Encoder()
    try:
        tree = encoder.value(state, "")
    except RecursionError as error:
        raise UnsupportedStateError("state is nested too deeply to store; flatten it") from error
    return Encoded(tree=tree, text=json_text(tree), leaves=tuple(encoder.leaves))


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
        described = describe(value, path or "state")
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
        restorer = _RESTORERS.get(kind)
        return self._foreign(node) if restorer is None else restorer(self, node)

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
            return restore(node, None, self._data)
        key = tuple(sorted((name, str(item)) for name, item in node.items()))
        if key not in self._shared:
            self._shared[key] = restore(node, self._entries[node["n"]], self._data)
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
