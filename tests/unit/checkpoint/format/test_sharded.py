"""State that is spread over ranks, saved by some number of them and loaded by another."""

from __future__ import annotations

import importlib
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.checkpoint.errors import CorruptCheckpointError, UnsupportedStateError
from orchestrator.checkpoint.format.sharded import ShardedLeaf, _holds, join, parts_of
from orchestrator.checkpoint.repository.persister import SnapshotPersister, StoreSettings
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from tests.support import warm

RANKS = Path(__file__).parents[1] / "sharded_ranks.py"


def run(what: str, ranks: int, folder: Path, *more: str) -> list[list[float]]:
    """Run the ranks; return the weights that rank 0 wrote, before and after a further step."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ORCH_")}
    arguments = (what, str(ranks), str(folder), *more)
    done = warm.run(RANKS.read_text(), *arguments, env=environ, modules=warm.SHARDED)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[float]] = json.loads((folder / f"{what}-{ranks}.json").read_text())
    return found


def test_saved_by_two_ranks_and_loaded_by_three_and_by_one(tmp_path: Path) -> None:
    saved = run("save", 2, tmp_path)
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "manifest.json",
        "shard-00000.json",
        "shard-00000.safetensors",
        "shard-00001.json",
        "shard-00001.safetensors",
        "state.json",
        "state.safetensors",
    ]
    for what, ranks in (("load", 3), ("whole", 1)):
        before, after = run(what, ranks, tmp_path)
        assert before == saved[0]
        assert after == pytest.approx(saved[1], abs=1e-6)  # gradients are averaged over a different number of ranks
    _notice_a_flipped_bit(tmp_path / "checkpoints")


def _notice_a_flipped_bit(root: Path) -> None:
    store = CheckpointRepository(root, attempt=3)
    (info,) = store.list()
    victim = Path(info.path) / "shard-00001.safetensors"
    content = bytearray(victim.read_bytes())
    content[-3] ^= 2
    victim.write_bytes(content)
    assert store.load_latest() is None
    assert "shard-00001.safetensors was changed" in store.quarantined[0]


def test_saved_by_three_ranks_in_shared_memory_and_persisted_for_one(tmp_path: Path) -> None:
    saved = run("save", 3, tmp_path, "snapshots")
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    settings = StoreSettings(root=str(tmp_path / "checkpoints"))
    actors = [SnapshotPersister(tmp_path / "snapshots", rank=rank, settings=settings) for rank in range(3)]
    for actor in (*actors, *actors):
        actor.flush(0)
    for actor in actors:
        actor.close()
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 1
    assert run("load", 1, tmp_path)[0] == saved[0]


def test_a_state_without_shards_is_not_touched() -> None:
    state = {"w": torch.ones(2), "n": [1, (2, 3)]}
    parts, gang = parts_of(state, None, 0)
    assert parts["state"] is state
    assert not gang
    assert parts_of(state, {"r": 1}, 1) == ({"rank-00001": {"r": 1}}, True)
    assert parts_of(state, None, 1) == ({}, False)


@pytest.mark.parametrize(
    "state", [{"a": {1: [2, (torch.ones(2),)]}}, OrderedDict(a=[torch.nn.Parameter(torch.ones(2))]), (torch.ones(2),)]
)
def test_a_tensor_of_a_kind_is_found_wherever_it_is(state: Any) -> None:
    assert _holds(state, torch.Tensor)
    assert not _holds(state, ShardedLeaf)


def test_a_state_that_holds_itself_is_refused_in_words(tmp_path: Path) -> None:
    importlib.import_module("torch.distributed.tensor")  # from now on states are searched for its tensors
    state: dict[str, Any] = {"step": 1}
    state["again"] = [state]
    assert parts_of(state, None, 0)[0]["state"] is state
    with pytest.raises(UnsupportedStateError, match="again"):
        CheckpointRepository(tmp_path, attempt=1).save(state, step=1)


def test_missing_pieces_are_noticed() -> None:
    state = {"w": ShardedLeaf(key="w", shape=(4,), dtype="float32")}
    half = {"key": "w", "offsets": [0], "tensor": torch.ones(2)}
    with pytest.raises(CorruptCheckpointError, match="do not make up"):
        join(state, lambda: [half])
    other = {"key": "w", "offsets": [2], "tensor": torch.zeros(2)}
    assert join(state, lambda: [other, half])["w"].tolist() == [1, 1, 0, 0]
