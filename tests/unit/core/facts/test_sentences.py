"""Every fact has a sentence, and no fact has to be read back from its sentence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.events import Failure
from orchestrator.core.facts.codec import FACTS
from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.faults import (
    FilesNotSent,
    GpuFailing,
    GpuLost,
    GpuSilent,
    MaxDuration,
    PythonException,
    Quarantined,
    RankEnd,
    StorageUnseen,
    Xid,
)
from orchestrator.core.facts.notes import PoliciesLeftOut
from orchestrator.core.facts.reasons import (
    AwaitsNodes,
    BudgetSpent,
    ByGrowth,
    ByIdleReclaim,
    ByLimit,
    ByNodeDrain,
    ByNodeReservation,
    ByShutdown,
    ByUser,
    DoesNotFit,
    MadeRoom,
    NodeReserved,
    NoNewCheckpoint,
    NoNodeWithLabels,
    NotEnoughFree,
    StopOrdered,
)
from orchestrator.core.states import FailureClass, StopPurpose
from tests.support.records import replace
from tests.unit.core import strategies


@pytest.mark.parametrize("kind", sorted(FACTS))
def test_every_fact_has_words(kind: str) -> None:
    assert FACTS[kind].sentence is not Fact.sentence or FACTS[kind].words


@settings(max_examples=80, deadline=None)
@given(strategies.known_facts)
def test_whatever_a_fact_holds_can_be_said(fact: Fact) -> None:
    assert isinstance(fact.sentence(), str)
    assert isinstance(fact.advice("job-1"), str)


ENDS = sorted((cls for cls in FACTS.values() if issubclass(cls, RankEnd)), key=lambda cls: cls.kind)
ABOUT_THE_GPU = {GpuSilent, GpuFailing, Quarantined}


@pytest.mark.parametrize("cls", [cls for cls in ENDS if cls not in ABOUT_THE_GPU], ids=lambda cls: cls.kind)
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_the_end_of_a_rank_names_it(cls: type[RankEnd], data: st.DataObject) -> None:
    fact = replace(data.draw(strategies.fact_of(cls)), rank=37)
    assert fact.sentence().startswith("rank 37")


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (MaxDuration(limit_seconds=20.0), "exceeded max_duration (20s)"),
        (
            AwaitsNodes(nodes=("b",), gpus=1, cpus=2),
            "waiting for node b, which is down; the nodes that are up cannot hold 1 GPU and 2 CPUs",
        ),
        (
            AwaitsNodes(nodes=("b", "c"), gpus=8, cpus=8),
            "waiting for nodes b, c, which are down; the nodes that are up cannot hold 8 GPUs and 8 CPUs",
        ),
        (
            NoNodeWithLabels(labels=("disk=nvme",)),
            "waiting for a node with disk=nvme: no node has this label; `orch nodes label` sets it",
        ),
        (
            NotEnoughFree(gpus=1, cpus=2, free_gpus=3, free_cpus=4, labels=("disk=nvme",)),
            "waiting for 1 GPU and 2 CPUs on nodes with disk=nvme; free now on all nodes: 3 GPUs, 4 CPUs",
        ),
        (
            NotEnoughFree(gpus=0, cpus=0.002, free_gpus=0, free_cpus=0),
            "waiting for a CPU that is not fully reserved (cpu: 0); free now: 0 GPUs, 0 CPUs",
        ),
        (
            NodeReserved(node="a", start=0.0, end=3600.0, said="new driver"),
            (
                "node a is reserved from 1970-01-01 00:00:00 UTC to 1970-01-01 01:00:00 UTC (new driver), and it is not known"
                " how long the job runs (max_duration says it)"
            ),
        ),
        (
            NotEnoughFree(
                gpus=1,
                cpus=2,
                free_gpus=3,
                free_cpus=4,
                reserved=(NodeReserved(node="a", start=60.0, end=3600.0, seconds=7200.0),),
            ),
            (
                "waiting for 1 GPU and 2 CPUs; free now: 3 GPUs, 4 CPUs; node a is reserved from 1970-01-01 00:01:00 UTC to"
                " 1970-01-01 01:00:00 UTC, and the job is expected to run for 2h"
            ),
        ),
        (
            NodeReserved(node="a", start=0.0, end=3600.0, begun=True),
            "node a is reserved until 1970-01-01 01:00:00 UTC",
        ),
        (
            MadeRoom(by=ByNodeReservation(node="a", end=3600.0, said="new driver")),
            "stopped to make room (node a is reserved until 1970-01-01 01:00:00 UTC (new driver))",
        ),
        (DoesNotFit(gpus=1, cpus=2), "does not fit on the nodes there are, even when they are empty: 1 GPU and 2 CPUs"),
        (NoNewCheckpoint(restarts=1), "1 restart in a row brought no newer checkpoint (retry.max_no_progress)"),
        (
            StopOrdered(purpose=StopPurpose.TIMEOUT, by=ByLimit(key="max_duration")),
            "exceeded max_duration; its processes have time to save",
        ),
        (
            StopOrdered(purpose=StopPurpose.CANCEL, by=ByUser(name="ada"), at_once=True),
            "cancelled by ada; its processes are killed",
        ),
        (
            StopOrdered(purpose=StopPurpose.RESIZE, by=ByGrowth(ranks=4, instead_of=2)),
            "stopped by the scheduler, to run on 4 ranks instead of 2; its processes have time to save",
        ),
        (MadeRoom(by=ByNodeDrain(name="ada")), "stopped to make room (ada drains its node)"),
        (MadeRoom(by=ByShutdown()), "stopped to make room (orch down --stop-jobs)"),
        (
            MadeRoom(by=ByIdleReclaim(job="new", seconds=1800.0)),
            "stopped to make room for new: all GPUs of this job had been idle for 30m",
        ),
        (
            Quarantined(gpu_uuid="GPU-1", cause=GpuLost(gpu_uuid="GPU-1", rank=2)),
            "quarantined: rank 2: its GPU went away (gpu GPU-1: the driver no longer has this GPU)",
        ),
        (
            StorageUnseen(rank=1, node="abcdef0123456789", storage_path="/ckpt"),
            (
                "rank 1: node abcdef012345 does not see checkpoint.storage_path (/ckpt), so what is saved there would be lost with"
                " it; mount the directory there, or drain the node"
            ),
        ),
        (
            FilesNotSent(
                rank=1, node="abcdef0123456789", said="No space left on device: /home/ada/.orch-node", host="node-b"
            ),
            (
                "rank 1: the working copy could not be written to node node-b (No space left on device:"
                " /home/ada/.orch-node); make room there, or drain the node"
            ),
        ),
    ],
)
def test_the_words_of_a_fact(fact: Fact, words: str) -> None:
    assert fact.sentence() == words


def test_a_gpu_keeps_its_id_however_long_the_words_of_a_program_are() -> None:
    fact = Xid(rank=0, gpu_uuid="GPU-1234", number=79, seconds_before=2.0)
    assert fact.sentence() == "rank 0: its GPU went away (gpu GPU-1234: Xid 79, 2s before)"
    long = PythonException(rank=0, error_type="ValueError", said="x" * 5000)
    assert len(long.sentence()) < 300
    assert len(long.said) == 5000


def test_a_failure_says_why_it_is_not_tried_again_and_what_became_of_the_log_policies() -> None:
    failure = Failure(
        failure_class=FailureClass.USER,
        cause=PythonException(rank=0, error_type="ValueError", said="boom"),
        policy_note=PoliciesLeftOut(pattern="(a+)+", seconds=2.0),
        refusal=BudgetSpent(failure_class=FailureClass.USER, used=1, budget=1),
    )
    assert failure.sentence() == "rank 0 raised ValueError: boom; not tried again: 1 of 1 user restarts used"
    told = failure.advice("job-1")
    assert told.startswith("read the traceback: orch logs job-1 --rank 0; the log policy ")


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        (PoliciesLeftOut(pattern="(a+)+", seconds=2.0), "the log policy '(a+)+' took longer than 2s"),
        (
            PoliciesLeftOut(seconds=30.0),
            "the log policies were not searched for: no processor was free for that within 30s",
        ),
        (PoliciesLeftOut(said="no memory"), "the log policies could not be searched for: no memory"),
    ],
)
def test_why_log_policies_are_left_out(fact: PoliciesLeftOut, said: str) -> None:
    assert fact.sentence().startswith(said)
