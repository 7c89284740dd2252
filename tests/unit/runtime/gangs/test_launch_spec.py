"""The launch plan of each rank of a gang, and the cost of making it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.events import RankPlacement
from orchestrator.runtime.gangs.launching import Places, rank_plans
from orchestrator.runtime.ranks.logs import LogLimits
from orchestrator.spec.paths import Paths
from tests.unit.core.builders import make_spec, pending

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.ranks.launch_spec import RankPlan

HOME = Path("/home/orch")


def seat(rank: int, node_id: str, *gpu_ids: str) -> RankPlacement:
    return RankPlacement(
        rank=rank,
        node_id=node_id,
        node_name=node_id,
        gpu_ids=gpu_ids,
        gpu_uuids=tuple(f"GPU-{i}" for i in gpu_ids),
        actor_pid=7,
    )


def places(**fields: Any) -> Places:
    given: dict[str, Any] = {
        "paths": Paths(home=HOME, socket=HOME / "s"),
        "work_dir": "/work",
        "node_dir": Path("/tmp/orch-0/abc/local"),
        "page_dir": Path("/dev/shm/orch"),
        "base_env": {"LANG": "C"},
        "secrets": {},
        "log_limits": LogLimits(),
        "previous_step": 0,
        "simulated": False,
    }
    return Places(**given | fields)


def plans_of(seats: list[RankPlacement], job: Job | None = None, **fields: Any) -> list[RankPlan]:
    job = job or pending(make_spec(workers=len(seats)))
    by_node = {node_id: places(**fields) for node_id in {s.node_id for s in seats}}
    return list(rank_plans(job, seats, ("10.0.0.1", 29500), by_node))


def test_each_rank_has_its_place_and_sees_all_gpus_of_the_job_on_its_node() -> None:
    plans = plans_of([seat(0, "b", "4"), seat(1, "a", "0"), seat(2, "b", "6")])
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert [tuple(plan.env[name] for name in names) for plan in plans] == [
        ("0", "0", "2", "0", "2", "4,6"),
        ("1", "0", "1", "1", "2", "0"),
        ("2", "1", "2", "0", "2", "4,6"),
    ]
    assert {plan.env["MASTER_ADDR"] + ":" + plan.env["MASTER_PORT"] for plan in plans} == {"10.0.0.1:29500"}
    assert len({plan.page for plan in plans}) == len({plan.exit_record for plan in plans}) == 3
    assert [plan.env["ORCH_PROGRESS_PATH"] for plan in plans] == [plan.page for plan in plans]
    assert len({plan.env["ORCH_PROCESS_TREE"] for plan in plans}) == 3


def test_simulated_gpus_are_not_shown_to_cuda() -> None:
    (plan,) = plans_of([seat(0, "a", "0")], simulated=True)
    assert plan.env["CUDA_VISIBLE_DEVICES"] == ""


def test_snapshots_are_shared_on_one_node_only() -> None:
    assert all(plan.snapshots is not None for plan in plans_of([seat(0, "a"), seat(1, "a")]))
    assert all(plan.snapshots is None for plan in plans_of([seat(0, "a"), seat(1, "b")]))


def test_external_checkpoints_are_watched_by_rank_0_alone() -> None:
    watch: Any = object()
    assert [plan.watch for plan in plans_of([seat(0, "a"), seat(1, "a")], watch=watch)] == [watch, None]


@pytest.mark.parametrize("entrypoint", ["python train.py", "/home/a/.pyenv/shims/python train.py"])
def test_a_rank_runs_the_interpreter_that_was_found_at_submission(entrypoint: str) -> None:
    job = pending(make_spec(workers=1, entrypoint=entrypoint), python="/opt/python/bin/python3")
    (plan,) = plans_of([seat(0, "a")], job)
    assert plan.python == "/opt/python/bin/python3"
    (same,) = plans_of([seat(0, "a")], pending(make_spec(workers=1), python="/opt/python/bin/python3"))
    assert plan.fork_socket == same.fork_socket
