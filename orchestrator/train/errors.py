"""What goes wrong in training, each with what to do next, and the rule that many ranks show one error.

All ranks of a job often meet the same error at the same time. `only_on_main` keeps it readable: rank 0 raises it as it
is; the others raise a twin that `except` clauses catch just the same, but that ends its process without a traceback.
"""

from __future__ import annotations

import os
import sys

from orchestrator.train.script.environment import read_environment


class TrainError(Exception):
    """Something that the training system can name; its message says what to do next."""


class ConfigError(TrainError, ValueError):
    """A configuration was refused. `problems` holds everything wrong with it, one sentence each, with the remedy."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems\n" + "\n".join(f"- {problem}" for problem in self.problems)


class DataError(TrainError, ValueError):
    """The data cannot be trained on: none, too little, unreadable, or of a shape that nothing can be made of."""


class ModelOutputError(TrainError, TypeError):
    """The model or the loss function returned something that holds no loss; see docs/training.md, "Batches"."""


class NonFiniteLossError(TrainError, ArithmeticError):
    """The loss stayed NaN or infinite after as many skipped steps as are allowed."""


class OutOfMemoryError(TrainError, RuntimeError):
    """A device ran out of memory; the message holds the sizes and the settings that lower them."""


class RecoveryTimeoutError(TrainError, RuntimeError):
    """Ranks are missing after a (re)start; the message names them."""


class StopTraining(SystemExit):
    """The job was told to stop and its state is saved. Ends the process with 143, as SIGTERM would have."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(143)


def only_on_main(error: TrainError, *, rank: int, under_orch: bool = False) -> TrainError:
    """The exception for this rank to raise: `error` on rank 0, elsewhere its quiet twin.

    `under_orch`: leave one line in this rank's own log, so that its exit is not taken for the cause.
    """
    if rank == 0:
        return error
    if under_orch:
        print(f"rank {rank} ends with the others: Rank 0 is gone, its error says why", file=sys.stderr, flush=True)
    return quiet(error)


def fail_once(error: TrainError, *, rank: int | None = None) -> TrainError:
    """The exception for this process to raise, so that all ranks end and one of them says why."""
    environment = read_environment(os.environ)
    return only_on_main(
        error, rank=environment.rank if rank is None else rank, under_orch=environment.attempt is not None
    )


def quiet(error: TrainError) -> TrainError:
    """A twin of `error` that is also a SystemExit with status 1: uncaught, it ends the process without a word."""
    twin_type = type(f"Quiet{type(error).__name__}", (type(error), SystemExit), {})
    twin = twin_type(*error.args)
    twin.code = 1
    assert isinstance(twin, TrainError)
    return twin
