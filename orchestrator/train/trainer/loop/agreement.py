"""Agreements of ranks outside of gradients: to stop together, and on the error to report.

Stopping: a signal reaches ranks at different steps, but they must leave after the same one, or those that continue wait
for ever. They communicate rarely enough to cost nothing, at the same steps, because each exchange sets the
step of the next.

Errors: a rank with an error writes a note to the rendezvous store; rank 0 reads it when its collective fails.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import contextmanager
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from orchestrator.train import errors
from orchestrator.train.errors import TrainError, only_on_main, quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.train.trainer.process_group import RankGroup

ASK_EVERY_SECONDS = 0.25
MAX_STEPS_BETWEEN = 256

_NOTE = "error/note"
_NOTE_WAIT = timedelta(seconds=1)
_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (?:closed|reset)|broken pipe|process ?group|socket timeout|recv(?:bytes)?\b|collective",
    re.IGNORECASE,
)


class StopAgreement:
    """Agreement of all ranks to stop after the same step. Call `reached` after every step, on every rank."""

    def __init__(self, place: RankGroup, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._distributed = place.distributed
        self._shared = torch.zeros(2, dtype=torch.float64, device=place.control_device) if place.distributed else None
        self._countdown = 1
        self._steps_between = 1
        self._asked_at = perf_counter()

    def reached(self) -> bool:
        """Whether to stop here. True on all ranks after the same step."""
        if not self._distributed:
            return self._wanted()
        wanted = self._wanted()  # always called: the first call installs the SIGTERM handler
        self._countdown -= 1
        if self._countdown > 0:
            return False
        return self._ask(wanted=wanted)

    def _ask(self, *, wanted: bool) -> bool:
        assert self._shared is not None
        now = perf_counter()
        self._shared[0] = float(wanted)
        self._shared[1] = (now - self._asked_at) / self._steps_between
        dist.all_reduce(self._shared, op=dist.ReduceOp.MAX)
        stop, slowest = self._shared.tolist()
        self._asked_at = now
        self._steps_between = min(MAX_STEPS_BETWEEN, max(1, math.floor(ASK_EVERY_SECONDS / max(slowest, 1e-6))))
        self._countdown = self._steps_between
        return bool(stop)


def share_error(error: TrainError, place: RankGroup, *, under_orch: bool) -> TrainError:
    """Inform the other ranks of the error here, and return the exception for this rank to raise.

    Rank 0's own error is raised unchanged. Another rank's error goes to rank 0, which reads it when this rank has ended
    and rank 0's collective fails: over gloo at once. Over NCCL that can take longer than a launcher waits, so there
    this rank reports the error.
    """
    if place.store is None:
        return error
    shown = place.is_main or place.device.type != "cpu"
    kind = type(error).__mro__[1] if isinstance(error, SystemExit) else type(error)
    note = {"type": kind.__name__, "text": f"rank {place.rank}: {error}", "shown": shown}
    try:
        place.store.set(_NOTE, json.dumps(note))
    except RuntimeError:  # rank 0, and with it the store, has ended
        return error
    return error if shown else only_on_main(error, rank=place.rank, under_orch=under_orch)


def explain_broken_collective(failure: Exception, place: RankGroup, *, under_orch: bool) -> TrainError | None:
    """Return the error behind a collective that failed because another rank had left; None when there is no note."""
    store = place.store
    if store is None or not _COLLECTIVE.search(f"{type(failure).__name__} {failure}"):
        return None
    try:
        store.wait([_NOTE], _NOTE_WAIT)
        note = json.loads(store.get(_NOTE))
    except (RuntimeError, ValueError):
        return None
    error: TrainError = getattr(errors, str(note["type"]), TrainError)(note["text"])
    return quiet(error) if note["shown"] else only_on_main(error, rank=place.rank, under_orch=under_orch)


@contextmanager
def one_voice(place: RankGroup, *, under_orch: bool) -> Iterator[None]:
    """End all ranks on an error on any rank, and make one of them report the reason."""
    try:
        yield
    except TrainError as error:
        raise share_error(error, place, under_orch=under_orch) from error.__cause__
    except (RuntimeError, OSError) as error:
        explained = explain_broken_collective(error, place, under_orch=under_orch)
        if explained is None:
            raise
        raise explained from None
