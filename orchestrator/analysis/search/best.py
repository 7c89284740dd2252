"""Selects the best trials of a search: one with one objective, with several all that no other trial beats. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def best_trials(given: Mapping[int, Sequence[float]], orders: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of the trials on the Pareto front, by the first objective; ``given`` has all that count."""
    signed = {
        number: tuple(-v if order == "max" else v for v, order in zip(values, orders, strict=True))
        for number, values in given.items()
    }
    front = [n for n, own in signed.items() if not any(_beats(other, own) for other in signed.values())]
    if len(orders) == 1:
        return tuple(sorted(front)[:1])
    return tuple(sorted(front, key=lambda number: signed[number]))


def _beats(other: Sequence[float], own: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(other, own, strict=True)) and tuple(other) != tuple(own)
