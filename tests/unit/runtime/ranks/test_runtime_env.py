"""A rank with an actor in an environment that Ray installed: its interpreter, its modules, its command."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.runtime.ranks.launch_spec import RankPlan, inside

MADE = "/tmp/s/runtime_resources/py_modules_files/x"
VENV = "/tmp/s/runtime_resources/pip/y/virtualenv/bin/python"
PLAN = RankPlan(
    job_id="digits-abc234",
    attempt=1,
    rank=0,
    mode="script",
    target="train.py",
    args=("--lr", "1"),
    python_options=("-u",),
    cwd="/work",
    env={"PATH": "/bin", "PYTHONPATH": "/mine"},
    threads=None,
    cold=False,
    python="/usr/bin/python3",
    fork_socket="",
    log_dir="",
    exit_record="",
    page="",
    previous_step=0,
)


def test_a_job_without_one_is_left_as_it_is() -> None:
    assert inside(PLAN, {"PYTHONPATH": MADE}, VENV) is PLAN


def test_modules_come_before_the_job_s_own_path() -> None:
    plan = inside(replace(PLAN, runtime_env=("py_modules",)), {"PYTHONPATH": f"/ray/own:{MADE}"}, VENV)
    assert plan.env["PYTHONPATH"] == f"{MADE}:/mine"
    assert (plan.cold, plan.mode, plan.target) == (True, "script", "train.py")


@pytest.mark.parametrize(
    ("mode", "target", "args", "expected"),
    [
        ("script", "train.py", ("a",), (VENV, ("-u", "train.py", "a"))),
        ("module", "pkg.mod", ("a",), (VENV, ("-u", "-m", "pkg.mod", "a"))),
        ("command", "/usr/bin/python3", ("-c", "pass"), (VENV, ("-c", "pass"))),
        ("command", "bash", ("run.sh",), ("bash", ("run.sh",))),
    ],
)
def test_packages_mean_another_interpreter(
    mode: str, target: str, args: tuple[str, ...], expected: tuple[str, tuple[str, ...]]
) -> None:
    options = () if mode == "command" else ("-u",)
    asked = replace(PLAN, runtime_env=("pip",), mode=mode, target=target, args=args, python_options=options)
    plan = inside(asked, {}, VENV)
    assert (plan.mode, plan.cold) == ("command", True)
    assert (plan.target, plan.args) == expected
    assert plan.env["PATH"] == "/tmp/s/runtime_resources/pip/y/virtualenv/bin:/bin"
    assert plan.env["VIRTUAL_ENV"] == "/tmp/s/runtime_resources/pip/y/virtualenv"
