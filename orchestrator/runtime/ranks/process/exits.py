"""Reports the exit of a rank's process with the evidence of its cause; missing evidence is left out."""

from __future__ import annotations

import asyncio
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from orchestrator.core.events import Exit
from orchestrator.runtime.ranks.evidence.endings import StopFacts, order_of, stop_facts, was_killed
from orchestrator.runtime.ranks.evidence.kernel_evidence import memory_use
from orchestrator.runtime.ranks.evidence.port_holder import port_evidence
from orchestrator.runtime.ranks.output.log_policies import match_policies

if TYPE_CHECKING:
    from orchestrator.core.facts.fact import Fact
    from orchestrator.runtime.ranks.event_log import EventLog
    from orchestrator.runtime.ranks.evidence.exit_evidence import ExitEvidence
    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.ranks.output.output import RankOutput
    from orchestrator.runtime.ranks.rank_checkpoints import RankCheckpoints
    from orchestrator.runtime.spawn.client import ErrorRaised, Exited


class ExitTeller:
    """Reports the exit of one process. ``error`` is the exception that its script raised, if it was reported."""

    def __init__(
        self,
        log: EventLog,
        output: RankOutput,
        evidence: ExitEvidence,
        checkpoints: RankCheckpoints,
        plan: RankPlan,
    ) -> None:
        self._plan = plan
        self._log = log
        self._output = output
        self._evidence = evidence
        self._checkpoints = checkpoints
        self.error: ErrorRaised | None = None

    async def report(self, event: Exited) -> None:
        """Report the exit."""
        await self._checkpoints.ended(well=event.exit_code == 0)
        try:
            self._output.drain()
        except Exception as error:
            report_fault("the rank's last output was left out", error)
        await self._add(event)

    async def _add(self, event: Exited) -> None:
        failed = event.exit_code != 0
        error = self.error if failed else None
        tail = self._output.tail if failed else ()
        text = "\n".join((*tail, f"{error.type}: {error.message}" if error else ""))
        policy: str = ""
        note: Fact | None = None
        evidence: tuple[Fact, ...] = ()
        try:
            policy, note = await match_policies(self._plan.log_policies, text) if failed else ("", None)
            evidence = self._evidence.facts() if failed else ()
        except Exception as fault:
            report_fault("evidence of the exit's cause was left out", fault)
        stop = await self._stop_facts(event)
        use = memory_use(event.memory, machine=self._evidence.killed_by_kernel(event, evidence)) if failed else None
        end = Exit(
            rank=self._plan.rank,
            at=event.at,
            exit_code=event.exit_code,
            signal=event.signal,
            error_type=error.type if error else "",
            error_message=error.message if error else "",
            error_at=error.at if error else None,
            log_tail=tail,
            evidence=evidence,
            policy=policy,
            policy_note=note,
            missing_file=error.missing_file if error else "",
            stop_seen_at=stop.stop_seen_at,
            stop_scope=stop.stop_scope,
            last_step=stop.last_step,
            total_steps=stop.total_steps,
            memory=use,
            ordered=order_of(event.cause),
        )
        self._log.add(kind="exited", at=event.at, exit=await self._with_port(end))

    async def _with_port(self, end: Exit) -> Exit:
        """Add evidence of what holds the port that the rank could not bind."""
        try:
            taken = await asyncio.to_thread(port_evidence, end, self._plan.env)
        except Exception as fault:
            report_fault("the process that holds the rank's port was left out", fault)
            return end
        return end if taken is None else replace(end, evidence=(*end.evidence, taken))

    async def _stop_facts(self, event: Exited) -> StopFacts:
        """Return whether the rank was asked to stop, and its last steps: those in its output where it reported none."""
        facts = partial(stop_facts, ended_at=event.at, killed=was_killed(event))
        stop = facts(event.ending)
        if event.cause is not None or stop.stop_seen_at is None or stop.last_step is not None:
            return stop
        try:
            return facts(event.ending, await self._output.last_progress())
        except Exception as error:
            report_fault("the step of the rank's last output was left out", error)
            return stop


def report_fault(what: str, error: Exception) -> None:
    """Log the fault in the actor's own log, with its traceback."""
    sys.stderr.write(f"{what}: {''.join(traceback.format_exception(error))}\n")
