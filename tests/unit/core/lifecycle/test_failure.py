"""Causes of failed attempts, and whether another attempt follows: tables of cases."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from orchestrator.core import events as ev
from orchestrator.core.diagnosis.quarantine import strike_of
from orchestrator.core.diagnosis.signatures import SIGNATURES
from orchestrator.core.facts.faults import NodeLost, PortTaken, Xid
from orchestrator.core.facts.findings import Hang, Lateness, Sign, Stillness
from orchestrator.core.facts.notes import PoliciesLeftOut
from orchestrator.core.facts.reasons import LogPolicyFails, NoNewCheckpoint
from orchestrator.core.lifecycle.advance import declare_hung
from orchestrator.core.lifecycle.failure import (
    KEEP_GANG_SECONDS,
    SETTLE_SECONDS,
    ClassifiedFailure,
    backoff_seconds,
    classify,
    decide_retry,
    is_collateral,
    repeated,
)
from orchestrator.core.states import AttemptState, FailureClass, StopScope
from orchestrator.spec.model import Backoff, ExitCodes, MaxRestarts, RetrySpec
from tests.support.records import replace
from tests.unit.core.builders import (
    T0,
    after,
    changed,
    checkpoint,
    exited,
    failed,
    failure,
    gone,
    lost,
    make_spec,
    pending,
    running,
)

if TYPE_CHECKING:
    from typing import Any

    from orchestrator.core.job.record import Job

NOW = T0 + 10.1
USER, INFRA, HANG, PREEMPTION = (
    FailureClass.USER,
    FailureClass.INFRA,
    FailureClass.HANG,
    FailureClass.PREEMPTION,
)
GLOO = {"error_type": "RuntimeError", "error_message": "[gloo/transport/tcp/pair.cc:534] Connection closed by peer"}
BOOM = {"error_type": "ValueError", "error_message": "boom\nmore"}


def job_with(*exits: dict[str, Any], workers: int = 2, retry: RetrySpec | None = None) -> Job:
    job = running(pending(make_spec(workers=workers, retry=retry or RetrySpec())))
    return after(job, *(exited(job, rank, **fields) for rank, fields in enumerate(exits) if fields))


def verdict(job: Job, now: float = NOW) -> ClassifiedFailure:
    found = classify(job, now)
    assert isinstance(found, ClassifiedFailure)
    return found


BUSY_PORT = {
    "error_type": "OSError",
    "error_message": "[Errno 98] Address already in use (while attempting to bind on address ('127.0.0.1', 29600))",
}


@pytest.mark.parametrize(
    ("taken", "failure_class", "said"),
    [
        (
            PortTaken(port=29600, rendezvous_port=41000, listening=True, pid=7, program="python"),
            USER,
            "rank 0: port 29600 is in use by process 7 (python) ([Errno 98]",
        ),
        (PortTaken(port=29600, rendezvous_port=None, listening=True), USER, "rank 0: port 29600 is in use ([Errno 98]"),
        (
            PortTaken(port=29600, rendezvous_port=29599, listening=True, pid=7),
            INFRA,
            "rank 0: port 29600, which follows from MASTER_PORT, is in use by process 7 (",
        ),
        (PortTaken(port=29600, rendezvous_port=41000), INFRA, "rank 0: port 29600 is in use ("),
    ],
    ids=["of the script", "of the script, held by another user", "counted on from MASTER_PORT", "no process listens"],
)
def test_only_a_port_that_the_script_chose_and_another_process_holds_ends_the_job_at_once(
    taken: PortTaken, failure_class: FailureClass, said: str
) -> None:
    job = job_with({**BUSY_PORT, "at": T0 + 10, "evidence": (taken,)}, workers=1)
    found = verdict(job).failure
    assert (found.failure_class, found.code) == (failure_class, "port_in_use")
    assert found.sentence().startswith(said)
    assert "port 0" in found.advice(job.id)
    assert decide_retry(job, found, NOW).retry is (failure_class is INFRA)
    before = replace(job.attempts[-1], failure=found)
    assert repeated(replace(job, attempts=(before, *job.attempts)), found).failure_class is USER


@pytest.mark.parametrize(
    ("fields", "failure_class", "code", "sentence"),
    [
        (BOOM, USER, "exception", "rank 0 raised ValueError: boom"),
        ({"error_type": "SystemExit", "error_message": ""}, USER, "exception", "rank 0 raised SystemExit"),
        ({"exit_code": 1}, USER, "exit_code", "rank 0 ended with exit code 1"),
        ({"signal": 9}, INFRA, "signal", "rank 0 was killed by SIGKILL"),
        ({"signal": 11}, INFRA, "signal", "rank 0 was killed by SIGSEGV"),
        ({"signal": 31}, INFRA, "signal", "rank 0 was killed by signal 31"),
        ({"exit_code": None}, INFRA, "gang_lost", "rank 0 went away without an exit status"),
        (
            {"exit_code": 75},
            INFRA,
            "retry_exit_code",
            "rank 0 requested a retry (exit code 75, in retry.exit_codes)",
        ),
        (
            {"error_type": "torch.OutOfMemoryError", "error_message": "CUDA out of memory. Tried to allocate"},
            USER,
            "cuda_oom",
            "rank 0: CUDA ran out of memory (CUDA out of memory. Tried to allocate)",
        ),
        (
            {"error_type": "RuntimeError", "error_message": "CUDA error: unknown error"},
            INFRA,
            "gpu_lost",
            "rank 0: its GPU went away (CUDA error: unknown error)",
        ),
        (
            {"log_tail": ("OSError: [Errno 28] No space left on device",)},
            INFRA,
            "disk_full",
            "rank 0: the disk is full",
        ),
        (
            {"error_type": "orchestrator.checkpoint.errors.ResumeMismatchError", "error_message": "rank 1 cannot load"},
            INFRA,
            "resume_mismatch",
            "rank 0: it could not load the checkpoint that the other ranks resume from (rank 1 cannot load)",
        ),
        (
            {"error_type": "ModuleNotFoundError", "error_message": "No module named 'x'"},
            USER,
            "import_error",
            "rank 0: a Python module is missing (No module named 'x')",
        ),
        ({"log_tail": ("Address already in use",)}, INFRA, "port_in_use", "rank 0: a port that it needs is in use"),
    ],
)
def test_one_rank_fails(fields: dict[str, Any], failure_class: FailureClass, code: str, sentence: str) -> None:
    found = verdict(job_with({**fields, "at": T0 + 10}))
    assert (found.failure.failure_class, found.failure.code, found.failure.sentence()) == (
        failure_class,
        code,
        sentence,
    )
    assert found.failure.rank == 0
    assert found.failed_at == T0 + 10


def test_every_signature_has_its_own_code_and_advice() -> None:
    facts = [s.build(0, "") for s in SIGNATURES]
    assert len({fact.code for fact in facts}) == len(SIGNATURES)
    assert all(fact.advice() and fact.sentence() for fact in facts)


def test_a_signal_is_told_as_a_signal_whatever_stood_in_the_log() -> None:
    found = verdict(job_with({"signal": 9, "log_tail": ("CUDA out of memory",)}))
    assert found.failure.code == "signal"
    assert found.failure.signal == 9
    assert found.failure.log_tail == ("CUDA out of memory",)


def test_the_exception_says_when_it_began_not_the_death() -> None:
    found = verdict(job_with({**BOOM, "at": T0 + 12, "error_at": T0 + 9}))
    assert found.failed_at == T0 + 9


class TestCollateral:
    """Survivors' errors never hide the rank that failed first."""

    @pytest.mark.parametrize(
        "fields",
        [
            GLOO,
            {"error_type": "DistBackendError", "error_message": "NCCL communicator was aborted on rank 1."},
            {"error_type": "torch.distributed.DistNetworkError", "error_message": "failed to recv, got 0 bytes"},
            {"error_type": "RuntimeError", "error_message": "Socket Timeout"},
            {"error_type": "ConnectionResetError", "error_message": "Connection reset by peer"},
            {"log_tail": ("noise", "RuntimeError: Rank 1 is gone")},
            {"signal": 6, "log_tail": ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",)},
        ],
    )
    def test_it_is_recognised(self, fields: dict[str, Any]) -> None:
        (ended,) = job_with(fields).exits
        assert is_collateral(ended)

    @pytest.mark.parametrize(
        "fields",
        [
            BOOM,
            {"exit_code": 0, "log_tail": ("Connection closed by peer",)},
            {"signal": 9, "log_tail": ("Connection closed by peer",)},
            {"signal": 11, "log_tail": ("NCCL error",)},
            {"exit_code": 1, "log_tail": ("Connection closed by peer", *(["later lines"] * 15))},
            {**BOOM, "log_tail": ("Connection closed by peer",)},
        ],
    )
    def test_a_root_is_not_taken_for_it(self, fields: dict[str, Any]) -> None:
        (ended,) = job_with(fields).exits
        assert not is_collateral(ended)

    def test_it_does_not_hide_a_root_that_is_reported_later(self) -> None:
        job = job_with({**GLOO, "at": T0 + 10.0}, {"signal": 9, "at": T0 + 10.2})
        assert verdict(job, T0 + 10.2).failure.rank == 1

    def test_it_waits_for_the_root_a_moment(self) -> None:
        job = job_with({**GLOO, "at": T0 + 10}, {})
        assert classify(job, T0 + 10) == T0 + 10 + SETTLE_SECONDS
        assert classify(job, T0 + 10 + SETTLE_SECONDS - 0.01) == T0 + 10 + SETTLE_SECONDS

    def test_after_the_moment_it_is_the_verdict_and_charged_to_nobody(self) -> None:
        found = verdict(job_with({**GLOO, "at": T0 + 10}, {}), T0 + 10 + SETTLE_SECONDS)
        assert (found.failure.rank, found.failure.failure_class) == (0, INFRA)

    def test_of_two_roots_the_first_is_named(self) -> None:
        job = job_with({**BOOM, "at": T0 + 10.2, "error_at": T0 + 9.0}, {"signal": 9, "at": T0 + 10.0})
        assert verdict(job).failure.rank == 0

    def test_it_does_not_hide_a_node_that_died(self) -> None:
        job = job_with({**GLOO, "at": T0 + 10}, {})
        found = verdict(after(job, lost(job, reason=NodeLost(rank=1, node="b"))), T0 + 10.05)
        assert (found.failure.code, found.failure.sentence()) == ("gang_lost", "rank 1: its node died")
        assert found.failed_at == T0 + 10

    @pytest.mark.parametrize(
        "fields",
        [
            GLOO,
            {"error_type": "torch.distributed.DistStoreError", "error_message": "wait timeout after 9ms, keys: /0"},
            {"signal": 6, "log_tail": ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)",)},
            {"error_type": "RuntimeError", "error_message": "Socket Timeout"},
        ],
    )
    def test_a_rank_that_ended_with_0_is_named_by_those_that_missed_it(self, fields: dict[str, Any]) -> None:
        ended = {"exit_code": 0, "at": T0 + 10.1, "last_step": 5}
        job = job_with({**fields, "at": T0 + 10}, ended)
        found = verdict(job).failure
        assert (found.failure_class, found.code, found.rank) == (USER, "ended_alone", 1)
        assert found.sentence().startswith(
            "rank 1 ended with exit code 0 after step 5, while rank 0 waited for it in a collective"
        )
        assert not decide_retry(job, found, NOW).retry
        assert "orch logs job --rank 1" in found.advice("job")

    @pytest.mark.parametrize(
        ("fields", "ended"),
        [
            (BOOM, {}),
            ({"signal": 9}, {}),
            (GLOO, {"at": T0 + 10 + 2 * SETTLE_SECONDS}),
            (GLOO, {"log_tail": ("RuntimeError: Connection closed by peer", "saved; bye")}),
            ({**GLOO, "evidence": (Xid(gpu_uuid="GPU-1", number=79),), "signal": 6, "log_tail": ("NCCL error",)}, {}),
        ],
        ids=["an exception", "a signal", "it ended later", "it was a victim too", "the GPU"],
    )
    def test_a_rank_that_ended_with_0_does_not_explain_other_failures(
        self, fields: dict[str, Any], ended: dict[str, Any]
    ) -> None:
        job = job_with({"at": T0 + 10, **fields}, {"exit_code": 0, "at": T0 + 9, **ended})
        assert verdict(job, T0 + 20).failure.rank == 0

    def test_a_root_is_not_hidden_by_the_gang_that_went_after_it(self) -> None:
        job = job_with({**BOOM}, {})
        assert verdict(after(job, lost(job))).failure.code == "exception"


@pytest.mark.parametrize(
    ("failure_class", "limits", "used", "retry", "refusal"),
    [
        (USER, MaxRestarts(), 0, False, ""),
        (USER, MaxRestarts(user=2), 1, True, ""),
        (USER, MaxRestarts(user=2), 2, False, "2 of 2 user restarts used"),
        (INFRA, MaxRestarts(), 9, True, ""),
        (INFRA, MaxRestarts(), 10, False, "10 of 10 infra restarts used"),
        (HANG, MaxRestarts(), 1, True, ""),
        (HANG, MaxRestarts(), 2, False, "2 of 2 hang restarts used"),
        (PREEMPTION, MaxRestarts(), 10_000, True, ""),
        (PREEMPTION, MaxRestarts(preemption=3), 3, False, "3 of 3 preemption restarts used"),
        (FailureClass.TIMEOUT, MaxRestarts(), 0, False, ""),
        (FailureClass.SPEC, MaxRestarts(), 0, False, ""),
    ],
)
def test_each_class_has_its_own_budget(
    failure_class: FailureClass, limits: MaxRestarts, used: int, retry: bool, refusal: str
) -> None:
    job = running(pending(make_spec(retry=RetrySpec(max_restarts=limits, max_no_progress=10**6))))
    others = {c.value: 99 for c in FailureClass if c is not failure_class}
    job = changed(job, restarts={**others, failure_class.value: used})
    found = decide_retry(job, failure(failure_class), NOW)
    assert (found.retry, found.refusal.sentence() if found.refusal else "") == (retry, refusal)


def test_a_log_policy_that_says_fail_comes_before_every_budget() -> None:
    found = decide_retry(running(), failure(policy="fail"), NOW)
    assert (found.retry, found.refusal) == (False, LogPolicyFails())


def test_the_policy_is_the_one_of_the_rank_that_failed_first() -> None:
    job = job_with({**GLOO, "at": T0 + 10.0, "policy": "fail"}, {**BOOM, "at": T0 + 10.2, "policy": "restart"})
    assert verdict(job).failure.policy == "restart"


def test_a_pattern_that_took_too_long_is_told_beside_the_failure() -> None:
    found = verdict(job_with({**BOOM, "policy_note": PoliciesLeftOut(pattern="(a+)+$", seconds=2.0)}))
    assert "; the log policy '(a+)+$' took longer than 2s to search for" in found.failure.advice("job")


def test_a_log_policy_may_restart_beyond_the_budget_but_not_without_progress() -> None:
    flaky = failure(USER, policy="restart")
    assert decide_retry(running(), flaky, NOW).retry
    assert not decide_retry(changed(running(), no_progress=3), flaky, NOW).retry


class TestProgress:
    """Restarts in a row without a newer checkpoint."""

    def test_they_are_bounded(self) -> None:
        job = changed(running(), no_progress=3)
        found = decide_retry(job, failure(), NOW)
        assert not found.retry
        assert found.refusal == NoNewCheckpoint(restarts=3)

    def test_a_newer_checkpoint_begins_anew_and_at_once(self) -> None:
        job = changed(running(), no_progress=3)
        job = after(job, checkpoint(job, 7))
        found = decide_retry(job, failure(), NOW)
        assert (found.retry, found.not_before) == (True, NOW)

    def test_the_bound_holds_through_a_life(self) -> None:
        job = running()
        for _ in range(3):
            found = decide_retry(job, failure(), NOW)
            assert found.retry
            job = after(job, failed(job, retry=True), gone(job))
            job = running(job, gang=job.gang)
        assert not decide_retry(job, failure(), NOW).retry


class TestBackoff:
    """Delays of restarts."""

    @pytest.mark.parametrize(
        ("without_progress", "at_most"), [(1, 1.0), (2, 2.0), (3, 4.0), (5, 16.0), (11, 600.0), (5000, 600.0)]
    )
    def test_it_doubles_up_to_the_maximum_with_a_jitter_below_a_tenth(
        self, without_progress: int, at_most: float
    ) -> None:
        seconds = backoff_seconds(running(), without_progress)
        assert 0.9 * at_most <= seconds <= at_most

    def test_the_jitter_depends_on_job_and_attempt_only(self) -> None:
        job = running()
        other = changed(job, id="digits-zzz999")
        assert backoff_seconds(job, 3) == backoff_seconds(job, 3)
        assert backoff_seconds(job, 3) != backoff_seconds(other, 3)

    def test_the_first_restart_is_immediate_and_keeps_the_gang(self) -> None:
        found = decide_retry(running(), failure(), NOW)
        assert (found.retry, found.keep_gang, found.not_before) == (True, True, NOW)

    def test_a_long_one_gives_the_gpus_back_meanwhile(self) -> None:
        backoff = Backoff(initial=timedelta(seconds=2 * KEEP_GANG_SECONDS))
        job = changed(running(pending(make_spec(retry=RetrySpec(backoff=backoff)))), no_progress=1)
        found = decide_retry(job, failure(), NOW)
        assert (found.retry, found.keep_gang) == (True, False)

    @pytest.mark.parametrize("code", ["gpu_lost", "gpu_ecc", "gpu_xid", "startup_timeout"])
    def test_a_place_that_would_fail_again_is_not_kept(self, code: str) -> None:
        found = decide_retry(running(), failure(code=code), NOW)
        assert (found.retry, found.keep_gang) == (True, False)


@pytest.mark.parametrize(("code", "failure_class"), [(3, INFRA), (75, USER)])
def test_the_exit_codes_to_retry_are_the_jobs_own(code: int, failure_class: FailureClass) -> None:
    job = job_with({"exit_code": code}, retry=RetrySpec(exit_codes=ExitCodes(retry=(3,))))
    assert verdict(job).failure.failure_class is failure_class


ASKED_AT = T0 + 8
ASKED = {"stop_seen_at": ASKED_AT, "stop_scope": StopScope.RANK}
SHUT_DOWN = {"stop_seen_at": ASKED_AT, "stop_scope": StopScope.MACHINE}


class TestStopFromOutside:
    """Ranks that end after a request to stop that orch did not send."""

    @pytest.mark.parametrize(
        "fields",
        [{"exit_code": 0}, {"exit_code": 143}, {"exit_code": 1}, {"signal": 15}, {"signal": 9}, BOOM, GLOO],
    )
    @pytest.mark.parametrize(("asked", "failure_class"), [(ASKED, INFRA), (SHUT_DOWN, PREEMPTION)])
    def test_however_they_end_the_job_has_neither_succeeded_nor_failed_by_itself(
        self, fields: dict[str, Any], asked: dict[str, Any], failure_class: FailureClass
    ) -> None:
        job = job_with({**fields, **asked, "last_step": 11, "total_steps": 60}, workers=1)
        found = verdict(job)
        assert (found.failure.failure_class, found.failure.code) == (failure_class, "stopped_from_outside")
        assert found.failure.sentence().startswith("rank 0 ended at step 11 of 60 after ")
        assert found.failed_at == ASKED_AT
        assert not job.ended_well

    def test_a_rank_that_had_done_its_last_step_has_finished(self) -> None:
        done = {"exit_code": 0, **ASKED, "last_step": 60, "total_steps": 60}
        assert job_with(done, workers=1).ended_well
        assert job_with(done, {"exit_code": 0, **ASKED}).ended_well, "rank 0 reports for both"
        assert not job_with(done, {"exit_code": 0, **ASKED, "last_step": 59, "total_steps": 60}).ended_well
        assert not job_with({**done, "exit_code": 143}, workers=1).ended_well

    def test_without_a_total_nothing_says_that_it_has_finished(self) -> None:
        job = job_with({"exit_code": 0, **ASKED, "last_step": 60}, workers=1)
        assert verdict(job).failure.sentence().startswith("rank 0 ended at step 60 after a request to stop")

    def test_a_rank_that_nothing_asked_has_ended_by_itself(self) -> None:
        job = job_with({"exit_code": 0, "last_step": 11, "total_steps": 60}, workers=1)
        assert job.ended_well
        assert classify(job, NOW) is None

    def test_one_that_left_explains_the_others_whatever_they_raise(self) -> None:
        left = {"exit_code": 0, **ASKED, "at": T0 + 9}
        assert verdict(job_with(left, {**BOOM, "at": T0 + 10})).failure.rank == 0
        assert verdict(job_with({**BOOM, "at": T0 + 10}, left)).failure.rank == 1

    def test_it_does_not_hide_a_rank_that_had_failed_before(self) -> None:
        found = verdict(job_with({"exit_code": 0, **ASKED, "at": T0 + 9}, {**BOOM, "at": ASKED_AT - 1}))
        assert (found.failure.rank, found.failure.failure_class) == (1, USER)

    def test_the_others_have_their_time_to_save(self) -> None:
        job = job_with({"exit_code": 0, **ASKED, "at": T0 + 10}, {})
        until = T0 + 10 + job.spec.stop_duration.total_seconds()
        assert classify(job, T0 + 10) == until
        assert verdict(job, until).failure.rank == 0

    def test_what_died_with_its_gang_is_not_waited_for(self) -> None:
        job = job_with({"exit_code": 0, **SHUT_DOWN, "at": T0 + 10}, {})
        assert verdict(after(job, lost(job)), T0 + 10).failure.failure_class is PREEMPTION

    def test_one_keeper_that_was_told_says_that_all_were(self) -> None:
        assert verdict(job_with({"exit_code": 0, **ASKED}, {"exit_code": 0, **SHUT_DOWN})).failure.failure_class is (
            PREEMPTION
        )

    @pytest.mark.parametrize(
        ("code", "name"), [(143, "SIGTERM"), (137, "SIGKILL"), (129, "SIGHUP"), (135, "SIGBUS"), (139, "SIGSEGV")]
    )
    def test_a_shells_exit_code_for_a_signal_is_no_error_of_the_script(self, code: int, name: str) -> None:
        found = verdict(job_with({"exit_code": code}, workers=1)).failure
        assert (found.failure_class, found.exit_code) == (INFRA, code)
        assert found.sentence() == f"rank 0 ended with exit code {code}, as a process killed by {name}"

    def test_a_preemption_says_nothing_about_progress(self) -> None:
        job = changed(running(), no_progress=3)
        stopped = failure(PREEMPTION)
        assert decide_retry(job, stopped, NOW).retry
        assert after(job, failed(job, failure=stopped)).no_progress == 3
        assert after(job, failed(job, failure=failure())).no_progress == 4

    def test_a_preempted_attempt_is_shown_as_one(self) -> None:
        job = running()
        assert after(job, failed(job, failure=failure(PREEMPTION))).attempts[-1].state is AttemptState.PREEMPTED

    def test_ranks_that_hang_on_one_that_left_hang_because_of_what_made_it_leave(self) -> None:
        hung = failure(HANG)
        (event,) = declare_hung(job_with({"exit_code": 0, **SHUT_DOWN}, {}), hung, T0 + 9, NOW)
        assert isinstance(event, ev.AttemptFailed)
        assert event.failure.failure_class is PREEMPTION
        (event,) = declare_hung(job_with({"exit_code": 0}, {}), hung, T0 + 9, NOW)
        assert isinstance(event, ev.AttemptFailed)
        assert event.failure == hung

    @pytest.mark.parametrize("sign", [Sign.COLLECTIVE, Sign.RENDEZVOUS, Sign.SPINS])
    def test_ranks_that_wait_for_one_that_ended_with_0_hang_because_of_it(self, sign: Sign) -> None:
        seen = Stillness(rank=0, sign=sign, collective="all_reduce", ended=(1,))
        cause = Hang(seen=seen, late=Lateness(still_seconds=60.0), attempt=1)
        job = job_with({}, {"exit_code": 0, "last_step": 5})
        (event,) = declare_hung(job, replace(failure(HANG), cause=cause, rank=0), T0 + 9, NOW)
        assert isinstance(event, ev.AttemptFailed)
        named = ("hang", 0) if sign is Sign.SPINS else ("ended_alone", 1)
        assert (event.failure.code, event.failure.rank) == named
        assert "rank 1 had ended with exit code 0" in cause.sentence()

    def test_it_speaks_against_no_node(self) -> None:
        for exits in ({"signal": 15}, {"exit_code": 0, **ASKED}, {"exit_code": 143}):
            job = job_with(exits, workers=1)
            event = failed(job, failure=verdict(job).failure)
            assert strike_of(after(job, event), event) is None


class TestRepeatedCrash:
    """A crash of a program that repeats itself at the same step is, the second time, the script's failure."""

    def second(self, before: dict[str, Any], now: dict[str, Any]) -> ClassifiedFailure:
        first = verdict(job_with({}, before))
        job = job_with({}, now)
        attempts = (replace(job.attempts[-1], number=1, failure=first.failure), replace(job.attempts[-1], number=2))
        return verdict(changed(job, attempts=attempts))

    @pytest.mark.parametrize(
        "crash",
        [
            {"signal": 11, "last_step": 40},
            {"signal": 6, "last_step": 0},
            {"error_type": "OSError", "error_message": "Address already in use"},
        ],
    )
    def test_the_same_again_is_the_script_s(self, crash: dict[str, Any]) -> None:
        assert verdict(job_with({}, crash)).failure.failure_class is INFRA
        found = self.second(crash, crash).failure
        assert (found.failure_class, found.code, found.rank) == (USER, "repeated_crash", 1)
        assert "in two attempts in a row" in found.sentence()
        assert not decide_retry(job_with({}, crash), found, NOW).retry

    @pytest.mark.parametrize(
        ("signals", "failure_class"), [((11, 11, 11), USER), ((6, 11, 11), INFRA), ((11, 11), INFRA)]
    )
    def test_before_the_first_step_it_takes_a_third_time(self, signals: tuple[int, ...], failure_class: Any) -> None:
        *before, now = ({"signal": signal} for signal in signals)
        job = job_with({}, now)
        attempts = [replace(job.attempts[-1], failure=verdict(job_with({}, crash)).failure) for crash in before]
        found = verdict(changed(job, attempts=(*attempts, job.attempts[-1]))).failure
        assert found.failure_class is failure_class

    @pytest.mark.parametrize(
        ("before", "now"),
        [
            ({"signal": 11, "last_step": 40}, {"signal": 11, "last_step": 41}),
            ({"signal": 11, "last_step": 40}, {"signal": 6, "last_step": 40}),
            ({"signal": 11}, {"signal": 11}),
            ({"signal": 9, "last_step": 40}, {"signal": 9, "last_step": 40}),
            ({"signal": 15, "last_step": 40}, {"signal": 15, "last_step": 40}),
        ],
    )
    def test_what_may_be_chance_is_not(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        assert self.second(before, now).failure.failure_class is INFRA
