"""`submit` and `run`: their requests, their output, and the start of a daemon when none is running."""

from __future__ import annotations

import io
import json
import os
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.api.errors import RefusedError, invalid_spec
from orchestrator.api.launch import ServeOptions, UpReply
from orchestrator.api.server.testing import serve_fake
from orchestrator.api.views import PlanReply
from orchestrator.spec.importing import name_for
from orchestrator.spec.job import parse_job
from orchestrator.spec.problems import SpecError
from tests.unit.cli.conftest import JOB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from orchestrator.api.requests import SubmitRequest
    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


def test_the_id_is_all_that_is_printed(orch: Orch, served: ServedFake, job_file: Path) -> None:
    done = orch("submit", str(job_file))
    (job_id,) = served.do(lambda service: list(service._jobs))
    assert done == (0, f"{job_id}\n", "")


def test_json(orch: Orch, served: ServedFake, job_file: Path) -> None:
    answer = orch("submit", str(job_file), "--json").json
    assert (answer["created"], answer["state"]) == (True, "PENDING")
    several = orch("submit", str(job_file), str(job_file), "--json").json
    assert [item["created"] for item in several] == [True, True]
    assert len({item["job_id"] for item in several} | {answer["job_id"]}) == 3


def test_what_is_sent(orch: Orch, served: ServedFake, job_file: Path) -> None:
    orch("submit", str(job_file), "--set", "priority=3", "--set=env.A=b=c", "--resume-from", "old@7")
    (request,) = served.do(lambda service: service.requests)
    assert request.overrides == ("priority=3", "env.A=b=c")
    assert request.resume_from == "old@7"
    assert request.cwd == str(job_file.parent)
    assert request.source == str(job_file)


def test_variables_that_the_file_names_are_sent_and_no_others(
    orch: Orch, served: ServedFake, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "HF_HOME"):
        monkeypatch.setenv(name, f"my {name}")
    job_file.write_text(JOB + "env: {pass: ['WANDB_*']}\n")
    done = orch("submit", str(job_file))
    assert "note: env.pass leaves out WANDB_API_KEY; `secrets: [WANDB_API_KEY]`" in done.err
    orch("submit", str(job_file), "--set", "env.pass=[HF_HOME]")
    orch("submit", str(job_file), "--set", "env.pass=none")
    requests = served.do(lambda service: service.requests)
    assert [dict(request.passed) for request in requests] == [
        {"WANDB_MODE": "my WANDB_MODE"},
        {"HF_HOME": "my HF_HOME"},
        {},
    ]


def test_too_many_variables_are_an_error_before_anything_is_sent(
    orch: Orch, served: ServedFake, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIG_ONE", "x" * 40_000)
    monkeypatch.setenv("BIG_TWO", "x" * 40_000)
    job_file.write_text(JOB + "env: {pass: ['BIG_*']}\n")
    done = orch("submit", str(job_file))
    assert done.code == 2
    assert "env.pass: the variables of env.pass have 80000 characters" in done.err
    assert served.do(lambda service: service.requests) == []


def test_dependencies_are_sent(orch: Orch, served: ServedFake, job_file: Path) -> None:
    orch("submit", str(job_file), "--after", "prepare", "--after=clean:any")
    orch("submit", str(job_file))
    first, second = served.do(lambda service: service.requests)
    assert (first.after, second.after) == (("prepare", "clean:any"), ())


def test_standard_input(orch: Orch, served: ServedFake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(JOB.encode())))
    monkeypatch.chdir(tmp_path)
    assert orch("submit", "-").code == 0
    (request,) = served.do(lambda service: service.requests)
    assert (request.yaml, request.source, request.cwd) == (JOB, "<stdin>", str(tmp_path))


def test_errors_of_the_file_come_with_their_place(orch: Orch, served: ServedFake, home: Path) -> None:
    (home / "bad.yaml").write_text("name: x\n")
    done = orch("submit", str(home / "bad.yaml"))
    assert (done.code, done.out) == (2, "")
    assert f"{home}/bad.yaml:1:1: entrypoint: is missing (write it)" in done.err
    problem = orch("submit", str(home / "bad.yaml"), "--json").problem
    assert problem["problems"][0]["line"] == 1


@pytest.mark.parametrize(
    ("name", "next_step"),
    [
        ("train.py", "orch init"),
        ("go.sbatch", "orch import"),
        ("go.sh", "orch run -- bash"),
        ("a b.ipynb", "'a b.ipynb'"),
    ],
)
def test_a_script_is_told_from_a_job_file(
    orch: Orch, home: Path, monkeypatch: pytest.MonkeyPatch, name: str, next_step: str
) -> None:
    monkeypatch.chdir(home)
    (home / name).write_text("name: digits\nentrypoint: python train.py\n")
    done = orch("submit", name)
    assert (done.code, done.out) == (2, "")
    assert f"{name} is a script, and not a job.yaml" in done.err
    assert next_step in done.err
    assert "No such file" in orch("submit", f"missing-{name}").err


def test_all_files_are_read_before_the_first_is_sent(orch: Orch, served: ServedFake, job_file: Path) -> None:
    done = orch("submit", str(job_file), "/no/such/job.yaml")
    assert done.code == 2
    assert "orch init" in done.err
    assert served.do(lambda service: service.requests) == []


def test_a_missing_secret_is_asked_for(
    orch: Orch, served: ServedFake, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "s.yaml").write_text(JOB + "secrets: [WANDB_KEY]\n")
    monkeypatch.delenv("WANDB_KEY", raising=False)
    done = orch("submit", str(home / "s.yaml"))
    assert done.code == 2
    assert "export WANDB_KEY=..." in done.err
    monkeypatch.setenv("WANDB_KEY", "hush")
    assert orch("submit", str(home / "s.yaml")).code == 0
    assert served.do(lambda service: service.requests[-1].secrets) == {"WANDB_KEY": "hush"}


def test_a_dry_run(orch: Orch, served: ServedFake, job_file: Path) -> None:
    done = orch("submit", str(job_file), "--dry-run")
    assert "would start now" in done.out
    assert orch("submit", str(job_file), "--dry-run", "--json").json["starts"] == "now"
    assert len(orch("submit", str(job_file), str(job_file), "--dry-run", "--json").json) == 2
    assert served.do(lambda service: service._jobs) == {}


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_dry_run_of_a_job_that_can_never_run_is_refused(
    orch: Orch, served: ServedFake, job_file: Path, arguments: tuple[str, ...]
) -> None:
    async def plan(*_: object) -> PlanReply:
        return PlanReply(name="big", queue="default", starts="never", reason="no node can fit 1 rank with 64 GPUs")

    served.do(lambda service: setattr(service, "plan", plan))
    done = orch("submit", str(job_file), "--dry-run", *arguments)
    assert done.code == 5
    assert "no node can fit 1 rank with 64 GPUs" in done.out


def test_follow_shows_one_log(orch: Orch, served: ServedFake, job_file: Path) -> None:
    assert orch("submit", str(job_file), str(job_file), "--follow").code == 2
    assert orch("submit", str(job_file), "--follow", "--json").code == 2
    assert served.do(lambda service: service.requests) == []


# -- no daemon is running


@pytest.fixture
def up(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ServeOptions]]:
    """Replace the slow work of ``orch up`` by the start of a fake daemon; yield the options of its calls."""
    calls: list[ServeOptions] = []
    running: list[Any] = []

    def start(settings: Any, options: ServeOptions) -> UpReply:
        calls.append(options)
        assert settings.home == home
        running.append(serve_fake(home / "run", owner_uid=os.getuid()))
        running[-1].__enter__()
        return UpReply(pid=1, started=True, seconds=0.1, address="")

    monkeypatch.setitem(sys.modules, "orchestrator.daemon.process.up", module(up=start))
    yield calls
    for context in running:
        context.__exit__(None, None, None)


def module(**functions: object) -> types.ModuleType:
    made = types.ModuleType("fake")
    made.__dict__.update(functions)
    return made


def test_submit_starts_a_daemon_and_says_so(orch: Orch, up: list[ServeOptions], job_file: Path) -> None:
    done = orch("submit", str(job_file))
    assert done.code == 0
    assert done.out.startswith("digits-")
    assert done.err == "no daemon is running; starting one (`orch down` stops it)\n"
    assert up == [ServeOptions()]
    assert orch("submit", str(job_file)).err == ""
    assert len(up) == 1


def test_a_daemon_that_does_not_start_is_told(
    orch: Orch, home: Path, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> UpReply:
        raise RefusedError("it did not start: port in use", hint="`orch doctor`")

    monkeypatch.setitem(sys.modules, "orchestrator.daemon.process.up", module(up=start))
    done = orch("submit", str(job_file))
    assert done.code == 5
    assert "port in use" in done.err


def test_no_daemon_is_started_for_another_machine(
    orch: Orch, up: list[ServeOptions], job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("ORCH_ADDRESS", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert orch("submit", str(job_file)).code == 4
    assert up == []


# -- run


def test_run_makes_the_job_it_means(
    orch: Orch, served: ServedFake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    line = (
        "run",
        "-n",
        "2",
        "--gpu",
        "0.5",
        "--cpu",
        "3",
        "--set",
        "priority=9",
        "--",
        "python",
        "train.py",
        "--lr",
        "0.1",
        "a b",
    )
    assert orch(*line).code == 0
    (request,) = served.do(lambda service: service.requests)
    spec = parse_job(request.yaml, overrides=request.overrides)
    assert (spec.name, spec.entrypoint, spec.priority) == ("train", "python train.py --lr 0.1 'a b'", 9)
    assert spec.resources.num_workers == 2
    assert (spec.resources.resources_per_worker.gpu, spec.resources.resources_per_worker.cpu) == (0.5, 3)
    assert request.cwd == str(tmp_path)


def test_run_needs_no_dashes_and_leaves_the_command_s_own_alone(orch: Orch, served: ServedFake) -> None:
    assert orch("run", "--name", "mine", "python", "train.py", "--json", "-q", "--wait").code == 0
    (request,) = served.do(lambda service: service.requests)
    assert json.loads(request.yaml)["entrypoint"] == "python train.py --json -q --wait"
    assert json.loads(request.yaml)["name"] == "mine"


def read_as_the_daemon_does(request: SubmitRequest) -> dict[str, Any]:
    try:
        parse_job(request.yaml, overrides=request.overrides)
    except SpecError as error:
        raise invalid_spec(error) from error
    return {"name": "train"}


def test_run_names_the_option_and_no_line_of_a_file(orch: Orch, served: ServedFake) -> None:
    served.do(lambda service: setattr(service, "_spec", read_as_the_daemon_does))
    wrong = ("--time", "10", "--name", "A b", "--label", "team=" + "x" * 300, "--set", "retry.max_restarts=-1")
    done = orch("run", *wrong, "--", "python", "train.py")
    assert (done.code, done.out) == (2, "")
    first, *lines, last = done.err.splitlines()
    assert first == "orch: this command line has 4 errors"
    assert {line.strip().partition(": ")[0] for line in lines} == {
        "--time",
        "--name",
        "--label",
        "--set retry.max_restarts",
    }
    assert not any("orch run>" in line for line in lines)
    assert last.endswith("`orch help run` describes each option")
    assert orch("run", "--time", "10m", "--", "python", "train.py").code == 0


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train.py"], "train"),
        (["python", "-u", "src/Train_Big.py", "--name", "x.py"], "train-big"),
        (["python", "-m", "pkg.sub.fit", "--x"], "fit"),
        (["bash", "./run.sh"], "run"),
        (["/opt/tool"], "tool"),
        (["python", "2024.py"], "job-2024"),
        (["./---"], "job"),
        (["python", "n" * 80 + ".py"], "n" * 50),
    ],
)
def test_default_names(command: list[str], name: str) -> None:
    assert name_for(command) == name


def test_run_with_everything(orch: Orch, served: ServedFake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS", "mine")
    options = ["--env", "A=b=c", "--env", "TOKENIZERS", "--queue", "big", "--priority", "70", "--gpu-model", "H100"]
    more = ["--time", "2h", "-l", "team=a", "--label", "note=x=y", "--gpu", "2", "-q"]
    assert orch("run", *options, *more, "--", "python", "train.py", "--env", "own").code == 0
    (request,) = served.do(lambda service: service.requests)
    job = parse_job(request.yaml)
    assert dict(job.env) == {"A": "b=c", "TOKENIZERS": "mine"}
    assert (job.queue, job.priority) == ("big", 70)
    assert job.max_duration is not None
    assert job.max_duration.total_seconds() == 7200
    assert dict(job.labels) == {"team": "a", "note": "x=y"}
    assert job.resources.resources_per_worker.gpu_model == "H100"
    assert job.entrypoint.endswith("--env own")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--env", "NOT_THERE_AT_ALL"), "--env NOT_THERE_AT_ALL=VALUE"),
        (("--label", "team"), "--label team=VALUE"),
        (("--watch", "--follow"), "--watch shows one job"),
        (("--watch", "--json"), "--watch shows one job"),
        (("--priority", "101"), "100"),
    ],
)
def test_run_refuses_what_it_cannot_mean(orch: Orch, served: ServedFake, options: tuple[str, ...], said: str) -> None:
    done = orch("run", *options, "--", "python", "train.py")
    assert done.code == 2
    assert said in done.err
