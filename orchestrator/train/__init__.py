"""The API for code inside the training process.

    from orchestrator.train import context

    ctx = context()
    checkpoint = ctx.load()
    ...
    ctx.report(step=step, total_steps=total, loss=loss)
    ctx.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=step)

Importing this package costs nothing: its parts are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.checkpoint.storage.directory import Checkpoint
    from orchestrator.spec.trainer import TrainingMode
    from orchestrator.train.script.elastic import BatchShare, NotElasticError
    from orchestrator.train.script.progress import ProgressPage
    from orchestrator.train.script.progress_reading import ProgressSnapshot
    from orchestrator.train.script.saving import CheckpointWarning
    from orchestrator.train.script.training_context import Context
    from orchestrator.train.trainer.config.config import MultiGPUConfig
    from orchestrator.train.trainer.engine.trainer import (
        DataParallelTrainer,
        DistributedDataParallelTrainer,
        FullyShardedTrainer,
        MultiGPUTrainer,
    )
    from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
    from orchestrator.train.trainer.loop.recovery import FaultToleranceManager
    from orchestrator.train.trainer.measure.metrics import MetricsCollector
    from orchestrator.train.trainer.measure.monitor import PerformanceMonitor

__all__ = [
    "BatchShare",
    "Checkpoint",
    "CheckpointWarning",
    "Context",
    "DataParallelTrainer",
    "DistributedDataParallelTrainer",
    "FaultToleranceManager",
    "FullyShardedTrainer",
    "MetricsCollector",
    "MultiGPUConfig",
    "MultiGPUTrainer",
    "MultiGPUTrainingManager",
    "NotElasticError",
    "PerformanceMonitor",
    "ProgressPage",
    "ProgressSnapshot",
    "TrainingMode",
    "context",
]

_HOMES = {
    "Checkpoint": "orchestrator.checkpoint.storage.directory",
    "BatchShare": "orchestrator.train.script.elastic",
    "NotElasticError": "orchestrator.train.script.elastic",
    "CheckpointWarning": "orchestrator.train.script.saving",
    "Context": "orchestrator.train.script.training_context",
    "DataParallelTrainer": "orchestrator.train.trainer.engine.trainer",
    "DistributedDataParallelTrainer": "orchestrator.train.trainer.engine.trainer",
    "FaultToleranceManager": "orchestrator.train.trainer.loop.recovery",
    "FullyShardedTrainer": "orchestrator.train.trainer.engine.trainer",
    "MetricsCollector": "orchestrator.train.trainer.measure.metrics",
    "MultiGPUConfig": "orchestrator.train.trainer.config.config",
    "MultiGPUTrainer": "orchestrator.train.trainer.engine.trainer",
    "MultiGPUTrainingManager": "orchestrator.train.trainer.loop.manager",
    "PerformanceMonitor": "orchestrator.train.trainer.measure.monitor",
    "ProgressPage": "orchestrator.train.script.progress",
    "ProgressSnapshot": "orchestrator.train.script.progress_reading",
    "TrainingMode": "orchestrator.spec.trainer",
}


def context() -> Context:
    """Return the Context of this process: rank, device, report, save, load, should_stop. The same object each time."""
    from orchestrator.train.script.training_context import current_context

    return current_context()


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
