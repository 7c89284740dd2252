"""What runs inside the training process.

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
    from orchestrator.checkpoint.reader import Checkpoint
    from orchestrator.train.config import MultiGPUConfig, TrainingMode
    from orchestrator.train.elastic import BatchShare, NotElasticError
    from orchestrator.train.faults import FaultToleranceManager
    from orchestrator.train.manager import MultiGPUTrainingManager
    from orchestrator.train.metrics import MetricsCollector
    from orchestrator.train.monitor import PerformanceMonitor
    from orchestrator.train.progress import ProgressPage, ProgressSnapshot
    from orchestrator.train.saving import CheckpointWarning
    from orchestrator.train.trainer import MultiGPUTrainer
    from orchestrator.train.trainers import DataParallelTrainer, DistributedDataParallelTrainer, FullyShardedTrainer
    from orchestrator.train.training_context import Context

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
    "Checkpoint": "orchestrator.checkpoint.reader",
    "BatchShare": "orchestrator.train.elastic",
    "NotElasticError": "orchestrator.train.elastic",
    "CheckpointWarning": "orchestrator.train.saving",
    "Context": "orchestrator.train.training_context",
    "DataParallelTrainer": "orchestrator.train.trainers",
    "DistributedDataParallelTrainer": "orchestrator.train.trainers",
    "FaultToleranceManager": "orchestrator.train.faults",
    "FullyShardedTrainer": "orchestrator.train.trainers",
    "MetricsCollector": "orchestrator.train.metrics",
    "MultiGPUConfig": "orchestrator.train.config",
    "MultiGPUTrainer": "orchestrator.train.trainer",
    "MultiGPUTrainingManager": "orchestrator.train.manager",
    "PerformanceMonitor": "orchestrator.train.monitor",
    "ProgressPage": "orchestrator.train.progress",
    "ProgressSnapshot": "orchestrator.train.progress",
    "TrainingMode": "orchestrator.train.config",
}


def context() -> Context:
    """The Context of this process: rank, device, report, save, load, should_stop. The same object each time."""
    from orchestrator.train.training_context import current_context

    return current_context()


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
