"""The place of this process: its rank, its device, and its connection to the other ranks.

Reconciles the configuration with the launcher's environment, joins and leaves torch's process group, and holds the
rendezvous store, in which ranks exchange notes. Decides nothing about training.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # missing in torch's stubs

from orchestrator.train.errors import ConfigError, RecoveryTimeoutError, fail_once
from orchestrator.train.script.environment import read_environment
from orchestrator.train.script.training_context import current_context
from orchestrator.train.trainer.config import rules as config_rules

if TYPE_CHECKING:
    from datetime import timedelta

    from orchestrator.train.script.training_context import Context
    from orchestrator.train.trainer.config.config import MultiGPUConfig

_BF16_CAPABILITY = (8, 0)
_BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """One rank's place. `store` is None for one rank alone; `joined` says that this module created the process group."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    store: Store | None = None
    joined: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether there are other ranks."""
        return self.world_size > 1

    @property
    def control_device(self) -> torch.device:
        """Return the device for small tensors of agreements: the CPU wherever the process group supports it."""
        if self.distributed and self.device.type == "cuda" and dist.get_backend() == "nccl":
            return self.device
        return torch.device("cpu")

    def wait_for_all(self, occasion: str, timeout: timedelta) -> None:
        """Wait until every rank has called this. Raises RecoveryTimeoutError, naming the ranks that have not."""
        if self.store is not None:
            _wait_for_all(self.store, self.rank, self.world_size, occasion, timeout)


def join_ranks(config: MultiGPUConfig, ctx: Context | None = None) -> RankGroup:
    """Find this rank's place, check the configuration against it, and join the process group.

    Raises ConfigError with every error; RecoveryTimeoutError when the others do not appear.
    """
    _log_environment(config)
    ctx = current_context() if ctx is None else ctx
    if config.rank is not None and (ctx.rank, ctx.world_size) != (config.rank, config.world_size):
        problem = f"rank is {config.rank}, but context() was called before and has rank {ctx.rank}: call it afterwards"
        raise fail_once(ConfigError(problem), rank=config.rank)
    device = _device(config, ctx.device, ctx.local_rank)
    problems = list(config_rules.conflicts_with_place(config, _surroundings(device, ctx)))
    if problems:
        raise fail_once(ConfigError(*map(config_rules.sentence, problems)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, joined = (None, False) if ctx.world_size == 1 else _join(config, device)
    return RankGroup(
        rank=ctx.rank,
        world_size=ctx.world_size,
        local_rank=ctx.local_rank,
        device=device,
        store=store,
        joined=joined,
    )


def leave(place: RankGroup) -> None:
    """Leave the process group, if `join_ranks` joined it. Idempotent."""
    if place.joined and dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_all(store: Store, rank: int, world_size: int, occasion: str, timeout: timedelta) -> None:
    keys = [f"{occasion}/{other}" for other in range(world_size)]
    store.set(keys[rank], "here")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise RecoveryTimeoutError(
            f"{occasion}: of {world_size} ranks, {', '.join(missing)} did not arrive within recovery_timeout "
            f"({timeout.total_seconds():g} s); look for the reason in their logs"
        ) from error


def _log_environment(config: MultiGPUConfig) -> None:
    """Set the environment from the configuration, for torch and `context()`, which read it; they must agree."""
    environment = read_environment(os.environ)
    problems = []
    for field, variable, found in (
        ("rank", "RANK", environment.rank),
        ("world_size", "WORLD_SIZE", environment.world_size),
        ("local_rank", "LOCAL_RANK", environment.local_rank),
    ):
        wanted = getattr(config, field)
        if wanted is None:
            continue
        if variable in os.environ and wanted != found:
            problems.append(f"{field} is {wanted}, but the launcher says {variable}={found}: leave {field} out")
        os.environ[variable] = str(wanted)
    if not problems and (config.world_size or 1) > 1 and "MASTER_ADDR" not in os.environ and not dist.is_initialized():
        problems.append(
            f"world_size is {config.world_size}, but nothing says where rank 0 is: start the script with orch or "
            "torchrun, or set MASTER_ADDR and MASTER_PORT"
        )
    if problems:
        raise fail_once(ConfigError(*problems), rank=environment.rank)


def _device(config: MultiGPUConfig, found: torch.device, local_rank: int) -> torch.device:
    ids = config.device_ids
    if ids is None or found.type != "cuda":
        return found
    index = 0 if config.training_mode == "data_parallel" else local_rank
    return torch.device("cuda", ids[index]) if index < len(ids) else found  # the rules refuse too few ids


def _surroundings(device: torch.device, ctx: Context) -> config_rules.Surroundings:
    on_cuda = device.type == "cuda"
    count = torch.cuda.device_count() if on_cuda else 0
    known = on_cuda and (device.index or 0) < count
    capability = torch.cuda.get_device_capability(device) if known else (0, 0)
    nvidia = torch.version.hip is None
    return config_rules.Surroundings(
        world_size=ctx.world_size,
        local_rank=ctx.local_rank,
        cuda_devices=count,
        on_cuda=on_cuda,
        computes_bf16=not on_cuda or not nvidia or capability >= _BF16_CAPABILITY,
        most_ranks=None if ctx.elastic is None else ctx.elastic[1],
    )


def _join(config: MultiGPUConfig, device: torch.device) -> tuple[Store, bool]:
    if dist.is_initialized():  # the script has initialised it
        return PrefixStore("orch", dist.distributed_c10d._get_default_store()), False  # noqa: SLF001 - torch has no public function for it
    backend = config.backend or _BACKENDS.get(device.type, "gloo")
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=config.recovery_timeout))
        _wait_for_all(store, rank, world_size, "start", config.recovery_timeout)
        dist.init_process_group(
            backend,
            store=PrefixStore("torch", store),
            rank=rank,
            world_size=world_size,
            timeout=config.timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistStoreError as error:
        raise RecoveryTimeoutError(
            f"the ranks did not find each other within recovery_timeout ({config.recovery_timeout.total_seconds():g} s): "
            f"{error}"
        ) from error
    return PrefixStore("orch", store), True
