"""Suggests values and prunes trials with Optuna, from all trials so far.

Nothing is kept between calls: the jobs of the matrix are the study. A daemon that was killed therefore continues with exactly what
the store has, and there is no second record that could differ from it.
"""

from __future__ import annotations

import warnings
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

State = Literal["running", "complete", "pruned", "failed"]
_STATES = {
    "running": TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a parameter, included; two whole numbers allow whole numbers only."""

    low: int | float
    high: int | float
    log: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it has whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Parameters to search, with lists or bounds, and the objectives (`min` or `max`) by name."""

    name: str
    objectives: Mapping[str, str]
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    prunes: bool = False
    warmup_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One trial: its values, its objectives (None where they are not complete), and the metric for pruning, by step."""

    number: int
    state: State
    values: Mapping[str, Any]
    objectives: tuple[float, ...] | None = None
    reported: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A running trial to end: the metric was ``value`` at ``step``; None for a value that is not finite."""

    number: int
    step: int
    value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Values for the next trials, and running trials to end."""

    suggested: tuple[Mapping[str, Any], ...] = ()
    pruned: tuple[Pruned, ...] = ()


def advise(space: Space, trials: Sequence[Trial], want: int) -> Advice:
    """Return the values of ``want`` further trials, and the running trials that do worse than the others."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.simplefilter("ignore", RuntimeWarning)  # a trial that has reported nothing finite
        study = _study(space, trials)
        pruned = _pruned(study, trials) if space.prunes else ()
        distributions = _distributions(space)
        suggested = tuple(
            _rounded(space, study.ask(fixed_distributions=distributions).params) for _ in range(max(0, want))
        )
    return Advice(suggested=suggested, pruned=pruned)


def _study(space: Space, trials: Sequence[Trial]) -> optuna.Study:
    following = max((trial.number for trial in trials), default=-1) + 1
    seed = zlib.crc32(
        f"{space.name}/{following}".encode()
    )  # the random trials at the beginning differ from one another
    study = optuna.create_study(
        directions=["maximize" if order == "max" else "minimize" for order in space.objectives.values()],
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=space.warmup_steps),
    )
    distributions = _distributions(space)
    for trial in trials:
        study.add_trial(_frozen(trial, distributions))
    return study


def _frozen(trial: Trial, distributions: dict[str, BaseDistribution]) -> FrozenTrial:
    state = trial.state
    if state == "complete" and trial.objectives is None:
        state = "failed"  # it succeeded, but not all objectives are known
    return optuna.trial.create_trial(
        state=_STATES[state],
        params={name: trial.values[name] for name in distributions},
        distributions=distributions,
        values=list(trial.objectives) if state == "complete" and trial.objectives is not None else None,
        intermediate_values=dict(trial.reported),
    )


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    found: dict[str, BaseDistribution] = {n: CategoricalDistribution(list(v)) for n, v in space.parameters.items()}
    for name, bounds in space.ranges.items():
        if bounds.is_whole:
            found[name] = IntDistribution(int(bounds.low), int(bounds.high), log=bounds.log)
        else:
            found[name] = FloatDistribution(float(bounds.low), float(bounds.high), log=bounds.log)
    return found


def _pruned(study: optuna.Study, trials: Sequence[Trial]) -> tuple[Pruned, ...]:
    found = []
    for trial, frozen in zip(trials, study.get_trials(deepcopy=False), strict=True):
        if trial.state != "running" or not trial.reported or not study.pruner.prune(study, frozen):
            continue
        step = max(trial.reported)
        value = trial.reported[step]
        found.append(Pruned(number=trial.number, step=step, value=value if value == value else None))  # noqa: PLR0124 - NaN
    return tuple(found)


def _rounded(space: Space, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as people read them in names and command lines: six digits, within the bounds."""
    return {
        name: value if (bounds := space.ranges.get(name)) is None or bounds.is_whole else _near(float(value), bounds)
        for name, value in values.items()
    }


def _near(value: float, bounds: Range) -> float:
    return min(float(bounds.high), max(float(bounds.low), float(f"{value:.{_DIGITS}g}")))
