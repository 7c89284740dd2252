"""The output of a training process: reports, log lines, the progress bar, traces, quiet ends."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from torch.profiler import ProfilerActivity, profile

from orchestrator.train.errors import DataError, only_on_main
from orchestrator.train.script.environment import RankEnvironment
from orchestrator.train.script.profiling import (
    REQUEST_SUFFIX,
    TRACE_SUFFIX,
    Tracer,
    TraceRefusedError,
    collect,
    listens,
    tracer_of_this_rank,
)
from orchestrator.train.script.training_context import Context
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
from orchestrator.train.trainer.loop.reporting import ProgressBar, log_event
from tests.support.pages import BothSides
from tests.unit.train.trainer.builders import a_dataset, a_model, cross_entropy, sgd


def test_progress_reaches_the_page_that_orch_reads(tmp_path: Path) -> None:
    page = BothSides.create(tmp_path / "page")
    writer = BothSides.open(tmp_path / "page")
    ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path / "checkpoints"), device="cpu"), writer)
    with MultiGPUTrainingManager(MultiGPUConfig(batch_size=8, progress_bar=False), ctx=ctx) as manager:
        manager.setup_training(a_model(), a_dataset(), a_dataset(8), loss_fn=cross_entropy, optimizer=sgd)
        manager.fit(2)
    seen = page.read()
    assert (seen.step, seen.total_steps, seen.samples, seen.phase) == (16, 16, 128, "validate")
    wanted = {"loss", "lr", "grad_norm", "samples_per_second", "step_seconds", "data_seconds", "forward_seconds"}
    assert wanted | {"backward_seconds", "optimizer_seconds", "peak_memory_bytes", "val_loss"} <= set(seen.metrics)
    page.close()
    writer.close()


def test_the_page_says_so_while_it_validates(tmp_path: Path) -> None:
    page = BothSides.create(tmp_path / "page")
    writer = BothSides.open(tmp_path / "page")
    ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path / "checkpoints"), device="cpu"), writer)
    seen: list[tuple[int, str]] = []

    def look(_outputs: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
        told = page.read()
        seen.append((told.step, told.phase))
        return torch.zeros(())

    with MultiGPUTrainingManager(MultiGPUConfig(batch_size=8, progress_bar=False), ctx=ctx) as manager:
        manager.setup_training(
            a_model(), a_dataset(), a_dataset(8), loss_fn=cross_entropy, optimizer=sgd, metrics={"look": look}
        )
        manager.fit(1)
    assert seen == [(8, "validate")]
    page.close()
    writer.close()


def test_a_stop_request_on_the_page_saves_and_leaves(tmp_path: Path) -> None:
    page = BothSides.create(tmp_path / "page")
    page.request_stop()
    writer = BothSides.open(tmp_path / "page")
    ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path / "checkpoints"), device="cpu"), writer)
    manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=8, progress_bar=False), ctx=ctx)
    manager.setup_training(a_model(), a_dataset(), loss_fn=cross_entropy, optimizer=sgd)
    with pytest.raises(SystemExit), manager:
        manager.fit(2)
    assert manager.progress.step == manager.fault_tolerance.saved_step == 1
    assert page.read().stop_seen
    page.close()
    writer.close()


def test_log_lines_are_structured(capsys: pytest.CaptureFixture[str]) -> None:
    log_event("train.step", step=3, loss=0.123456789, of=None)
    assert json.loads(capsys.readouterr().out) == {"event": "train.step", "step": 3, "loss": 0.123457}


def test_log_lines_go_through_structlog_where_the_script_uses_it() -> None:
    with structlog.testing.capture_logs() as lines:
        log_event("train.step", step=3)
    assert lines == [{"event": "train.step", "step": 3, "log_level": "info"}]


def test_log_lines_for_people_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    log_event("train.step", step=3, loss=0.5)
    assert shown.getvalue() == "train.step step=3 loss=0.5\n"


def test_the_progress_bar_shows_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    bar = ProgressBar(100)
    bar.show(25, 1, {"loss": 0.25, "samples_per_second": 1234.5, "step_seconds": 0.1})
    bar.close()
    text = shown.getvalue()
    assert "25/100" in text
    assert "loss 0.25  samples/s 1234" in text


def test_a_long_run_logs_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datetime import timedelta

    for folder, bar in (("log", False), ("bar", True)):
        ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path / folder), device="cpu"))
        config = MultiGPUConfig(batch_size=8, progress_bar=bar, log_interval=timedelta(milliseconds=1))
        with MultiGPUTrainingManager(config, ctx=ctx) as manager:
            manager.setup_training(a_model(), a_dataset(), loss_fn=cross_entropy, optimizer=sgd)
            manager.fit(1)
        captured = capsys.readouterr()
        events = [json.loads(line) for line in captured.out.splitlines() if line.startswith("{")]
        steps = [event for event in events if event["event"] == "train.step"]
        assert bool(steps) is not bar
        assert ("8/8" in captured.err) is bar
    assert {"loss", "lr", "step", "epoch"} <= set(steps[-1] if steps else {"loss", "lr", "step", "epoch"})


def test_a_trace_of_a_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is requested from outside, taken in the middle of training, and whole once it has its name."""
    ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path / "checkpoints"), device="cpu"))
    manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=8, progress_bar=False), ctx=ctx)
    manager._tracer = Tracer(tmp_path / "page", torch.device("cpu"))
    manager.setup_training(a_model(), a_dataset(), loss_fn=cross_entropy, optimizer=sgd)
    target = manager._tracer.ask(3)
    manager.fit(1)
    names = [event.get("name", "") for event in json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]]
    assert names.count("Optimizer.step#SGD.step") == 3
    assert listens(tmp_path / "page", os.getpid())
    manager.close()
    assert not listens(tmp_path / "page", os.getpid())
    assert sorted(path.name for path in tmp_path.glob("page*")) == [target.name]


def test_a_trace_of_a_loop_of_the_user_s_own_that_ends_early(tmp_path: Path) -> None:
    """`train_step` counts the steps, too; the trace so far is written when training ends."""
    ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path / "checkpoints"), device="cpu"))
    with MultiGPUTrainingManager(MultiGPUConfig(batch_size=8, progress_bar=False), ctx=ctx) as manager:
        manager._tracer = Tracer(tmp_path / "page", torch.device("cpu"))
        _, loader, _ = manager.setup_training(a_model(), a_dataset(), loss_fn=cross_entropy, optimizer=sgd)
        manager._tracer.ask(100)
        batches = list(loader)
        for _ in range(3):
            manager.train_step(batches[0])
        with pytest.raises(TraceRefusedError, match="being taken already"):
            manager._tracer.ask()
    trace = collect(tmp_path / "page")
    assert trace is not None
    names = [event.get("name", "") for event in json.loads(gzip.decompress(trace))["traceEvents"]]
    assert names.count("Optimizer.step#SGD.step") == 2, "the first step looks, the others are traced"
    assert not list(tmp_path.glob("page*"))


def test_a_trace_is_told_of_also_when_it_was_fetched_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requester removes the file as soon as it has its name: the training loop must not use it again."""
    replace = Path.replace

    def fetch_at_once(path: Path, target: Path) -> Path:
        replaced = replace(path, target)
        if target.name.endswith(TRACE_SUFFIX):
            assert collect(tmp_path / "page") is not None
        return replaced

    monkeypatch.setattr(Path, "replace", fetch_at_once)
    ctx = Context(RankEnvironment(checkpoint_dir=str(tmp_path / "checkpoints"), device="cpu"))
    with MultiGPUTrainingManager(MultiGPUConfig(batch_size=8, progress_bar=False), ctx=ctx) as manager:
        manager._tracer = Tracer(tmp_path / "page", torch.device("cpu"))
        _, loader, _ = manager.setup_training(a_model(), a_dataset(), loss_fn=cross_entropy, optimizer=sgd)
        manager._tracer.ask(1)
        batches = list(loader)
        for _ in range(3):
            manager.train_step(batches[0])
        assert not manager._tracer.active
        assert manager.progress.step == 3


def test_a_profiler_of_the_script_s_own_is_left_alone(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "page", torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU]) as own:
        tracer.ask(1)
        tracer.look()
        assert not tracer.active
        torch.ones(2).add(1)
    assert "aten::add" in {event.name for event in own.events()}
    tracer.look()  # the request is still there
    assert tracer.step_done() is not None


def test_a_trace_that_a_profiler_of_the_script_ends_is_given_up(tmp_path: Path) -> None:
    """Torch crashes the process when such a trace is exported."""
    tracer = Tracer(tmp_path / "page", torch.device("cpu"))
    tracer.ask(1)
    tracer.look()
    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(2).add(1)
    assert tracer.step_done() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.trace-ready"]
    tracer.ask(1)
    tracer.look()
    assert tracer.step_done() is not None


def test_a_profiler_of_the_script_that_outlasts_a_trace_is_left_alone(tmp_path: Path) -> None:
    """Ending the trace would end that profiler, and torch crashes the process when it is exported."""
    tracer = Tracer(tmp_path / "page", torch.device("cpu"))
    tracer.ask(1)
    tracer.look()
    with profile(activities=[ProfilerActivity.CPU]) as own:
        assert tracer.step_done() is None
        torch.ones(2).add(1)
    own.export_chrome_trace(str(tmp_path / "own.json"))
    assert "aten::add" in (tmp_path / "own.json").read_text()


def test_a_trace_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = Tracer(tmp_path / "page", torch.device("cpu"))

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gzip, "open", full)
    tracer.ask(1)
    tracer.look()
    assert tracer.step_done() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.trace-ready"], (
        "the request is gone: who asked hears of it"
    )


@pytest.mark.parametrize(("text", "steps"), [("{}", 5), ("no json", 5), ('{"steps": 0}', 1), ('{"steps": 1e9}', 100)])
def test_requests_for_traces_are_bounded(tmp_path: Path, text: str, steps: int) -> None:
    tracer = Tracer(tmp_path / "page", torch.device("cpu"))
    Path(str(tmp_path / "page") + REQUEST_SUFFIX).write_text(text)
    tracer.look()
    assert tracer.active
    assert tracer._left == steps
    while tracer.active:
        tracer.step_done()


def test_nobody_can_ask_for_a_trace_outside_of_orch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCH_PROGRESS_PATH", raising=False)
    tracer = tracer_of_this_rank(torch.device("cpu"))
    tracer.look()
    assert not tracer.active
    assert tracer.finish() is None
    with pytest.raises(RuntimeError, match="no path to write traces to"):
        tracer.ask()


# Errors of many ranks


def test_rank_0_raises_the_error_itself_and_others_a_quiet_twin(capfd: pytest.CaptureFixture[str]) -> None:
    error = DataError("sample 3 is broken")
    assert only_on_main(error, rank=0) is error
    twin = only_on_main(error, rank=1, under_orch=True)
    assert isinstance(twin, DataError)
    assert isinstance(twin, SystemExit)
    assert str(twin) == "sample 3 is broken"
    assert "rank 0 has failed" in capfd.readouterr().err


def test_an_uncaught_quiet_error_ends_the_process_without_a_word() -> None:
    code = "from orchestrator.train.trainer.config.config import MultiGPUConfig; MultiGPUConfig(batch_size=0)"
    ended = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RANK": rank, "WORLD_SIZE": "2"},
            capture_output=True,
            text=True,
            check=False,
        )
        for rank in ("0", "1")
    ]
    assert [process.returncode for process in ended] == [1, 1]
    assert ended[0].stderr.count("batch_size: expected a whole number of at least 1, got 0") == 1
    assert ended[1].stderr == ended[1].stdout == ""
