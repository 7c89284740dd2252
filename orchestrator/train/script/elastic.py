"""Divides the samples of an optimizer step among ranks: the batch stays the same for any number of ranks.

Pure arithmetic, without torch. The samples of a step are numbered 0 to ``global_batch`` - 1; each rank takes a
contiguous row of them, rows differ by at most one sample (of 256 samples on 3 ranks: 86, 85, 85), and a rank processes
its row in pieces that fit its memory.

Data parallelism averages gradients over ranks, as if all had seen equally many samples. Multiplied by its ``weight``,
the mean loss of a piece counts for its samples: the average is then the gradient of the mean over the global batch, and
the same learning rate is right for any number of ranks.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import SupportsIndex


class NotElasticError(RuntimeError):
    """The job may get any number of ranks, and its script has not requested its share of the batch.

    Call ``context().batch_share(global_batch)``, train with the training system (which calls it), or write a fixed num_workers.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One forward and backward pass: samples ``start`` to ``stop`` - 1 of the step. See BatchShare."""

    start: int
    samples: int
    weight: float
    last: bool

    @property
    def stop(self) -> int:
        """Number of the last sample plus one."""
        return self.start + self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """One rank's part in every optimizer step.

    ``start`` and ``samples`` are its row of the step's ``global_batch`` samples; ``pieces`` are that row, cut for the
    passes of gradient accumulation. Multiply the mean loss of a piece by its ``weight`` before ``backward()``, and let
    DistributedDataParallel send gradients in the ``last`` one only (``no_sync()`` around the others). ``weight`` is that of
    the whole row, for a step in one pass.
    """

    global_batch: int
    rank: int
    world_size: int
    start: int
    samples: int
    weight: float
    pieces: tuple[Piece, ...]
    portions: tuple[int, ...]
    """The samples of every rank."""
    same_passes: bool
    """Whether all ranks have equally many pieces; false only when some rank has fewer samples than others have passes."""

    @property
    def accumulation(self) -> int:
        """Return the number of forward and backward passes of this rank per optimizer step."""
        return len(self.pieces)


def share_out(
    global_batch: SupportsIndex, *, rank: int, world_size: int, per_pass: SupportsIndex | None = None
) -> BatchShare:
    """Return the share of ``rank`` in steps of ``global_batch`` samples, in passes of at most ``per_pass`` samples.

    Raises ValueError for a batch with less than one sample per rank, or less than one sample per pass.
    """
    portions = equal_portions(operator.index(global_batch), world_size)
    passes = _passes(max(portions), _limit(per_pass, max(portions)))
    return _share(portions, rank, passes, same=passes <= min(portions))


def equal_portions(global_batch: int, world_size: int) -> tuple[int, ...]:
    """Return the samples of each rank, as equal as possible. Raises ValueError for a batch with less than one for each."""
    if global_batch < world_size:
        raise ValueError(
            f"a batch of {global_batch} samples cannot be shared by {world_size} ranks: make it larger, or allow fewer ranks "
            "(resources.num_workers.max)"
        )
    least, rest = divmod(global_batch, world_size)
    return tuple(least + (1 if rank < rest else 0) for rank in range(world_size))


def share_of(portions: Sequence[int], *, rank: int, per_pass: SupportsIndex | None = None) -> BatchShare:
    """Return the share of ``rank`` with a number of samples for each rank: in the fewest passes for its own samples.

    Raises ValueError for a rank without a sample, or for less than one sample per pass.
    """
    if min(portions) < 1:
        raise ValueError(f"portions are {list(portions)}: each rank takes at least one sample")
    limit = _limit(per_pass, max(portions))
    passes = [_passes(samples, limit) for samples in portions]
    return _share(portions, rank, passes[rank], same=len(set(passes)) == 1)


def _limit(per_pass: SupportsIndex | None, most: int) -> int:
    limit = most if per_pass is None else operator.index(per_pass)
    if limit < 1:
        raise ValueError(f"per_pass is {limit}: a pass takes at least one sample")
    return limit


def _passes(samples: int, limit: int) -> int:
    return -(-samples // limit)


def _share(portions: Sequence[int], rank: int, passes: int, *, same: bool) -> BatchShare:
    whole, world_size, samples = sum(portions), len(portions), portions[rank]
    start = sum(portions[:rank])
    return BatchShare(
        global_batch=whole,
        rank=rank,
        world_size=world_size,
        start=start,
        samples=samples,
        weight=_weight(samples, whole, world_size),
        pieces=_pieces(start, samples, min(passes, samples), whole, world_size),
        portions=tuple(portions),
        same_passes=same,
    )


def _pieces(start: int, samples: int, passes: int, whole: int, world_size: int) -> tuple[Piece, ...]:
    least, rest = divmod(samples, passes)
    pieces = []
    for number in range(passes):
        size = least + (1 if number < rest else 0)
        weight = _weight(size, whole, world_size)
        pieces.append(Piece(start=start, samples=size, weight=weight, last=number == passes - 1))
        start += size
    return tuple(pieces)


def _weight(samples: int, whole: int, world_size: int) -> float:
    return samples * world_size / whole


def parse_range(text: str) -> tuple[int, int]:
    """Read ``2-8``: the fewest and the most ranks. Raises ValueError."""
    least, _, most = text.partition("-")
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise ValueError(f"{text!r} is not a range of ranks such as 2-8; unset it or correct it")
    return int(least), int(most)


def must_ask(least: int, most: int) -> NotElasticError:
    """Return the error of a script that reports without having requested its share."""
    return NotElasticError(
        f"the job may run on {least} to {most} ranks (resources.num_workers), but its script has not asked for its share of "
        "the batch, which would be another with each number of ranks: call context().batch_share(global_batch) before the "
        "first step, train with MultiGPUTrainingManager, or write a fixed num_workers"
    )
