"""The real Trainer, Lightning and Accelerate report, stop at a saved step, and continue to the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from orchestrator.train.errors import StopTraining
from orchestrator.train.integrations import common
from orchestrator.train.script.environment import RankEnvironment
from orchestrator.train.script.progress import ProgressPage
from orchestrator.train.script.training_context import Context
from tests.support.pages import BothSides

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 8


@pytest.fixture
def page(tmp_path: Path) -> ProgressPage:
    return BothSides.create(tmp_path / "page")


def context(tmp_path: Path, page: ProgressPage | None = None) -> Context:
    return Context(RankEnvironment(checkpoint_dir=str(tmp_path / "orch"), device="cpu"), page)


class StopAt(Context):
    """A context that receives SIGTERM once a step was reported."""

    def __init__(self, directory: Path, step: int) -> None:
        super().__init__(RankEnvironment(checkpoint_dir=str(directory / "orch"), device="cpu"))
        self._at = step

    def report(self, **values: Any) -> None:
        super().report(**values)
        if values.get("step") == self._at:
            os.kill(os.getpid(), signal.SIGTERM)

    def should_stop(self) -> bool:
        self._stop.watch()
        return super().should_stop()


@pytest.fixture(autouse=True)
def own_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def stopping(tmp_path: Path, step: int) -> Context:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an earlier context of this process has its own handler there
    made = StopAt(tmp_path, step)
    made.should_stop()  # from now on SIGTERM is a request
    return made


def data() -> TensorDataset:
    torch.manual_seed(1)
    inputs = torch.randn(STEPS * 4, 8)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 2)


# Hugging Face


def hf_trainer(output: Path) -> Any:
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.layer(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    arguments = transformers.TrainingArguments(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"x": x, "labels": y} for x, y in data()]
    return transformers.Trainer(model=Model(), args=arguments, train_dataset=rows)


@pytest.mark.rare
def test_hf_reports_stops_and_goes_on(tmp_path: Path, page: ProgressPage) -> None:
    pytest.importorskip("transformers")
    from orchestrator.train.integrations import hf

    whole = hf_trainer(tmp_path / "whole")
    hf.train(whole, ctx=context(tmp_path, page))
    told = page.read()
    assert (told.step, told.total_steps) == (STEPS, STEPS)
    assert told.metrics["loss"] > 0

    with pytest.raises(StopTraining) as stopped:
        hf.train(hf_trainer(tmp_path / "out"), ctx=stopping(tmp_path, 5))
    assert stopped.value.code == 143
    newest = common.newest(tmp_path / "out", hf.CHECKPOINT)
    assert newest is not None
    assert newest.name == "checkpoint-5"
    (tmp_path / "out" / "checkpoint-7").mkdir()  # begun, and cut off
    (tmp_path / "out" / "checkpoint-7" / "trainer_state.json").write_text('{"global_step"')
    again = hf_trainer(tmp_path / "out")
    hf.train(again, ctx=context(tmp_path))
    assert again.state.global_step == STEPS
    assert torch.equal(again.model.layer.weight, whole.model.layer.weight)
    finished = hf_trainer(tmp_path / "out")
    assert hf.train(finished, ctx=context(tmp_path)) is None
    assert finished.state.global_step == STEPS
    assert torch.equal(finished.model.layer.weight, whole.model.layer.weight)


# Lightning


def lightning_parts() -> tuple[Any, Any, Any]:
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            inputs, targets = batch
            loss = nn.functional.cross_entropy(self.layer(inputs), targets)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    trainer = pl.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    return trainer, Module(), StatefulDataLoader(data(), batch_size=4)  # Lightning saves its position as well


@pytest.mark.rare
def test_lightning_reports_stops_and_goes_on(tmp_path: Path, page: ProgressPage) -> None:
    pytest.importorskip("lightning.pytorch")
    from orchestrator.train.integrations import lightning

    trainer, whole, loader = lightning_parts()
    trainer.fit(whole, loader)
    trainer, module, loader = lightning_parts()
    with pytest.raises(StopTraining) as stopped:
        lightning.fit(trainer, module, loader, ctx=stopping(tmp_path, 5))
    assert stopped.value.code == 143
    assert [path.name for path in (tmp_path / lightning.FOLDER).iterdir()] == ["step-5.ckpt"]
    (tmp_path / lightning.FOLDER / ".draft-7").write_bytes(b"cut off")
    trainer, module, loader = lightning_parts()
    lightning.fit(trainer, module, loader, ctx=context(tmp_path, page), save_every=2)
    told = page.read()
    assert (told.step, told.total_steps) == (STEPS, STEPS)
    assert told.metrics["train_loss"] > 0
    assert torch.equal(module.layer.weight, whole.layer.weight)
    assert sorted(path.name for path in (tmp_path / lightning.FOLDER).iterdir()) == ["step-6.ckpt", "step-8.ckpt"]


# Accelerate


def accelerated(tmp_path: Path, ctx: Context, **settings: Any) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    from orchestrator.train.integrations.accelerate import resume

    accelerator = accelerate.Accelerator(cpu=True)
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    run = resume(accelerator, tmp_path / settings.pop("folder", "states"), ctx=ctx, **settings)
    batches = list(DataLoader(data(), batch_size=4))
    for step in range(run.step, STEPS):
        inputs, targets = batches[step]
        loss = nn.functional.cross_entropy(net(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        run.step_done(total_steps=STEPS, loss=loss.item())
    return accelerator.unwrap_model(net)


def test_accelerate_reports_stops_and_goes_on(tmp_path: Path, page: ProgressPage) -> None:
    pytest.importorskip("accelerate")
    whole = accelerated(tmp_path, context(tmp_path, page), folder="whole")
    told = page.read()
    assert (told.step, told.total_steps, told.phase) == (STEPS, STEPS, "train")
    with pytest.raises(StopTraining):
        accelerated(tmp_path, stopping(tmp_path, 5))
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["step-5"]
    (tmp_path / "states" / ".draft-6").mkdir()
    again = accelerated(tmp_path, context(tmp_path), save_every=2, keep=1)
    assert torch.equal(again.weight, whole.weight)  # type: ignore[arg-type]
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["step-8"]
