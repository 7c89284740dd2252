"""The kernel's evidence of a rank's death: a real memory kill where this user may cause one, else written files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.core.events import MemoryUse
from orchestrator.core.facts.faults import GpuLost, KernelMessage, OomCount, OomKill, Xid
from orchestrator.core.states import OutOf
from orchestrator.gpu.exporter import GpuStatus
from orchestrator.gpu.sample import GpuInfo, Sample, Vendor, XidCount
from orchestrator.gpu.sampler import Health
from orchestrator.runtime.exporters.exporters import evidence_of
from orchestrator.runtime.ranks.exit_evidence import KernelWatch, OomWatch, memory_use
from orchestrator.runtime.spawn.client import MemoryUsed
from tests.support.stack import wait_until

MEMORY = Path("/sys/fs/cgroup/memory")
EATER = "import sys; sys.stdin.readline(); held = bytearray(256 * 1024 * 1024)"


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="needs a memory control group (v1) that may be changed")
def test_a_real_memory_kill_is_seen() -> None:
    group = MEMORY / f"orch-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 * 1024 * 1024))
        with subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE) as eater:
            watch = OomWatch.of_process(eater.pid)
            (group / "cgroup.procs").write_text(str(eater.pid))
            watch.mark()
            assert watch.killed() is None
            assert eater.stdin is not None
            eater.stdin.write(b"\n")
            eater.stdin.close()
            assert eater.wait(300) == -signal.SIGKILL
        killed = watch.killed()
        assert killed is not None
        assert (killed.path, killed.before) == (f"{group}/memory.oom_control", 0)
        assert killed.count > 0
    finally:
        wait_until("the group is empty", lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_the_counter_of_the_second_version_is_read(tmp_path: Path) -> None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.split(":")[1]:
            pytest.skip("this machine's groups are of the first version")
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 4\n")
    watch = OomWatch.of_process(os.getpid(), root=tmp_path)
    events.write_text("low 0\noom 5\noom_kill 5\n")
    assert watch.killed() == OomCount(path=str(events), before=4, count=5)
    watch.mark()
    assert watch.killed(), "the kill may have come in the moment before the mark"
    watch.mark()
    assert not watch.killed(), "long ago"


def test_a_process_without_a_group_that_can_be_read_gives_no_evidence(tmp_path: Path) -> None:
    watch = OomWatch.of_process(os.getpid(), root=tmp_path)
    watch.mark()
    assert watch.killed() is None


KERNEL = (
    "6,1,100000000,-;Out of memory: Killed process 42 (python3) total-vm:1kB\n"
    "6,2,200000000,-;Out of memory: Killed process 42 (python3) total-vm:2kB\n"
    "6,3,200000000,-;Out of memory: Killed process 423 (python3)\n"
    "4,4,201000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=42, name=python, GPU has fallen off the bus.\n"
    " SUBSYSTEM=pci\n"
)


def test_the_kernels_log_is_searched_for_the_process_and_the_last_moments(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,0,199000000,-;Out of memory: Killed process 42 (python3) of an earlier life\n")
    watch = KernelWatch(source=log)
    with log.open("a") as file:
        file.write(KERNEL)
    oom, lost = watch.facts(42, now=205.0)
    assert oom == OomKill(
        pid=42, process="python3", said="kernel: Out of memory: Killed process 42 (python3) total-vm:2kB"
    )
    assert isinstance(lost, Xid)
    assert (lost.number, lost.bus_id, lost.code) == (79, "0000:3b:00", "gpu_lost")
    watch.close()
    watch.close()
    assert watch.facts(42, now=205.0) == ()


def test_what_was_logged_before_a_mark_is_still_there_and_what_is_old_is_not_read_again(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("")
    watch = KernelWatch(source=log)
    began = time.clock_gettime(time.CLOCK_MONOTONIC)

    def logged(seconds: float) -> None:
        with log.open("a") as file:
            file.write(f"6,1,{int((began + seconds) * 1e6)},-;Killed process 42 (python3) at {seconds:g}\n")

    logged(14)
    watch.mark(began + 15)
    logged(16)
    assert watch.facts(42, began + 17) == tuple(
        KernelMessage(said=f"Killed process 42 (python3) at {at}") for at in (14, 16)
    )
    logged(20)
    watch.mark(began + 20)  # too soon: the mark does not move
    logged(29)
    watch.mark(began + 31)
    assert watch.facts(42, began + 32) == tuple(
        KernelMessage(said=f"Killed process 42 (python3) at {at}") for at in (20, 29)
    ), "what came after the mark before is read, and the last moments of it are told"
    watch.close()


def test_a_log_that_cannot_be_read_gives_no_evidence(tmp_path: Path) -> None:
    watch = KernelWatch(source=tmp_path / "none")
    watch.mark(1e9)
    assert watch.facts(42) == ()
    watch.close()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK | os.W_OK), reason="the kernel's log is not ours to write")
def test_the_real_log_tells_what_was_written_since() -> None:
    watch = KernelWatch()
    Path("/dev/kmsg").write_text(f"orch test: Killed process {os.getpid()} (not really)\n")
    assert watch.facts(os.getpid()) == (KernelMessage(said=f"orch test: Killed process {os.getpid()} (not really)"),)
    watch.close()


def _status(health: Health, *xids: XidCount, at: float = 0.0) -> GpuStatus:
    info = GpuInfo(
        uuid="GPU-1",
        index=0,
        ordinal=0,
        vendor=Vendor.NVIDIA,
        model="H100",
        memory_total_bytes=None,
        pci_bus_id="0000:3b:00.0",
        driver_version="595",
    )
    sample = Sample(gpu_uuid="GPU-1", timestamp=at, monotonic=0.0, xids=xids)
    return GpuStatus(info=info, health=health, sample=sample if health is Health.OK else None, error=None)


def test_the_driver_tells_of_a_lost_gpu_and_of_xids_of_the_last_minute() -> None:
    now = 1_700_000_000.0 - 90_000.0  # whatever the clock of the GPU's node shows
    old, new = (XidCount(code=c, count=1, last_timestamp=now - a) for c, a in ((48, 100.0), (119, 2.0)))
    assert evidence_of("GPU-1", _status(Health.OK, old, new, at=now)) == [
        Xid(gpu_uuid="GPU-1", number=119, at=now - 2.0, seconds_before=now - (now - 2.0))
    ]
    assert evidence_of("GPU-1", _status(Health.LOST)) == [GpuLost(gpu_uuid="GPU-1")]


def test_memory_kills_of_the_machine_are_counted(tmp_path: Path) -> None:
    source = tmp_path / "vmstat"
    source.write_text("pgfault 7\noom_kill 4\n")
    watch = OomWatch.of_machine(source)
    assert not watch.killed()
    source.write_text("pgfault 7\noom_kill 5\n")
    assert watch.killed()
    watch.mark()
    assert watch.killed(), "the kill may have come in the moment before the mark"
    watch.mark()
    assert not watch.killed(), "long ago"
    assert not OomWatch.of_machine(tmp_path / "absent").killed()


@pytest.mark.parametrize(
    ("used", "machine", "expected"),
    [
        (MemoryUsed(max_rss_bytes=7), False, MemoryUse(used_bytes=7)),
        (MemoryUsed(max_rss_bytes=7), True, MemoryUse(used_bytes=7, killed=OutOf.MACHINE)),
        (
            MemoryUsed(max_rss_bytes=7, peak_bytes=1000, limit_bytes=1000, kills=1),
            True,
            MemoryUse(used_bytes=1000, limit_bytes=1000, killed=OutOf.LIMIT),
        ),
        (
            MemoryUsed(
                max_rss_bytes=1500, peak_bytes=1000, limit_bytes=1000, kills=1
            ),  # its shared memory is not charged to its group
            False,
            MemoryUse(used_bytes=1000, limit_bytes=1000, killed=OutOf.LIMIT),
        ),
        (
            MemoryUsed(max_rss_bytes=7, peak_bytes=500, limit_bytes=1000, kills=1),
            False,
            MemoryUse(used_bytes=500, limit_bytes=1000, killed=OutOf.MACHINE),
        ),
        (
            MemoryUsed(max_rss_bytes=7, peak_bytes=1000, limit_bytes=1000),
            False,
            MemoryUse(used_bytes=1000, limit_bytes=1000),
        ),
    ],
    ids=["alone", "machine", "limit", "limit, in a large process", "a group above", "at its limit, but alive"],
)
def test_a_kill_is_the_limits_when_the_limit_was_reached(used: MemoryUsed, machine: bool, expected: MemoryUse) -> None:
    assert memory_use(used, machine=machine) == expected
    assert memory_use(None, machine=machine) is None
