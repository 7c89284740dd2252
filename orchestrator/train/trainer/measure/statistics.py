"""Statistics: the confidence interval of a mean of step times, which are not independent of each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = 20
_FEWEST_PER_BLOCK = 5
_T_975 = 2.093  # Student's t, 19 degrees of freedom, two-sided 95 %


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of a series, by batch means; None for less than 100 values.

    Neighbouring steps resemble each other (caches, clocks, other users of the machine), so single values would give an
    interval that is too narrow. Means of twenty stretches are close to independent.
    """
    size = len(values) // BLOCKS
    if size < _FEWEST_PER_BLOCK:
        return None
    used = list(values)[-size * BLOCKS :]
    means = [sum(used[start : start + size]) / size for start in range(0, len(used), size)]
    mean = sum(means) / BLOCKS
    deviation = math.sqrt(sum((value - mean) ** 2 for value in means) / (BLOCKS - 1))
    margin = _T_975 * deviation / math.sqrt(BLOCKS)
    return mean - margin, mean + margin
