"""Every command that reads or acts: its text for people, its JSON, and its errors."""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.queue_views import HolderView, OutlookView
from orchestrator.api.views import AuditEntry, CheckpointView, FailureView, GpuView, ProgressView

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.api.server.testing import ServedFake
    from orchestrator.api.views import JobView
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


@pytest.fixture
def job(served: ServedFake) -> JobView:
    found: JobView = served.do(lambda service: service.add(state="RUNNING", reason="every rank is up"))
    return found


# -- status


def test_status_lists_jobs(orch: Orch, job: JobView) -> None:
    done = orch("status")
    assert (done.code, done.err) == (0, "")
    assert job.id in done.out
    assert "every rank is up" in done.out


def test_status_without_jobs_says_how_to_make_one(orch: Orch, served: ServedFake) -> None:
    assert orch("status").out == "no jobs; `orch submit job.yaml` makes one\n"
    assert orch("status", "--json").json["jobs"] == []


def test_status_leaves_out_what_ended_long_ago(orch: Orch, served: ServedFake) -> None:
    old = served.do(lambda service: service.add("old", state="FAILED", ended_at=time.time() - 100_000))
    new = served.do(lambda service: service.add("new", state="FAILED", ended_at=time.time() - 1000))
    shown = orch("status").out
    assert new.id in shown
    assert old.id not in shown
    assert [item["id"] for item in orch("status", "--json").json["jobs"]] == [new.id]
    assert old.id in orch("status", "--state", "all").out
    assert old.id in orch("status", "--since", "2020-01-01").out


def test_status_filters(orch: Orch, served: ServedFake, job: JobView) -> None:
    other = served.do(lambda service: service.add("other", user="bob", state="PENDING"))
    assert [item["id"] for item in orch("status", "--user", "bob", "--json").json["jobs"]] == [other.id]
    assert [item["id"] for item in orch("status", "--state", "running, failed", "--json").json["jobs"]] == [job.id]
    assert len(orch("status", "-s", "running", "-s", "pending", "--json").json["jobs"]) == 2
    wrong = orch("status", "--state", "flying")
    assert wrong.code == 2
    assert "RUNNING" in wrong.err


def test_status_of_one_job(orch: Orch, job: JobView) -> None:
    done = orch("status", "digits")
    assert done.out.startswith(f"{job.id}  RUNNING  every rank is up\n")
    assert done.err == f"digits is {job.id}, the newest of that name\n"
    assert orch("status", job.id).err == ""
    assert orch("status", "digits", "--json").json["id"] == job.id


def test_status_takes_a_job_or_a_filter(orch: Orch, job: JobView) -> None:
    assert orch("status", "digits", "--user", "x").code == 2


def test_status_without_a_daemon(orch: Orch) -> None:
    done = orch("status")
    assert done.code == 4
    assert "orch up" in done.err


def test_an_ambiguous_prefix_lists_the_candidates(orch: Orch, served: ServedFake, job: JobView) -> None:
    other = served.do(lambda service: service.add("digits-big"))
    done = orch("status", "dig")
    assert done.code == 2
    assert job.id in done.err
    assert other.id in done.err


# -- actions


@pytest.mark.parametrize(("verb", "state"), [("cancel", "CANCELLED"), ("pause", "SUSPENDED"), ("resume", "PENDING")])
def test_actions(orch: Orch, served: ServedFake, job: JobView, verb: str, state: str) -> None:
    done = orch(verb, "digits")
    assert (done.code, done.out) == (0, f"{job.id}\n")
    assert state in done.err
    assert orch("status", job.id, "--json").json["state"] == state
    again = orch(verb, job.id, "--json")
    assert again.json["job_id"] == job.id


def test_rerun_prints_the_new_id(orch: Orch, served: ServedFake, job: JobView) -> None:
    done = orch("rerun", job.id, "--from-checkpoint")
    assert done.code == 0
    assert done.out.strip() != job.id
    assert served.do(lambda service: len(service._jobs)) == 2


def test_update(orch: Orch, job: JobView) -> None:
    assert orch("update", job.id, "--priority", "90").code == 0
    assert orch("status", job.id, "--json").json["priority"] == 90
    assert orch("update", job.id).code == 2
    assert orch("update", job.id, "--priority", "101").code == 2


def test_a_refusal_has_exit_code_5(orch: Orch, served: ServedFake, job: JobView) -> None:
    served.do(lambda service: service.set(job.id, state="SUCCEEDED"))
    done = orch("pause", job.id)
    assert done.code == 5
    assert "orch rerun" in done.err


def test_one_refusal_does_not_keep_the_others_back(orch: Orch, served: ServedFake, job: JobView) -> None:
    other = served.do(lambda service: service.add("other"))
    done = orch("cancel", "nothing", job.id, other.id)
    assert done.code == 6, "done for some, not for others"
    assert done.out.split() == [job.id, other.id]
    assert "nothing" in done.err
    both = orch("cancel", job.id, other.id, "--json")
    assert [item["job_id"] for item in both.json] == [job.id, other.id]


# -- history


def test_events(orch: Orch, served: ServedFake, job: JobView) -> None:
    served.do(lambda service: service.set(job.id, reason="moving on"))
    done = orch("events", job.id)
    assert done.out.splitlines()[0].split() == ["TIME", "EVENT", "WHAT"]
    assert "moving on" in done.out
    assert [event["sequence"] for event in orch("events", job.id, "--json").json["events"]] == [1, 2]
    last = orch("events", job.id, "--tail", "1")
    assert "moving on" in last.out
    assert "job_submitted" not in last.out
    assert [event["sequence"] for event in orch("events", job.id, "-n", "1", "--json").json["events"]] == [2]
    assert orch("events", job.id, "-n", "0", "--json").json["events"] == []
    last_at = max(event["at"] for event in orch("events", job.id, "--json").json["events"])
    for offset, count in ((-1, 2), (1, 0)):
        since = dt.datetime.fromtimestamp(last_at + offset).isoformat()  # noqa: DTZ006  # the user's own time zone
        assert len(orch("events", job.id, "--since", since, "--json").json["events"]) == count
    assert orch("events", job.id, "--since", "10").code == 2


def test_the_audit_log_is_shown_without_control_characters(served: ServedFake, orch: Orch) -> None:
    entry = AuditEntry(
        at=1_790_000_000.0,
        user="ada",
        uid=1000,
        source="unix pid 7",
        action="POST /api/v1/jobs/x\x1b[2J/cancel",
        job="digits-abc234",
        result="not_permitted",
        status=403,
        detail="",
    )
    served.do(lambda service: service.noted.extend([replace(entry, user="grace"), entry]))
    shown = orch("events", "--audit", "--tail", "1").out
    assert all(word in shown for word in ("ada", "unix pid 7", "digits-abc234", "not_permitted"))
    assert "grace" not in shown
    assert "\x1b" not in shown
    assert [one["user"] for one in orch("events", "--audit", "--json").json["entries"]] == ["grace", "ada"]
    for wrong in (("events",), ("events", "digits", "--audit"), ("events", "--audit", "--follow")):
        assert orch(*wrong).code == 2


def test_explain(orch: Orch, served: ServedFake) -> None:
    ahead = served.do(lambda service: service.add("first", priority=90))
    late = served.do(lambda service: service.add("late"))
    served.do(lambda service: service.add("behind", priority=10))
    busy = HolderView(job_id="busy-aaaaaa", name="busy", user="bob", gpus=4.0)
    known = replace(busy, ends_at=time.time() + 7260, basis="like jobs", like_jobs=5, error=0.1)
    stop = replace(busy, lost_gpu_seconds=5400.0)
    told = OutlookView(starts_at=known.ends_at, ahead=(ahead.id,), rule="priority", holders=(known,), stops=(stop,))
    served.do(lambda service: setattr(service, "outlook_answer", told))
    done = orch("explain", late.id)
    assert f"1 ahead in the queue: {ahead.id}" in done.out
    assert "expected start: in about 2h" in done.out
    assert f"{ahead.id} is before it: it has the higher priority" in done.out
    assert "bob" in done.out
    assert "run times of 5 like jobs, half of such forecasts within 10%" in done.out
    assert "preemption for it would stop busy-aaaaaa (bob), which repeat at most 1.5 GPU hours" in done.out
    assert "what happened last:" in done.out
    answer = orch("explain", late.id, "--json").json
    assert answer["ahead"] == [ahead.id]
    assert answer["job"]["id"] == late.id
    assert orch("explain", late.id, "--json").json["outlook"]["rule"] == "priority"
    served.do(lambda service: setattr(service, "outlook_answer", OutlookView(holders=(busy,))))
    done = orch("explain", ahead.id)
    assert "ahead" not in done.out
    assert "expected start: not known" in done.out
    assert "nothing is known of it" in done.out
    served.do(lambda service: setattr(service, "outlook_answer", OutlookView(starts={late.id: time.time() + 7260})))
    assert "in 2h" in orch("queue").out
    assert orch("queue", "--json").json["expected_starts"].keys() == {late.id}


def test_status_has_the_short_form_of_why_a_job_waits(orch: Orch, served: ServedFake, job: JobView) -> None:
    assert "place" not in orch("status").out, "nothing waits"
    next_, late = (served.do(lambda service, name=name: service.add(name)) for name in ("next", "late"))
    starts = {next_.id: time.time() + 7260}
    told = OutlookView(starts=starts, order=(next_.id, late.id))
    served.do(lambda service: setattr(service, "outlook_answer", told))
    shown = {line.split()[0]: line for line in orch("status").out.splitlines()}
    assert f"place 1, starts in about 2h: {next_.reason}" in shown[next_.id]
    assert f"place 2: {late.reason}" in shown[late.id]
    assert "place" not in shown[job.id]
    assert "priority 50, owner, place 2" in orch("status", late.id).out
    answer = orch("status", "--json").json
    assert (answer["order"], answer["expected_starts"]) == ([next_.id, late.id], starts)
    one = orch("status", next_.id, "--json").json
    assert (one["place"], one["expected_start"]) == (1, starts[next_.id])
    assert "place" not in orch("status", job.id, "--json").json


def test_queue(orch: Orch, served: ServedFake, job: JobView) -> None:
    assert orch("queue").out == "nothing waits\n"
    low = served.do(lambda service: service.add("low", priority=1))
    high = served.do(lambda service: service.add("high", priority=99))
    same = served.do(lambda service: service.add("same", priority=99))
    assert [item["id"] for item in orch("queue", "--json").json["jobs"]] == [high.id, same.id, low.id]
    assert [line.split()[0] for line in orch("queue").out.splitlines()] == ["JOB", high.id, same.id, low.id]


def test_profile(orch: Orch, served: ServedFake, job: JobView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = orch("profile", job.id, "--steps", "3")
    assert (done.code, done.err) == (0, "")
    assert (tmp_path / f"{job.id}-rank0.trace.json.gz").read_bytes() == b"a trace"
    asked = served.do(lambda service: [call for call in service.calls if call[0] == "profile"])[-1][1][1]
    assert (asked.steps, asked.rank) == (3, 0)
    there = orch("profile", job.id, "--rank", "1", "--output", "t.gz", "--json").json
    assert there == {"job_id": job.id, "rank": 1, "path": "t.gz", "bytes": 7}


def test_profile_says_why_not(orch: Orch, served: ServedFake, job: JobView, tmp_path: Path) -> None:
    assert orch("profile", job.id, "--output", str(tmp_path / "no" / "t.gz")).code == 2
    assert orch("profile", job.id, "--output", str(tmp_path)).code == 2
    assert orch("profile", job.id, "--steps", "101").code == 2
    served.do(lambda service: service.set(job.id, state="PENDING"))
    refused = orch("profile", job.id)
    assert (refused.code, refused.out) == (5, "")
    assert "does not run" in refused.err


def test_stacks(orch: Orch, served: ServedFake, job: JobView) -> None:
    shown = orch("stacks", job.id)
    assert (shown.code, shown.err) == (0, "")
    assert "rank 0: process 100, sleeping, 0.00 s of processor time\n  Main\n    train (/work/train.py:7)" in shown.out
    one = orch("stacks", job.id, "--rank", "1", "--json").json
    assert [rank["rank"] for rank in one["ranks"]] == [1]
    served.do(lambda service: service.set(job.id, state="PENDING"))
    refused = orch("stacks", job.id)
    assert (refused.code, refused.out) == (5, "")
    assert "does not run" in refused.err


def test_checkpoints(orch: Orch, served: ServedFake, job: JobView) -> None:
    assert orch("checkpoints", job.id).out == "no checkpoint yet\n"
    good = CheckpointView(step=10, at=1.0, path="/c/10", size_bytes=2048, metrics={"loss": 0.5})
    served.do(lambda service: service.save(job.id, good))
    shown = orch("checkpoints", job.id, "--verify")
    assert shown.code == 0
    assert shown.out.splitlines()[1].split()[0] == "10"
    assert "2.0 KiB" in shown.out
    assert "loss 0.5" in shown.out
    served.do(
        lambda service: service.save(job.id, CheckpointView(step=20, at=2.0, path="/c/20", problem="digest differs"))
    )
    assert orch("checkpoints", job.id).code == 0
    broken = orch("checkpoints", job.id, "--verify")
    assert broken.code == 1
    assert "broken: digest differs" in broken.out
    answer = orch("checkpoints", job.id, "--verify", "--json")
    assert answer.code == 1
    assert [item["valid"] for item in answer.json["checkpoints"]] == [False, True]


# -- nodes


def test_nodes(orch: Orch, served: ServedFake) -> None:
    done = orch("nodes")
    assert done.out.splitlines()[1].split() == ["node-a", "READY", "2/2", "8/8"]
    assert orch("nodes", "cordon", "node-a").out == "node-a is cordoned\n"
    assert orch("nodes", "--json").json["nodes"][0]["state"] == "CORDONED"
    assert orch("nodes", "drain", "node-a", "--json").json["state"] == "DRAINING"
    assert orch("nodes", "uncordon", "node-a").code == 0
    missing = orch("nodes", "cordon", "node-z")
    assert missing.code == 3
    assert "orch nodes" in missing.err


def test_labels_of_nodes(orch: Orch, served: ServedFake) -> None:
    assert orch("nodes", "label", "node-a", "disk=nvme", "topology.rack=r1").code == 0
    assert "disk=nvme, topology.rack=r1" in orch("nodes").out
    assert orch("nodes", "label", "node-a", "--remove", "disk").code == 0
    assert orch("nodes", "--json").json["nodes"][0]["labels"] == {"topology.rack": "r1"}
    for wrong in (("disk",), ("=x",), (), ("disk=ssd", "--remove", "disk")):
        done = orch("nodes", "label", "node-a", *wrong)
        assert (done.code, done.out) == (2, "")


def test_reservations_of_nodes(orch: Orch, served: ServedFake) -> None:
    assert orch("nodes", "reservations").out == "no node is reserved\n"
    before = time.time()
    assert orch("nodes", "reserve", "node-a", "--from", "2h", "--for", "90m", "--reason", "new driver").code == 0
    (one,) = orch("nodes", "reservations", "--json").json["reservations"]
    assert (one["node"], one["id"], one["reason"]) == ("node-a", "r1", "new driver")
    assert one["end_at"] - one["start_at"] == 5400
    assert before + 7199 <= one["start_at"] <= time.time() + 7200
    assert "new driver" in orch("nodes", "reservations").out
    assert orch("nodes", "unreserve", "node-a", "r1").code == 0
    assert orch("nodes", "--json").json["nodes"][0]["reservations"] == []
    assert orch("nodes", "reserve", "node-a", "--from", "now", "--for", "1h").code == 0
    for wrong in (("--from", "tomorrow", "--for", "1h"), ("--from", "2h", "--for", "1"), ("--from", "2h")):
        done = orch("nodes", "reserve", "node-a", *wrong)
        assert (done.code, done.out) == (2, "")


def test_a_gpu_that_is_out_is_named(orch: Orch, served: ServedFake) -> None:
    import dataclasses

    gpu = GpuView(uuid="GPU-1", index=0, model="H100", healthy=False, problem="Xid 79\x1b")
    served.do(lambda s: s._nodes.update({"node-a": dataclasses.replace(s._nodes["node-a"], gpus=(gpu,))}))
    shown = orch("nodes").out
    assert "node-a: GPU 0 (GPU-1): Xid 79?" in shown
    assert "H100" in shown


# -- logs


@pytest.fixture
def logged(served: ServedFake) -> JobView:
    job: JobView = served.do(lambda service: service.add(state="SUCCEEDED", num_workers=2))
    served.do(lambda service: service.write(job.id, "step 1", "loss 2"))
    served.do(lambda service: service.write(job.id, "step 1", "warning: hot", rank=1, stream="stderr"))
    return job


def test_logs(orch: Orch, logged: JobView) -> None:
    assert orch("logs", logged.id).out == "[0] step 1\n[0] loss 2\n[1] step 1\n[1] warning: hot\n"
    assert orch("logs", logged.id, "--rank", "1").out == "step 1\nwarning: hot\n"
    assert orch("logs", logged.id, "--tail", "1").out == "[1] warning: hot\n"
    assert orch("logs", logged.id, "--tail", "0").out == ""
    assert orch("logs", logged.id, "--attempt", "2").out == ""


def test_logs_are_searched_before_they_are_cut(orch: Orch, logged: JobView) -> None:
    assert orch("logs", logged.id, "--grep", "^step", "--tail", "1").out == "[1] step 1\n"
    assert orch("logs", logged.id, "--grep", "nothing like it").out == ""
    wrong = orch("logs", logged.id, "--grep", "(")
    assert wrong.code == 2
    assert "backslash" in wrong.err


def test_logs_with_times_and_as_json(orch: Orch, logged: JobView) -> None:
    import json

    line = orch("logs", logged.id, "--rank", "0", "-t").out.splitlines()[0]
    assert line.endswith(".000 step 1")
    first = json.loads(orch("logs", logged.id, "--json").out.splitlines()[0])
    assert {key: first[key] for key in ("rank", "stream", "text", "attempt")} == {
        "rank": 0, "stream": "stdout", "text": "step 1", "attempt": 1,
    }  # fmt: skip


def test_logs_since(orch: Orch, logged: JobView) -> None:
    assert orch("logs", logged.id, "--since", "1s").out == ""
    assert len(orch("logs", logged.id, "--since", "2020-01-01").out.splitlines()) == 4
    assert orch("logs", logged.id, "--since", "soon").code == 2


def test_logs_of_no_job(orch: Orch, served: ServedFake) -> None:
    assert orch("logs", "nothing").code == 3
    assert orch("logs", "digits", "--tail", "-1").code == 2


# -- wait


def test_wait_mirrors_the_result(orch: Orch, served: ServedFake) -> None:
    good = served.do(lambda service: service.add(state="SUCCEEDED"))
    failure = FailureView(failure_class="user", sentence="raised", log_tail=("KeyError: 'x'",), advice="mend it")
    bad = served.do(lambda service: service.add("bad", state="FAILED", reason="raised", failure=failure))
    gone = served.do(lambda service: service.add("gone", state="CANCELLED"))
    assert orch("wait", good.id).code == 0
    told = orch("wait", bad.id)
    assert (told.code, told.out) == (1, "")
    assert "FAILED: raised" in told.err
    assert "KeyError: 'x'" in told.err
    assert "mend it" in told.err
    assert orch("wait", gone.id).code == 1
    assert orch("wait", good.id, bad.id, "-q") == (1, "", "")
    assert orch("wait", good.id, "--json").json["state"] == "SUCCEEDED"
    assert [item["state"] for item in orch("wait", good.id, bad.id, "--json").json] == ["SUCCEEDED", "FAILED"]


def test_wait_gives_up_when_its_time_is_over(orch: Orch, served: ServedFake) -> None:
    ended = served.do(lambda service: service.add(state="SUCCEEDED"))
    runs = served.do(lambda service: service.add("runs", state="RUNNING"))
    assert orch("wait", ended.id, "--timeout", "0s").code == 0
    result = orch("wait", runs.id, "--timeout", "100ms")
    assert (result.code, result.out) == (7, "")
    assert f"{runs.id} has not ended yet: RUNNING" in result.err
    assert "orch cancel" in result.err
    assert orch("wait", ended.id, runs.id, "--timeout", "0s").code == 7, "the time is for all of them together"
    for nonsense in ("10", "soon", "-1s", "2000d"):
        assert orch("wait", runs.id, "--timeout", nonsense).code == 2


def test_progress_is_shown_in_the_table(orch: Orch, served: ServedFake, job: JobView) -> None:
    served.do(lambda service: service.set(job.id, progress=ProgressView(fraction=0.25, eta_seconds=60.0)))
    assert "25% 1m left" in orch("status").out


# -- prune


def test_prune(orch: Orch, served: ServedFake) -> None:
    old = served.do(lambda service: service.add(state="FAILED"))
    dry = orch("prune", "--dry-run", "--older-than", "0s")
    kept = f"checkpoints stay at s3://bucket/{old.id}\n"
    assert (dry.out, dry.err) == (f"{old.id}\n", f"{kept}would remove 1 job, 1.0 KiB\n")
    assert orch("prune", "--older-than", "12h", "--yes", "--json").json["removed"] == [old.id]
    assert orch("prune", "-y").err == "removed 0 jobs, 0 B\n"
    assert orch("prune", "--older-than", "old").code == 2
    assert [call[1][0] for call in served.do(lambda s: s.calls)] == [0, 43200, 2592000]


def test_prune_names_what_it_could_not_remove(orch: Orch, served: ServedFake) -> None:
    stuck = served.do(lambda service: service.add(state="FAILED"))
    served.do(lambda service: service.unremovable.add(stuck.id))
    done = orch("prune", "--older-than", "0s", "--yes")
    assert (done.code, done.out) == (5, "")
    assert done.err.splitlines() == [
        f"{stuck.id} stays: /home/jobs/{stuck.id}: out: Operation not permitted",
        "removed 0 jobs, 0 B",
        "make what stays removable for the daemon's user, then run orch prune again",
    ]
    answer = orch("prune", "--older-than", "0s", "--yes", "--json")
    assert (answer.code, answer.json["left"][0]["job_id"]) == (5, stuck.id)


# -- invalid command lines


@pytest.mark.parametrize(
    "line",
    [
        ("nope",),
        ("status", "--nope"),
        ("submit",),
        ("logs",),
        ("update", "x", "--priority", "high"),
        ("status", "a", "b"),
        ("completion", "tcsh"),
    ],
)
def test_a_wrong_line_is_told_with_the_usage(orch: Orch, line: tuple[str, ...]) -> None:
    done = orch(*line)
    assert (done.code, done.out) == (2, "")
    assert "Usage: orch" in done.err


def test_a_misspelt_command_is_guessed(orch: Orch) -> None:
    assert "Did you mean 'status'" in orch("statu").err


def test_help_lists_every_command_in_its_section(orch: Orch) -> None:
    from orchestrator.cli.app import ENTRIES

    shown = orch("--help")
    assert shown.code == 0
    for entry in ENTRIES:
        assert f"  {entry.name} " in shown.out
        assert f"{entry.section}:" in shown.out
        one = orch(entry.name, "--help")
        assert one.code == 0
        assert f"Usage: orch {entry.name}" in one.out


def test_a_bug_is_told_as_one(orch: Orch, job: JobView, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("orchestrator.cli.commands.status.job_lines", broken)
    done = orch("status")
    assert done.code == 70
    assert "ZeroDivisionError: oops" in done.err
    assert "please report" in done.err
    assert orch("queue").code == 0


def test_a_wrong_environment_is_told(orch: Orch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCH_HOME", "relative/path")
    for command in ("status", "nodes"):
        done = orch(command)
        assert done.code == 2
        assert "ORCH_HOME" in done.err
