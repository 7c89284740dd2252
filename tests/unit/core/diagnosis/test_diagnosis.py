"""Findings open on lasting problems, name the right rank and GPU, close afterwards, and never open on a healthy job."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from benchmarks.insight.traces import JobModel, Opened, diagnose
from orchestrator.core.diagnosis.definitions import DEFINITIONS, PRECEDENCE
from orchestrator.core.diagnosis.diagnosis import Changes, Diagnosis, worst
from orchestrator.core.diagnosis.observation import GpuSeen, JobSeen, RestartsSeen, SavesSeen, StallSeen
from orchestrator.core.facts import findings as f
from orchestrator.core.facts.codec import FACTS
from orchestrator.core.facts.faults import ExitCode, GpuLost, Xid
from orchestrator.core.facts.findings import Lateness, Sign, Stillness
from orchestrator.core.thresholds import MAX_FINDINGS
from tests.support.records import replace

FAULT_AT = 60.0


def names(opened: list[Opened]) -> list[tuple[str, int | None]]:
    return [(one.finding.kind, one.finding.rank) for one in opened]


def slower(rank: int, factor: float) -> Callable[[JobModel], None]:
    def change(job: JobModel) -> None:
        job.each[rank].slower = factor

    return change


def gpu_is(rank: int, **values: object) -> Callable[[JobModel, float, JobSeen], JobSeen]:
    def hook(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        if at < FAULT_AT:
            return seen
        gpus = [replace(gpu, **values) if gpu.rank == rank else gpu for gpu in seen.gpus]  # type: ignore[arg-type]
        return replace(seen, gpus=tuple(gpus))

    return hook


def test_an_open_finding_has_the_figures_of_the_newest_observation_and_no_event_for_them() -> None:
    diagnosis = Diagnosis(0.0)
    cause = ExitCode(rank=0, exit_code=1)

    def look(at: float, restarts: int) -> Changes:
        loop = RestartsSeen(count=min(restarts, 9), seconds=8.0, cause=cause, total=restarts)
        return diagnosis.observe(JobSeen(running=False, restarts=loop), at, 1000.0 + at)

    (opened,) = look(2.0, 3).opened
    assert look(4.0, 2000) == Changes()
    (newest,) = diagnosis.findings
    assert isinstance(newest, f.RestartLoop)
    assert (newest.total, newest.since) == (2000, opened.since)
    assert newest.sentence().startswith("2000 restarts, the newest 9 in 8s, the last because rank 0")
    assert look(6.0, 1) == Changes(closed=(newest,)), "figures below the threshold do not show it"
    assert Diagnosis(0.0, [newest]).observe(JobSeen(), 2.0, 2.0).closed == (newest,)


def test_every_kind_has_a_definition_with_a_hysteresis() -> None:
    kinds = {cls for cls in FACTS.values() if issubclass(cls, f.Finding)}
    assert set(DEFINITIONS) == kinds
    assert all(one.closes_at <= one.opens_at for one in DEFINITIONS.values())
    assert all(one.close_seconds >= 0.0 <= one.open_seconds for one in DEFINITIONS.values())
    assert len(PRECEDENCE) == len(kinds)


@pytest.mark.parametrize(
    "job",
    [
        JobModel(),
        JobModel(ranks=8, step_seconds=5.0),
        JobModel(step_seconds=0.005, noise=0.1),
        JobModel(lockstep=False, noise=0.2, parts=False),
        JobModel(reports=False),
        JobModel(simulated=True, parts=False),
        JobModel(gpus=False, parts=False),
        JobModel(ranks=1),
        JobModel(first_step_at=300.0),
        JobModel(paused=lambda at: 100.0 <= at < 125.0),
        JobModel(models=("H100", "A100")),
    ],
)
def test_a_healthy_job_has_no_findings(job: JobModel) -> None:
    assert names(diagnose(job, 600.0)) == []


@pytest.mark.parametrize("factor", [1.25, 2.0])
@pytest.mark.parametrize(
    "job",
    [
        JobModel(),
        JobModel(ranks=8, simulated=True, parts=False),
        JobModel(ranks=2, lockstep=False, parts=False),
        JobModel(gpus=False, parts=False, step_seconds=2.0),
    ],
    ids=["trainer", "simulated", "without collectives", "no GPU"],
)
def test_a_slow_rank_is_named_within_a_minute(job: JobModel, factor: float) -> None:
    job = replace(job, each=[])
    found = diagnose(job, 180.0, events=[(FAULT_AT, slower(1, factor))])
    assert names(found) == [("rank_slow", 1)]
    assert found[0].at <= FAULT_AT + 60.0
    slow = found[0].finding
    assert isinstance(slow, f.RankSlow)
    assert slow.awaited is job.lockstep
    assert slow.factor == pytest.approx(factor, rel=0.1)


def test_without_times_of_its_own_the_awaited_rank_is_known_by_its_power() -> None:
    job = JobModel(parts=False)
    assert names(diagnose(job, 180.0, events=[(FAULT_AT, slower(2, 2.0))])) == [("rank_awaited", 2)]


@pytest.mark.parametrize("ranks", [(2,), (0, 1, 2, 3)])
def test_starved_input_is_told_of_one_rank_or_of_all(ranks: tuple[int, ...]) -> None:
    def starve(job: JobModel) -> None:
        for rank in ranks:
            job.each[rank].data_share = 0.5

    found = diagnose(JobModel(), 180.0, events=[(FAULT_AT, starve)])
    assert names(found) == [("input_starved", 2 if len(ranks) == 1 else None)]


def test_an_idle_gpu_and_a_slow_one_are_named() -> None:
    def idle(job: JobModel) -> None:
        job.each[3].idle_gpu = True

    def low(job: JobModel) -> None:
        job.each[3].clock = 0.7

    for reports in (True, False):
        found = diagnose(JobModel(reports=reports), 180.0, events=[(FAULT_AT, idle)])
        assert names(found) == [("gpu_idle", 3)]
        assert found[0].finding.gpu_uuid == "GPU-3"
    found = diagnose(JobModel(), 180.0, events=[(FAULT_AT, low), (FAULT_AT, slower(3, 1.4))])
    assert names(found) == [("gpu_slow", 3)], "it explains why the rank is slow"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"throttle": ("thermal",)}, "gpu_throttled"),
        ({"throttle": ("power_cap",), "power_limit_watts": 250.0}, "gpu_throttled"),
        ({"foreign_pids": (4711,)}, "gpu_shared"),
        ({"fault": Xid(gpu_uuid="GPU-1", number=79)}, "gpu_fault"),
        ({"fault": GpuLost(gpu_uuid="GPU-1")}, "gpu_fault"),
        ({"silent": True}, "exporter_silent"),
    ],
)
def test_what_a_driver_or_an_exporter_says_is_told_with_the_gpu(values: dict[str, object], kind: str) -> None:
    (found,) = diagnose(JobModel(hook=gpu_is(1, **values)), 150.0)
    assert (found.finding.kind, found.finding.rank, found.finding.gpu_uuid) == (kind, 1, "GPU-1")
    assert found.finding.node == "n1"
    assert FAULT_AT <= found.finding.since <= found.at <= FAULT_AT + 60.0


def test_a_gpu_at_its_own_limit_and_clocks_that_a_person_set_are_no_throttling() -> None:
    def all_capped(_job: JobModel, _at: float, seen: JobSeen) -> JobSeen:
        reasons = ("power_cap", "clock_setting")
        return replace(seen, gpus=tuple(replace(gpu, throttle=reasons) for gpu in seen.gpus))

    assert names(diagnose(JobModel(hook=all_capped), 300.0)) == []


def test_one_bad_sample_opens_nothing() -> None:
    def glitch(_job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        if at % 20.0:
            return seen
        bad = replace(seen.gpus[0], utilization=0.0, throttle=("thermal",), foreign_pids=(1,), silent=True)
        return replace(seen, gpus=(bad, *seen.gpus[1:]))

    assert names(diagnose(JobModel(hook=glitch), 300.0)) == []


def test_a_finding_closes_when_it_is_over_and_takes_longer_to_open_again() -> None:
    diagnosis = Diagnosis(0.0)
    gpu = GpuSeen(gpu_uuid="GPU-0", rank=0, sampled_at=1.0)
    changes = []
    for tick in range(300):
        at = 2.0 * tick
        shared = (tick // 25) % 2 == 1
        seen = JobSeen(gpus=(replace(gpu, foreign_pids=(7,) if shared else ()),))
        change = diagnosis.observe(seen, at, 1000.0 + at)
        changes += [("open", at) for _ in change.opened] + [("close", at) for _ in change.closed]
    kinds = [kind for kind, _ in changes]
    assert kinds[:2] == ["open", "close"]
    assert kinds.count("open") <= 2, "what flaps is not told of again and again"
    assert kinds.count("open") - kinds.count("close") == len(diagnosis.findings)


def test_a_restarted_daemon_goes_on_with_what_is_open_and_closes_it() -> None:
    known = f.GpuShared(rank=0, gpu_uuid="GPU-0", pids=(7,), since=5.0, confidence=f.Confidence.CERTAIN)
    diagnosis = Diagnosis(0.0, [known])
    gpu = GpuSeen(gpu_uuid="GPU-0", rank=0, foreign_pids=(7,))
    assert diagnosis.observe(JobSeen(gpus=(gpu,)), 1.0, 1.0).opened == ()
    assert diagnosis.findings == (known,)
    closed = [diagnosis.observe(JobSeen(), float(at), float(at)).closed for at in range(2, 40, 2)]
    assert [one for changes in closed for one in changes] == [known]


def test_one_observation_gives_a_known_finding_its_figures_and_another_attempt_keeps_them() -> None:
    known = f.GpuShared(rank=0, gpu_uuid="GPU-0", pids=(7,), since=5.0, confidence=f.Confidence.CERTAIN)
    diagnosis = Diagnosis(0.0, [known])
    assert (diagnosis.findings, diagnosis.measured) == ((known,), ())
    diagnosis.observe(JobSeen(gpus=(GpuSeen(gpu_uuid="GPU-0", rank=0, foreign_pids=(8,)),)), 1.0, 1.0)
    (newest,) = diagnosis.measured
    assert isinstance(newest, f.GpuShared)
    assert (newest.pids, newest.since) == ((8,), 5.0)
    assert Diagnosis(2.0, [known], diagnosis.measured).measured == (newest,)
    assert Diagnosis(2.0, [], diagnosis.measured).findings == (), "it has closed meanwhile"


def test_what_was_not_witnessed_does_not_count() -> None:
    diagnosis = Diagnosis(0.0)
    gpu = GpuSeen(gpu_uuid="GPU-0", rank=0, silent=True)
    opened = [diagnosis.observe(JobSeen(gpus=(gpu,)), at, at).opened for at in (2.0, 40_000.0)]
    assert opened == [(), ()], "the machine slept"


def stall(still: float, sign: Sign, **values: float | bool) -> JobSeen:
    late = Lateness(still_seconds=still, usual_seconds=0.1)
    seen = Stillness(rank=2, sign=sign, place="pull (/work/data.py:7)", pid=9)
    return JobSeen(stall=StallSeen(seen=seen, late=late, longest_step=0.2, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "kinds"),
    [
        (stall(4.0, Sign.STOPPED), ["rank_stopped"]),
        (stall(20.0, Sign.OUTSIDE), []),
        (stall(31.0, Sign.OUTSIDE), ["no_step"]),
        (stall(31.0, Sign.OUTSIDE, longest_pause=60.0), []),
        (stall(61.0, Sign.WORKS), []),
        (stall(301.0, Sign.WORKS), ["no_step"]),
        (stall(5.0, Sign.LOCK, proven=True), ["no_step"]),
    ],
)
def test_a_job_that_is_still_is_told_of_at_once_with_the_rank(seen: JobSeen, kinds: list[str]) -> None:
    opened = Diagnosis(0.0).observe(seen, 1.0, 1.0).opened
    assert [one.kind for one in opened] == kinds
    assert all(one.rank == 2 for one in opened)


def test_a_job_that_runs_and_does_nothing() -> None:
    late = Lateness(still_seconds=60.0, by_steps=False)
    gone = StallSeen(seen=Stillness(rank=0, sign=Sign.UNKNOWN), late=late)

    def nothing(_job: JobModel, _at: float, seen: JobSeen) -> JobSeen:
        return replace(seen, gpus=tuple(replace(gpu, utilization=0.0) for gpu in seen.gpus), stall=gone)

    def works(job: JobModel, at: float, seen: JobSeen) -> JobSeen:
        busy = replace(gone, seen=replace(gone.seen, sign=Sign.WORKS))
        return replace(nothing(job, at, seen), stall=busy)

    assert names(diagnose(JobModel(reports=False, hook=nothing), 120.0)) == [("job_idle", None)]
    assert names(diagnose(JobModel(reports=False, hook=works), 600.0)) == []


@pytest.mark.parametrize(("value", "said"), [(math.nan, "NaN"), (math.inf, "infinite")])
def test_a_loss_that_is_no_number(value: float, said: str) -> None:
    job = JobModel(loss=lambda step, rnd: value if step > 600 else 3.0 / (1 + step) + rnd.random())
    (found,) = diagnose(job, 200.0)
    assert isinstance(found.finding, f.LossNotFinite)
    assert (found.finding.metric, found.finding.value) == ("loss", said)


def test_a_flat_loss_is_told_apart_from_one_that_is_reported_now_and_then() -> None:
    flat = JobModel(loss=lambda step, rnd: 2.3025 if step > 600 else rnd.random())
    assert names(diagnose(flat, 180.0)) == [("loss_flat", None)]
    by_epoch = JobModel(loss=lambda step, _: 3.0 / (1 + step // 500))
    assert names(diagnose(by_epoch, 900.0)) == []
    once = JobModel(loss=lambda _step, _rnd: 1.0)
    assert names(diagnose(once, 300.0)) == []


def test_saves_that_fail_or_are_rare() -> None:
    failing = JobModel(saves=lambda at: SavesSeen(failures=3 if at > FAULT_AT else 0, said="no space left"))
    (found,) = diagnose(failing, 100.0)
    assert isinstance(found.finding, f.SavesFailing)
    assert names(diagnose(JobModel(saves=lambda _: SavesSeen(failures=1)), 100.0)) == []
    rare = JobModel(saves=lambda at: SavesSeen(ever=True, unsaved_seconds=1700.0 + at, interval_seconds=300.0))
    assert names(diagnose(rare, 200.0)) == [("saves_rare", None)]
    assert names(diagnose(JobModel(saves=lambda at: SavesSeen(unsaved_seconds=1700.0 + at)), 300.0)) == []


@pytest.mark.parametrize(("step", "kinds"), [(0, ["started_over"]), (570, ["started_over"]), (600, [])])
def test_an_attempt_that_began_behind_its_checkpoint(step: int, kinds: list[str]) -> None:
    job = JobModel(saves=lambda _: SavesSeen(ever=True, unsaved_seconds=1.0, behind=(step, 640)))
    assert [kind for kind, _ in names(diagnose(job, 20.0))] == kinds


def test_a_restart_loop_has_its_cause() -> None:
    seen = JobSeen(running=False, restarts=RestartsSeen(count=3, seconds=700.0, cause=ExitCode(rank=1, exit_code=3)))
    (found,) = Diagnosis(0.0).observe(seen, 1.0, 1.0).opened
    assert isinstance(found, f.RestartLoop)
    assert found.cause == ExitCode(rank=1, exit_code=3)


def test_the_number_of_findings_is_bounded_and_the_gravest_come_first() -> None:
    def silent(_job: JobModel, _at: float, seen: JobSeen) -> JobSeen:
        first = replace(seen.gpus[40], fault=GpuLost(gpu_uuid="GPU-40"))
        rest = [replace(gpu, foreign_pids=(1,)) for gpu in seen.gpus if gpu is not seen.gpus[40]]
        return replace(seen, gpus=(*rest, first))

    found = diagnose(JobModel(ranks=64, hook=silent), 30.0)
    assert len(found) == MAX_FINDINGS
    assert found[0].finding.kind == "gpu_fault"
    first = worst([one.finding for one in reversed(found)])
    assert first is not None
    assert first.rank == 40


def test_a_slow_node_is_named_and_its_ranks_are_not() -> None:
    job = JobModel(ranks=4, nodes=2)

    def slow(model: JobModel) -> None:
        for rank in (2, 3):
            model.each[rank].slower = 1.5

    (found,) = diagnose(job, 180.0, events=[(FAULT_AT, slow)])
    node = found.finding
    assert isinstance(node, f.NodeSlow)
    assert (node.node, node.rank, node.ranks) == ("n2", None, 2)
    assert node.factor == pytest.approx(1.5, rel=0.1)


def test_skewed_clocks_of_two_nodes_are_two_findings() -> None:
    offsets = {"n1": 40.0, "n2": -90.0}

    def skew(_job: JobModel, _at: float, seen: JobSeen) -> JobSeen:
        return replace(
            seen, gpus=tuple(replace(gpu, clock_offset_seconds=offsets.get(gpu.node, 0.0)) for gpu in seen.gpus)
        )

    found = diagnose(JobModel(ranks=6, nodes=3, hook=skew), 90.0)
    assert {one.finding.node: getattr(one.finding, "seconds", None) for one in found} == offsets
    assert len({f.key_of(one.finding) for one in found}) == 2


def test_steps_without_any_use_of_the_gpus_are_told_and_simulated_gpus_are_not() -> None:
    def unused(_job: JobModel, _at: float, seen: JobSeen) -> JobSeen:
        return replace(seen, gpus=tuple(replace(gpu, utilization=0.0) for gpu in seen.gpus))

    assert names(diagnose(JobModel(hook=unused), 120.0)) == [("gpus_unused", None)]
    assert names(diagnose(JobModel(hook=unused, simulated=True, parts=False), 120.0)) == []


@pytest.mark.parametrize(
    ("stall", "kinds"), [(20.0, ["saves_slow"]), (5.0, []), (None, [])], ids=["a third", "a twelfth", "not known"]
)
def test_saves_that_take_a_large_share_of_their_interval(stall: float | None, kinds: list[str]) -> None:
    saves = SavesSeen(ever=True, unsaved_seconds=1.0, interval_seconds=60.0, stall_seconds=stall)
    assert [kind for kind, _ in names(diagnose(JobModel(saves=lambda _: saves), 60.0))] == kinds
    brief = replace(saves, interval_seconds=1.0, stall_seconds=0.5)
    assert names(diagnose(JobModel(saves=lambda _: brief), 60.0)) == []


def test_gpu_memory_that_grows_says_when_it_is_full() -> None:
    job = JobModel(ranks=1, memory=lambda at, _: 20e9 + 1e7 * at)
    (found,) = diagnose(job, 800.0)
    growing = found.finding
    assert isinstance(growing, f.GpuMemoryGrowing)
    assert growing.gpu_uuid == "GPU-0"
    assert growing.seconds_left == pytest.approx((80e9 - growing.used_bytes) / 1e7, rel=0.01)
    slow = JobModel(ranks=1, memory=lambda at, _: 20e9 + 1e5 * at)
    assert names(diagnose(slow, 800.0)) == [], "it lasts for longer than is told of"
