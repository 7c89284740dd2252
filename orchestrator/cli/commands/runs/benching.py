"""Other measurements of `orch bench`: the training suite, and the sweep of NCCL's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.errors import EXIT_OK

if TYPE_CHECKING:
    from orchestrator.bench.plan import BenchRequest
    from orchestrator.cli.session import Session


def run_training_suite(session: Session, request: BenchRequest, name: str, *, sweep: bool, as_json: bool) -> int:
    """Measure the suite and show its claims. Raises BenchError."""
    from orchestrator.bench.errors import BenchError
    from orchestrator.bench.suite.report import claim_lines
    from orchestrator.bench.suite.training import check_suite, run_suite

    if sweep:
        raise BenchError("--suite and --nccl-sweep are two measurements", hint="run one after the other")
    check_suite(name, request)
    outcome = run_suite(request, environ=session.environ, note=session.console.note)
    if as_json:
        from orchestrator.cli.session import print_json

        print_json(session, {"files": [str(path) for path in outcome.files], **outcome.document})
        return EXIT_OK
    for line in claim_lines(outcome.checked):
        session.console.print(line)
    for path in outcome.files:
        session.console.note(f"wrote {path}")
    return EXIT_OK


def run_nccl_sweep(session: Session, request: BenchRequest, *, as_json: bool) -> int:
    """Try the settings on all GPUs of this machine. Raises BenchError if too few, or none, work with NCCL."""
    from orchestrator.bench.nccl.machine import sweep_machine
    from orchestrator.bench.nccl.sweep import sweep_json, sweep_lines

    outcome = sweep_machine(request, environ=session.environ, note=session.console.note)
    if as_json:
        from orchestrator.cli.session import print_json

        print_json(session, sweep_json(outcome))
        return EXIT_OK
    for line in sweep_lines(outcome):
        session.console.print(line)
    return EXIT_OK
