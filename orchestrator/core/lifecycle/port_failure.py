"""Decides whether the script or orch chose a port in use: only one that the script fixes is taken in the next attempt too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from orchestrator.core.facts.rank_ends import PortTaken, Problem, ScriptProblem
from orchestrator.core.states import FailureClass

if TYPE_CHECKING:
    from orchestrator.core.events import Exit
    from orchestrator.core.facts.rank_ends import RankEnd


def with_port(ended: Exit, failure_class: FailureClass, cause: RankEnd) -> tuple[FailureClass, RankEnd]:
    """Return class and cause with what is known of the port; any other cause as it is.

    Class USER, without a restart, where the error names a port that does not follow from MASTER_PORT and a process listens there after
    the rank has ended. A port that orch chose is another one in the next attempt, and one at which no process listens (connections
    that end, an error without the port) may be free by then.
    """
    if not isinstance(cause, ScriptProblem) or cause.problem is not Problem.PORT_IN_USE:
        return failure_class, cause
    taken = next((fact for fact in ended.evidence if isinstance(fact, PortTaken)), None)
    if taken is None:
        return failure_class, cause
    lasting = taken.listening and not taken.chosen_by_orch
    return FailureClass.USER if lasting else failure_class, replace(taken, rank=ended.rank, said=cause.said)
