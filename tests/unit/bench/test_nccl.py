"""The sweep of NCCL's settings with measurements from a table: tried settings, settings that help, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.bench.nccl import (
    Link,
    SweepOutcome,
    candidates,
    check_machine,
    links_of,
    sweep,
    sweep_lines,
)
from orchestrator.bench.plan import BenchError, RankError
from orchestrator.cli.main import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PCIE = """\
        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      PHB     SYS     0-15            0
GPU1    PHB      X      SYS     0-15            0
NIC0    SYS     SYS      X

Legend:
  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
NVLINK = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n"


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


def swept(factors: dict[tuple[str, str], float | Exception], gpus: int = 2, topology: str = PCIE) -> SweepOutcome:
    timer = FakeTimer({frozenset({setting}): factor for setting, factor in factors.items()})
    return sweep(timer, gpus, links_of(topology), rounds=6, note=lambda _text: None)


def test_links_are_read_from_the_matrix() -> None:
    assert links_of(NVLINK) == {Link.NVLINK}
    assert links_of("GPU0 X PIX SYS\nGPU1 PIX X NODE\n") == {Link.SWITCH, Link.SOCKETS, Link.HOST}
    assert links_of(None) == links_of("nothing of the kind") == frozenset()


def test_what_is_tried_follows_the_topology() -> None:
    def variables(gpus: int, topology: str) -> set[str]:
        return {f"{n}={v}" for one in candidates(gpus, links_of(topology)) for n, v in one.variables.items()}

    nvlink, pcie = variables(8, NVLINK), variables(2, PCIE)
    assert {"NCCL_PROTO=LL128", "NCCL_ALGO=Tree"} <= nvlink
    assert not any(one.startswith("NCCL_P2P") for one in nvlink), "NVLink needs P2P"
    assert "NCCL_PROTO=LL128" not in pcie
    assert "NCCL_ALGO=Tree" not in pcie, "a tree of two GPUs is a ring"
    assert {"NCCL_P2P_DISABLE=1", "NCCL_P2P_LEVEL=SYS", "NCCL_MIN_NCHANNELS=16", "NCCL_MAX_NCHANNELS=16"} <= pcie


def test_settings_that_help_are_found_alone_and_together() -> None:
    outcome = swept({("NCCL_PROTO", "Simple"): 0.8, ("NCCL_P2P_DISABLE", "1"): 0.9, ("NCCL_PROTO", "LL"): 2.0})
    assert outcome.together is not None
    assert outcome.together.candidate.variables == {"NCCL_PROTO": "Simple", "NCCL_P2P_DISABLE": "1"}
    assert outcome.best is outcome.together
    assert outcome.together.speed_ups[0].value == pytest.approx(1 / 0.72, rel=0.01)
    text = "\n".join(sweep_lines(outcome))
    assert "Helps: NCCL_PROTO=Simple NCCL_P2P_DISABLE=1" in text
    assert "Nothing was set." in text
    assert "Not verified: this sweep has not run on several GPUs yet" in text


def test_nothing_helps_where_all_are_alike() -> None:
    outcome = swept({})
    assert outcome.best is None
    assert "No setting helps: leave NCCL's own choice." in "\n".join(sweep_lines(outcome))


def test_a_setting_that_nccl_refuses_drops_out_and_is_named() -> None:
    outcome = swept({("NCCL_PROTO", "LL"): RankError("rank 0: invalid usage")})
    (failed,) = [one for one in outcome.tried if one.error]
    assert failed.candidate.variables == {"NCCL_PROTO": "LL"}
    assert not failed.helps(0)
    assert "| NCCL_PROTO=LL | failed: rank 0: invalid usage |" in "\n".join(sweep_lines(outcome))


def test_a_machine_whose_nccl_fails_is_told() -> None:
    class Broken:
        def seconds(self, variables: object, sizes: object) -> list[float]:
            raise RankError("rank 1: NCCL error: no device")

    with pytest.raises(BenchError, match="NCCL failed with its own choice of settings: rank 1: NCCL error: no device"):
        sweep(Broken(), 2, frozenset(), rounds=5, note=lambda _text: None)


@pytest.mark.parametrize(
    ("gpus", "nvidia", "seen"), [(0, False, "0 GPUs"), (1, True, "1 GPU$"), (4, False, "4 GPUs that NCCL does not")]
)
def test_a_machine_without_several_nvidia_gpus_is_refused(gpus: int, nvidia: bool, seen: str) -> None:
    with pytest.raises(BenchError, match=f"needs at least 2 NVIDIA GPUs in this machine, and torch sees {seen}"):
        check_machine(gpus, nvidia=nvidia)
    check_machine(2, nvidia=True)


def test_on_processors_the_command_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run(("bench", "--nccl-sweep", "--output-dir", str(tmp_path))) == 2
    assert "needs at least 2 NVIDIA GPUs in this machine, and torch sees 0 GPUs" in capsys.readouterr().err
