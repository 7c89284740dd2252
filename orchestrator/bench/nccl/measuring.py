"""The port that times all-reduces under given settings, and the real one: ranks that are started anew with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from orchestrator.bench.processes import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class AllReduceTimer(Protocol):
    """Times all-reduces over all GPUs of a machine."""

    def seconds(self, variables: Mapping[str, str], sizes: Sequence[int]) -> Sequence[float]:
        """Of an all-reduce of each so many bytes, under these environment variables. Raises RankError where NCCL refuses them."""


class RankTimer:
    """NCCL reads its settings once in a process: each measurement has ranks of its own."""

    def __init__(self, gpus: int, logs: Path, environ: Mapping[str, str]) -> None:
        self._gpus, self._logs, self._environ = gpus, logs, environ

    def seconds(self, variables: Mapping[str, str], sizes: Sequence[int]) -> Sequence[float]:
        """The slowest rank's, of each size."""
        with RankProcesses(self._logs, {**self._environ, **variables}) as ranks:
            ranks.start(self._gpus)
            ranks.join([self._gpus], "cuda")
            answers = ranks.ask({"do": "all_reduce", "ranks": self._gpus, "sizes": list(sizes)}, self._gpus)
        return [max(times) for times in zip(*answers, strict=True)]


class FakeTimer:
    """Times by a table of factors: for tests, and for a look at the report without GPUs."""

    def __init__(self, factors: Mapping[frozenset[tuple[str, str]], float | Exception]) -> None:
        self._factors = factors
        self.asked: list[dict[str, str]] = []

    def seconds(self, variables: Mapping[str, str], sizes: Sequence[int]) -> Sequence[float]:
        """A latency and a bandwidth, times the product of the factors of the settings; every call a little different."""
        self.asked.append(dict(variables))
        factor = 1 + 0.001 * (len(self.asked) % 7)
        for setting in variables.items():
            one = self._factors.get(frozenset({setting}), 1.0)
            if isinstance(one, Exception):
                raise one
            factor *= one
        return [factor * (20e-6 + size / 100e9) for size in sizes]
