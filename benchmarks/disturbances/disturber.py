"""Disturbs a job repeatedly; it must continue after each disturbance."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psutil

from orchestrator.api.errors import DaemonStoppingError, OrchError
from tests.support.evidence import sections
from tests.support.stack import wait_until

if TYPE_CHECKING:
    import random

    from benchmarks.disturbances.places import Place, Victim
    from tests.support.ledger import Ledger
    from tests.support.stack import Stack

PAIRS: Final = 0.3  # share of the disturbances that hit two processes at once
ABUSES_SHARE: Final = 0.2  # share of those of abuses.py
FROZEN_SECONDS: Final = (0.1, 2.0)
SIGNALS: Final = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP, "freeze": signal.SIGSTOP}
STOPPED_FOR_GOOD: Final = frozenset({"rank"})
"""Kinds of process that may stay stopped, because orch detects it; the others are only frozen for a while."""
LATE_SECONDS: Final = 60.0
"""A recovery that takes longer is shown while it lasts: afterwards the cause of the delay cannot be seen."""


@dataclass(slots=True)
class Found:
    """Disturbances so far, and the duration of each recovery, by the disturbance."""

    disturbances: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    passed_over: int = 0
    recoveries: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Disturber:
    """Disturbs a job of ``place`` that runs until it is told to end."""

    place: Place
    ledger: Ledger
    job_id: str
    dice: random.Random
    found: Found = field(default_factory=Found)

    def once(self) -> None:
        """Make one disturbance, and wait for the recovery from it."""
        if self.place.abuses and self.dice.random() < ABUSES_SHARE:
            self._abuse(self.dice.choice(sorted(self.place.abuses)))
            return
        attempt = self.place.stack.job(self.job_id).attempt
        known = self.place.victims(self.job_id, self.dice)
        kinds = self.dice.sample(sorted(known), 2 if self.dice.random() < PAIRS else 1)
        done: dict[str, tuple[str, Victim]] = {}  # manner and victim, by the victim's kind
        for kind in kinds:
            how = self._manner(kind)
            victim = self._hit(kind, SIGNALS[how])
            if victim is not None:
                done[kind] = how, victim
                self._say(f"{how} {kind} {victim.pid}")
        if not done:
            self.found.passed_over += 1
            return
        ended = {kind: victim for kind, (how, victim) in done.items() if how != "freeze"}
        step, began = self.ledger.last_step(self.job_id), time.monotonic()
        self._thaw([victim for how, victim in done.values() if how == "freeze"])
        name = " and ".join(sorted(f"{how} {kind}" for kind, (how, _) in done.items()))
        self.found.disturbances[name] += 1
        daemon = ended["daemon"].pid if "daemon" in ended else 0
        self._recovered(name, step, attempt + any(victim.carries for victim in ended.values()), daemon)
        self.found.seconds[name].append(time.monotonic() - began)
        self._say(f"attempt {attempt} went on after {self.found.seconds[name][-1]:.2f} s")
        self.found.recoveries += 1
        self.place.replace_ended([victim.pid for victim in ended.values()])

    def _abuse(self, name: str) -> None:
        self._say(name)
        step, began = self.ledger.last_step(self.job_id), time.monotonic()
        self.place.abuses[name](self.place.stack, self.dice)
        self.found.disturbances[name] += 1
        self._recovered(name, step, 0, 0)
        self.found.seconds[name].append(time.monotonic() - began)
        self._say(f"went on after {self.found.seconds[name][-1]:.2f} s")
        self.found.recoveries += 1

    def _say(self, what: str) -> None:
        """Write one line of the campaign's log, with the time that the job's events also have."""
        print(f"{time.strftime('%H:%M:%S')} {self.place.stack.home.name} {self.job_id}: {what}", file=sys.stderr)

    def _manner(self, kind: str) -> str:
        if kind in self.place.only_frozen:
            return "freeze"
        return self.dice.choice(sorted(SIGNALS) if kind in STOPPED_FOR_GOOD else ["freeze", "kill", "terminate"])

    def _hit(self, kind: str, number: signal.Signals) -> Victim | None:
        """Send the signal to a process of this kind; return it, None where it is missing during a recovery."""
        try:
            victim = self.place.victims(self.job_id, self.dice)[kind]()
            if victim is not None:
                os.kill(victim.pid, number)
        except (ProcessLookupError, psutil.Error, KeyError, IndexError, StopIteration, OSError):
            return None
        except OrchError:  # the daemon, which reports the other processes, was hit first
            return None
        return victim

    def _thaw(self, frozen: list[Victim]) -> None:
        if frozen:
            time.sleep(self.dice.uniform(*FROZEN_SECONDS))
        for victim in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)

    def _recovered(self, name: str, step: int, attempt: int, daemon: int) -> None:
        """Wait until a daemon other than ``daemon`` answers, and the job runs in ``attempt`` or a later one and has made a step after ``step``."""
        stack = self.place.stack
        late_at = time.monotonic() + LATE_SECONDS

        def back() -> bool:
            nonlocal late_at
            if time.monotonic() >= late_at:
                late_at = float("inf")
                print(f"after {name}, for {LATE_SECONDS:g} s:\n{evidence(stack, self.job_id)}", file=sys.stderr)
            try:
                if stack.daemon_pid() == daemon:
                    return False
                job = stack.job(self.job_id)
            except DaemonStoppingError:  # it was terminated, and ends in order
                return False
            except OrchError:
                stack.up()
                return False
            return job.state == "RUNNING" and job.attempt >= attempt and self.ledger.last_step(self.job_id) > step

        wait_until("a new step", back, interval=0.1)


def evidence(stack: Stack, job_id: str) -> str:
    """Return the job's last events, and the state of its daemon."""
    events = stack.orch("events", job_id, "--tail", "60").stdout
    rest = "\n".join(f"-- {title}\n{text}" for title, text in sections(stack))
    return f"{events}\n{rest}"
