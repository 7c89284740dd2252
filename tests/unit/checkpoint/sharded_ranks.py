"""The ranks of the tests of sharded state: each trains a small FSDP2 model, or loads what another number of ranks saved.

Arguments: what to do (``save``, ``load``, ``whole``), the number of ranks, a directory, and ``snapshots`` to go through
shared memory. The ranks are forked off once everything is imported.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(ranks: int, seed: int, width: int = 7) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with rows not divisible by ``ranks``, sharded over all of them, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 5), torch.nn.Linear(5, 1)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run one step with the same data on every rank, so that the number of ranks does not matter."""
    torch.manual_seed(5)
    optimizer.zero_grad()
    model(torch.randn(16, 6)).square().mean().backward()
    optimizer.step()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the sharded state, as torch returns it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "note": "text"}


def result(model: torch.nn.Module) -> list[float]:
    """Return all weights, unsharded."""
    return [x for p in model.parameters() for x in p.full_tensor().flatten().tolist()]  # type: ignore[attr-defined]


def main(what: str, ranks: int, rank: int, folder: Path) -> None:
    """Run one rank: save, load or read a whole state in ``folder``."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{what}-{ranks}", rank=rank, world_size=ranks)
    from orchestrator.checkpoint import IncompatibleStateError
    from orchestrator.train import context

    if what == "load":
        wider = build(ranks, seed=1, width=8)
        step(*wider)
        with pytest.raises(IncompatibleStateError, match=r"\(7, 6\) in the checkpoint and \(8, 6\)"):
            context().load(into=state_of(*wider))
    model, optimizer = build(ranks, seed=1 if what == "save" else 2)
    step(model, optimizer)
    if what == "save":
        assert context().save(state_of(model, optimizer), step=1)
        dist.barrier()
    else:
        mine = state_of(model, optimizer)
        loaded = context().load(into=mine if what == "load" else None)
        assert loaded is not None
        assert loaded.state["note"] == "text"
        whole = StateDictOptions(full_state_dict=True) if what == "whole" else None
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded.state["model"],
            optim_state_dict=loaded.state["optimizer"],
            options=whole,
        )
    before = result(model)
    step(model, optimizer)
    after = result(model)
    if rank == 0:
        (folder / f"{what}-{ranks}.json").write_text(json.dumps([before, after]))
    dist.barrier()
    dist.destroy_process_group()


def _fork(what: str, ranks: int, rank: int, folder: Path, *, snapshots: bool) -> int:
    """Fork a process for one rank, with the imports of this one."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        ORCH_JOB_ID="sharded",
        ORCH_ATTEMPT="1" if what == "save" else "2",
        ORCH_CHECKPOINT_DIR=f"{folder}/checkpoints",
    )
    if snapshots:
        os.environ["ORCH_SNAPSHOT_DIR"] = f"{folder}/snapshots"
    try:
        main(what, ranks, rank, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _what, _ranks, _folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    _pids = [_fork(_what, _ranks, r, _folder, snapshots="snapshots" in sys.argv) for r in range(_ranks)]
    sys.exit(max([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in _pids]))
