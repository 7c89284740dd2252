"""Names of the tensor types that checkpoints hold: a closed table, so that a name in a file has no other meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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
