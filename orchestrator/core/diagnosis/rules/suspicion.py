"""The result of a rule: a possible finding, and the figure that its definition uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.facts.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """Possible finding with its ``figure``, larger for worse; ``definitions.py`` defines where the finding opens."""

    finding: Finding
    figure: float
