"""One effect in progress: sends its orders, waits for the answers, and starts again after a missing answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from orchestrator.core.facts.gangs import RecordRestored
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.memory.network import NoAnswerError
from orchestrator.runtime.memory.ranks import StaleAttemptError

if TYPE_CHECKING:
    from orchestrator.core.ids import JobId
    from orchestrator.runtime.memory.network import Network
    from orchestrator.runtime.memory.nodes import MemoryNode

_FIRST_DELAY: Final = 0.2
_LONGEST_DELAY: Final = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """An action for a node; None means the control plane."""

    node: MemoryNode | None
    do: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Continue at wall time ``until``."""

    until: float


Steps: TypeAlias = Generator[Sequence[Order] | Pause, list[Any], None]
"""Yields orders that are sent at once, and receives their answers in the same order; or yields a pause."""


@dataclass(slots=True)
class EffectTask:
    """Runs the steps of ``make`` to their end. ``lost`` is called when the gang turns out to be lost."""

    job_id: JobId
    network: Network
    make: Callable[[], Steps]
    lost: Callable[[GangLostError], None]
    _steps: Steps | None = None
    _delay: float = _FIRST_DELAY
    _asked: int = 0
    _answers: dict[int, Any] = field(default_factory=dict)
    _wanted: int = 0
    _ended: bool = False

    def start(self) -> None:
        """Begin soon: no step runs before the caller has returned."""
        self.network.agenda.after(0.0, self._begin)

    def cancel(self) -> None:
        """Send no more orders. Orders already sent are still carried out."""
        self._ended = True
        if self._steps is not None:
            self._steps.close()

    def _begin(self) -> None:
        if not self._ended:
            self._steps = self.make()
            self._advance(partial(next, self._steps))

    def _advance(self, resume: Callable[[], Sequence[Order] | Pause]) -> None:
        try:
            wanted = resume()
        except StopIteration:
            self._ended = True
        except GangLostError as error:
            self._ended = True
            self.lost(error)
        except StaleAttemptError:
            self._ended = True
            self.lost(GangLostError(RecordRestored()))
        except NoAnswerError:
            self.network.agenda.after(self._delay, self._begin)
            self._delay = min(self._delay * 2, _LONGEST_DELAY)
        else:
            self._ask(wanted)

    def _ask(self, wanted: Sequence[Order] | Pause) -> None:
        self._asked += 1
        self._answers = {}
        match wanted:
            case Pause():
                self._wanted = 1
                self.network.agenda.at(wanted.until, partial(self._answered, self._asked, 0, None))
            case _:
                self._wanted = len(wanted)
                for number, order in enumerate(wanted):
                    answer = partial(self._answered, self._asked, number)
                    self.network.ask(self.job_id, order.node, order.do, answer)

    def _answered(self, asked: int, number: int, what: Any) -> None:
        if self._ended or asked != self._asked or self._steps is None or number in self._answers:
            return  # the task has continued without this answer, or has it already
        self._answers[number] = what
        if len(self._answers) < self._wanted:
            return
        answers = [self._answers[n] for n in range(self._wanted)]
        errors = [a for a in answers if isinstance(a, Exception)]
        if errors:
            worst = next((e for e in errors if isinstance(e, GangLostError)), errors[0])
            self._advance(partial(self._steps.throw, worst))
        else:
            self._advance(partial(self._steps.send, answers))
