"""Rules about a job's checkpoints and the storage that takes them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core import thresholds as d
from orchestrator.core.diagnosis.definitions import DEFINITIONS
from orchestrator.core.diagnosis.rules.suspicion import Suspicion
from orchestrator.core.facts import findings as f

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.core.diagnosis.figures.storage_window import RankStorage, StorageFigures
    from orchestrator.core.diagnosis.figures.windows import JobFigures
    from orchestrator.core.diagnosis.observation import SavesSeen


def saves_suspicions(job: JobFigures) -> Iterator[Suspicion]:
    """Return the suspicions from the figures of saves."""
    saves = job.newest.saves
    full = _full(saves, job.storage)
    if full is not None:
        yield full
    if saves.failures and saves.cause not in d.STORAGE_FULL:
        finding = f.SavesFailing(failures=saves.failures, said=saves.said, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=finding, figure=float(saves.failures))
    slow_storage = _slow_storage(job)
    if slow_storage is not None:
        yield slow_storage
    stall, interval = saves.stall_seconds, saves.interval_seconds
    if stall is not None and interval and stall >= d.LEAST_STALL_SECONDS:
        slow = f.SavesSlow(seconds=stall, interval_seconds=interval, confidence=f.Confidence.CERTAIN)
        yield Suspicion(finding=slow, figure=stall / interval)
    yield from _rare(saves)


def _full(saves: SavesSeen, storage: StorageFigures) -> Suspicion | None:
    """Return the suspicion that a save failed for lack of space, or that the next one lacks it; None if unknown."""
    failed = bool(saves.failures) and saves.cause in d.STORAGE_FULL
    known = storage.free_bytes is not None and storage.needed_bytes > 0
    if not failed and not known:
        return None
    fill = storage.needed_bytes / max(1, storage.free_bytes or 0) if known else 0.0
    finding = f.StorageFull(
        free_bytes=storage.free_bytes,
        needed_bytes=storage.needed_bytes,
        said=saves.said if failed else "",
        confidence=f.Confidence.CERTAIN,
    )
    return Suspicion(finding=finding, figure=max(1.0, fill) if failed else fill)


def _slow_storage(job: JobFigures) -> Suspicion | None:
    """Return the suspicion of slow storage; with the slowest rank if only its write is slow and training waits less."""
    storage = job.storage
    found = [(_over(one), one) for one in storage.ranks]
    waiting = storage.waiting / d.WAITING_SHARE
    figure, worst = max(found, key=lambda pair: pair[0], default=(0.0, None))
    if worst is None and not storage.waiting:
        return None
    closes = DEFINITIONS[f.StorageSlow].closes_at
    slow = sum(each >= closes for each, _ in found)
    alone = worst is not None and len(found) > 1 and slow == 1 and figure > waiting
    finding = f.StorageSlow(
        rank=worst.rank if alone and worst is not None else None,
        seconds=worst.seconds if worst is not None else 0.0,
        usual_seconds=worst.usual_seconds if worst is not None else None,
        share=min(1.0, storage.waiting),
        busy=worst is not None and worst.busy,
        confidence=f.Confidence.CERTAIN,
    )
    return Suspicion(finding=finding, figure=max(figure, waiting))


def _over(one: RankStorage) -> float:
    """Return the write's time over what it may take. Writes that take long each time are paced, and harm only where training waits."""
    if one.usual_seconds is None:
        return one.seconds / d.FIRST_WRITE_SECONDS if one.busy else 0.0
    return one.seconds / max(d.LEAST_WRITE_SECONDS, d.USUAL_WRITES * one.usual_seconds)


def _rare(saves: SavesSeen) -> Iterator[Suspicion]:
    if saves.unsaved_seconds is None:
        return
    meant = d.SAVES_MISSED * (saves.interval_seconds or 0.0)
    allowed = max(d.UNSAVED_SECONDS, meant) if saves.ever or saves.interval_seconds else d.NEVER_SAVED_SECONDS
    rare = f.SavesRare(
        seconds=saves.unsaved_seconds, interval_seconds=saves.interval_seconds, confidence=f.Confidence.CERTAIN
    )
    yield Suspicion(finding=rare, figure=saves.unsaved_seconds / allowed)
