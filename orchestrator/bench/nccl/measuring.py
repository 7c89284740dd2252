"""The port that times all-reduces under given settings, and its implementations: new ranks each time, and a fake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orchestrator.bench.processes import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class AllReduceTimer(Protocol):
    """Times all-reduces over all GPUs of a machine."""

    def seconds(self, variables: Mapping[str, str], sizes: Sequence[int]) -> Sequence[float]:
        """Return seconds for an all-reduce of each size in bytes, under these variables. Raises RankError if NCCL refuses."""


class RankTimer:
    """Measures with real ranks: new ones each time, because NCCL reads its settings once in a process."""

    def __init__(self, gpus: int, logs: Path, environ: Mapping[str, str]) -> None:
        self._gpus, self._logs, self._environ = gpus, logs, environ

    def seconds(self, variables: Mapping[str, str], sizes: Sequence[int]) -> Sequence[float]:
        """Return the slowest rank's seconds for each size."""
        with RankProcesses(self._logs, {**self._environ, **variables}) as ranks:
            ranks.start(self._gpus)
            ranks.join([self._gpus], "cuda")
            answers = ranks.ask({"do": "all_reduce", "ranks": self._gpus, "sizes": list(sizes)}, self._gpus)
        return [max(times) for times in zip(*answers, strict=True)]


class FakeTimer:
    """Computes times from a table of factors: for tests, and for a look at the report without GPUs."""

    def __init__(self, factors: Mapping[frozenset[tuple[str, str]], float | Exception]) -> None:
        self._factors = factors
        self.asked: list[dict[str, str]] = []

    def seconds(self, variables: Mapping[str, str], sizes: Sequence[int]) -> Sequence[float]:
        """Return a latency plus the bytes at a bandwidth, times the settings' factors; each call differs a little."""
        self.asked.append(dict(variables))
        factor = 1 + 0.001 * (len(self.asked) % 7)
        for setting in variables.items():
            one = self._factors.get(frozenset({setting}), 1.0)
            if isinstance(one, Exception):
                raise one
            factor *= one
        return [factor * (20e-6 + size / 100e9) for size in sizes]
