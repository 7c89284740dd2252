"""Train an unmodified Hugging Face model with the training system: it takes its batch by name and returns its own loss.

    orch submit job.yaml
    torchrun --nproc-per-node 2 train.py
    python train.py --use-gradient-checkpointing

The model is a small GPT-2 with random weights, so nothing is downloaded; `AutoModelForCausalLM.from_pretrained(NAME)` in
its place fine-tunes a real one. Needs `pip install transformers`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager


class Lines(Dataset[dict[str, Tensor]]):
    """Source text of Python's argparse module, in pieces of `length` bytes."""

    def __init__(self, length: int) -> None:
        text = Path(argparse.__file__).read_bytes()
        self._pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().split(length)[:-1]

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one piece under the names that Hugging Face models expect."""
        return {"input_ids": self._pieces[index], "labels": self._pieces[index]}


def model() -> nn.Module:
    """Return a GPT-2 of two layers with a vocabulary of bytes."""
    try:
        from transformers import AutoModelForCausalLM, GPT2Config
    except ImportError as error:
        raise SystemExit("this example needs Hugging Face's models: pip install transformers") from error
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    made: nn.Module = AutoModelForCausalLM.from_config(config)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    args, settings = parser.parse_known_args()
    with MultiGPUTrainingManager(MultiGPUConfig.from_args(settings, batch_size=16)) as manager:
        manager.setup_training(model(), Lines(64), optimizer=lambda ours: torch.optim.AdamW(ours, lr=3e-3))
        result = manager.fit(args.epochs)
        if manager.place.is_main:
            print(
                f"loss {result.history[0]['loss']:.3f} in the first epoch, {result.history[-1]['loss']:.3f} in the last"
            )


if __name__ == "__main__":
    main()
