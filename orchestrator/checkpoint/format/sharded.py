"""States whose tensors are sharded over ranks (FSDP2, DTensor): each rank stores its own pieces, any number loads them.

``split`` replaces each DTensor in the shared state by a ``ShardedLeaf``, and returns the pieces that this rank stores;
they are one more part of the checkpoint, so digests, fencing and "complete when every rank's part is in" apply to them
too. ``join`` assembles the pieces: as whole tensors on the CPU, or directly into the DTensors of another run, whose
layout may differ. torch.distributed.checkpoint plans which block goes where; its own file format pickles its metadata,
so only its planner is used, and the files stay safetensors and JSON.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.errors import (
    MALFORMED,
    CorruptCheckpointError,
    IncompatibleStateError,
    UnsupportedStateError,
)
from orchestrator.checkpoint.format import layout
from orchestrator.checkpoint.format.tensorfile import torch_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedLeaf:
    """Replaces in the shared state a tensor that ranks store in pieces under ``key``."""

    key: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class _Pieces:
    """The result of ``split``: whether there is any DTensor, and this rank's own pieces."""

    found: bool
    own: list[dict[str, Any]]
    tensors: dict[str, Any]


def parts_of(state: Any, rank_state: Any, rank: int) -> tuple[dict[str, Any], bool]:
    """Return the parts of a checkpoint that ``rank`` stores, by name, and whether every rank has a part in it.

    Raises UnsupportedStateError for a DTensor that differs between ranks when assembled (Partial).
    """
    shared, pieces = _split(state)
    parts: dict[str, Any] = {layout.STATE: shared} if rank == 0 else {}
    if rank_state is not None:
        parts[layout.rank_part(rank)] = rank_state
    if pieces.found:
        parts[layout.shard_part(rank)] = pieces.own
    return parts, rank_state is not None or pieces.found


def join(state: Any, read_pieces: Callable[[], Iterable[Mapping[str, Any]]], into: Any = None) -> Any:
    """Return a stored state with its sharded tensors in place; ``read_pieces`` returns those of all ranks.

    ``into`` is a state of the same structure: its DTensors are filled and used in the result; the other sharded tensors
    are assembled whole. Raises CorruptCheckpointError when pieces are missing, IncompatibleStateError when ``into`` has
    other shapes.
    """
    leaves: dict[str, ShardedLeaf] = {}
    _visit(state, "", lambda leaf, _: leaves.setdefault(leaf.key, leaf), ShardedLeaf)
    if not leaves:
        return state
    pieces: dict[str, list[Mapping[str, Any]]] = {key: [] for key in leaves}
    for piece in read_pieces():
        pieces.setdefault(_checked(piece)["key"], []).append(piece)
    for key, leaf in leaves.items():
        if sum(piece["tensor"].numel() for piece in pieces[key]) != math.prod(leaf.shape):
            raise CorruptCheckpointError(f"the pieces of {key} do not make up a tensor of shape {leaf.shape}")
    targets = _split(into)[1].tensors if into is not None else {}
    wanted = {key: targets[key] for key in leaves if key in targets}
    for key, target in wanted.items():
        if tuple(target.shape) != leaves[key].shape:
            raise IncompatibleStateError(
                f"{key} has shape {leaves[key].shape} in the checkpoint and {tuple(target.shape)} in the state to load into;"
                " load into a model of the same shapes, or start from nothing in another checkpoint directory"
            )
    if wanted:
        _fill(wanted, pieces)
    whole = {key: wanted.get(key) if key in wanted else _whole(leaf, pieces[key]) for key, leaf in leaves.items()}
    return _visit(state, "", lambda leaf, _: whole[leaf.key], ShardedLeaf)


def _split(state: Any) -> tuple[Any, _Pieces]:
    pieces = _Pieces(found=False, own=[], tensors={})
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    if kind is None or not _holds(state, kind):
        return state, pieces

    def take(tensor: Any, path: str) -> ShardedLeaf:
        pieces.found = True
        pieces.tensors[path] = tensor
        piece = _own_piece(tensor, path)
        if piece is not None:
            pieces.own.append(piece)
        return ShardedLeaf(key=path, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    return _visit(state, "", take, kind), pieces


def _holds(state: Any, kind: type) -> bool:
    """Whether the state contains a ``kind``. Checks types, a container at a time: every save calls this."""
    found, seen = [state], set()
    while found:
        value = found.pop()
        if isinstance(value, kind):
            return True
        if type(value) not in _CONTAINERS or id(value) in seen:
            continue
        seen.add(id(value))
        items = value.values() if isinstance(value, dict) else value
        kinds = set(map(type, items))
        if any(issubclass(each, kind) for each in kinds):
            return True
        if not kinds.isdisjoint(_CONTAINERS):
            found.extend(item for item in items if type(item) in _CONTAINERS)
    return False


def _own_piece(tensor: Any, path: str) -> dict[str, Any] | None:
    """Return the piece of a DTensor that this rank stores; None when it has none, or another rank stores the same."""
    coordinate = tensor.device_mesh.get_coordinate()
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedStateError(f"{path}: a partial DTensor is a sum not yet made; redistribute() it before saving")
    if coordinate is None:
        return None
    for place, placement in zip(coordinate, tensor.placements, strict=True):
        if placement.is_replicate() and place != 0:
            return None
    shape, offsets = _local(tensor)
    if math.prod(shape) == 0:
        return None
    return {"key": path, "offsets": list(offsets), "tensor": tensor.to_local().detach()}


def _local(tensor: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return shape and offsets of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return shape, offsets


def _visit(value: Any, path: str, replace: Callable[[Any, str], Any], kind: Any) -> Any:
    """Replace every instance of ``kind`` in ``value``; a value without any is returned as it is, not copied."""
    if isinstance(value, kind):
        return replace(value, path)
    inside = f"{path}." if path else ""
    if type(value) in (dict, OrderedDict):
        made = {key: _visit(item, f"{inside}{key}", replace, kind) for key, item in value.items()}
        if all(made[key] is item for key, item in value.items()):
            return value
        copied: Any = type(value)(made)
        if hasattr(value, "_metadata"):
            copied._metadata = value._metadata  # noqa: SLF001  (torch's own attribute)
        return copied
    if type(value) in (list, tuple):
        items = [_visit(item, f"{inside}{number}", replace, kind) for number, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return items if type(value) is list else tuple(items)
    return value


def _whole(leaf: ShardedLeaf, pieces: Iterable[Mapping[str, Any]]) -> Any:
    import torch

    try:
        made = torch.empty(leaf.shape, dtype=torch_type(leaf.dtype))
        for piece in pieces:
            tensor = piece["tensor"]
            where = tuple(slice(at, at + size) for at, size in zip(piece["offsets"], tensor.shape, strict=True))
            made[where].copy_(tensor)
    except MALFORMED as error:
        raise CorruptCheckpointError(f"the pieces of {leaf.key} do not fit together: {error}") from error
    return made


def pieces_of(part: Any) -> list[Any]:
    """Return the pieces that one rank has stored. Raises CorruptCheckpointError for an invalid list."""
    if not isinstance(part, list):
        raise CorruptCheckpointError("a rank's pieces of sharded tensors are malformed")
    return part


def _checked(piece: Any) -> Mapping[str, Any]:
    """Validate a stored piece. Raises CorruptCheckpointError."""
    import torch

    if (
        isinstance(piece, dict)
        and isinstance(piece.get("key"), str)
        and isinstance(piece.get("tensor"), torch.Tensor)
        and isinstance(piece.get("offsets"), list)
        and len(piece["offsets"]) == piece["tensor"].dim()
        and all(type(at) is int and at >= 0 for at in piece["offsets"])
    ):
        return piece
    raise CorruptCheckpointError("a piece of a sharded tensor is malformed")


def _fill(targets: Mapping[str, Any], pieces: Mapping[str, list[Mapping[str, Any]]]) -> None:
    """Copy into this rank's part of each DTensor what the stored pieces have of it, whatever the two layouts are."""
    for key, target in targets.items():
        if target.device_mesh.get_coordinate() is None:
            continue
        own, (_, starts) = target.detach().to_local(), _local(target)
        filled = 0
        try:
            for piece in pieces[key]:
                filled += _copy_common(own, starts, piece["tensor"], piece["offsets"])
        except MALFORMED as error:
            raise CorruptCheckpointError(f"the pieces of {key} do not fit together: {error}") from error
        if filled != own.numel():
            raise CorruptCheckpointError(f"the pieces of {key} do not make up a tensor of shape {tuple(target.shape)}")


def _copy_common(own: Any, starts: Sequence[int], tensor: Any, offsets: Sequence[int]) -> int:
    """Copy the block of a whole that both have, of which each begins at its offsets; return the number of its elements."""
    begins = [max(mine, its) for mine, its in zip(starts, offsets, strict=True)]
    ends = [
        min(mine + here, its + there)
        for mine, here, its, there in zip(starts, own.shape, offsets, tensor.shape, strict=True)
    ]
    if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
        return 0
    into = tuple(slice(begin - mine, end - mine) for begin, end, mine in zip(begins, ends, starts, strict=True))
    block = tensor[tuple(slice(begin - its, end - its) for begin, end, its in zip(begins, ends, offsets, strict=True))]
    own[into].copy_(block)
    return int(block.numel())
