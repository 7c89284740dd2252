"""What a rule says: a finding that may be true, and the figure that its definition judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.facts.findings import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """``figure`` is larger for worse; ``core/diagnosis/definitions.py`` says from where on the finding is open."""

    finding: Finding
    figure: float
