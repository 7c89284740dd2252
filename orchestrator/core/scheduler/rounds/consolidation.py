"""Consolidation: running jobs move to other nodes so that the first job that finds too little free fits. Pure.

It is off unless ``Sharing.consolidate`` is set. It serves a job that would fit if the free GPUs were on the same nodes.
Jobs move only to what is free now, so that none of them waits: each leaves its nodes, and continues where the decision
that stops it has placed it. A move has the same conditions as a preemption: ``preemptible``, ``min_runtime``, at most
four stops in an hour; a job that was stopped for another moves only once it has saved since. Jobs of the waiting job's
queue with a higher priority do not move.

What the jobs lose together, GPU time since their newest checkpoint on storage and the time of their last start, must be
less than what the waiting job gains: its GPUs, for the time that it would wait otherwise (backfill.py; if that is not
known, for as long again as it has waited). A move waits for a checkpoint that is due within a minute.

Nodes are cleared one after the other, until the job fits. Each time it is the node where jobs that have a place
elsewhere lose the least until another rank of the waiting job fits (all ranks, if it needs one node for them). At the
end, moves that are not needed are dropped, the costliest first.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING, Final, NamedTuple

from orchestrator.core.facts.moves import ByConsolidation, Consolidation, MoveRefusal
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.scheduler.backfill import reservation
from orchestrator.core.scheduler.placement import (
    capacity,
    free_on,
    give_back,
    known_shares,
    place,
    rank_size,
    shape_of,
    share_unknown,
    suits,
    take,
)
from orchestrator.core.scheduler.preemption import ends_anyway, preemptible_at
from orchestrator.core.scheduler.room.timetable import closed_to
from orchestrator.core.scheduler.room.topology import topology_of
from orchestrator.core.scheduler.room.vacancy import Vacancy
from orchestrator.core.scheduler.service.levels import waiting_since
from orchestrator.core.scheduler.service.saves import move_loss, worth_waiting
from orchestrator.core.states import AttemptState, JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.events import Event
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.room.holding import Holding
    from orchestrator.core.scheduler.rounds.round import Round
    from orchestrator.core.scheduler.service.saves import Saves

MOST_NODES: Final = 64
"""Maximum number of nodes examined in a turn, those where jobs lose the least."""
SOONEST: Final = 10.0
"""Minimum seconds until moves that would cost too much are considered again."""

Loss = tuple[float, float, int]


class Move(NamedTuple):
    """A job, the node that each of its ranks moves to, the GPUs that it may share there, and what it loses."""

    job: Job
    nodes: tuple[str, ...]
    shares: tuple[str | None, ...]
    loss: Loss


class Plan(NamedTuple):
    """Jobs that move, and the GPU seconds that these lose and the waiting job gains; or why none moves.

    ``wait_until``: the moves wait for a checkpoint that is due then.
    """

    moves: tuple[Move, ...] = ()
    gained: float = 0.0
    refusal: MoveRefusal | None = None
    wait_until: float | None = None
    ask_again_at: float | None = None

    @property
    def lost(self) -> float:
        """Return the GPU seconds that the jobs lose at most."""
        return sum(move.loss[0] for move in self.moves)

    @property
    def under_way(self) -> bool:
        """Return whether the jobs move now, or once they have saved."""
        return bool(self.moves) and self.refusal is None

    def events(self, head: Job, nodes: Mapping[str, Node], now: float) -> list[Event]:
        """Return the events that stop the jobs, each with the nodes on which it continues."""
        found: list[Event] = []
        for move in self.moves if self.under_way and self.wait_until is None else ():
            by = ByConsolidation(
                job=head.id,
                nodes=move.nodes,
                names=_names(move.nodes, nodes),
                lost_gpu_seconds=move.loss[0],
                gained_gpu_seconds=self.gained,
            )
            found += request_stop(move.job, StopPurpose.MOVE, by, now)
        return found

    def fact(self, nodes: Mapping[str, Node]) -> Consolidation:
        """Return what is planned, or why nothing is."""
        return Consolidation(
            jobs=tuple(move.job.id for move in self.moves),
            places=tuple(_names(move.nodes, nodes) for move in self.moves),
            lost_gpu_seconds=self.lost,
            gained_gpu_seconds=self.gained,
            refusal=self.refusal,
            wait_until=self.wait_until,
        )


def moving_for(job: Job, holding: Holding) -> tuple[Job, ...]:
    """Return the jobs that are leaving their nodes for this one."""
    by = ((other, other.stop.by) for other in holding.moving.values() if other.stop is not None)
    return tuple(other for other, one in by if isinstance(one, ByConsolidation) and one.job == job.id)


def consolidate(head: Job, round_: Round, now: float) -> Plan | None:
    """Return which jobs move for one that does not fit, or why none does.

    None if too little is free on all nodes together, or if enough will be free anyway.
    """
    holding, nodes = round_.holding, round_.nodes
    staying = [job for job in holding if not ends_anyway(job)]
    if any(map(share_unknown, staying)) or rank_size(head)[1] <= 0:
        return None
    free = Vacancy(free_on(nodes.values(), holding), topology_of(nodes.values()))
    gpus = rank_size(head)[1] * head.size.least
    shared, whole, _ = free.sums()
    if gpus > (whole if rank_size(head)[1] >= 1 else shared):
        return None
    beside = free if len(staying) == len(holding) else free_on(nodes.values(), staying)
    if place(head, beside, nodes) is not None:
        return None
    if not round_.shares.sharing.consolidate:
        return Plan(refusal=MoveRefusal.OFF)
    if holding.stopping or holding.moving:
        return Plan(refusal=MoveRefusal.BUSY)
    found = reservation(head, holding, free, nodes, now, round_.run_times)
    gained = gpus * max(0.0, now - waiting_since(head) if found is None else found.at - now)
    able = [job for job in staying if _may_move(job, head, round_, now) and all(i in free for i in job.nodes)]
    due = {job.id: preemptible_at(job) for job in able}
    search = _Search(head, [job for job in able if due[job.id] <= now], free, round_, now)
    moves = search.run()
    if not moves:
        later = min((at for at in due.values() if at > now), default=None)
        return Plan(gained=gained, refusal=MoveRefusal.NO_PLACE, ask_again_at=later)
    plan = Plan(moves, gained)
    if plan.lost >= gained:
        soon = now + max(
            SOONEST, (plan.lost - gained) / gpus
        )  # the gain grows by no more than the waiting job's GPUs per second
        return plan._replace(refusal=MoveRefusal.TOO_DEAR, ask_again_at=soon)
    saving = [at for move in moves if (at := worth_waiting(move.job, now, round_.saves)) is not None]
    return plan._replace(wait_until=min(saving, default=None), ask_again_at=min(saving, default=None))


def _may_move(job: Job, head: Job, round_: Round, now: float) -> bool:
    if job.state is not JobState.RUNNING or not job.spec.preemptible or job.degraded or job.succeeded or job.gang_lost:
        return False
    tree = round_.shares.tree
    if tree.queue_of(job) == tree.queue_of(head) and job.priority > head.priority:
        return False
    stopped = len(job.attempts) > 1 and job.attempts[-2].state is AttemptState.PREEMPTED
    return not stopped or _has_saved(job, round_.saves, now)


def _has_saved(job: Job, saves: Saves, now: float) -> bool:
    began, saved = job.attempts[-1].running_at, saves.saved_at(job, now)
    return began is not None and saved is not None and saved >= began


class _Search:
    """Clears nodes. ``_open`` is what is free now, less what moves take; ``_after`` is what is free after all moves."""

    def __init__(self, head: Job, able: Sequence[Job], free: Vacancy, round_: Round, now: float) -> None:
        self._head = head
        self._nodes = round_.nodes
        self._open = free
        self._after = Vacancy({node_id: left.copy() for node_id, left in free.items()}, free.topology)
        self._losses = {job.id: move_loss(job, now, round_.saves) for job in able}
        self._on: dict[str, list[Job]] = {}
        for job in sorted(able, key=lambda job: self._losses[job.id]):
            for node_id in set(job.nodes):
                self._on.setdefault(node_id, []).append(job)
        strict = head.spec.resources.placement_strategy == "STRICT_PACK"
        self._step = head.size.least if strict else 1

    def run(self) -> tuple[Move, ...]:
        """Return the moves after which the job fits; nothing where there are none."""
        shape, closed = shape_of(self._head), closed_to(self._head, self._nodes)
        left = {i for i in self._on if i not in closed and suits(shape, self._nodes[i])}
        moves: list[Move] = []
        while self._room() < self._head.size.least:
            gone = {move.job.id for move in moves}
            looked = nsmallest(MOST_NODES, left, key=lambda i: (self._least(i, gone), i))
            trials = [(self._cost(trial), node_id) for node_id in looked if (trial := self._try(node_id, gone))]
            if not trials:
                return ()
            _, node_id = min(trials)
            moves += self._clear(node_id, gone)
            left.discard(node_id)
        return self._needed(moves)

    def _room(self) -> int:
        return capacity(self._head, self._after, self._nodes)

    def _least(self, node_id: str, gone: Collection[str]) -> float:
        """Return the GPU seconds that the cheapest jobs on a node lose until it has the GPUs of ``_step`` ranks."""
        gpus, lost = self._after[node_id].gpus, 0.0
        for job in self._on[node_id]:
            if gpus >= rank_size(self._head)[1] * self._step:
                break
            if job.id not in gone:
                gpus += rank_size(job)[1] * job.nodes.count(node_id)
                lost += self._losses[job.id][0]
        return lost

    @staticmethod
    def _cost(moves: Sequence[Move]) -> tuple[float, float, int]:
        return sum(m.loss[0] for m in moves), sum(m.loss[1] for m in moves), len(moves)

    def _try(self, node_id: str, gone: Collection[str]) -> list[Move]:
        for vacancy in (self._open, self._after):
            vacancy.begin()
        try:
            return self._clear(node_id, gone)
        finally:
            for vacancy in (self._open, self._after):
                vacancy.restore()

    def _clear(self, node_id: str, gone: Collection[str]) -> list[Move]:
        """Move jobs off a node, cheapest first, until the waiting job has more room; return none if it gets none."""
        wanted = max(self._step, self._room() + 1)
        nothing = self._open.changing(node_id)  # no job moves to a node that is being cleared
        nothing.cpus, nothing.idle_gpus, nothing.memory_bytes = 0.0, 0, 0
        nothing.shares.clear()
        moves: list[Move] = []
        for job in self._on[node_id]:
            where = None if job.id in gone else place(job, self._open, self._nodes, ranks=len(job.nodes))
            if where is None:
                continue
            take(job, where, self._open)
            give_back(job, job.nodes, known_shares(job), self._after)
            moves.append(Move(job, where, take(job, where, self._after), self._losses[job.id]))
            if self._room() >= wanted:
                return moves
        return []

    def _needed(self, moves: Sequence[Move]) -> tuple[Move, ...]:
        """Return the moves without those that are not needed."""
        kept = list(moves)
        for move in sorted(moves, key=lambda move: move.loss, reverse=True):
            job = move.job
            give_back(job, move.nodes, move.shares, self._after)
            take(job, job.nodes, self._after, known_shares(job))
            if self._room() >= self._head.size.least:
                kept.remove(move)
            else:
                give_back(job, job.nodes, known_shares(job), self._after)
                take(job, move.nodes, self._after, move.shares)
        return tuple(kept)


def _names(node_ids: Iterable[str], nodes: Mapping[str, Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(nodes[node_id].name for node_id in node_ids))
