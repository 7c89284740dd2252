"""Opens the terminal of a rank before its process starts, and connects it to the rank's output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.runtime.ranks.process.exits import report_fault
from orchestrator.runtime.ranks.sessions.rank_terminal import TERMINAL_VARIABLE, RankTerminal

if TYPE_CHECKING:
    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.ranks.output.output import RankOutput


def with_terminal(plan: RankPlan, output: RankOutput) -> tuple[RankPlan, RankTerminal | None]:
    """Return the plan with its terminal's path, and the terminal; None where the node has none left and none is needed.

    Raises OSError for an interactive job.
    """
    try:
        terminal = RankTerminal(plan.rank, idle_seconds=plan.idle_seconds, note=lambda line: output.note([line]))
    except OSError as error:
        if plan.idle_seconds is not None:
            raise
        report_fault("the rank has no terminal for a debugger", error)
        return plan, None
    if terminal.interactive:
        output.show(terminal.show)
        return plan, terminal
    output.show(lambda data: terminal.show(data.replace(b"\n", b"\r\n")))  # as a terminal ends lines
    return replace(plan, env={**plan.env, TERMINAL_VARIABLE: terminal.path}), terminal
