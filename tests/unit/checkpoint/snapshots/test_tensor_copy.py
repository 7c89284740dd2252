"""Copying on several threads: everything, and the same bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from orchestrator.checkpoint.snapshots.file import SnapshotReader
from orchestrator.checkpoint.snapshots.writer import SnapshotWriter, TensorCopy

WORTH_BYTES = 4 << 20
"""Least size for several threads, below the production value, so that tests need not copy much."""


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as made:
        yield made


def some_tensors() -> list[torch.Tensor]:
    torch.manual_seed(1)
    wide = torch.randn(700, 2000)
    return [
        torch.randn(900, 1500),
        torch.tensor(3.0),
        wide.t(),  # its rows are not contiguous in memory
        torch.randint(0, 9, (50,)),
        torch.nn.Parameter(torch.randn(1000, 400)),
        torch.empty(0, 7),
    ]


def test_several_threads_copy_what_one_does(pool: ThreadPoolExecutor) -> None:
    sources = some_tensors()
    assert sum(source.numel() * source.element_size() for source in sources) > WORTH_BYTES
    targets = [
        torch.zeros_like(source, requires_grad=False, memory_format=torch.contiguous_format) for source in sources
    ]
    copy = TensorCopy(targets, threads=3, pool=pool, worth_bytes=WORTH_BYTES)
    for change in range(3):
        with torch.no_grad():
            changed = [source + change for source in sources]
        copy.copy(changed)
        assert all(torch.equal(target, source) for target, source in zip(targets, changed, strict=True))
    copy.copy(sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert not any(target.requires_grad for target in targets)


def test_what_one_thread_cannot_copy_is_the_callers_error(pool: ThreadPoolExecutor) -> None:
    targets = [torch.zeros(600, 1000), torch.zeros(600, 1000), torch.zeros(600, 1000)]
    sources = [torch.ones(600, 1000), torch.ones(600, 1000), torch.ones(600, 999)]
    with pytest.raises(RuntimeError, match="999"):
        TensorCopy(targets, threads=3, pool=pool, worth_bytes=WORTH_BYTES).copy(sources)
    assert torch.equal(targets[0], sources[0]), "the others are done when the error comes"
    assert torch.equal(targets[1], sources[1])


def test_a_snapshot_by_several_threads_is_read_back(tmp_path) -> None:
    writer = SnapshotWriter(tmp_path, rank=0, world_size=1, attempt=1, job_id="j", token="t", threads=3)
    try:
        for step in (1, 2, 3, 4):
            state = {"a": torch.full((800, 1000), float(step)), "b": torch.arange(700_000) + step, "step": step}
            assert writer.save({"state": state}, step=step, gang=False) > WORTH_BYTES
            reader = SnapshotReader(tmp_path, job_id="j")
            newest = reader.newest()
            assert newest is not None
            loaded = reader.load(newest, 0, 1)
            assert loaded.step == step
            assert torch.equal(loaded.state["a"], state["a"])
            assert torch.equal(loaded.state["b"], state["b"])
    finally:
        writer.close()
