"""Reads every GPU once, with a deadline, for commands that print once and end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from orchestrator.gpu.balance.view import GpuRow, gpu_row
from orchestrator.gpu.reader import GpuLostError
from orchestrator.gpu.sample import Vendor
from orchestrator.gpu.sampler import Health

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.gpu.reader import GpuReader
    from orchestrator.gpu.sample import Sample

DEADLINE_SECONDS: Final = 3.0
_TWICE: Final = frozenset({Vendor.INTEL, Vendor.SIMULATED})
"""Vendors whose utilization is a rate: it takes two readings, `_APART_SECONDS` apart."""
_APART_SECONDS: Final = 0.25


def read_once(readers: Sequence[GpuReader], node: str, deadline_seconds: float = DEADLINE_SECONDS) -> list[GpuRow]:
    """Return a row per reader, in their order, and close the readers. A GPU that does not answer in time is stale."""
    outcomes: dict[int, Sample | Exception] = {}

    def ask(number: int, reader: GpuReader) -> None:
        try:
            sample = reader.read()
            if reader.info.vendor in _TWICE:
                time.sleep(_APART_SECONDS)
                sample = reader.read()
            outcomes[number] = sample
        except Exception as error:
            outcomes[number] = error
        finally:
            reader.close()

    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in enumerate(readers)]
    deadline = time.monotonic() + deadline_seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    silent = TimeoutError(f"its driver has not answered within {deadline_seconds:g} s")
    return [_row(reader, node, outcomes.get(number, silent)) for number, reader in enumerate(readers)]


def _row(reader: GpuReader, node: str, outcome: Sample | Exception) -> GpuRow:
    if not isinstance(outcome, Exception):
        return gpu_row(reader.info, node, outcome)
    health = Health.FAILING
    if isinstance(outcome, GpuLostError):
        health = Health.LOST
    elif isinstance(outcome, TimeoutError):
        health = Health.STALE
    return gpu_row(reader.info, node, None, health=health, problem=str(outcome))
