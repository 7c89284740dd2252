"""Errors of training, each with what to do next, and the rule by which many ranks show one error.

All ranks of a job often meet the same error at the same time. `only_on_main` keeps the output readable: rank 0 raises
the error itself; the others raise a twin that `except` clauses catch as well, but that ends its process without a
traceback.
"""

from __future__ import annotations

import os
import sys

from orchestrator.train.script.environment import read_environment


class TrainError(Exception):
    """An error of the training system; its message says what to do next."""


class ConfigError(TrainError, ValueError):
    """A configuration is invalid. `problems` holds every error in it, one sentence each, with the remedy."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems)} problems\n" + "\n".join(f"- {problem}" for problem in self.problems)


class DataError(TrainError, ValueError):
    """The data cannot be used for training: none, too little, unreadable, or of an unusable shape."""


class ModelOutputError(TrainError, TypeError):
    """The model or the loss function returned something that holds no loss; see docs/training.md, "Batches"."""


class NonFiniteLossError(TrainError, ArithmeticError):
    """The loss stayed NaN or infinite after the allowed number of skipped steps."""


class OutOfMemoryError(TrainError, RuntimeError):
    """A device ran out of memory; the message holds the sizes and the settings that lower them."""


class RecoveryTimeoutError(TrainError, RuntimeError):
    """Ranks are missing after a start or restart; the message names them."""


class StopTraining(SystemExit):
    """The job received a stop request and its state is saved. Ends the process with 143, as SIGTERM would have."""

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(143)


def only_on_main(error: TrainError, *, rank: int, under_orch: bool = False) -> TrainError:
    """Return the exception for this rank to raise: `error` on rank 0, elsewhere its quiet twin.

    `under_orch`: write one line to this rank's own log, so that its exit does not count as the cause.
    """
    if rank == 0:
        return error
    if under_orch:
        print(f"rank {rank} ends too: rank 0 has failed, see its error", file=sys.stderr, flush=True)
    return quiet(error)


def fail_once(error: TrainError, *, rank: int | None = None) -> TrainError:
    """Return the exception for this process to raise, so that all ranks end and one of them reports why."""
    environment = read_environment(os.environ)
    return only_on_main(
        error, rank=environment.rank if rank is None else rank, under_orch=environment.attempt is not None
    )


def quiet(error: TrainError) -> TrainError:
    """Return a twin of `error` that is also a SystemExit with status 1: uncaught, it ends the process without output."""
    twin_type = type(f"Quiet{type(error).__name__}", (type(error), SystemExit), {})
    twin = twin_type(*error.args)
    twin.code = 1
    assert isinstance(twin, TrainError)
    return twin
