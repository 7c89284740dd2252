"""Detects out-of-memory errors on any device, reports them with the sizes and the settings that help, and measures peaks."""

from __future__ import annotations

import gc
import re
import resource
import sys
from typing import TYPE_CHECKING

import torch

from orchestrator.units import size

if TYPE_CHECKING:
    from orchestrator.train.trainer.config.config import MultiGPUConfig

_MESSAGES = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` reports that a device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_MESSAGES.search(str(error)))


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: on its GPU since `reset_peak`, on the host since its start."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device) -> None:
    """Restart the measurement of the peak, where the device supports that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_unused(device: torch.device) -> None:
    """Free what is not referenced any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe_shortage(
    error: BaseException, config: MultiGPUConfig, device: torch.device, *, accumulate: int, parameters: int
) -> str:
    """Return what ran out, the sizes of the parts, and the settings to change, in the order in which to try them."""
    where = "CUDA out of memory" if device.type == "cuda" else "out of memory"
    lines = [f"{where} on {device} with batch_size {config.batch_size}, {accumulate} accumulated: {_first_line(error)}"]
    fixed = parameters * 4 * 4  # weights, gradients, and two moments, 4 bytes each
    lines.append(f"weights, gradients and Adam's state take about {size(fixed)}; the rest grows with the batch")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        peak = torch.cuda.max_memory_allocated(device)
        lines.append(f"this process peaked at {size(peak)}; {size(free)} of {size(total)} are free")
    lines.extend(_remedies(config, accumulate))
    return "\n".join(lines)


def _remedies(config: MultiGPUConfig, accumulate: int) -> list[str]:
    remedies = []
    if config.batch_size > 1:
        change = f"batch_size: {max(1, config.batch_size // 2)}"
        if config.global_batch_size is None:
            change += f", gradient_accumulation_steps: {accumulate * 2}"
        remedies.append(
            f"half the batch with the same effect: {change} (or oom_retry: true, which does it when needed)"
        )
    if not config.use_mixed_precision:
        remedies.append("lower precision: use_mixed_precision: true")
    if not config.use_gradient_checkpointing:
        remedies.append("less kept for the backward pass: use_gradient_checkpointing: true")
    if config.training_mode != "fully_sharded":
        remedies.append("weights and optimizer spread over the ranks: training_mode: fully_sharded")
    return [f"- {remedy}" for remedy in remedies]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
