"""``python -m tests.released VERSION``: writes files and messages of this version into ``tests/released/VERSION``."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.checkpoint import CheckpointRepository
from orchestrator.runtime.forkserver import wire
from orchestrator.train.script.progress import ProgressPage
from tests.released.samples import MESSAGES, REQUEST, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
STATES: tuple[tuple[int, Any], ...] = (
    (10, {"epoch": 1, "note": "older"}),
    (
        20,
        {
            "model": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
            "epoch": 2,
            "odd": float("inf"),
            "random": list(range(70)),
            "pairs": {1: "a", (2, "b"): {3}},
            "bytes": b"\0" * 2000,
        },
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Write all samples into a new folder. Raises FileExistsError for an existing one."""
    (version,) = arguments
    folder = HERE / version
    folder.mkdir()
    messages = [
        {"type": type(each).__name__, "pickle": base64.b64encode(pickle.dumps(each, 5)).decode(), "told": plain(each)}
        for each in MESSAGES
    ]
    (folder / "messages.json").write_text(json.dumps(messages, indent=1) + "\n")
    told = {"protocol": wire.PROTOCOL, "request": base64.b64encode(wire.encode(dict(REQUEST))).decode()}
    (folder / "wire.json").write_text(json.dumps(told, indent=1) + "\n")
    with_page(folder / "progress.page")
    repository = CheckpointRepository(folder / "checkpoints", attempt=1, job_id="digits-k3f9q2", keep=None)
    for step, state in STATES:
        repository.save(state, step=step, metrics={"loss": 1 / step})
    shutil.rmtree(folder / "checkpoints" / ".spares")  # files for the next saves
    return 0


def with_page(path: Path) -> None:
    """Write a progress page as a rank leaves it."""
    page = ProgressPage.create(path)
    page.write(step=41, total_steps=100, epoch=2.0, metrics={"loss": 0.5})
    page.mark_stop_seen()
    page.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
