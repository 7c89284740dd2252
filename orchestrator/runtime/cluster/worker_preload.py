"""What the idle workers of an embedded head do before anything is asked of them; imported by Ray's workers only.

They become orch's own actors: what a rank actor needs is imported (60 ms less for every start), and what Ray would import
on top of that is not.
"""

from __future__ import annotations

import orchestrator.runtime.ranks.actor  # noqa: F401 - imported for Ray's workers to have it
from orchestrator.runtime.cluster.serializers import forgo_foreign_serializers

forgo_foreign_serializers()
