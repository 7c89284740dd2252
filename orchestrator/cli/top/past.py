"""History of `orch top`: earlier values, counters for rates, and the loads of the last minute."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from orchestrator.cli.top.frame import Traffic
from orchestrator.gpu.balance.balance import SETTLED_SECONDS, GpuLoad, LoadWindow
from orchestrator.gpu.balance.view import balance_json
from orchestrator.gpu.sampler import Health
from orchestrator.units import clock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.api.views import JobView
    from orchestrator.gpu.balance.view import GpuRow

HISTORY = 240
TRAFFIC = ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")
Series = dict[str, deque[float | None]]


class Past:
    """Earlier readings, by GPU."""

    def __init__(self) -> None:
        self._load: Series = {}
        self._power: Series = {}
        self._counters: dict[str, tuple[float, tuple[int | None, ...]]] = {}
        self._traffic: dict[str, Traffic] = {}
        self._window = LoadWindow()

    def add(self, rows: tuple[GpuRow, ...]) -> None:
        """Add a reading. A GPU that is missing from it is dropped once its history is empty."""
        now = time.monotonic()
        for row in rows:
            self._add(row, now)
        for uuid in self._load.keys() - {row.gpu_uuid for row in rows}:
            self._load[uuid].append(None)
            self._power[uuid].append(None)
            if all(value is None for value in self._power[uuid]):
                for known in (self._load, self._power, self._counters, self._traffic):
                    known.pop(uuid, None)

    def _add(self, row: GpuRow, now: float) -> None:
        known = row.health in {Health.OK, Health.STARTING}
        utilization = row.utilization_ratio if known else None
        self._load.setdefault(row.gpu_uuid, deque(maxlen=HISTORY)).append(utilization)
        self._power.setdefault(row.gpu_uuid, deque(maxlen=HISTORY)).append(row.power_watts if known else None)
        if known and row.sampled_at is not None:
            self._count(row, row.sampled_at)
            used = None if row.memory_used_bytes is None else float(row.memory_used_bytes)
            self._window.add_load(
                row.gpu_uuid, now, GpuLoad(utilization=utilization, memory=used, power=row.power_watts)
            )

    def _count(self, row: GpuRow, at: float) -> None:
        """Compute rates from the counters of two samples; None for a counter that was reset."""
        counters = (
            row.pcie_transmit_bytes, row.pcie_receive_bytes, row.nvlink_transmit_bytes, row.nvlink_receive_bytes,
        )  # fmt: skip
        before = self._counters.get(row.gpu_uuid)
        if before is not None and before[0] == at:
            return
        self._counters[row.gpu_uuid] = (at, counters)
        if before is None or at < before[0]:
            return
        self._traffic[row.gpu_uuid] = Traffic(
            **{
                name: None if new is None or old is None or new < old else (new - old) / (at - before[0])
                for name, old, new in zip(TRAFFIC, before[1], counters, strict=True)
            }
        )

    @property
    def load(self) -> dict[str, tuple[float | None, ...]]:
        """Utilization of each GPU, oldest first."""
        return {uuid: tuple(values) for uuid, values in self._load.items()}

    @property
    def power(self) -> dict[str, tuple[float | None, ...]]:
        """Power of each GPU, oldest first."""
        return {uuid: tuple(values) for uuid, values in self._power.items()}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Traffic of each GPU, from its newest two samples."""
        return dict(self._traffic)

    def balance(self, job: JobView) -> Mapping[str, Any] | None:
        """Return the daemon's balance of the job if it has one; else compute it from the readings while the job ran."""
        if job.balance is not None:
            return job.balance
        uuids = [uuid for rank in job.gpus for uuid in rank.gpu_uuids]
        attempt = job.attempts[-1] if job.attempts else None
        if not uuids or attempt is None or attempt.running_at is None:
            return None
        running = time.time() - attempt.running_at
        if running < SETTLED_SECONDS:
            return None
        now = time.monotonic()
        return balance_json(self._window.balance(uuids, now, since=now - running))


class DaemonWatch:
    """Records whether the daemon answers, and since when it does not."""

    def __init__(self) -> None:
        self._was_there = False
        self._gone_since = 0.0

    def origin(self, *, there: bool) -> str:
        """Return the origin of a reading's rows; empty if it is the daemon."""
        if there:
            self._was_there, self._gone_since = True, 0.0
            return ""
        self._gone_since = self._gone_since or time.time()
        since = f" since {clock(self._gone_since)}" if self._was_there else ""
        return f"no daemon{since}: this machine only"
