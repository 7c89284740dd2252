"""The diagnosis of one job: takes observations, opens and closes findings, and keeps the figures of open ones current. Begin here.

``figures.py`` computes figures from observations, ``rules.py`` derives suspicions from figures, and ``definitions.py``
defines when a suspicion is a finding: at which figure and after how long it opens, below which and after how long it
closes. Pure; only observed time counts, as in ``Heartbeat``: of a gap in which the observer did not run, at most
``LONGEST_TICK_SECONDS`` count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from orchestrator.core.diagnosis.definitions import PRECEDENCE, definition_of
from orchestrator.core.diagnosis.figures import JobWindows
from orchestrator.core.diagnosis.rules import gpu_suspicions, job_suspicions, process_suspicions, rank_suspicions
from orchestrator.core.facts.findings import LoadUneven, key_of
from orchestrator.core.thresholds import AGAIN_FACTOR, LONGEST_AGAIN_SECONDS, MAX_FINDINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from orchestrator.core.diagnosis.figures import JobFigures
    from orchestrator.core.diagnosis.observation import JobSeen
    from orchestrator.core.diagnosis.rules import Suspicion
    from orchestrator.core.facts.findings import Finding, FindingKey

LONGEST_TICK_SECONDS: Final = 5.0
"""Of a longer gap between two observations, only this much counts as observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Findings that an observation opens, and findings that it closes."""

    opened: tuple[Finding, ...] = ()
    closed: tuple[Finding, ...] = ()


@dataclass(slots=True)
class _Known:
    """State of one kind and subject: since when its figure has been high or low, and the finding while it is open."""

    high_since: float | None = None
    high_at: float = 0.0
    low_since: float | None = None
    open: Finding | None = None
    closed_times: int = 0
    carried: bool = False
    """The finding was open before the daemon started, and its figure has not been high since."""
    measured: bool = True
    """The figures of ``open`` were observed by this daemon."""


class Diagnosis:
    """The diagnosis of one attempt. ``opened`` are findings that are open already; ``measured`` those with figures of this daemon."""

    def __init__(self, now: float, opened: Iterable[Finding] = (), measured: Iterable[Finding] = ()) -> None:
        self._clock = 0.0
        self._ticked_at = now
        self._windows = JobWindows(0.0)
        self._known: dict[FindingKey, _Known] = {
            key_of(finding): _Known(open=finding, carried=True, measured=False) for finding in opened
        }
        for finding in measured:
            if key_of(finding) in self._known:
                self._known[key_of(finding)] = _Known(open=finding)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the open findings with the figures of the newest observation that shows them, the most severe first."""
        found = [known.open for known in self._known.values() if known.open is not None]
        return tuple(sorted(found, key=lambda finding: (PRECEDENCE[finding.kind], key_of(finding)[1] or 0)))

    @property
    def measured(self) -> tuple[Finding, ...]:
        """Return the open findings with figures that this daemon has observed."""
        return tuple(one for one in self.findings if self._known[key_of(one)].measured)

    def observe(self, seen: JobSeen, now: float, wall: float) -> Changes:
        """Add an observation at ``now``, monotonic seconds; ``wall`` is the same in seconds since the epoch."""
        self._clock += min(max(0.0, now - self._ticked_at), LONGEST_TICK_SECONDS)
        self._ticked_at = now
        suspicions = _strongest(suspect(self._windows.add(self._clock, seen)))
        explained = _explained(suspicions.values())
        opened = []
        for key, suspicion in suspicions.items():
            known = self._known.setdefault(key, _Known())
            self._weigh(known, suspicion, wall, explained=key in explained)
            if known.open is not None and (known.low_since is None or known.carried):
                known.open = replace(suspicion.finding, since=known.open.since)
                known.measured = True
                known.carried = known.carried and known.low_since is not None
            if known.open is None and self._is_due(known, suspicion):
                opened.append((known, replace(suspicion.finding, since=known.high_at)))
        closed = [known.open for key, known in self._known.items() if self._is_over(known, suspicions.get(key))]
        for finding in closed:
            self._close(finding)
        room = max(0, MAX_FINDINGS - len(self.findings))
        opened.sort(key=lambda pair: PRECEDENCE[pair[1].kind])
        for known, finding in opened[:room]:
            known.open, known.low_since, known.carried, known.measured = finding, None, False, True
        return Changes(opened=tuple(finding for _, finding in opened[:room]), closed=tuple(filter(None, closed)))

    def _weigh(self, known: _Known, suspicion: Suspicion, wall: float, *, explained: bool) -> None:
        definition = definition_of(suspicion.finding)
        if suspicion.figure < definition.closes_at or explained:
            known.high_since = None
        elif known.high_since is None and suspicion.figure >= definition.opens_at:
            known.high_since, known.high_at = self._clock, wall
        if suspicion.figure >= definition.closes_at and not explained:
            known.low_since = None
        elif known.low_since is None:
            known.low_since = self._clock

    def _is_due(self, known: _Known, suspicion: Suspicion) -> bool:
        definition = definition_of(suspicion.finding)
        if known.high_since is None or suspicion.figure < definition.opens_at:
            return False
        seconds = definition.open_seconds
        if known.closed_times:
            again = max(seconds, definition.close_seconds) * AGAIN_FACTOR**known.closed_times
            seconds = min(again, LONGEST_AGAIN_SECONDS)
        return self._clock - known.high_since >= seconds

    def _is_over(self, known: _Known, suspicion: Suspicion | None) -> bool:
        if suspicion is None:
            known.high_since = None
            known.low_since = self._clock if known.low_since is None else known.low_since
        if known.open is None or known.low_since is None:
            return False
        return self._clock - known.low_since >= definition_of(known.open).close_seconds

    def _close(self, finding: Finding | None) -> None:
        if finding is not None:
            known = self._known[key_of(finding)]
            known.open, known.high_since = None, None
            known.closed_times += 1


def suspect(job: JobFigures) -> list[Suspicion]:
    """Return all suspicions from a job's figures."""
    return [*gpu_suspicions(job), *rank_suspicions(job), *process_suspicions(job), *job_suspicions(job)]


def _strongest(suspicions: Iterable[Suspicion]) -> dict[FindingKey, Suspicion]:
    """Return one suspicion for each kind and subject: of two metrics with the same problem, the one with the larger figure."""
    found: dict[FindingKey, Suspicion] = {}
    for suspicion in suspicions:
        key = key_of(suspicion.finding)
        if key not in found or found[key].figure < suspicion.figure:
            found[key] = suspicion
    return found


def _explained(suspicions: Iterable[Suspicion]) -> set[FindingKey]:
    """Return suspicions that a more severe one about the same rank or GPU explains: a throttled GPU makes its rank slow."""
    strong = [s.finding for s in suspicions if s.figure >= definition_of(s.finding).opens_at]
    compared = [finding for finding in strong if finding.rank is not None or finding.gpu_uuid]
    found = {key_of(later) for later in compared if any(_explains(earlier, later) for earlier in compared)}
    return found | {key_of(finding) for finding in strong if isinstance(finding, LoadUneven) and compared}


def _explains(first: Finding, second: Finding) -> bool:
    if PRECEDENCE[first.kind] >= PRECEDENCE[second.kind] or definition_of(first).apart or definition_of(second).apart:
        return False
    same_gpu = bool(first.gpu_uuid) and first.gpu_uuid == second.gpu_uuid
    return same_gpu or (first.rank is not None and first.rank == second.rank)


def worst(findings: Sequence[Finding]) -> Finding | None:
    """Return the finding to show where there is space for one."""
    return min(findings, key=lambda finding: (PRECEDENCE[finding.kind], finding.rank or 0), default=None)
