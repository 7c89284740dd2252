"""Finds why a process group does not form: a rank that does not enter its set-up, or one that expects more ranks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.health import LEAST_APART, Standing, standing
from orchestrator.core.facts.hangs import Sign, Stillness

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.diagnosis.health import Frame, RankLook

GATHERING: Final = frozenset({Sign.RENDEZVOUS, Sign.WORLD_SIZE})
SET_UP: Final = "init_process_group"
_FILE: Final = "/torch/distributed/distributed_c10d.py"


def in_set_up(frames: Sequence[Frame]) -> bool:
    """Whether a thread with these frames sets up its job's process group."""
    return any(frame.function == SET_UP and frame.file.endswith(_FILE) for frame in frames)


def gathering(pairs: Mapping[int, tuple[RankLook, RankLook]], num_ranks: int) -> Stillness | None:
    """Return what keeps the ranks from their process group, by two looks at each; None where none of them waits for it."""
    waiting = [rank for rank in sorted(pairs) if _waits_there(*pairs[rank])]
    if not waiting:
        return None
    sizes = {rank: size for rank in waiting if (size := getattr(pairs[rank][1], "world_size", None)) is not None}
    wrong = {rank: size for rank, size in sizes.items() if size != num_ranks}
    if wrong:
        first = min(wrong)
        rank = None if len(wrong) == num_ranks else first
        return Stillness(rank=rank, sign=Sign.WORLD_SIZE, world_size=wrong[first], num_ranks=num_ranks)
    missing = [rank for rank in range(num_ranks) if rank not in waiting]
    if any(rank in pairs and standing(*pairs[rank]) in (Standing.WORKS, Standing.SPINS) for rank in missing):
        return None  # it makes progress
    if not missing:
        return Stillness(rank=None, sign=Sign.RENDEZVOUS, num_ranks=num_ranks)
    place = pairs[missing[0]][1].place if missing[0] in pairs else ""
    return Stillness(rank=missing[0], sign=Sign.RENDEZVOUS, place=place, num_ranks=num_ranks)


def _waits_there(before: RankLook, after: RankLook) -> bool:
    if after.at - before.at < LEAST_APART or before.pid != after.pid or not (before.threads and after.threads):
        return False
    return before.threads[0].frames == after.threads[0].frames and in_set_up(after.threads[0].frames)
