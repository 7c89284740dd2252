"""A sweep on this machine: detects its GPUs and their links, and times all-reduces with real ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.bench.environment import topology
from orchestrator.bench.nccl.measuring import RankTimer
from orchestrator.bench.nccl.settings import links_of
from orchestrator.bench.nccl.sweep import check_machine, sweep
from orchestrator.bench.plan import check
from orchestrator.bench.processes import RankProcesses, make_logs, rank_environ

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestrator.bench.nccl.sweep import SweepOutcome
    from orchestrator.bench.plan import BenchRequest


def sweep_machine(request: BenchRequest, *, environ: Mapping[str, str], note: Callable[[str], None]) -> SweepOutcome:
    """Sweep NCCL settings on this machine, without the NCCL_ variables of ``environ``. Raises BenchError where there is nothing to sweep."""
    check(request)
    logs = make_logs(request.output)
    kept = {name: value for name, value in environ.items() if not name.startswith("NCCL_")}
    prepared = rank_environ(kept, request.threads)
    with RankProcesses(logs, prepared) as ranks:
        ranks.start(1)
        (seen,) = ranks.ask({"do": "describe"}, 1)
    gpus = len(seen["gpus"])
    check_machine(gpus, nvidia=seen["versions"]["nccl"] is not None)
    return sweep(RankTimer(gpus, logs, prepared), gpus, links_of(topology()), rounds=request.runs, note=note)
