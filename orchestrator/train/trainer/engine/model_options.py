"""Applies a configuration's options to the model itself, before ranks are added: device, batch norm, recomputation.

Each option keeps the parameter objects and their names, so that existing optimizers and checkpoints
without the option still fit.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from orchestrator.train.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.train.trainer.config.config import MultiGPUConfig
    from orchestrator.train.trainer.process_group import RankGroup


def prepare_model(model: nn.Module, config: MultiGPUConfig, place: RankGroup) -> nn.Module:
    """Put `model` on the rank's device and apply the options. Raises ConfigError for one that the model does not support."""
    model = model.to(place.device)
    if config.sync_bn and place.distributed and place.device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if config.use_gradient_checkpointing:
        recompute_activations(model)
    return model


def recompute_activations(model: nn.Module) -> int:
    """Make `model` keep only the inputs of its blocks, and recompute the rest in the backward pass; return the number of blocks.

    Uses the switch of Hugging Face models. Raises ConfigError where no blocks are found.
    """
    switch = getattr(model, "gradient_checkpointing_enable", None)
    if callable(switch):
        switch(gradient_checkpointing_kwargs={"use_reentrant": False})
        return 1
    blocks = find_blocks(model)
    if not blocks:
        raise ConfigError(
            "use_gradient_checkpointing found no blocks: the model has neither an nn.ModuleList nor an nn.Sequential "
            "with parts that have parameters; call torch.utils.checkpoint.checkpoint in its forward, and turn this off"
        )
    for block in blocks:
        block.forward = functools.partial(_recomputed, block.forward)
    return len(blocks)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: the elements of the outermost nn.ModuleLists, else of the outermost nn.Sequentials."""
    for kind in (nn.ModuleList, nn.Sequential):
        found = [part for group in _outermost(model, kind) for part in group.children() if _learns(part)]
        if found:
            return found
    return []


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    if isinstance(module, kind):
        return [module]
    return [found for child in module.children() for found in _outermost(child, kind)]


def _learns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
