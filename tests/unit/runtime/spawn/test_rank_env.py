"""A rank's environment: the precedence of values, and variables that are never passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.spawn.environment import (
    INHERITED,
    inheritable_environment,
    node_environment,
    rank_environment,
)

ARGUMENTS: dict[str, Any] = {
    "base": {"PATH": "/bin"},
    "job_env": {},
    "job_id": "digits-k3f9q2",
    "attempt": 4,
    "world_size": 4,
    "local_world_size": 2,
    "group_rank": 1,
    "group_world_size": 2,
    "master_addr": "10.0.0.1",
    "master_port": 29501,
    "restart_count": 3,
    "max_restarts": 10,
    "visible_gpus": ("4", "6"),
    "checkpoint_dir": "/ckpt",
    "resume_from": None,
}


def environment(progress_path: str | None = None, **arguments: Any) -> dict[str, str]:
    """Return the environment of rank 3, the second on its node."""
    node = node_environment(**ARGUMENTS | arguments)
    return rank_environment(node, rank=3, local_rank=1, progress_path=progress_path)


def test_complete() -> None:
    assert environment() == {
        "PATH": "/bin",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501",
        "TORCHELASTIC_RUN_ID": "digits-k3f9q2",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "10",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": "",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "4,6",
        "ORCH_JOB_ID": "digits-k3f9q2",
        "ORCH_ATTEMPT": "4",
        "ORCH_CHECKPOINT_DIR": "/ckpt",
    }


def test_optional_ones_are_there_when_they_have_a_value() -> None:
    optional: dict[str, Any] = {
        "resume_from": "/ckpt/7",
        "progress_path": "/p",
        "previous_step": 0,
        "working_dir": "/w",
    }
    env = environment(**optional, extra={"ORCH_CHECKPOINT_KEEP": "3"}, error_file="/e")
    names = ("ORCH_RESUME_FROM", "ORCH_PROGRESS_PATH", "ORCH_PREVIOUS_STEP", "PWD", "ORCH_CHECKPOINT_KEEP")
    assert [env[name] for name in names] == ["/ckpt/7", "/p", "0", "/w", "3"]
    assert env["TORCHELASTIC_ERROR_FILE"] == "/e"


@pytest.mark.parametrize(
    ("base", "job", "name", "expected"),
    [
        ({"A": "base"}, {"A": "job"}, "A", "job"),
        ({"OMP_NUM_THREADS": "8"}, {}, "OMP_NUM_THREADS", "8"),
        ({"OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS", "2"),
        ({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        ({"RANK": "9"}, {"RANK": "8"}, "RANK", "3"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}, "CUDA_VISIBLE_DEVICES", "4,6"),
    ],
)
def test_who_wins(base: dict[str, str], job: dict[str, str], name: str, expected: str | None) -> None:
    assert environment(base=base, job_env=job).get(name) == expected


def test_one_rank_on_a_machine_takes_all_its_threads_and_sees_no_gpu_it_was_not_given() -> None:
    env = environment(local_world_size=1, visible_gpus=())
    assert "OMP_NUM_THREADS" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_jobs_inherit_what_is_listed_and_what_the_operator_names() -> None:
    kept = {
        "PATH": "/bin",
        "HF_HOME": "/data",
        "LC_ALL": "C.UTF-8",
        "http_proxy": "http://p:1",
        "NCCL_DEBUG": "INFO",
        "LD_LIBRARY_PATH": "/l",
    }
    kept |= {
        "PYTHONBREAKPOINT": "ipdb.set_trace",
        "OMP_NUM_THREADS": "8",
        "ORCH_HOME": "/h",
        "CUDA_HOME": "/usr/local/cuda",
    }
    secret = dict.fromkeys(
        (
            "WANDB_API_KEY",
            "HF_TOKEN",
            "OPENAI_APIKEY",
            "PGPASS",
            "GH_PAT",
            "SLACK_WEBHOOK_URL",
            "TF_VAR_pw",
            "NCCL_TOKEN",
        ),
        "x",
    )
    of_others = dict.fromkeys(
        ("RAY_ADDRESS", "PWD", "RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ORCH_RESUME_FROM", "ORCH_TOKEN"), "x"
    )
    of_others |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "CONDA_PREFIX", "SITE", "LICENSE"), "x")
    base = kept | secret | of_others
    assert inheritable_environment(base) == kept
    more = inheritable_environment(
        {**base, "SITE_ROOT": "/s", "SITE_KEY": "x"},
        ("SITE_*", "GH_PAT", "OPENAI_APIKEY", "HF_TOKEN", "ORCH_*", "RANK", "M*"),
    )
    assert more == kept | {"SITE_ROOT": "/s", "GH_PAT": "x", "OPENAI_APIKEY": "x", "HF_TOKEN": "x"}


def test_the_documentation_lists_them() -> None:
    text = (Path(__file__).parents[4] / "docs" / "environment.md").read_text()
    for subject, names in INHERITED.items():
        assert f"| {subject} | {', '.join(f'`{name}`' for name in names.split())} |" in text


def test_each_vendors_runtime_sees_the_jobs_gpus_alone() -> None:
    amd, intel = environment(vendor="amd"), environment(vendor="intel")
    assert (amd["ROCR_VISIBLE_DEVICES"], amd["HIP_VISIBLE_DEVICES"], amd["CUDA_VISIBLE_DEVICES"]) == (
        "4,6",
        "0,1",
        "0,1",
    )
    assert intel["ZE_AFFINITY_MASK"] == "4,6"
    assert not {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"} & environment(vendor="nvidia").keys()
    assert environment(vendor="amd", visible_gpus=())["HIP_VISIBLE_DEVICES"] == ""
