"""Train a GPT to write Python, byte by byte, on Python's own standard library.

    orch submit job.yaml
    torchrun --nproc-per-node 2 train.py
    python train.py --depth 4 --use-mixed-precision

Depth, data and batch are options, and so is every setting of the training system (docs/training.md). With
--tokens-per-parameter the number of steps follows from the size of the model.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from model import GPT, write
from text import Windows, read
from torch import Tensor
from torch.nn import functional

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager


def next_byte_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per byte."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=2, help="layers; the width is 64 times as much")
    parser.add_argument("--context", type=int, default=64, help="bytes that the model looks back")
    parser.add_argument(
        "--shards", type=int, default=2, help="millions of bytes of text; the last tenth is for validation"
    )
    parser.add_argument("--text", type=Path, help="a directory of text files instead of the standard library")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--tokens-per-parameter", type=float, help="instead of --steps: 20 is a common choice")
    return parser.parse_known_args()


def main() -> None:
    args, settings = arguments()
    config = MultiGPUConfig.from_args(settings, batch_size=16, max_grad_norm=1.0)
    with MultiGPUTrainingManager(config) as manager:
        text = b"".join(read(args.text, args.shards))
        cut = len(text) // 10 * 9
        model = GPT(depth=args.depth, context=args.context)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        tokens_per_step = config.batch_size * manager.place.world_size * manager.trainer.accumulate * args.context
        steps = args.steps
        if args.tokens_per_parameter is not None:
            steps = math.ceil(args.tokens_per_parameter * parameters / tokens_per_step)
        if manager.place.is_main:
            print(
                f"{parameters:,} parameters, {len(text) / 1e6:.1f} MB of text, {steps:,} steps of {tokens_per_step:,} bytes "
                f"({manager.place.world_size} ranks x {config.batch_size} x {args.context}, "
                f"{manager.trainer.accumulate} accumulated): {steps * tokens_per_step:,} bytes",
                flush=True,
            )
        manager.setup_training(
            model,
            Windows(text[:cut], args.context),
            Windows(text[cut:], args.context),
            loss_fn=next_byte_loss,
            optimizer=lambda ours: torch.optim.AdamW(ours, lr=args.lr, weight_decay=0.1),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps + 1),
        )
        result = manager.fit(max_steps=steps)
        if manager.place.is_main:
            bits, mfu = result.summary["val_loss"] / math.log(2), result.summary.get("mfu")
            print(
                f"{bits:.3f} bits per byte on text not trained on, {result.summary['tokens_per_second']:,.0f} bytes/s, "
                f"MFU {'unknown' if mfu is None else f'{100 * mfu:.1f} %'}"
            )
            if config.training_mode != "fully_sharded":  # there no rank has the whole model
                print(write(model, "def ", 200))


if __name__ == "__main__":
    main()
