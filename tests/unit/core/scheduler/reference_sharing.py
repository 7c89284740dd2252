"""The sharing part of the reference scheduler: shares, quotas, limits, ageing and reclaims by their definitions."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.facts.reasons import QueueAtMaximum, UserAtLimit
from orchestrator.core.scheduler.durations import Like, RunTimes
from orchestrator.core.scheduler.shares import Account, Amounts, PastUse, Sharing, Used
from orchestrator.core.states import AttemptState
from orchestrator.spec.queues import QueueSpec, queue_problems
from tests.unit.core.builders import T0

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

NOW = T0 + 1000
NAMES = ("digits", "words")


def need(job: Job) -> tuple[float, float, int]:
    worker = job.spec.resources.resources_per_worker
    return worker.cpu, worker.gpu, worker.memory_bytes or 0


def ranks_of(job: Job) -> int:
    assert isinstance(job.spec.resources.num_workers, int)
    return job.spec.resources.num_workers


def gpus_of(job: Job) -> float:
    return need(job)[1] * ranks_of(job)


def waits_since(job: Job) -> float:
    """Return the time since which a waiting job waits: its submission, or its preemption."""
    last = job.attempts[-1] if job.attempts else None
    if last is None or last.state is not AttemptState.PREEMPTED or last.ended_at is None:
        return job.submission.submitted_at
    return last.ended_at


def seconds_run(job: Job) -> float:
    """Return the time that the job's attempts were up; all of them have ended."""
    return sum(one.ended_at - one.running_at for one in job.attempts if one.ended_at and one.running_at)


@dataclass
class Policy:
    """The terms of sharing, past usage, and the nodes."""

    sharing: Sharing
    past: PastUse
    nodes: Mapping[str, Node]
    idle: Mapping[JobId, float] = field(default_factory=dict)

    def chain(self, name: str) -> list[QueueSpec]:
        """Return the queue and its ancestors, the uppermost first; nothing without queues."""
        if not self.sharing.queues:
            return []
        known = {queue.name: queue for queue in self.sharing.queues}
        found = [known.get(name, QueueSpec(name=name))]
        while found[0].parent:
            found.insert(0, known[found[0].parent])
        return found

    def inside(self, job: Job, queue: str) -> bool:
        return queue in [one.name for one in self.chain(job.spec.queue)]

    def guaranteed(self, name: str) -> int:
        own = next((queue.guaranteed for queue in self.sharing.queues if queue.name == name), 0)
        return max(own, sum(self.guaranteed(queue.name) for queue in self.sharing.queues if queue.parent == name))

    def gpus(self, queue: str, having: Sequence[Job]) -> float:
        return sum(gpus_of(job) for job in having if self.inside(job, queue))

    def share(self, having: Sequence[Job], accounts: Sequence[Account]) -> float:
        """Return the dominant share of these jobs and accounts: the current and the average one."""
        there = [node for node in self.nodes.values() if node.schedulable]
        whole = (sum(n.gpus for n in there), sum(n.cpus for n in there), sum(n.memory_bytes for n in there))
        total = [0.0, 0.0, 0.0]
        for job in having:
            cpus, gpus, memory = need(job)
            began = (
                job.attempts[-1].started_at if job.nodes else NOW
            )  # a job that this round places begins now, also a second time
            weight = 1.0 + (1.0 - 0.5 ** ((NOW - began) / self.sharing.half_life))
            for place, amount in enumerate((gpus, cpus, memory)):
                total[place] += weight * ranks_of(job) * amount
        for account in accounts:
            used = self.past.used[account]
            weight = math.log(2) / self.sharing.half_life * 0.5 ** ((NOW - used.at) / self.sharing.half_life)
            for place, amount in enumerate(used.amounts):
                total[place] += weight * amount
        return round(max(amount / of if of else 0.0 for amount, of in zip(total, whole, strict=True)), 9)

    def place_of(self, job: Job, having: Sequence[Job]) -> tuple[object, ...]:
        """Return the key by which jobs are chosen, the smallest first."""
        chain = self.chain(job.spec.queue)
        levels = []
        for queue in chain:
            within = [one for one in having if self.inside(one, queue.name)]
            accounts = [a for a in self.past.used if queue.name in [one.name for one in self.chain(a.queue)]]
            borrows = self.gpus(queue.name, having) >= self.guaranteed(queue.name)
            levels.append((borrows, self.share(within, accounts) / queue.weight))
        since = waits_since(job)
        level = -1 if NOW - since >= self.sharing.ageing else self.level(job)
        return tuple(levels), -job.priority, self.user_share(job, having), level, since, job.submission.sequence

    def user_share(self, job: Job, having: Sequence[Job]) -> float:
        """Return the share of the job's user in its queue."""
        user, queues = job.submission.user, {job.spec.queue} if self.sharing.queues else None
        mine = [one for one in having if one.submission.user == user and (not queues or one.spec.queue in queues)]
        accounts = [a for a in self.past.used if a.user == user and (not queues or a.queue in queues)]
        return self.share(mine, accounts)

    def level(self, job: Job) -> int:
        """Return the level of a waiting job."""
        return self.level_of(job, self.ran_class(job))

    def ran_class(self, job: Job) -> float:
        """Return the class of a waiting job's run time, which counts only after a preemption."""
        preempted = job.attempts and job.attempts[-1].state is AttemptState.PREEMPTED
        return self.class_of(seconds_run(job)) if preempted else 0.0

    @staticmethod
    def class_of(seconds: float) -> float:
        return next(30.0 * 2**n for n in range(99) if seconds < 60.0 * 2**n)

    def kind(self, job: Job) -> tuple[object, ...]:
        """Return values by which jobs that need the same are told apart: a forecast, a run time, a back-off."""
        times = self.past.run_times.known.get(Like(job.submission.user, job.name), ())
        return job.name if len(times) >= 3 else "", self.ran_class(job), job.id if job.not_before else ""

    def level_of(self, job: Job, ran: float) -> int:
        """Return how often a minute is doubled to reach the time that the job is expected to need after ``ran`` seconds."""
        times = self.past.run_times.known.get(Like(job.submission.user, job.name), ())
        longer = [seconds for seconds in times if seconds > ran]
        known = len(times) >= 3 and longer
        expected = statistics.median(longer) - ran if known else max(600.0, ran)
        if job.spec.max_duration is not None:
            expected = min(expected, job.spec.max_duration.total_seconds() - ran)
        return next(n for n in range(99) if expected <= 60.0 * 2**n)

    def overdue(self, waiting: Sequence[Job]) -> list[Job]:
        """Return the first job of each lane in which none has started for too long, the longest wait first."""
        kinds = {(job.spec.queue, job.submission.user, job.priority) for job in waiting}
        found = []
        for kind in kinds if len(kinds) > 1 else ():
            ready = [
                job
                for job in waiting
                if (job.spec.queue, job.submission.user, job.priority) == kind and job.not_before <= NOW
            ]
            for job in sorted(ready, key=lambda one: (waits_since(one), one.submission.sequence))[:1]:
                since = max(waits_since(job), self.past.started.get(kind, 0.0))
                if NOW - since >= self.sharing.ageing:
                    found.append((since, job.submission.sequence, job))
        return [job for _, _, job in sorted(found, key=lambda entry: entry[:2])]

    def limit(self, job: Job, having: Sequence[Job]) -> QueueAtMaximum | UserAtLimit | None:
        gpus, user = gpus_of(job), job.submission.user
        for queue in self.chain(job.spec.queue):
            used = self.gpus(queue.name, having)
            if queue.maximum is not None and gpus and used + gpus > queue.maximum:
                return QueueAtMaximum(queue=queue.name, maximum=queue.maximum, used=used, gpus=gpus)
        mine = [one for one in having if one.submission.user == user]
        if self.sharing.user_jobs is not None and len(mine) >= self.sharing.user_jobs:
            return UserAtLimit(user=user, limit=self.sharing.user_jobs, used=len(mine), gpus=0.0)
        used = sum(gpus_of(one) for one in mine)
        if self.sharing.user_gpus is not None and gpus and used + gpus > self.sharing.user_gpus:
            return UserAtLimit(user=user, limit=self.sharing.user_gpus, used=used, gpus=gpus)
        return None

    def victims(self, job: Job, able: Sequence[Job], having: Sequence[Job], waiting: set[str]) -> list[Job]:
        """Return the jobs that may be stopped for the job, in order."""
        chosen: list[Job] = []
        for other in able:
            if not self.sharing.queues or other.spec.queue == job.spec.queue:
                chosen += [other] if other.priority < job.priority else []
                continue
            mine, its = next(
                pair
                for pair in zip(self.chain(job.spec.queue), self.chain(other.spec.queue), strict=False)
                if pair[0].name != pair[1].name
            )
            left = self.gpus(its.name, [one for one in having if one not in chosen])
            most = min(self.guaranteed(mine.name), self.fair(mine, having, waiting))  # less if too much is guaranteed
            within = self.gpus(mine.name, having) + gpus_of(job) <= most + 1e-6
            above = left > self.fair(its, having, waiting) + 1e-6
            chosen += [other] if within and above and gpus_of(job) and gpus_of(other) else []
        return chosen

    def fair(self, queue: QueueSpec, having: Sequence[Job], waiting: set[str]) -> float:
        """Return a queue's fair share: its guarantee, and a weighted part of the rest of its level, by bisection."""
        configured = {one.name: one for one in self.sharing.queues}
        siblings = {one.name: one for one in self.sharing.queues if one.parent == queue.parent}
        if queue.parent:
            whole = self.fair(configured[queue.parent], having, waiting)
        else:
            whole = sum(node.gpus for node in self.nodes.values() if node.schedulable)
            siblings |= {
                self.chain(name)[0].name: self.chain(name)[0] for name in waiting | {one.spec.queue for one in having}
            }
        siblings.setdefault(queue.name, queue)
        most, least = {}, {}
        for one in siblings.values():
            hungry = any(one.name in [above.name for above in self.chain(name)] for name in waiting)
            bound = math.inf if one.maximum is None else float(one.maximum)
            most[one.name] = min(bound, math.inf if hungry else self.gpus(one.name, having))
            least[one.name] = min(most[one.name], self.guaranteed(one.name))
        if sum(least.values()) > whole:
            return least[queue.name] * whole / sum(least.values())
        low, high = 0.0, 1e6
        for _ in range(200):
            level = (low + high) / 2
            poured = sum(min(most[n], least[n] + level * one.weight) for n, one in siblings.items())
            low, high = (level, high) if poured < whole else (low, level)
        return min(most[queue.name], least[queue.name] + high * queue.weight)


def random_policy(
    choose: random.Random, users: Sequence[str], names: Sequence[str], known: Mapping[str, Node]
) -> Policy:
    """Return queues in a third of the cases, past usage and starts in most, small limits in some."""
    queues = _random_queues(choose) if len(names) > 1 and choose.random() < 0.7 else ()
    used = {
        Account(name, user): Used(NOW - choose.randint(0, 900), Amounts(*(choose.randint(0, 9) * 1e3 for _ in "gcm")))
        for name in names
        for user in users
        if choose.random() < 0.4
    }
    started = {
        (name, user, priority): NOW - choose.randint(1, 900)
        for name in names
        for user in users
        for priority in (50, 60)
        if choose.random() < 0.3
    }
    sharing = Sharing(
        queues=queues,
        half_life=choose.choice([600.0, 86400.0]),
        ageing=choose.choice([60.0, 300.0, 86400.0]),
        user_jobs=choose.choice([None, None, None, 2]),
        user_gpus=choose.choice([None, None, None, 4]),
    )
    return Policy(sharing, PastUse(used=used, started=started, run_times=_random_times(choose, users)), known)


def _random_times(choose: random.Random, users: Sequence[str]) -> RunTimes:
    """Return run times of like jobs; some users and names have enough of them."""
    likes = [Like(user, name) for user in users for name in NAMES if choose.random() < 0.4]
    return RunTimes({who: [choose.choice([20.0, 200.0, 2000.0]) for _ in range(choose.randint(1, 5))] for who in likes})


def _random_queues(choose: random.Random) -> tuple[QueueSpec, ...]:
    while True:
        deep = choose.random() < 0.5
        found = tuple(
            QueueSpec(
                name=name,
                parent="top" if deep and name in "ab" else "",
                guaranteed=choose.choice([0, 0, 2, 4, 8]),
                maximum=choose.choice([None, None, 4, 8]) if name != "top" else choose.choice([None, 8]),
                weight=choose.choice([1.0, 1.0, 2.0]),
            )
            for name in (["top", "a", "b", "c"] if deep else ["a", "b", "c"])
        )
        if not queue_problems(found):
            return found
