"""Simulated GPUs: their values follow the real load, from a fake /proc with a clock and from real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.gpu import proc
from orchestrator.gpu.drivers import simulated
from orchestrator.gpu.drivers.simulated import (
    SimulatedAssignments,
    SimulatedReader,
    WaitProbe,
    open_simulated,
    simulated_gpus,
    write_assignments,
)
from orchestrator.gpu.load import Band, LoadWindow, balance
from orchestrator.gpu.sample import GpuReadError, Vendor
from tests.unit.gpu.support import wait_for


class FakeProc:
    """A fake /proc with processes that the test updates."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def process(
        self,
        pid: int,
        *,
        busy: float = 0.0,
        ready: float = 0.0,
        started: int = 1000,
        resident: int = 100 << 20,
        where: str = "0",
        threads: tuple[str, ...] = ("python", "pt_gloo_runloop"),
        state: str = "S",
    ) -> None:
        base = self.root / str(pid)
        pages = resident // os.sysconf("SC_PAGE_SIZE")
        fields = [state, *["0"] * 18, str(started), "0", str(pages), *["0"] * 20]
        for number, name in enumerate(threads):
            task = base / "task" / str(pid + number)
            task.mkdir(parents=True, exist_ok=True)
            run = int(busy * 1e9) if number == 0 else 0
            (task / "schedstat").write_text(f"{run} {int(ready * 1e9) if number == 0 else 0} 7\n")
            (task / "comm").write_text(f"{name}\n")
        (base / "stat").write_text(f"{pid} (a (nasty) name) {' '.join(fields)}\n")
        (base / "wchan").write_text(where)

    def end(self, pid: int) -> None:
        (self.root / str(pid) / "stat").unlink()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def world(tmp_path: Path) -> tuple[FakeProc, Clock, Path]:
    return FakeProc(tmp_path / "proc"), Clock(), tmp_path / "gpus.json"


def reader_of(world: tuple[FakeProc, Clock, Path], index: int = 0, probe: WaitProbe | None = None) -> SimulatedReader:
    fake, clock, path = world
    info = simulated_gpus(index + 1, "node1")[index]
    return SimulatedReader(info, SimulatedAssignments(path), probe=probe, procfs=fake.root, clock=clock)


def test_every_label_says_simulated() -> None:
    for info in simulated_gpus(2, "node1"):
        assert info.simulated
        assert info.vendor is Vendor.SIMULATED
        for label in (info.uuid, info.model, info.pci_bus_id, info.driver_version):
            assert "simulated" in label
    assert len({info.uuid for info in (*simulated_gpus(2, "a"), *simulated_gpus(2, "b"))}) == 4


def test_a_gpu_without_processes_idles(world: tuple[FakeProc, Clock, Path]) -> None:
    reader, clock = reader_of(world), world[1]
    first = reader.read()
    assert (first.utilization, first.power_watts) == (None, None), "rates need two looks"
    clock.now += 1.0
    sample = reader.read()
    assert (sample.utilization, sample.power_watts, sample.memory_used_bytes) == (0.0, simulated.IDLE_WATTS, 0)


def test_utilization_is_the_ranks_share_of_time_at_work(world: tuple[FakeProc, Clock, Path]) -> None:
    fake, clock, path = world
    write_assignments(path, {0: [100]})
    fake.process(100, busy=10.0)
    reader = reader_of(world)
    reader.read()
    clock.now += 2.0
    fake.process(100, busy=10.5, ready=0.5)
    sample = reader.read()
    assert sample.utilization == pytest.approx(0.5), "work it is kept from doing counts as work"
    assert sample.memory_used_bytes == 100 << 20
    assert sample.power_watts == pytest.approx(60.0 + 240.0 * 0.5)
    assert sample.energy_joules == pytest.approx(180.0 * 2.0)


def test_a_rank_that_waits_for_others_is_busy_and_draws_little(world: tuple[FakeProc, Clock, Path]) -> None:
    fake, clock, path = world
    write_assignments(path, {0: [100]})
    probe = WaitProbe(fake.root)
    fake.process(100, where="futex_do_wait")
    reader = reader_of(world)
    reader._probe, reader._attached = probe, True  # probed by hand, not in the background
    reader.read()
    for where in ("futex_do_wait", "futex_do_wait", "futex_do_wait", "0"):
        fake.process(100, busy=0.25, where=where)
        probe.probe()
    clock.now += 1.0
    sample = reader.read()
    assert sample.utilization == pytest.approx(1.0)
    assert sample.power_watts == pytest.approx(60.0 + 240.0 * (0.25 + 0.15 * 0.75))
    reader._attached = False


@pytest.mark.parametrize(
    ("where", "threads", "waits"),
    [
        ("futex_do_wait", ("python", "pt_gloo_runloop"), True),
        ("futex_wait_queue", ("python", "gloo_tcp_loop"), True),
        ("futex_do_wait", ("python", "worker"), False),
        ("hrtimer_nanosleep", ("python", "pt_gloo_runloop"), False),
        ("pipe_read", ("python", "pt_gloo_runloop"), False),
    ],
)
def test_only_members_of_a_process_group_that_sleep_on_a_lock_wait(
    world: tuple[FakeProc, Clock, Path], where: str, threads: tuple[str, ...], waits: bool
) -> None:
    fake = world[0]
    fake.process(100, where=where, threads=threads)
    probe = WaitProbe(fake.root)
    probe.take(100)
    probe.probe()
    assert probe.take(100) == float(waits)


def test_a_sensor_repeats_itself_when_asked_too_soon(world: tuple[FakeProc, Clock, Path]) -> None:
    reader, clock = reader_of(world), world[1]
    first = reader.read()
    clock.now += 0.05
    again = reader.read()
    assert (first.fresh, again.fresh) == (True, False)
    assert again.driver_timestamp == first.driver_timestamp
    clock.now += 0.06
    assert reader.read().fresh


def test_processes_come_go_and_are_not_taken_for_one_another(world: tuple[FakeProc, Clock, Path]) -> None:
    fake, clock, path = world
    reader = reader_of(world)
    reader.options.processes = True
    write_assignments(path, {0: [100]})
    fake.process(100, busy=5.0)
    reader.read()
    clock.now += 1.0
    sample = reader.read()
    assert sample.utilization == 0.0, "what it did before it was seen is not counted"
    assert [process.pid for process in sample.processes] == [100]
    fake.process(100, busy=50.0, started=2000)
    clock.now += 1.0
    assert reader.read().utilization == 0.0, "another process with the same number"
    fake.end(100)
    clock.now += 1.0
    sample = reader.read()
    assert (sample.memory_used_bytes, sample.processes) == (0, ())
    fake.process(100, state="Z")
    clock.now += 1.0
    assert reader.read().processes == (), "a zombie is not on the GPU"


def test_heat_follows_power_and_energy_only_grows(world: tuple[FakeProc, Clock, Path]) -> None:
    fake, clock, path = world
    write_assignments(path, {0: [100]})
    reader = reader_of(world)
    busy, celsius, joules = 0.0, [], []
    for _ in range(200):
        fake.process(100, busy=busy)
        sample = reader.read()
        celsius.append(sample.temperature or 0.0)
        joules.append(sample.energy_joules or 0.0)
        clock.now += 1.0
        busy += 1.0
    assert celsius == sorted(celsius)
    assert celsius[-1] == pytest.approx(30.0 + 0.18 * 300.0, abs=0.5)
    assert joules == sorted(joules)


def test_assignments_missing_changed_and_broken(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "gpus.json"
    assignments = SimulatedAssignments(path)
    assert assignments.pids(0) == ()
    write_assignments(path, {1: {7, 3}, 0: []})
    assert (assignments.pids(0), assignments.pids(1), assignments.pids(9)) == ((), (3, 7), ())
    assert json.loads(path.read_text()) == {"version": 1, "gpus": {"0": [], "1": [3, 7]}}
    write_assignments(path, {1: [8]})
    assert assignments.pids(1) == (8,)
    path.write_text('{"version": 2, "gpus": {}}')
    with pytest.raises(GpuReadError, match="Restart the daemon"):
        assignments.pids(1)
    path.write_text("[]")
    with pytest.raises(GpuReadError, match="Delete it"):
        assignments.pids(1)
    path.unlink()
    assert assignments.pids(1) == ()
    assert [entry.name for entry in path.parent.iterdir()] == [], "no drafts are left behind"


SPIN = "import time\nprint('up', flush=True)\nwhile True: pass"
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)"


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for code in (SPIN, SLEEP)
    ]
    for one in running:
        assert one.stdout is not None
        assert one.stdout.readline() == "up\n"
    yield running
    for one in running:
        one.kill()
        one.communicate()


def test_real_processes_a_busy_one_and_a_sleeping_one(ranks: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    write_assignments(path, {index: [one.pid] for index, one in enumerate(ranks)})
    readers = open_simulated(2, "node1", SimulatedAssignments(path))
    windows = {reader.info.uuid: LoadWindow() for reader in readers}
    threads = {thread.name for thread in threading.enumerate()}

    def watched() -> bool:
        for reader in readers:
            sample = reader.read()
            if sample.fresh:
                windows[sample.gpu_uuid].add(sample)
        loads = {uuid: window.load(sample.monotonic) for uuid, window in windows.items()}
        busy, idle = loads.values()
        judged = balance(loads).worst is not None
        return bool(busy and idle and (busy.utilization or 0.0) > 0.5 and judged)

    wait_for(watched, "the busy rank being seen")
    busy, idle = (reader.read() for reader in readers)
    assert (idle.utilization or 0.0) < 0.2
    assert (busy.memory_used_bytes or 0) > 1 << 20
    result = balance({uuid: window.load(busy.monotonic) for uuid, window in windows.items()})
    assert result.worst is not None
    assert result.worst.band is Band.POOR
    for reader in readers:
        reader.close()
    wait_for(lambda: {thread.name for thread in threading.enumerate()} <= threads, "the probe's end")


def test_a_process_is_named_with_those_it_descends_from() -> None:
    line = proc.ancestors(os.getpid())
    assert line[:2] == (os.getpid(), os.getppid())
    assert proc.ancestors(2**22 + 1) == ()
