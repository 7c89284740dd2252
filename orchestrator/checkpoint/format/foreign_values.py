"""Converts values of torch and numpy to nodes of a checkpoint's tree and back. Imports neither until a value needs it.

Tensors come back on the CPU, contiguous, with the same type, shape, dtype, values and ``requires_grad``; two views of
the same memory with the same shape come back as one tensor (tied weights stay tied). Overlapping views that differ are
stored one by one.
"""

from __future__ import annotations

import ctypes
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.checkpoint.errors import UnsupportedStateError
from orchestrator.checkpoint.format.sharded import ShardedLeaf
from orchestrator.checkpoint.format.tensorfile import OTHER_TORCH_TYPES, TORCH_TYPES, torch_type

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

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
