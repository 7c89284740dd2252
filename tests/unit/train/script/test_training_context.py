"""The training script's side of orch."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
import pytest
import torch

from orchestrator.checkpoint import StaleAttemptError, UnsupportedStateError
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.gpu.recording.recorder import TrainingFile
from orchestrator.train.script.environment import read_environment
from orchestrator.train.script.saving import CheckpointWarning
from orchestrator.train.script.training_context import Context
from tests.support.pages import BothSides


@pytest.fixture
def make(tmp_path, page):
    """Return a function that makes contexts, which report to ``page`` and save below the test's folder."""

    def make(**environ):
        defaults = {
            "ORCH_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
            "ORCH_ATTEMPT": "1",
            "ORCH_JOB_ID": "job-222222",
        }
        return Context(read_environment({**defaults, **environ}), page)

    return make


def run_script(tmp_path, body, *, environ=None, **options):
    """Run a training script with plain python in its own folder."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("ORCH_", "RANK", "WORLD"))}
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env={**clean, "PYTHONPATH": os.getcwd(), **(environ or {})},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def test_a_context_knows_its_place(make):
    ctx = make(RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", ORCH_ATTEMPT="3")
    assert (ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size) == (1, 4, 1, 2)
    assert (ctx.is_main, ctx.job_id, ctx.attempt) == (False, "job-222222", 3)


def test_the_device_is_the_cpu_without_cuda_and_the_environments_choice_when_it_has_one(make, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert make().device == torch.device("cpu")
    assert make(ORCH_DEVICE="cuda:3").device == torch.device("cuda:3")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (2, 0)])
def test_ranks_take_the_device_of_their_local_rank_and_share_when_there_are_fewer(
    make, monkeypatch, kind, local_rank, index
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert make(RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE="4").device == torch.device(kind, index)


def test_an_accelerator_that_ranks_cannot_train_on_together_is_left_alone(make, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    assert make().device == torch.device("cpu")


def test_a_report_reaches_the_page(make, page):
    make(ORCH_PREVIOUS_STEP="1").report(
        step=np.int64(2),
        total_steps=10,
        epoch=0,
        phase="train",
        samples=64,
        tokens=128,
        loss=torch.tensor(0.5),
        accuracy=np.float32(0.25),
        count=3,
    )
    seen = page.read()
    assert (seen.step, seen.total_steps, seen.epoch, seen.phase, seen.samples, seen.tokens) == (
        2,
        10,
        0,
        "train",
        64,
        128,
    )
    assert seen.metrics == {"loss": 0.5, "accuracy": 0.25, "count": 3.0}


@pytest.mark.parametrize(
    ("report", "error", "message"),
    [
        ({"step": "7"}, TypeError, r"report\(step='7'\): a whole number is needed"),
        ({"step": 1.5}, TypeError, "whole number"),
        ({"step": True}, TypeError, "whole number"),
        ({"step": -1}, ValueError, r"step=-1\): must be between 0"),
        ({"samples": 2**63}, ValueError, "samples"),
        ({"step": 1, "loss": "0.5"}, TypeError, r"report\(loss='0.5'\): a number is needed"),
        ({"step": 1, "loss": None}, TypeError, "loss=None"),
        ({"step": 1, "loss": torch.zeros(2)}, TypeError, "a number is needed"),
        ({"epoch": "one"}, TypeError, "epoch"),
        ({"phase": 3}, TypeError, "a phase is a short text"),
    ],
)
def test_a_report_of_nonsense_is_refused_and_changes_nothing(make, page, report, error, message):
    with pytest.raises(error, match=message):
        make().report(**report)
    assert page.read().step is None


def test_a_recording_is_told_epoch_batch_and_phase(make, tmp_path):
    """Rank 0 alone writes it, in the form that `orch record` reads (gpu.recorder.TrainingFile)."""
    path = tmp_path / "training.json"
    told = TrainingFile(path)
    ctx = make(ORCH_TRAINING_METADATA=str(path))
    assert told() == {}
    ctx.report(step=3, epoch=1, phase="train", loss=0.5)
    assert told() == {"epoch": 1, "batch": 3, "phase": "train"}
    ctx.report(step=4, phase="validate")
    assert told() == {"epoch": 1, "batch": 4, "phase": "validate"}
    ctx.report(step=5)
    assert told()["batch"] == 4, "not more often than somebody reads it"
    make(ORCH_TRAINING_METADATA=str(path), RANK="1", WORLD_SIZE="2").report(step=9, epoch=9)
    assert told()["epoch"] == 1


def test_a_recording_that_cannot_be_told_is_warned_of_once(make, tmp_path):
    ctx = make(ORCH_TRAINING_METADATA=str(tmp_path / "no" / "training.json"))
    with pytest.warns(RuntimeWarning, match="lacks epoch and phase"):
        ctx.report(step=1, epoch=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ctx.report(step=2, epoch=2)
        make(ORCH_TRAINING_METADATA=str(tmp_path / "no" / "training.json")).report(step=1, epoch=1)


def test_save_and_load_tell_the_page(make, page):
    ctx = make()
    assert ctx.load() is None
    assert ctx.save({"weight": torch.arange(3.0)}, step=4, rank_state={"seed": 1}, metrics={"loss": torch.tensor(0.5)})
    facts = page.read().checkpoint
    assert (facts.saved_step, facts.failed_saves, facts.failure) == (4, 0, "")
    assert facts.saved_bytes > 12
    assert (page.read().saves, page.read().snapshot_step) == (1, None)
    assert page.read().save_seconds > 0
    assert os.path.isdir(facts.saved_path)

    loaded = make(ORCH_ATTEMPT="2").load()
    assert torch.equal(loaded.state["weight"], torch.arange(3.0))
    assert (loaded.rank_state, loaded.step, loaded.metrics, loaded.path) == (
        {"seed": 1},
        4,
        {"loss": 0.5},
        facts.saved_path,
    )
    assert page.read().checkpoint.resumed_step == 4
    assert page.read().saving_since is None


def test_a_damaged_checkpoint_is_told_on_the_page(make, page):
    ctx = make()
    ctx.save({"n": 1}, step=1)
    ctx.save({"n": 2}, step=2)
    with open(os.path.join(page.read().checkpoint.saved_path, "state.json"), "ab") as file:
        file.write(b" ")
    assert make(ORCH_ATTEMPT="2").load().state == {"n": 1}
    assert page.read().checkpoint.quarantined[0].startswith("step-000000000002-a1: state.json")


def test_a_failed_save_warns_once_is_shown_and_the_next_one_tries_again(make, page, tmp_path):
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where the directory should be")
    ctx = make()
    with pytest.warns(CheckpointWarning, match="checkpoint of step 1 not saved"):
        assert not ctx.save({"n": 1}, step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ctx.save({"n": 2}, step=2)
    facts = page.read().checkpoint
    assert (facts.failed_saves, page.read().saves) == (2, 0)
    assert "step 2" in facts.failure
    blocked.unlink()
    assert ctx.save({"n": 3}, step=3)
    assert (page.read().checkpoint.failure, page.read().checkpoint.saved_step) == ("", 3)


def test_even_warnings_as_errors_do_not_let_a_failed_save_end_the_training(make, tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not make().save({"n": 1}, step=1)


def test_a_state_that_cannot_be_stored_is_an_error_of_the_script(make):
    with pytest.raises(UnsupportedStateError, match=r"model: pass the state of torch.nn.modules.linear.Linear"):
        make().save({"model": torch.nn.Linear(1, 1)}, step=1)


@pytest.mark.parametrize("step", [-1, 1.0, None, "3", True])
def test_save_refuses_a_bad_step(make, step):
    with pytest.raises((TypeError, ValueError), match="step"):
        make().save({}, step=step)


def test_a_leftover_of_an_older_attempt_must_end(make):
    old, new = make(ORCH_ATTEMPT="1"), make(ORCH_ATTEMPT="2")
    old.save({"n": 1}, step=1)
    new.load()
    with pytest.raises(StaleAttemptError, match="attempt 2 has taken over"):
        old.save({"n": 2}, step=2)


def test_save_is_nothing_on_other_ranks_without_a_part_of_their_own(make, tmp_path):
    assert make(RANK="1", WORLD_SIZE="2").save({"n": 1}, step=1)
    assert not (tmp_path / "checkpoints").exists()


def test_save_may_come_from_any_thread_one_at_a_time(make, tmp_path):
    ctx = make(ORCH_CHECKPOINT_KEEP="all")
    threads = [threading.Thread(target=ctx.save, args=({"n": step},), kwargs={"step": step}) for step in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    steps = sorted(info.step for info in CheckpointRepository(tmp_path / "checkpoints").list())
    assert steps == [0, 1, 2, 3, 4, 5]


def test_a_job_without_a_checkpoint_resumes_from_the_one_it_was_given(make, tmp_path):
    other = CheckpointRepository(tmp_path / "other", attempt=3)
    info = other.save({"n": 7}, step=70)
    ctx = make(ORCH_RESUME_FROM=info.path)
    assert ctx.load().state == {"n": 7}
    ctx.save({"n": 8}, step=80)
    assert ctx.load().state == {"n": 8}


def test_should_stop_follows_the_page(make, page):
    ctx = make()
    assert not ctx.should_stop()
    page.request_stop()
    assert ctx.should_stop()
    assert page.read().stop_seen


def test_sigterm_asks_for_a_stop_and_children_keep_the_default(tmp_path):
    done = run_script(
        tmp_path,
        """
        import os, signal
        from orchestrator.train import context
        ctx = context()
        assert not ctx.should_stop()
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)  # ends the child
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not ctx.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ctx.should_stop()
        print("ended by itself")
        """,
    )
    assert (done.stdout, done.returncode) == ("ended by itself\n", 0), done.stderr


def test_a_handler_of_the_scripts_own_is_left_alone(tmp_path):
    done = run_script(
        tmp_path,
        """
        import os, signal
        from orchestrator.train import context
        signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
        ctx = context()
        ctx.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ctx.should_stop()
        """,
    )
    assert (done.stdout, done.returncode) == ("mine\n", 0), done.stderr


def test_before_the_first_question_sigterm_ends_the_process(tmp_path):
    done = run_script(
        tmp_path,
        """
        import os, signal
        from orchestrator.train import context
        context().report(step=1)
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    )
    assert done.returncode == -signal.SIGTERM


def test_a_question_from_another_thread_installs_no_handler(tmp_path):
    done = run_script(
        tmp_path,
        """
        import signal, threading
        from orchestrator.train import context
        thread = threading.Thread(target=context().should_stop)
        thread.start(); thread.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        context().should_stop()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        """,
    )
    assert done.returncode == 0, done.stderr


def test_plain_python_saves_below_its_working_directory_and_resumes(tmp_path):
    body = """
        from orchestrator.train import context
        ctx = context()
        found = ctx.load()
        start = 0 if found is None else found.step
        print(ctx.rank, ctx.world_size, ctx.is_main, start)
        ctx.save({"n": start}, step=start + 5)
    """
    outputs = [run_script(tmp_path, body).stdout for _ in range(3)]
    assert outputs == ["0 1 True 0\n", "0 1 True 5\n", "0 1 True 10\n"]
    assert (tmp_path / "checkpoints" / "step-000000000015-a1" / "manifest.json").exists()


def test_importing_costs_neither_torch_nor_numpy(tmp_path):
    done = run_script(
        tmp_path,
        """
        import sys
        import orchestrator.train, orchestrator.checkpoint
        ctx = orchestrator.train.context()
        ctx.report(step=1, loss=0.5)
        ctx.save({"step": 1}, step=1)
        assert ctx.load().state == {"step": 1}
        loaded = {"torch", "numpy", "ray", "safetensors", "fsspec"} & set(sys.modules)
        assert not loaded, loaded
        assert callable(orchestrator.train.context), "the function must survive the import of its module"
        assert orchestrator.train.context() is ctx
        """,
    )
    assert done.returncode == 0, done.stderr


def test_the_packages_export_what_they_name():
    import orchestrator.checkpoint
    import orchestrator.train

    for package in (orchestrator.checkpoint, orchestrator.train):
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'missing'"):
            package.missing  # noqa: B018


def test_a_forked_child_leaves_its_parents_page_alone(tmp_path):
    page = BothSides.create(tmp_path / "page")
    done = run_script(
        tmp_path,
        """
        import os
        from orchestrator.train import context
        ctx = context()
        ctx.report(step=1)
        child = os.fork()
        if child == 0:
            ctx.report(step=99)
            context().report(step=100)
            os._exit(0)
        os.waitpid(child, 0)
        ctx.report(step=2)
        """,
        environ={"ORCH_PROGRESS_PATH": str(tmp_path / "page")},
    )
    assert done.returncode == 0, done.stderr
    assert (page.read().step, page.read().max_step) == (2, 2)
    page.close()


def test_a_missing_page_is_told_and_training_goes_on(tmp_path):
    done = run_script(
        tmp_path,
        """
        import warnings
        warnings.simplefilter("default")
        from orchestrator.train import context
        context().report(step=1)
        print("trained")
        """,
        environ={"ORCH_PROGRESS_PATH": str(tmp_path / "nowhere")},
    )
    assert done.stdout == "trained\n"
    assert "progress will not be shown" in done.stderr
