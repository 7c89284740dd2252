"""The training script's interface to orch: rank, progress, save, load, stop.

Works the same under orch, torchrun and plain ``python``; only the available services differ. Owns no policy and no file
format: those are in orchestrator.checkpoint. Must not import torch before a device is requested, nor Ray ever.

(The module is not called ``context``: importing it would replace the function ``orchestrator.train.context``.)
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex, cast

from orchestrator.train.script.agreement import ShmAgreement, StopAgreement, StopSignal
from orchestrator.train.script.elastic import BatchShare, must_ask, share_out
from orchestrator.train.script.environment import METADATA_VARIABLE, RankEnvironment, read_environment
from orchestrator.train.script.progress import ProgressPage, ProgressPageError
from orchestrator.train.script.save_schedule import AUTO, SaveSchedule
from orchestrator.train.script.saving import CheckpointWarning, Saver

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from orchestrator.checkpoint.storage.directory import Checkpoint

__all__ = ["CheckpointWarning", "Context", "current_context"]

_LARGEST_COUNT = 2**63 - 1
_METADATA_SECONDS = 0.1
"""A recording has a row a second by default; changes of epoch and phase are written at once."""


class Context:
    """One rank's view of its job. Get it with ``orchestrator.train.context()``."""

    def __init__(self, environment: RankEnvironment, page: ProgressPage | None = None) -> None:
        self._environment = environment
        self._page = page
        path = environment.metadata_path
        self._metadata = _RunMetadata(path) if path is not None and environment.rank == 0 else None
        self._saver = Saver(environment, page)
        self._stop = StopSignal()
        self._agreement: StopAgreement | None = None
        self._stopping = False
        self._schedule: SaveSchedule | None = None
        self._board: ShmAgreement | None = None
        self._lock = threading.Lock()  # serialises saves and loads
        self._device: torch.device | None = None
        self._asked = environment.elastic is None  # for its share of the batch, if required

    @property
    def rank(self) -> int:
        """The number of this process among all ranks, from 0."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._environment.world_size

    @property
    def local_rank(self) -> int:
        """The number of this process among the ranks of its node."""
        return self._environment.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this node."""
        return self._environment.local_world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._environment.rank == 0

    @property
    def job_id(self) -> str:
        """The job's id; empty outside of orch."""
        return self._environment.job_id

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1; 1 outside of orch."""
        return 1 if self._environment.attempt is None else self._environment.attempt

    @property
    def elastic(self) -> tuple[int, int] | None:
        """The fewest and the most ranks that this job may get; None when their number is fixed."""
        return self._environment.elastic

    def batch_share(self, global_batch: SupportsIndex, *, per_pass: SupportsIndex | None = None) -> BatchShare:
        """Return this rank's samples of each optimizer step of ``global_batch`` samples, for any number of ranks.

        ``per_pass`` is the most samples of one forward pass: what fits this rank's memory. Elastic jobs must call this
        before their first step; with a fixed number of ranks it is optional. Raises ValueError for a batch of fewer
        samples than ranks.
        """
        share = share_out(global_batch, rank=self.rank, world_size=self.world_size, per_pass=per_pass)
        self._asked = True
        return share

    @property
    def device(self) -> torch.device:
        """The device of this rank: ``cuda:LOCAL_RANK`` (or ``xpu``) where there is a GPU, else the CPU. Imports torch."""
        if self._device is None:
            self._device = _choose_device(self._environment)
        return self._device

    def report(
        self,
        *,
        step: int | None = None,
        total_steps: int | None = None,
        epoch: float | None = None,
        phase: str | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        **metrics: SupportsFloat,
    ) -> None:
        """Report the training progress; call it after every optimizer step. Takes microseconds; the latest report counts.

        ``samples`` and ``tokens`` are totals so far. Omitted values keep their last value. Metrics are numbers, or
        anything that ``float()`` accepts (a CUDA tensor makes the call wait for the device). A step below one already
        reported is shown but counts as no progress. Raises TypeError or ValueError for an invalid number, and
        NotElasticError in an elastic job that has not called ``batch_share``.
        """
        if step is not None:
            self._check_asked()
        known = {name: _metric(name, value) for name, value in metrics.items()} if metrics else None
        counts = {
            name: _whole(name, value)
            for name, value in (("step", step), ("total_steps", total_steps), ("samples", samples), ("tokens", tokens))
            if value is not None
        }
        if epoch is not None and type(epoch) is not int:
            epoch = _metric("epoch", epoch)
        if phase is not None and not isinstance(phase, str):
            raise TypeError(f"report(phase={phase!r}): a phase is a short text such as 'train' or 'evaluate'")
        if self._page is not None:
            self._page.write(epoch=epoch, phase=phase, metrics=known, **counts)
        if self._metadata is not None:
            self._metadata.note(epoch=epoch, step=counts.get("step"), phase=phase)

    def save(
        self,
        state: Any,
        *,
        step: int,
        rank_state: Any = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        durable: bool | None = None,
    ) -> bool:
        """Save a checkpoint of ``step``. True when this rank's part is safe, False when saving failed.

        ``state`` is what all ranks share (model, optimizer, ...): rank 0 stores it, elsewhere it is ignored, so that
        every rank may call this. With DTensors (FSDP2) in it every rank must, because each rank stores its own pieces of them. ``rank_state`` is this rank's own (random states, data position): use it on every
        rank or on none; the checkpoint then counts when every rank's part is stored. Both may nest dictionaries, lists,
        tuples, plain values, numpy and torch; nothing is pickled. A step already saved by this attempt is left as is.

        Under orch the whole state is in memory when this returns, and is then written to storage. With ``durable=True`` (the
        default where ``checkpoint.interval`` is a number of steps or a time), or with a score among the ``keep_best`` best,
        this save itself is written, after earlier such saves; ``save`` waits while two of them are not yet written. Any
        other save may be skipped for a newer one.

        A full or failing disk never raises: it warns once, is shown in ``orch status``, and the next save tries
        again. Raises UnsupportedStateError for a state that cannot be stored, ValueError for a bad step, NotElasticError
        as ``report`` does, and StaleAttemptError when a newer attempt has taken over and this process is a leftover. May be called from any
        thread, one save at a time.
        """
        number = _whole("step", step, "save")
        self._check_asked()
        scores = {name: _metric(name, value, "save") for name, value in (metrics or {}).items()}
        with self._lock:
            sure = self._environment.interval != AUTO if durable is None else durable
            # When orch did not request the stop, its sender may also end the rank actor before the actor has stored a snapshot.
            leaving = self._stopping and not (self._page is not None and self._page.stop_requested)
            done = self._saver.save(
                state,
                step=number,
                rank_state=rank_state,
                metrics=scores,
                durable=sure,
                leaving=leaving,
            )
            if self._schedule is not None:
                self._schedule.saved(stall_seconds=self._saver.stall_seconds, cost_seconds=self._saver.cost_seconds)
            return done

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step``. Call once per step, on every rank.

        The interval is the job's ``checkpoint.interval``: by default it is chosen, again after each save, to minimise
        the cost of saving and of repeating lost steps. All ranks of a node get the same answer. Other saves are allowed
        too.
        """
        number = _whole("step", step, "should_save")
        if self._schedule is None:
            self._schedule = self._make_schedule()
        before = self._schedule.choice
        due = self._schedule.is_due(number)
        choice = self._schedule.choice
        if choice is not None and (before is None or choice.steps != before.steps):
            self._saver.report.publish(interval_steps=choice.steps, interval_reason=choice.reason)
        return due

    def load(self, into: Any = None) -> Checkpoint | None:
        """Return the newest valid checkpoint, or None when there is none to start from. Damaged ones are quarantined.

        Sharded tensors are returned whole and on the CPU, on any number of ranks; with ``into``, a state of the same
        structure, its DTensors are filled in place instead and used in ``state``.

        Without its own checkpoint, a job started with ``--resume-from`` gets the one named there. Raises
        CheckpointError when that one is damaged, or when ranks cannot agree; OSError when storage is out of reach.
        """
        with self._lock:
            return self._saver.load(into)

    def should_stop(self) -> bool:
        """Whether the job must end now: save, then leave the loop. Call once per step.

        All ranks of a node get the answer yes after the same step, so that none is left alone in a collective. The
        first call installs a handler for SIGTERM, if there is no other and it is made in the main thread: from then on
        SIGTERM no longer ends the process by itself.
        """
        if self._agreement is None:
            self._agreement = StopAgreement(self._open_board())
        self._stop.watch()
        requested = self._stop.received or (self._page is not None and self._page.stop_requested)
        if not self._agreement.is_now(requested=requested):
            return False
        self.confirm_stop()
        return True

    def confirm_stop(self) -> None:
        """Record that this rank stops now because the ranks agreed to, after a stop request to any one of them.

        Needed only where your own code makes the ranks agree: `should_stop` calls it before it returns True.
        """
        if self._page is not None:
            self._page.mark_stop_seen()
        self._stopping = True

    def _check_asked(self) -> None:
        if not self._asked and self._environment.elastic is not None:
            raise must_ask(*self._environment.elastic)

    def leave_page(self) -> None:
        """Report nothing from now on."""
        self._page = self._metadata = None
        self._saver.leave()

    def _make_schedule(self) -> SaveSchedule:
        here = self._environment
        return SaveSchedule(
            here.interval,
            rank=here.rank,
            board=self._open_board(),
            recovery_seconds=here.recovery_seconds,
            failure_seconds=here.failure_seconds,
        )

    def _open_board(self) -> ShmAgreement | None:
        """Return the agreement of this node's ranks; None where it is not needed or not possible."""
        here = self._environment
        if here.world_size == 1 or not here.on_one_node or here.snapshot_dir is None or here.token is None:
            return None
        if self._board is None:
            try:
                self._board = ShmAgreement(here.snapshot_dir, here.token)
            except OSError as error:
                self._saver.report.warn("board", f"each rank decides for itself when to save and stop: {error}")
        return self._board


def _choose_device(environment: RankEnvironment) -> torch.device:
    import torch

    if environment.device is not None:
        return torch.device(environment.device)
    kind = _accelerator()
    count = torch.accelerator.device_count() if kind else 0
    # Ranks that share a device (gpu: 0.5) outnumber the devices that they see.
    return torch.device(kind, environment.local_rank % count) if count else torch.device("cpu")


def _accelerator() -> str:
    """Return torch's name for this machine's GPUs: cuda (NVIDIA, AMD) or xpu (Intel); empty without any that ranks can share work on."""
    import torch

    if not torch.accelerator.is_available():
        return ""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and found.type in ("cuda", "xpu") else ""


def _whole(name: str, value: Any, call: str = "report") -> int:
    if isinstance(value, bool):
        raise TypeError(f"{call}({name}={value}): a whole number is needed")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{call}({name}={value!r}): a whole number is needed; use int()") from error
    if not 0 <= number <= _LARGEST_COUNT:
        raise ValueError(f"{call}({name}={number}): must be between 0 and 2**63 - 1")
    return number


def _metric(name: str, value: Any, call: str = "report") -> float:
    if type(value) is float:
        return value
    try:
        if isinstance(value, str | bytes):
            raise TypeError(f"{type(value).__name__} is text")  # noqa: TRY301  (float() would parse it)
        return float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"{call}({name}={value!r}): a number is needed ({error})") from error


class _RunMetadata:
    """Labels of a run for `orch record`: epoch, batch and phase, in a small JSON file at `path` that rank 0 replaces. Omitted values keep their last value."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._draft = f"{path}.{os.getpid()}.new"
        self._known: dict[str, float | int | str] = {}
        self._write_at = 0.0
        self._works = True

    def note(self, *, epoch: float | None, step: int | None, phase: str | None) -> None:
        """Record values, and write when due. Never raises: a full disk costs the recording only its labels."""
        known = self._known
        changed = (epoch is not None and known.get("epoch") != epoch) or (
            phase is not None and known.get("phase") != phase
        )
        for name, value in (("epoch", epoch), ("batch", step), ("phase", phase)):
            if value is not None:
                known[name] = value
        now = time.monotonic()
        if self._works and (changed or now >= self._write_at):
            self._write_at = now + _METADATA_SECONDS
            self._write()

    def _write(self) -> None:
        try:
            with open(self._draft, "w", encoding="utf-8") as file:  # noqa: PTH123  (half the time of Path's)
                file.write(json.dumps(self._known))
            os.replace(self._draft, self._path)  # noqa: PTH105 - strings: done at every report
        except OSError as error:
            self._works = False
            message = (
                f"{METADATA_VARIABLE}: {self._path} cannot be written ({error}); the recording lacks epoch and phase"
            )
            with contextlib.suppress(RuntimeWarning):  # where warnings are errors
                warnings.warn(message, RuntimeWarning, stacklevel=5)


_current: Context | None = None


def current_context() -> Context:
    """Return the one Context of this process, created from its environment on first use."""
    global _current  # noqa: PLW0603  (one per process)
    if _current is None:
        environment = read_environment(os.environ)
        _current = Context(environment, _open_page(environment))
    return _current


def _open_page(environment: RankEnvironment) -> ProgressPage | None:
    if environment.progress_path is None:
        return None
    try:
        page = ProgressPage.open(environment.progress_path, previous_step=environment.previous_step)
    except ProgressPageError as error:
        warnings.warn(f"progress will not be shown: {error}", RuntimeWarning, stacklevel=3)
        return None
    if not page.claim():  # a child of the rank that imports its parent's script
        page.close()
        return None
    return page


def _forget_after_fork() -> None:
    """Drop the inherited context in a forked child, which is not the rank: it would write to the parent's page."""
    global _current  # noqa: PLW0603 - one per process
    if _current is not None:
        _current.leave_page()
    _current = None


os.register_at_fork(after_in_child=_forget_after_fork)
