"""Every text that a rank actor hands to the daemon passes the masker; paths and numbers stay."""

from __future__ import annotations

from orchestrator.checkpoint.repository.persister import PersisterStatus
from orchestrator.core.diagnosis.health import Frame, RankLook, Thread
from orchestrator.core.events import Exit
from orchestrator.core.facts.faults import KernelMessage
from orchestrator.core.facts.notes import PoliciesLeftOut
from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.ranks.rank_events import RankEvent, masked_event, masked_look, masked_progress, masked_status
from orchestrator.train.script.progress_reading import CheckpointFacts, ProgressSnapshot

MASKER = Masker(["hunter2"])
TEXT = "with hunter2 in it"


def test_an_event() -> None:
    end = Exit(
        rank=0,
        at=1.0,
        exit_code=1,
        signal=None,
        error_type=TEXT,
        error_message=TEXT,
        log_tail=(TEXT, "line"),
        evidence=(KernelMessage(said=TEXT),),
        policy="fail",
        policy_note=PoliciesLeftOut(pattern=TEXT),
    )
    event = RankEvent(number=1, kind="exited", at=1.0, exit=end)
    masked = masked_event(event, MASKER)
    assert "hunter2" not in repr(masked)
    assert masked.exit is not None
    assert (masked.number, masked.exit.policy, masked.exit.log_tail) == (1, "fail", ("with *** in it", "line"))
    assert masked_event(event, Masker(())) is event


def test_a_progress_page() -> None:
    facts = CheckpointFacts(
        saved_path="/data/run",
        failure=TEXT,
        quarantined=(TEXT,),
        interval_reason=TEXT,
        snapshots_off=TEXT,
    )
    page = ProgressSnapshot(step=3, phase=TEXT, metrics={"loss": 1.0, "hunter2": 2.0}, checkpoint=facts)
    masked = masked_progress(page, MASKER)
    assert "hunter2" not in repr(masked)
    assert masked.metrics == {"loss": 1.0, "***": 2.0}
    assert (masked.step, masked.checkpoint.saved_path) == (3, "/data/run")


def test_what_became_of_a_snapshot() -> None:
    status = PersisterStatus(step=1, path="/data/run/step-1", failure=TEXT)
    assert masked_status(status, MASKER) == PersisterStatus(step=1, path="/data/run/step-1", failure="with *** in it")
    assert masked_status(None, MASKER) is None


def test_a_look_at_the_processes() -> None:
    threads = (Thread(name=TEXT, frames=(Frame("hunter2", "/src/hunter2.py", 7),)),)
    masked = masked_look(RankLook(rank=0, at=1.0, threads=threads, problem=TEXT), MASKER)
    assert "hunter2" not in repr(masked)
    assert str(masked.threads[0].frames[0]) == "*** (/src/***.py:7)"
