"""A rank's place: its device and its process groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(slots=True)
class Place:
    """A rank's device, and the process groups of the first ranks by their number."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)
