"""The precision of a step: autocast, and gradient scaling where fp16 needs it.

Weights and optimizer state stay fp32. rules.py checks first what the hardware supports.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, cast

import torch

if TYPE_CHECKING:
    from orchestrator.train.trainer.config.config import MultiGPUConfig

PrecisionName = Literal["fp32", "bf16", "fp16"]

_BF16_CAPABILITY = (8, 0)  # older GPUs run bf16 too, but in software


class MixedPrecision:
    """The precision of a run: `name`, the autocast around a forward pass, and the scaler (None without fp16)."""

    def __init__(self, config: MultiGPUConfig, device: torch.device) -> None:
        self.name: PrecisionName = resolve(config.precision or "fp32", device)
        self.dtype: torch.dtype | None = {
            "fp32": None,
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
        }[self.name]
        self.scaler = torch.amp.GradScaler(device.type) if self.name == "fp16" else None
        self._autocast: AbstractContextManager[None] = (
            nullcontext() if self.dtype is None else torch.autocast(device.type, dtype=self.dtype)
        )

    def autocast(self) -> AbstractContextManager[None]:
        """Enter this around the forward pass and the loss. One object, created once: steps are not nested."""
        return self._autocast


def resolve(precision: str, device: torch.device) -> PrecisionName:
    """Return what `auto` means on `device`; any other value unchanged."""
    if precision != "auto":
        return cast("PrecisionName", precision)
    if device.type != "cuda" or torch.version.hip is not None:
        return "bf16"
    return "bf16" if torch.cuda.get_device_capability(device) >= _BF16_CAPABILITY else "fp16"
