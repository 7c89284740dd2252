"""The contract of the store."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.clock import ClockReading
from orchestrator.core import events as ev
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.fold import Change
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.spec.model import NotifySpec
from orchestrator.store.errors import (
    AmbiguousJobError,
    BrokenChainError,
    IdempotencyConflictError,
    JobExistsError,
    JobNotFoundError,
    NamedByOthersError,
    StoreClosedError,
    VersionConflictError,
)
from orchestrator.store.records import FinishedCount, JobFilter, StoredPlace, StoredQueueChange
from orchestrator.store.store import PAGE_EVENTS
from tests.support.records import replace
from tests.unit.core.builders import (
    ID,
    T0,
    chain,
    exited,
    failed,
    finished,
    lost,
    make_spec,
    pending,
    released,
    started,
    stop,
    submission,
)
from tests.unit.store.lives import add, cancel, end, note, notes_of, run_it, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.store.store import Store

    Run = Callable[..., Any]

NOWHERE = "nothing-222222"


def of_matrix(
    index: int, matrix_id: str = "grid-aaaaaa", *, key: str = "k", suffix: str = "22222", values: Any = None
) -> ev.JobSubmitted:
    cell = ev.MatrixCell(matrix_id=matrix_id, name="grid", index=index, count=3, values=values or {"lr": index})
    job_id = JobId(f"point-{'bcdefghij'[index]}{suffix}")
    return submission(make_spec(), job_id=job_id, name="point", matrix=cell, idempotency_key=f"{key}/{index}")


def test_it_answers_until_it_is_closed(store: Store, run: Run) -> None:
    assert run(store.answers()) is None
    store.close()
    with pytest.raises(StoreClosedError):
        run(store.answers())


class TestSubmit:
    """A job is accepted once."""

    def test_a_job_is_accepted_and_found_again(self, store: Store, run: Run) -> None:
        job, new = run(store.submit(submission()))
        assert new
        assert (job.id, job.submission.sequence, job.version, job.state) == (ID, 1, 1, JobState.PENDING)
        assert run(store.job(ID)) == job

    def test_several_jobs_are_accepted_at_once_or_not_at_all(self, store: Store, run: Run) -> None:
        events = [of_matrix(n) for n in range(3)]
        jobs, new = run(store.submit_all(events))
        assert (new, [job.id for job in jobs]) == (True, [event.job_id for event in events])
        again, new = run(store.submit_all([of_matrix(n, "grid-zzzzzz", suffix="44444") for n in range(3)]))
        assert (new, again) == (False, jobs)
        with pytest.raises(IdempotencyConflictError):
            run(store.submit_all([of_matrix(n, suffix="55555") for n in range(4)]))
        with pytest.raises(IdempotencyConflictError):
            run(store.submit_all([of_matrix(0, suffix="66666", values={"lr": 9})]))
        taken = [of_matrix(n, key="other", suffix=suffix) for n, suffix in ((7, "77777"), (0, "22222"))]
        with pytest.raises(JobExistsError):
            run(store.submit_all(taken))
        assert [job.id for job in run(store.jobs(JobFilter()))] == [job.id for job in reversed(jobs)]

    def test_a_matrix_is_found_by_its_id_its_name_and_the_beginning_of_its_id(self, store: Store, run: Run) -> None:
        jobs, _ = run(store.submit_all([of_matrix(n) for n in range(2)]))
        assert run(store.matrix_jobs("grid-aaaaaa")) == jobs
        assert run(store.matrix_jobs("grid")) == []
        for reference in ("grid-aaaaaa", "grid", "grid-a", "gri"):
            assert run(store.find_matrix(reference, 1000)) == "grid-aaaaaa"
        for reference in (jobs[0].id, "point", "poi", "nothing", ""):
            assert run(store.find_matrix(reference, 1000)) is None
        run(store.submit_all([of_matrix(n, "grid-abbbbb", key="second", suffix="33333") for n in range(2)]))
        assert run(store.find_matrix("grid", 1000)) == "grid-abbbbb"
        with pytest.raises(AmbiguousJobError):
            run(store.find_matrix("grid-a", 1000))
        run(add(store, "grid"))
        assert run(store.find_matrix("grid", 1000)) is None

    def test_jobs_are_numbered_in_the_order_of_their_arrival(self, store: Store, run: Run) -> None:
        jobs = [run(add(store, f"job-{n}", at=T0 - n)) for n in range(3)]
        assert [j.submission.sequence for j in jobs] == [1, 2, 3]

    def test_the_same_key_gets_the_first_job(self, store: Store, run: Run) -> None:
        first, _ = run(store.submit(submission(idempotency_key="k")))
        again = submission(idempotency_key="k", job_id="digits-other2", at=T0 + 9, work_dir="/elsewhere")
        job, new = run(store.submit(again))
        assert (job, new) == (first, False)
        with pytest.raises(JobNotFoundError):
            run(store.job("digits-other2"))

    def test_the_same_key_gets_the_first_job_as_it_is_now(self, store: Store, run: Run) -> None:
        job = run(end(store, run(store.submit(submission(idempotency_key="k")))[0]))
        assert run(store.submit(submission(idempotency_key="k"))) == (job, False)

    @pytest.mark.parametrize(
        "difference",
        [
            {"spec": make_spec(priority=51)},
            {"snapshot": "sha256:2"},
            {"resume_from": "old-222222@5"},
            {"rerun_of": "old-222222"},
        ],
        ids=lambda d: next(iter(d)),
    )
    def test_the_same_key_for_a_different_job_is_refused(
        self, store: Store, run: Run, difference: dict[str, Any]
    ) -> None:
        run(store.submit(submission(idempotency_key="k")))
        other = {"idempotency_key": "k", "job_id": "digits-other2", **difference}
        with pytest.raises(IdempotencyConflictError, match=f"'k' already belongs to job {ID}.*use a new key"):
            run(store.submit(submission(**other)))
        assert len(run(store.load_live())) == 1

    def test_another_user_may_use_the_same_key(self, store: Store, run: Run) -> None:
        run(store.submit(submission(idempotency_key="k")))
        _, new = run(store.submit(submission(idempotency_key="k", uid=1001, job_id="digits-other2")))
        assert new

    def test_an_accepted_job_is_found_by_its_key(self, store: Store, run: Run) -> None:
        job, _ = run(store.submit(submission(idempotency_key="k")))
        run(store.submit(submission(idempotency_key="", job_id="digits-nokey2")))
        assert run(store.accepted(job.submission.uid, "k")) == job
        assert [
            run(store.accepted(*asked))
            for asked in ((job.submission.uid + 1, "k"), (job.submission.uid, "l"), (job.submission.uid, ""))
        ] == [None] * 3

    def test_an_id_that_is_taken_is_refused(self, store: Store, run: Run) -> None:
        run(store.submit(submission()))
        with pytest.raises(JobExistsError, match="generate another"):
            run(store.submit(submission(idempotency_key="other")))
        assert [j.submission.idempotency_key for j in run(store.load_live())] == [f"key-{ID}"]

    def test_one_key_from_many_at_once_is_one_job(self, store: Store, run: Run) -> None:
        async def all_at_once() -> list[tuple[Any, bool]]:
            calls = (store.submit(submission(idempotency_key="k", job_id=f"job-{n}")) for n in range(20))
            return await asyncio.gather(*calls)

        found = run(all_at_once())
        assert sum(new for _, new in found) == 1
        assert len({job.id for job, _ in found}) == 1


class TestAppend:
    """Events and records change together."""

    def test_it_returns_the_new_record_and_keeps_it(self, store: Store, run: Run) -> None:
        job = run(run_it(store, run(add(store, ID))))
        assert (job.state, job.version, job.attempt_number) == (JobState.RUNNING, 3, 1)
        assert run(store.job(ID)) == job

    def test_events_are_numbered_by_the_version_they_lead_to(self, store: Store, run: Run) -> None:
        run(run_it(store, run(add(store, ID))))
        stored = run(store.events(ID))
        assert [(e.number, e.event.kind) for e in stored] == [
            (1, "job_submitted"),
            (2, "attempt_started"),
            (3, "attempt_running"),
        ]
        assert stored[0].event == submission(make_spec(name="digits"))

    def test_duplicates_and_late_facts_are_not_written(self, store: Store, run: Run) -> None:
        job = run(run_it(store, run(add(store, ID))))
        fact = exited(job, 0, signal=9)
        (once,) = run(write(store, [fact, fact]))
        (twice,) = run(write(store, [fact]))
        assert once == twice
        assert once.version == 4
        assert len(run(store.events(ID))) == 4

    def test_a_batch_answers_with_every_job_it_names_in_order(self, store: Store, run: Run) -> None:
        a, b = run(add(store, "a-1")), run(add(store, "b-2"))
        found = run(write(store, [note(b, "x"), note(a, "y"), note(b, "z")]))
        assert [(j.id, notes_of(j)) for j in found] == [("b-2", ("x", "z")), ("a-1", ("y",))]

    def test_a_batch_is_written_whole_or_not_at_all(self, store: Store, run: Run) -> None:
        a, b = run(add(store, "a-1")), run(add(store, "b-2"))
        (first, late) = chain(b, note(b, "x"), note(b, "y"))
        with pytest.raises(VersionConflictError):
            run(store.append([*chain(a, note(a, "x")), late]))
        assert run(store.job(a.id)) == a
        assert len(run(store.events(a.id))) == 1
        run(store.append([*chain(a, note(a, "x")), first, late]))
        assert [run(store.job(job.id)).version for job in (a, b)] == [2, 3]

    def test_a_record_is_refused_whose_version_does_not_follow_the_stored_one(self, store: Store, run: Run) -> None:
        job = run(add(store, ID))
        run(store.append(chain(job, note(job, "first"))))
        with pytest.raises(VersionConflictError, match=r"no longer at version 1.*orch doctor"):
            run(store.append(chain(job, note(job, "another"))))
        assert notes_of(run(store.job(ID))) == ("first",)
        assert len(run(store.events(ID))) == 2
        assert run(store.verify()) == []

    def test_changes_are_refused_that_do_not_follow_one_another(self, store: Store, run: Run) -> None:
        job = run(add(store, ID))
        first, second, third = chain(job, note(job, "x"), note(job, "y"), note(job, "z"))
        for broken in ([first, third], [first, first], [Change(job, third.event, third.after)]):
            with pytest.raises(BrokenChainError, match=f"{ID} does not follow.*restart the daemon"):
                run(store.append(broken))
        assert run(store.job(ID)) == job
        run(store.append([first, second, third]))
        assert run(store.verify()) == []

    def test_what_is_written_already_is_not_written_again(self, store: Store, run: Run) -> None:
        job = run(run_it(store, run(add(store, ID))))
        zeros = [exited(job, rank, exit_code=0) for rank in range(job.num_workers)]
        won = ev.AttemptSucceeded(job_id=ID, at=T0 + 11, attempt=1)
        changes = chain(job, *zeros, won, released(job), finished(job, JobState.SUCCEEDED, exit_code=0))
        for _ in range(2):  # a caller that was cancelled repeats the call
            run(store.append(changes))
        assert run(store.job(ID)) == changes[-1].after
        assert [e.number for e in run(store.events(ID))] == list(range(1, changes[-1].after.version + 1))
        assert run(store.finished_counts()) == [FinishedCount("default", JobState.SUCCEEDED, "", 1)]
        assert run(store.verify()) == []

    def test_a_job_that_is_not_there_is_refused(self, store: Store, run: Run) -> None:
        job = run(add(store, ID))
        stranger = pending(job_id=NOWHERE)
        with pytest.raises(JobNotFoundError, match=f"{NOWHERE}.*orch status"):
            run(store.append([*chain(job, note(job, "x")), *chain(stranger, note(stranger, "x"))]))
        assert run(store.job(ID)) == job

    def test_terminal_is_final(self, store: Store, run: Run) -> None:
        job = run(end(store, run(add(store, ID))))
        late = [finished(job, JobState.FAILED), lost(job), exited(job, 0), stop(job, StopPurpose.CANCEL), started(job)]
        assert run(write(store, late)) == [job]

    def test_a_note_about_a_job_that_ended_is_kept(self, store: Store, run: Run) -> None:
        job = run(end(store, run(add(store, ID))))
        (noted,) = run(write(store, [note(job, "outputs copied")]))
        assert (notes_of(noted), noted.state, noted.ended_at) == (("outputs copied",), JobState.SUCCEEDED, T0 + 30)
        assert run(store.load_live()) == []

    def test_many_at_once_lose_nothing(self, store: Store, run: Run) -> None:
        async def all_at_once() -> None:
            job = await add(store, ID)
            notes = chain(job, *(note(job, f"note {n}") for n in range(50)))
            await asyncio.gather(*(store.append([change]) for change in notes))

        run(all_at_once())
        assert run(store.job(ID)).version == 51
        assert run(store.verify()) == []

    def test_one_that_fails_does_not_fail_the_others(self, store: Store, run: Run) -> None:
        async def all_at_once() -> list[Any]:
            job = await add(store, ID)
            calls = [store.append([change]) for change in chain(job, *(note(job, f"note {n}") for n in range(10)))]
            bad = [store.append(chain(job, note(job, "never"), note(job, "nor this"))) for _ in range(5)]
            mixed = [call for pair in zip(calls[::2], bad, calls[1::2], strict=True) for call in pair]
            return await asyncio.gather(*mixed, return_exceptions=True)

        found = run(all_at_once())
        assert [isinstance(f, VersionConflictError) for f in found] == [False, True, False] * 5
        job = run(store.job(ID))
        assert sorted(notes_of(job)) == sorted(f"note {n}" for n in range(10))
        assert run(store.verify()) == []


class TestRead:
    """Queries of the stored jobs and events."""

    def test_live_jobs_come_in_order_of_arrival_without_those_that_ended(self, store: Store, run: Run) -> None:
        jobs = [run(add(store, f"job-{n}")) for n in range(4)]
        run(cancel(store, jobs[1]))
        third = run(run_it(store, jobs[2]))
        assert run(store.load_live()) == [jobs[0], third, jobs[3]]

    def test_a_job_that_is_not_there(self, store: Store, run: Run) -> None:
        for question in (store.job(NOWHERE), store.events(NOWHERE), store.find(NOWHERE, 1000), store.find("", 1000)):
            with pytest.raises(JobNotFoundError, match="orch status"):
                run(question)

    @pytest.mark.parametrize(
        ("query", "expected"),
        [
            ({}, [5, 4, 3, 2, 1]),
            ({"limit": 2}, [5, 4]),
            ({"before": 4}, [3, 2, 1]),
            ({"before": 4, "limit": 1}, [3]),
            ({"user": "ada"}, [4, 2]),
            ({"user": "nobody"}, []),
            ({"states": frozenset({"PENDING"})}, [5, 4, 3]),
            ({"states": frozenset({"PENDING", "CANCELLED"})}, [5, 4, 3, 2]),
            ({"states": frozenset({"PENDING", "CANCELLED"}), "limit": 3}, [5, 4, 3]),
            ({"states": frozenset({"PENDING", "CANCELLED"}), "user": "ada"}, [4, 2]),
            ({"states": frozenset({"RUNNING"})}, []),
            ({"since": T0 + 3}, [5, 4, 3]),
            ({"since": T0 + 3, "user": "ada"}, [4]),
            ({"since": T0 + 3, "states": frozenset({"PENDING"}), "before": 5}, [4, 3]),
            ({"since": T0 + 99}, []),
            ({"limit": 0}, []),
        ],
        ids=lambda value: str(
            {k: sorted(v) if isinstance(v, frozenset) else v for k, v in value.items()}
            if isinstance(value, dict)
            else value
        ),
    )
    def test_jobs_are_filtered_newest_first(
        self, store: Store, run: Run, query: dict[str, Any], expected: list[int]
    ) -> None:
        jobs = [run(add(store, f"job-{n}", at=T0 + n, user="ada" if n % 2 == 0 else "bob")) for n in range(1, 6)]
        run(end(store, jobs[0]))
        run(cancel(store, jobs[1]))
        found = run(store.jobs(JobFilter(**query)))
        assert [j.submission.sequence for j in found] == expected
        assert all(run(store.job(j.id)) == j for j in found)

    def test_a_clock_that_went_back_hides_no_job(self, store: Store, run: Run) -> None:
        for n, at in enumerate((T0 + 50, T0 + 10, T0 + 60)):
            run(add(store, f"job-{n}", at=at))
        assert [j.id for j in run(store.jobs(JobFilter(since=T0 + 40)))] == ["job-2", "job-0"]

    def test_events_are_read_from_a_number_on(self, store: Store, run: Run) -> None:
        job = run(add(store, ID))
        run(write(store, [note(job, f"{n}") for n in range(5)]))
        assert [e.number for e in run(store.events(ID, after=2))] == [3, 4, 5, 6]
        assert [e.number for e in run(store.events(ID, after=2, limit=2))] == [3, 4]
        assert run(store.events(ID, after=6)) == []

    def test_a_reference_is_an_id_a_name_or_a_prefix(self, store: Store, run: Run) -> None:
        for job_id in ("digits-aaa222", "digits-bbb222", "mnist-ccc222", "mnist-ccd222"):
            run(add(store, job_id))
        for reference, expected in {
            "digits-aaa222": ("digits-aaa222", "id", 0),
            "digits": ("digits-bbb222", "name", 1),
            "mnist": ("mnist-ccd222", "name", 1),
            "digits-b": ("digits-bbb222", "prefix", 0),
            "mnist-ccd": ("mnist-ccd222", "prefix", 0),
        }.items():
            found = run(store.find(reference, 1000))
            assert (found.job.id, found.by, found.others) == expected
        with pytest.raises(AmbiguousJobError, match=r"mnist-ccc222, mnist-ccd222.*more letters") as caught:
            run(store.find("mnist-c", 1000))
        assert caught.value.candidates == ("mnist-ccc222", "mnist-ccd222")
        with pytest.raises(JobNotFoundError):
            run(store.find("igits", 1000))

    def test_a_name_is_the_user_s_own_and_those_of_others_are_named(self, store: Store, run: Run) -> None:
        mine = run(add(store, "train-aaa222"))
        theirs = run(add(store, "train-bbb222", user="bob", uid=1001))
        only = run(add(store, "other-ccc222", user="bob", uid=1001))
        assert run(store.find("train", 1000)).job == mine
        assert run(store.find("train", 1001)).job == run(store.find("bob/train", 1000)).job == theirs
        assert run(store.find("ada/train", 1001)).others == 0
        for reference in (only.id, "other-c", "bob/other"):  # ids and prefixes are everyone's
            assert run(store.find(reference, 1000)).job == only
        with pytest.raises(NamedByOthersError, match=r"bob/other \(other-ccc222\)") as caught:
            run(store.find("other", 1000))
        assert caught.value.candidates == (("bob/other", only.id),)
        for reference in ("ada/other", "carol/train", "/train", "bob/", "bob/train-bbb222"):
            with pytest.raises(JobNotFoundError):
                run(store.find(reference, 1000))
        run(store.submit_all([replace(of_matrix(n), uid=1001, user="bob") for n in range(2)]))
        assert run(store.find_matrix("grid", 1001)) == run(store.find_matrix("bob/grid", 1000)) == "grid-aaaaaa"
        assert run(store.find_matrix("ada/grid", 1001)) is run(store.find_matrix("train", 1000)) is None
        for ask in (store.find, store.find_matrix):
            with pytest.raises(NamedByOthersError) as caught:
                run(ask("grid", 1000))
            assert caught.value.candidates == (("bob/grid", "grid-aaaaaa"),)

    def test_jobs_are_counted_by_state(self, store: Store, run: Run) -> None:
        assert run(store.state_counts()) == dict.fromkeys(JobState, 0)
        run(run_it(store, run(add(store, "a-1"))))
        run(cancel(store, run(add(store, "b-2"))))
        run(add(store, "c-3"))
        counts = run(store.state_counts())
        assert {s: n for s, n in counts.items() if n} == {
            JobState.RUNNING: 1,
            JobState.CANCELLED: 1,
            JobState.PENDING: 1,
        }


class TestTotals:
    """Counts of ended jobs, which are kept for good."""

    def test_they_are_counted_by_queue_state_and_class(self, store: Store, run: Run) -> None:
        run(end(store, run(add(store, "a-1"))))
        run(end(store, run(add(store, "b-2"))))
        run(cancel(store, run(add(store, "c-3", spec=make_spec(queue="night")))))
        job = run(run_it(store, run(add(store, "d-4"))))
        run(write(store, [exited(job), failed(job, retry=False), released(job), finished(job, JobState.FAILED)]))
        assert run(store.finished_counts()) == [
            FinishedCount("default", JobState.FAILED, "infra", 1),
            FinishedCount("default", JobState.SUCCEEDED, "", 2),
            FinishedCount("night", JobState.CANCELLED, "", 1),
        ]

    def test_pruning_and_late_facts_do_not_change_them(self, store: Store, run: Run) -> None:
        job = run(end(store, run(add(store, "a-1"))))
        before = run(store.finished_counts())
        run(write(store, [note(job, "x"), finished(job, JobState.FAILED)]))
        assert run(store.prune(T0 + 1000)) == ["a-1"]
        assert run(store.finished_counts()) == before


class TestPrune:
    """Old jobs are removed; live ones are not."""

    def test_only_jobs_that_ended_before_the_time_go(self, store: Store, run: Run) -> None:
        old, edge, young = (run(add(store, f"job-{n}")) for n in range(3))
        for job, at in ((old, T0 + 10), (edge, T0 + 20), (young, T0 + 30)):
            run(cancel(store, job, at=at))
        alive = run(add(store, "alive-1", at=T0 - 10**6))
        assert run(store.ended_before(T0 + 20)) == [old.id]
        assert run(store.prune(T0 + 20)) == [old.id]
        with pytest.raises(JobNotFoundError):
            run(store.job(old.id))
        with pytest.raises(JobNotFoundError):
            run(store.events(old.id))
        assert [j.id for j in run(store.jobs(JobFilter()))] == [alive.id, young.id, edge.id]
        assert run(store.prune(T0 + 20)) == []
        assert run(store.verify()) == []

    def test_what_is_to_be_kept_stays(self, store: Store, run: Run) -> None:
        kept, going = (run(cancel(store, run(add(store, f"job-{n}")), at=T0 + n)) for n in range(2))
        assert run(store.ended_before(T0 + 10, {kept.id})) == [going.id]
        assert run(store.prune(T0 + 10, {kept.id})) == [going.id]
        assert [j.id for j in run(store.jobs(JobFilter()))] == [kept.id]

    def test_a_place_is_never_given_twice(self, store: Store, run: Run) -> None:
        last = run(cancel(store, run(add(store, "a-1"))))
        run(store.prune(T0 + 1000))
        assert run(add(store, "b-2")).submission.sequence == last.submission.sequence + 1


def test_a_sound_store_has_nothing_wrong(store: Store, run: Run) -> None:
    run(end(store, run(add(store, "a-1"))))
    run(run_it(store, run(add(store, "b-2"))))
    assert run(store.verify()) == []


def test_there_is_room(store: Store) -> None:
    status = store.disk()
    assert status.trouble is None
    assert status.free_bytes > 0


def test_a_closed_store_takes_and_tells_nothing(store: Store, run: Run) -> None:
    job = run(add(store, ID))
    store.close()
    store.close()
    for call in (
        store.submit(submission(job_id="b-2")),
        write(store, [note(job, "x")]),
        store.load_live(),
        store.job(ID),
        store.verify(),
        store.prune(0.0),
    ):
        with pytest.raises(StoreClosedError, match="open it again"):
            run(call)


class TestNotices:
    """Notices for web hooks are written with the transition, and stay until they are delivered."""

    def test_a_transition_writes_its_notices_and_nothing_else_does(self, store: Store, run: Run) -> None:
        hooks = (NotifySpec(url="http://a/x", on=("PENDING", "FAILED")), NotifySpec(url="http://b/y"))
        run(store.submit(submission(make_spec(notify=hooks))))
        due, first = run(store.due_notices(T0, 10))
        assert [(n.notice.url, json.loads(n.notice.body)["state"]) for n in due] == [("http://a/x", "PENDING")]
        assert first is None, "none becomes due later"
        run(write(store, [finished(run(store.job(ID)), JobState.CANCELLED)]))
        assert len(run(store.due_notices(T0, 10))[0]) == 1, "nobody asked for CANCELLED"

    def test_notices_move_with_the_clock_and_its_reading(self, store: Store, run: Run) -> None:
        assert run(store.clock()) is None
        run(store.submit(submission(make_spec(notify=(NotifySpec(url="http://a/x", on=("PENDING",)),)))))
        ((found,), _) = run(store.due_notices(T0, 10))
        run(store.settle_notice(found.number, again_at=T0 + 60))
        reading = ClockReading("a boot", 5.0, T0 - 3600)
        run(store.append((), clock=reading, moved=-3600.0))
        assert run(store.clock()) == reading
        assert run(store.due_notices(T0 - 3600, 10)) == ([], T0 - 3540)
        run(store.append((), clock=ClockReading("a boot", 6.0, T0 - 3599)))
        assert run(store.due_notices(T0 - 3600, 10)) == ([], T0 - 3540), "only a move moves them"

    def test_a_notice_waits_until_its_time_and_goes_when_it_is_told(self, store: Store, run: Run) -> None:
        hook = NotifySpec(url="http://a/x", on=("PENDING",))
        run(store.submit(submission(make_spec(notify=(hook,)))))
        ((found,), _) = run(store.due_notices(T0, 10))
        run(store.settle_notice(found.number, again_at=T0 + 60))
        assert run(store.due_notices(T0 + 59, 10)) == ([], T0 + 60)
        ((again,), _) = run(store.due_notices(T0 + 60, 10))
        assert (again.number, again.attempts, again.notice) == (found.number, 1, found.notice)
        run(store.settle_notice(found.number, again_at=None))
        assert run(store.due_notices(T0 + 60, 10)) == ([], None)
        run(store.settle_notice(found.number, again_at=None))

    def test_each_receiver_has_its_own_queue(self, store: Store, run: Run) -> None:
        urls = ["http://a/1", "http://a/2", "http://a/3", "https://a/4", "http://a:8080/5", "http://b"]
        for number, url in enumerate(urls):
            spec = make_spec(notify=(NotifySpec(url=url, on=("PENDING",)),))
            run(store.submit(submission(spec, job_id=f"a-{number}")))
        due, _ = run(store.due_notices(T0, 2))
        assert [found.notice.url for found in due] == [urls[0], urls[1], *urls[3:]]


class TestPlaces:
    """Records about nodes and GPUs outlive the daemon."""

    def test_it_is_kept_replaced_and_forgotten(self, store: Store, run: Run) -> None:
        assert run(store.places()) == []
        node = StoredPlace(kind="node", name="n-1", body={"cordoned_by": "ann", "strikes": [{"at": 1.5}]})
        gpu = StoredPlace(kind="gpu", name="n-1", body={"strikes": []})
        run(store.put_places([node, gpu]))
        assert run(store.places()) == [gpu, node]
        again = StoredPlace(kind="node", name="n-1", body={"cordoned_by": ""})
        run(store.put_places([again, StoredPlace(kind="gpu", name="n-1", body=None)]))
        assert run(store.places()) == [again]
        run(store.put_places([StoredPlace(kind="node", name="other", body=None)]))
        run(store.put_places([]))
        assert run(store.places()) == [again]


def test_a_long_history_is_read_page_by_page(store: Store, run: Run) -> None:
    job = run(add(store, ID))
    notes = [note(job, f"note {n}") for n in range(2 * PAGE_EVENTS + 1)]
    run(write(store, notes))

    async def numbers(after: int) -> list[int]:
        return [stored.number async for stored in store.every_event(job.id, after=after)]

    assert run(numbers(0)) == list(range(1, 2 * PAGE_EVENTS + 3))
    assert run(numbers(PAGE_EVENTS + 2)) == list(range(PAGE_EVENTS + 3, 2 * PAGE_EVENTS + 3))
    assert run(numbers(2 * PAGE_EVENTS + 2)) == []


def test_a_job_that_ended_is_to_be_tidied_until_it_was(store: Store, run: Run) -> None:
    live = run(add(store, "live-1"))
    first = run(cancel(store, run(add(store, "first-1"))))
    second = run(end(store, run(add(store, "second-1"))))
    assert run(store.untidied()) == [first.id, second.id]
    run(write(store, [note(first, "told late")]))
    run(store.tidied([first.id]))
    assert run(store.untidied()) == [second.id]
    run(store.tidied([first.id, live.id, JobId("nobody-1")]))
    assert run(store.untidied()) == [second.id]
    run(store.prune(T0 + 1000))
    assert run(store.untidied()) == []


def test_changes_of_queues_are_kept_in_their_order(store: Store, run: Run) -> None:
    assert run(store.queue_changes()) == []
    first = StoredQueueChange(name="lab", body={"name": "lab", "weight": 2.0}, by="ada", at=1.5)
    other = StoredQueueChange(name="prod", body={"name": "prod"}, by="bob", at=2.5)
    again = StoredQueueChange(name="lab", body={"name": "lab", "maximum": 3}, by="bob", at=3.5)
    for change in (first, other, again):
        run(store.put_queue_change(change))
    assert run(store.queue_changes()) == [first, other, again]
