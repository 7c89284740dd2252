"""The safetensors file format, read and written with the standard library alone, and its types by torch's names.

Not the safetensors package, because only torch is certain to exist in a training script's interpreter, because the rank
actor writes tensors of any type without importing torch, and because reading and hashing in one pass makes loading
fast. The tests compare both directions with the package.

Format: 8 bytes little-endian header length, JSON header ``{name: {dtype, shape, data_offsets}}`` padded with spaces,
then the data without gaps. Entries are ordered by decreasing item size, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
_LENGTH = struct.Struct("<Q")
_ALIGN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor's position: its name, safetensors type name, shape, and bytes [begin, end) of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def plan(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[TensorEntry, ...]:
    """Assign positions to tensors given as (name, type name, shape), in the order of the file."""
    entries = []
    at = 0
    for name, dtype, shape in sorted(tensors, key=lambda item: -ITEM_BYTES[item[1]]):
        size = ITEM_BYTES[dtype] * prod(shape)
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, begin=at, end=at + size))
        at += size
    return tuple(entries)


def header(entries: Sequence[TensorEntry], metadata: Mapping[str, str], *, most_bytes: int = MAX_HEADER_BYTES) -> bytes:
    """Return everything before the data: length and padded JSON. Raises ValueError above ``most_bytes`` (100 MB)."""
    body: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        body[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    raw = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(len(raw) + _LENGTH.size) % _ALIGN)
    if len(raw) > most_bytes:
        raise ValueError(f"{len(entries)} tensors need a header of {len(raw)} bytes; safetensors allows 100 MB")
    return _LENGTH.pack(len(raw)) + raw


def parse(
    raw: bytes | bytearray | memoryview, *, data_bytes: int | None = None
) -> tuple[tuple[TensorEntry, ...], memoryview]:
    """Return the entries of a whole file, and its data section. Raises CorruptCheckpointError when they do not match.

    ``data_bytes``: ``raw`` is only the head of a file with that much data.
    """
    view = memoryview(raw)
    try:
        (length,) = _LENGTH.unpack_from(view)
        if length > min(MAX_HEADER_BYTES, len(view) - _LENGTH.size):
            raise CorruptCheckpointError(f"tensor file: header of {length} bytes in a file of {len(view)}")
        body = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
        data = view[_LENGTH.size + length :]
        entries = tuple(_entry(name, value) for name, value in body.items() if name != "__metadata__")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"tensor file: unreadable header ({error})") from error
    _check(entries, len(data) if data_bytes is None else data_bytes)
    return entries, data


def _entry(name: str, value: Mapping[str, object]) -> TensorEntry:
    shape, offsets, dtype = value["shape"], value["data_offsets"], value["dtype"]
    if not (isinstance(shape, list) and isinstance(offsets, list) and isinstance(dtype, str)):
        raise TypeError(f"entry {name!r} is malformed")
    begin, end = offsets
    if any(type(number) is not int for number in (*shape, begin, end)) or any(size < 0 for size in shape):
        raise TypeError(f"entry {name!r} has a shape or an offset that is not a count")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _check(entries: Sequence[TensorEntry], data_bytes: int) -> None:
    for entry in entries:
        if entry.dtype not in ITEM_BYTES:
            raise CorruptCheckpointError(f"tensor {entry.name!r} has unknown type {entry.dtype!r}")
        expected = ITEM_BYTES[entry.dtype] * prod(entry.shape)
        if not (0 <= entry.begin <= entry.end <= data_bytes and entry.end - entry.begin == expected):
            raise CorruptCheckpointError(f"tensor {entry.name!r} is outside its file or has the wrong size")


TORCH_TYPES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""The types of safetensors, by torch's names."""
OTHER_TORCH_TYPES = frozenset({
    "complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2",
    "quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
})  # fmt: skip
"""Types of torch that safetensors lacks. A type in neither table is neither stored nor restored."""


def torch_type(name: Any) -> Any:
    """Return the torch type with that name. Raises ValueError for any other name."""
    import torch

    if not isinstance(name, str) or not (name in TORCH_TYPES or name in OTHER_TORCH_TYPES) or not hasattr(torch, name):
        raise ValueError(f"{name!r} is not a type of this torch")
    return getattr(torch, name)
