"""Measures the time from SIGKILL of a random rank, at a random moment, to the next optimizer step not done before.

All contenders run the same script, which saves after every step: this measures the restart, not the repetition of lost steps, of
which there is at most one (``--save-every 10`` adds some five to each contender's). Each contender has a job of its own in each round, alone
on the machine, that is killed once. ``ours_actor_killed`` is the same with the rank's Ray actor killed instead of the training process.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import contenders
from benchmarks.measure import interleave, parser, report, result, summary, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.api.client import Client

STEPS = 1_000_000
SECONDS_PER_STEP = 0.01
STEADY_SECONDS = (
    3.0  # training between a start or a recovery and the next kill: the work after a start is another measure
)
RECOVER_SECONDS = 40.0  # torchrun: 3 to 13 s, or it hangs; counted as a failure then


class Victim:
    """A contender's running job, which is started again after it gave up."""

    def __init__(self, start: Callable[[], contenders.Run], choose: Callable[[contenders.Run], int]) -> None:
        self._start, self._choose = start, choose
        self._run: contenders.Run | None = None

    def kill_once(self) -> float:
        """Kill a process of the job; return the seconds from the kill to the next new step."""
        if self._run is None:
            self._run = self._start()
            self._run.first_step_seconds()
        run = self._run
        try:
            begun = run.steps()[-1]
            steady = begun.at_seconds + STEADY_SECONDS + random.uniform(0.0, 20 * SECONDS_PER_STEP)
            wait_for("steady steps", lambda: run.steps()[-1].at_seconds > steady)
            pid = self._choose(run)
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            before = [s for s in run.steps() if s.at_seconds <= killed_at]
            step = wait_for("a new step", lambda: _new_step(run, before), RECOVER_SECONDS)
            return float(step.at_seconds - killed_at)
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """End the job."""
        if self._run is not None:
            self._run.__exit__(None, None, None)
            self._run = None


def _new_step(run: contenders.Run, before: Sequence[contenders.Step]) -> contenders.Step | None:
    # A surviving rank may still finish the step that was under way: only a step of a new process is a recovery.
    old = {s.pid for s in before}
    done = before[-1].number
    return next((s for s in run.steps()[len(before) :] if s.pid not in old and s.number > done), None)


def _any_rank(run: contenders.Run) -> int:
    return random.choice(list(contenders.worker_pids(run.ledger).values()))


def _actor(client: Client, ranks: int) -> Callable[[contenders.Run], int]:
    def choose(run: contenders.Run) -> int:
        assert isinstance(run, contenders.OrchRun)
        rank = random.randrange(ranks)
        events = [e for e in client.events(run.id) if e.kind == "gang_placed"]
        return int(events[-1].body["seats"][rank]["actor_pid"])

    return choose


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=10)
    contenders.add_shape(options)
    options.add_argument("--save-every", type=int, default=1, help="steps between the script's saves (default 1)")
    arguments = options.parse_args()
    shape = contenders.shape_of(options, arguments)
    random.seed(20_261_121)
    orch = contenders.Orch()
    orch.up()

    def submit() -> contenders.Run:
        return orch.submit(STEPS, SECONDS_PER_STEP, arguments=f"{arguments.save_every} {shape.device}", shape=shape)

    victims = {"ours": Victim(submit, _any_rank)}
    starts: dict[str, Callable[[int, float, int], contenders.Run]] = {
        "torchrun": partial(contenders.torchrun, shape=shape),
        "ray_train": contenders.ray_train,
    }
    for name in filter(None, arguments.peers.split(",")):
        victims[name] = Victim(partial(starts[name], STEPS, SECONDS_PER_STEP, arguments.save_every), _any_rank)
    try:
        # One job at a time on the machine: each arm's job ends before the next arm's begins.
        found = interleave({name: _alone(v) for name, v in victims.items()}, arguments.pairs)
        actor = Victim(submit, _actor(orch.client, shape.ranks))
        killed_actors = [actor.kill_once() for _ in range(arguments.pairs)]
        actor.close()
    finally:
        for victim in victims.values():
            victim.close()
        orch.close()
    values = dict(found.values)
    mine = values.pop("ours")
    report(
        result(
            "recovery_gpu" if arguments.gpu else "recovery",
            "s",
            "lower",
            mine,
            values,
            failures=found.failures,
            shape=asdict(shape),
            ours_actor_killed=summary(killed_actors),
            save_every=arguments.save_every,
        ),
        arguments.json,
    )


def _alone(victim: Victim) -> Callable[[], float]:
    def once() -> float:
        try:
            return victim.kill_once()
        finally:
            victim.close()

    return once


if __name__ == "__main__":
    main()
