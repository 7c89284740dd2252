"""Pieces of tensors in the form that torch.distributed.checkpoint reads. Imports torch: use only while loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner


class PieceReader(StorageReader):
    """Reads from pieces in memory: for each key, tensors with their offsets in the whole."""

    def __init__(self, pieces: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._pieces = pieces

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is one checkpoint only."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept any id: the checkpoint has no name."""
        return checkpoint_id is None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return shape, type and pieces of each tensor."""
        return Metadata(state_dict_metadata={key: _described(pieces) for key, pieces in self._pieces.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: FBT001 - torch's signature
        """Do nothing: the reader needs no setup."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Accept the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Accept the plan."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Copy each requested block."""
        for item in plan.items:
            piece = next(
                piece
                for piece in self._pieces[item.storage_index.fqn]
                if tuple(piece["offsets"]) == tuple(item.storage_index.offset or ())
            )
            block = piece["tensor"]
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                block = block.narrow(dimension, start, length)
            target = planner.resolve_tensor(item)
            target.detach().copy_(block)
            planner.commit_tensor(item, target)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


def _described(pieces: Sequence[Mapping[str, Any]]) -> TensorStorageMetadata:
    ends = [[at + size for at, size in zip(piece["offsets"], piece["tensor"].shape, strict=True)] for piece in pieces]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=pieces[0]["tensor"].dtype),
        size=torch.Size([max(sizes) for sizes in zip(*ends, strict=True)]),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(piece["offsets"]), sizes=piece["tensor"].shape) for piece in pieces
        ],
    )
