"""Parts of a job's record: an attempt, how a rank of it ended, and a requested stop."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core import events as ev  # noqa: TC001  # conformance.py reads the annotations when it runs
from orchestrator.core.facts.fact import Fact  # noqa: TC001
from orchestrator.core.states import AttemptState, StopPurpose, StopScope  # noqa: TC001


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How one rank of the current attempt ended."""

    rank: int
    exit_code: int | None
    signal: int | None
    at: float
    error_type: str = ""
    error_message: str = ""
    error_at: float | None = None
    log_tail: tuple[str, ...] = ()
    evidence: tuple[Fact, ...] = ()
    policy: str = ""
    policy_note: Fact | None = None
    missing_file: str = ""
    left_out_by: str = ""
    stop_seen_at: float | None = None
    stop_scope: StopScope | None = None
    last_step: int | None = None
    total_steps: int | None = None
    memory: ev.MemoryUse | None = None

    @property
    def ok(self) -> bool:
        """The rank ended with exit code 0."""
        return self.exit_code == 0

    @property
    def failed_at(self) -> float:
        """When the failure began: the exception if there was one, else the death."""
        return self.error_at if self.error_at is not None else self.at

    @property
    def finished(self) -> bool:
        """The rank had reported its last step."""
        return self.last_step is not None and self.total_steps is not None and self.last_step >= self.total_steps

    def completed(self, *, others: bool) -> bool:
        """The rank did all of its work; ``others``: another rank of its attempt had reported its last step."""
        return self.ok and (self.finished or (others and self.last_step is None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt, current or past. ``ranks`` is its size: that of an elastic job may change between attempts.

    ``progressed``: it has saved a checkpoint that is newer than the one that it began with.
    """

    number: int
    gang: int
    state: AttemptState
    started_at: float
    running_at: float | None = None
    ended_at: float | None = None
    first_step_at: float | None = None
    first_step: int | None = None
    steps_lost: int = 0
    start_step: int = 0
    checkpoint_step: int = 0
    failure: ev.Failure | None = None
    ranks: int = 0
    progressed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A requested stop."""

    purpose: StopPurpose
    by: str
    at: float
    deadline: float
