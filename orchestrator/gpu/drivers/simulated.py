"""Simulated GPUs that report real work: ranks on a machine without a GPU, measured as a GPU would report them.

Utilization is the share of time in which the rank's process worked, was ready to work, or waited for other ranks: a
real GPU spins in the collective kernel and counts as busy, and only its power differs. Memory is the process's resident
set. Power, heat and energy follow from the work. Nothing is random: two identical ranks show the same load, and a slow
one shows as it would on hardware.

Not detectable from outside: a rank that sleeps on a lock for another reason than its peers (for example a data loader
that pins memory in a thread) also counts as busy.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from orchestrator.gpu import proc
from orchestrator.gpu.sample import Detail, GpuInfo, GpuProcess, GpuReadError, ReaderOptions, Sample, Throttle, Vendor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path


MEMORY_BYTES: Final = 16 * 2**30
IDLE_WATTS: Final = 60.0
LIMIT_WATTS: Final = 300.0
WAITING_WORK: Final = 0.15
"""Power of a GPU that spins in a collective, as a share of full work: it distinguishes a waiting rank from a busy one."""
AMBIENT_CELSIUS: Final = 30.0
CELSIUS_PER_WATT: Final = 0.18
HEAT_SECONDS: Final = 20.0
IDLE_HERTZ: Final = 345e6
BUSY_HERTZ: Final = 1.98e9
SENSOR_SECONDS: Final = 0.1
"""The sensor's update interval, like that of real sensors; a sooner reading repeats the last value."""
PROBE_SECONDS: Final = 0.05


UUID_PREFIX: Final = "simulated-"


def is_simulated(uuid: str) -> bool:
    """Whether a GPU is a simulated one, by its UUID."""
    return uuid.startswith(UUID_PREFIX)


def simulated_gpus(count: int, node: str) -> tuple[GpuInfo, ...]:
    """Return the identities of `count` simulated GPUs of a node; their UUIDs are unique across nodes."""
    return tuple(
        GpuInfo(
            uuid=f"{UUID_PREFIX}{node}-{index}",
            index=index,
            ordinal=index,
            vendor=Vendor.SIMULATED,
            model="simulated GPU",
            memory_total_bytes=MEMORY_BYTES,
            pci_bus_id=f"simulated:{index}",
            driver_version="simulated",
            simulated=True,
        )
        for index in range(count)
    )


class WaitProbe:
    """Samples a few times a second whether ranks wait for each other, which /proc does not record.

    Shared by the simulated GPUs of a process; its thread lives from the first `attach` to the last `detach`.
    """

    def __init__(self, procfs: Path = proc.PROC) -> None:
        """Probe nothing until the first process is requested."""
        self._proc = procfs
        self._seen: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._users = 0
        self._stop = threading.Event()

    def take(self, pid: int) -> float:
        """Return the share of probes since the last call in which the process waited for other ranks; watch it from now."""
        with self._lock:
            waited, probes = self._seen.get(pid, (0, 0))
            self._seen[pid] = (0, 0)
        return waited / probes if probes else 0.0

    def forget(self, pid: int) -> None:
        """Stop probing this process."""
        with self._lock:
            self._seen.pop(pid, None)

    def probe(self) -> None:
        """Probe every watched process once."""
        with self._lock:
            pids = tuple(self._seen)
        for pid in pids:
            waits = proc.waits_on_lock(pid, self._proc) and proc.in_process_group(pid, self._proc)
            with self._lock:
                if pid in self._seen:
                    waited, probes = self._seen[pid]
                    self._seen[pid] = (waited + waits, probes + 1)

    def attach(self) -> None:
        """Probe in the background from now on."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._stop = threading.Event()
        threading.Thread(target=self._run, args=(self._stop,), name="orch-wait-probe", daemon=True).start()

    def detach(self) -> None:
        """Undo one `attach`; the background thread ends with the last."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stop.set()

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(PROBE_SECONDS):
            self.probe()


@dataclass(slots=True)
class _State:
    """The GPU's state: the sensor's last values; rates are absent before the second reading."""

    at: float | None = None
    timestamp: float = 0.0
    utilization: float | None = None
    work: float | None = None
    watts: float | None = None
    joules: float = 0.0
    celsius: float = AMBIENT_CELSIUS + IDLE_WATTS * CELSIUS_PER_WATT
    ranks: dict[int, proc.ProcessUse] = field(default_factory=dict)


class SimulatedReader:
    """Reads one simulated GPU; see `orchestrator.gpu.sample.GpuReader`."""

    def __init__(
        self,
        info: GpuInfo,
        assignments: SimulatedAssignments | None,
        *,
        probe: WaitProbe | None = None,
        procfs: Path = proc.PROC,
        clock: Callable[[], float] = time.monotonic,
        options: ReaderOptions | None = None,
    ) -> None:
        """Watch the processes that `assignments` names for this GPU; without assignments the GPU is idle.

        `probe` may be shared by the readers of a process; `procfs` and `clock` (monotonic seconds) are for tests.
        """
        self.info = info
        self.options = options or ReaderOptions()
        self._assignments = assignments
        self._probe = probe
        self._proc = procfs
        self._clock = clock
        self._state = _State()
        self._attached = False

    def read(self, detail: Detail = Detail.FULL) -> Sample:
        """Read the processes and their work since the sensor's last update."""
        now, wall, start = self._clock(), time.time(), time.perf_counter()
        state = self._state
        if self._probe is not None and not self._attached:
            self._attached = True
            self._probe.attach()
        # A tolerance: ten readings a second are all new, also when one is early.
        due = state.at is None or now - state.at >= 0.95 * SENSOR_SECONDS
        if due:
            self._advance(now)
            state.timestamp = wall
        used = sum(rank.resident_bytes for rank in state.ranks.values())
        processes = (
            tuple(GpuProcess(pid=pid, memory_bytes=rank.resident_bytes) for pid, rank in sorted(state.ranks.items()))
            if self.options.processes and detail is Detail.FULL
            else ()
        )
        return Sample(
            gpu_uuid=self.info.uuid,
            timestamp=wall,
            monotonic=now,
            duration_seconds=time.perf_counter() - start,
            driver_timestamp=state.timestamp,
            fresh=due,
            utilization=state.utilization,
            memory_activity=state.work,
            memory_used_bytes=min(used, MEMORY_BYTES),
            memory_total_bytes=MEMORY_BYTES,
            power_watts=state.watts,
            power_limit_watts=LIMIT_WATTS,
            energy_joules=state.joules,
            temperatures=(("gpu", state.celsius),),
            temperature_limits=(("gpu", "slowdown", 90.0), ("gpu", "shutdown", 95.0)),
            clocks=(("sm", BUSY_HERTZ if state.utilization else IDLE_HERTZ),),
            throttle=((Throttle.POWER_CAP, False), (Throttle.THERMAL, False)),
            processes=processes,
        )

    def _advance(self, now: float) -> None:
        """Advance the sensor to `now`."""
        state = self._state
        elapsed = 0.0 if state.at is None else now - state.at
        work, waiting = self._load(elapsed)
        if elapsed > 0.0:
            state.utilization = min(1.0, work + waiting)
            state.work = work
            watts = IDLE_WATTS + (LIMIT_WATTS - IDLE_WATTS) * min(1.0, work + WAITING_WORK * waiting)
            state.watts = watts
            state.joules += watts * elapsed
            target = AMBIENT_CELSIUS + CELSIUS_PER_WATT * watts
            state.celsius += (target - state.celsius) * (1.0 - math.exp(-elapsed / HEAT_SECONDS))
        state.at = now

    def _load(self, elapsed: float) -> tuple[float, float]:
        """Return (share of time at work, share of time waiting for other ranks) since the last update."""
        pids = self._assignments.pids(self.info.ordinal) if self._assignments is not None else ()
        before, self._state.ranks = self._state.ranks, {}
        busy = waiting = 0.0
        for pid in pids:
            use = proc.read_use(pid, self._proc)
            if use is None:
                continue
            busy += use.busy_seconds_since(before.get(pid))
            waiting += self._probe.take(pid) if self._probe is not None else 0.0
            self._state.ranks[pid] = use
        if self._probe is not None:
            for pid in before.keys() - self._state.ranks.keys():
                self._probe.forget(pid)
        work = min(1.0, busy / elapsed) if elapsed > 0.0 else 0.0
        return work, min(waiting, 1.0 - work)

    def reopen(self) -> None:
        """Do nothing: there is no handle."""

    def close(self) -> None:
        """Stop watching processes."""
        if self._probe is not None and self._attached:
            self._attached = False
            for pid in self._state.ranks:
                self._probe.forget(pid)
            self._probe.detach()
        self._state.ranks = {}


def open_simulated(
    count: int, node: str, assignments: SimulatedAssignments | None, *, procfs: Path = proc.PROC
) -> list[SimulatedReader]:
    """Return readers for `count` simulated GPUs of a node."""
    probe = WaitProbe(procfs)
    return [SimulatedReader(info, assignments, probe=probe, procfs=procfs) for info in simulated_gpus(count, node)]


FORMAT_VERSION: Final = 1
FILE_NAME: Final = "simulated-gpus.json"
"""The file's name in the state directory of a daemon or a node's agent."""


def write_assignments(path: Path, pids_by_gpu: Mapping[int, Iterable[int]]) -> None:
    """Replace the file at `path` by this assignment: simulated GPU number to the process ids that run on it."""
    document = {
        "version": FORMAT_VERSION,
        "gpus": {str(index): sorted(pids) for index, pids in sorted(pids_by_gpu.items())},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(document), encoding="utf-8")
    draft.replace(path)


class SimulatedAssignments:
    """Reads the assignment file, again only when it has been replaced: which process runs on which simulated GPU.

    The file is JSON: `{"version": 1, "gpus": {"0": [4711], "1": [4712, 4713]}}`, simulated GPU number to process ids. It is
    replaced atomically by a rename, so a reader sees either the old state or the new one. A missing file means that nothing
    runs yet. One process writes it; any number read it.
    """

    def __init__(self, path: Path) -> None:
        """Follow the file at `path`, which need not exist yet."""
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._pids: dict[int, tuple[int, ...]] = {}

    def pids(self, index: int) -> tuple[int, ...]:
        """Return the processes on simulated GPU `index`. Raises GpuReadError for an invalid file."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._pids = None, {}
            return ()
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            self._pids = self._load()
            self._stamp = stamp
        return self._pids.get(index, ())

    def _load(self) -> dict[int, tuple[int, ...]]:
        try:
            document = json.loads(self._path.read_bytes())
            if document["version"] != FORMAT_VERSION:
                raise GpuReadError(
                    f"{self._path} is an assignment of version {document['version']}; this program reads version"
                    f" {FORMAT_VERSION}. Restart the daemon so that both are of one release."
                )
            return {int(index): tuple(int(pid) for pid in pids) for index, pids in document["gpus"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GpuReadError(
                f"{self._path} does not say which process runs on which simulated GPU ({error}). Delete it and restart"
                " the daemon, which writes it again."
            ) from error
