"""Train LeNet-5 on handwritten digits: what a training script for orch looks like.

Plain PyTorch and four calls: load() at the start, report() after each step, save() now and then, should_stop() to leave
in time. Killed at any moment, it goes on from its last checkpoint, in the middle of the epoch, with the same samples
and the same random numbers as if nothing had happened. It runs the same in three ways:

    orch submit job.yaml
    torchrun --nproc-per-node 2 train.py
    python train.py
"""

from __future__ import annotations

import argparse
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from orchestrator.train import Context, context

TEST_SAMPLES = 360  # of 1,797


class LeNet5(nn.Module):
    """LeCun's network of 1998, with ReLU and max pooling: (n, 1, 32, 32) pixels -> (n, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, kernel_size=5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 120, kernel_size=5), nn.ReLU(), nn.Flatten()),
        )
        self.classifier = nn.Sequential(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of a batch."""
        scores: Tensor = self.classifier(self.features(images))
        return scores


def read_digits() -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 28, 28) of 0 to 1 and their labels (n), shuffled, from the file beside this script.

    Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), doi:10.24432/C50P49, CC BY 4.0.
    """
    with gzip.open(Path(__file__).parent / "digits.csv.gz") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    images = functional.interpolate(table[:, :64].reshape(-1, 1, 8, 8) / 16, size=28, mode="bilinear")
    return images, table[:, 64].long()


def shift(images: Tensor) -> Tensor:
    """Place 28 x 28 images in fields of 32 x 32, the whole batch anywhere, drawn from torch's global generator."""
    top, left = torch.randint(0, 5, (2,)).tolist()
    return functional.pad(images, (left, 4 - left, top, 4 - top))


def accuracy_of(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that the model classifies correctly."""
    model.eval()
    with torch.inference_mode():
        right: Tensor = model(images).argmax(dim=1) == labels
    return right.sum().item() / len(labels)


@dataclass
class Progress:
    """State of the training. ``position`` is the number of samples of this epoch that all ranks together have seen."""

    step: int = 0
    epoch: int = 0
    position: int = 0


def pick(count: int, progress: Progress, batch_size: int, ctx: Context) -> Tensor:
    """Return the indices of this rank's next batch: its share of the samples that come next in the epoch's order.

    The order depends on the epoch alone, so it needs no saving, and any number of ranks can go on from a position.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(progress.epoch))
    start = progress.position
    return order[start : start + batch_size * ctx.world_size][ctx.rank :: ctx.world_size]


def resume(ctx: Context, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Load the newest checkpoint and return its progress; the beginning when there is none."""
    checkpoint = ctx.load()
    if checkpoint is None:
        return Progress()
    model.load_state_dict(checkpoint.state["model"])
    optimizer.load_state_dict(checkpoint.state["optimizer"])
    if checkpoint.rank_state is not None:  # None when the number of ranks has changed
        torch.set_rng_state(checkpoint.rank_state["rng"])
    return Progress(checkpoint.step, checkpoint.state["epoch"], checkpoint.state["position"])


def save(
    ctx: Context, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, **metrics: float
) -> None:
    """Save everything that the next step depends on."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": progress.epoch,
        "position": progress.position,
    }
    ctx.save(state, step=progress.step, rank_state={"rng": torch.get_rng_state()}, metrics=metrics)


def agree(ctx: Context, loss: Tensor) -> tuple[float, bool]:
    """Return the mean loss of all ranks, and whether any was told to stop: they must all leave after the same step."""
    shared = torch.tensor([loss.item(), float(ctx.should_stop())], device=ctx.device)
    if ctx.world_size > 1:
        dist.all_reduce(shared)
    return shared[0].item() / ctx.world_size, shared[1].item() > 0


def train(ctx: Context, args: argparse.Namespace, model: nn.Module, images: Tensor, labels: Tensor) -> bool:
    """Train to the end, or until told to stop; return whether the end was reached."""
    per_step = args.batch_size * ctx.world_size
    steps_per_epoch = len(images) // per_step
    if steps_per_epoch == 0:
        raise SystemExit(f"--batch-size {args.batch_size} x {ctx.world_size} ranks is more than {len(images)} images")
    total_steps = args.epochs * steps_per_epoch
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    progress = resume(ctx, model, optimizer)
    trained = DistributedDataParallel(model) if ctx.world_size > 1 else model
    while progress.step < total_steps:
        batch = pick(len(images), progress, args.batch_size, ctx)
        scores = trained(shift(images[batch]).to(ctx.device))
        loss = functional.cross_entropy(scores, labels[batch].to(ctx.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        progress.step, progress.position = progress.step + 1, progress.position + per_step
        if progress.position + per_step > len(images):  # the remaining samples have another place in the next epoch
            progress.epoch, progress.position = progress.epoch + 1, 0
        mean_loss, stop = agree(ctx, loss)
        ctx.report(
            step=progress.step,
            total_steps=total_steps,
            epoch=progress.epoch,
            samples=progress.step * per_step,
            loss=mean_loss,
        )
        due = progress.step % args.save_every == 0 if args.save_every else ctx.should_save(progress.step)
        if stop or due or progress.step == total_steps:
            save(ctx, model, optimizer, progress, loss=mean_loss)
        if ctx.is_main and progress.step % 100 == 0:
            print(f"step {progress.step}/{total_steps}  loss {mean_loss:.4f}")
        if stop:
            return False
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save-every", type=int, help="steps between checkpoints; by default as often as it pays")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ctx = context()
    torch.manual_seed(ctx.rank)
    if ctx.device.type == "cuda":
        torch.cuda.set_device(ctx.device)
    if ctx.world_size > 1:
        dist.init_process_group("nccl" if ctx.device.type == "cuda" else "gloo")

    images, labels = read_digits()
    model = LeNet5().to(ctx.device)
    if train(ctx, args, model, images[:-TEST_SAMPLES], labels[:-TEST_SAMPLES]):
        seen = functional.pad(images[-TEST_SAMPLES:], (2, 2, 2, 2)).to(ctx.device)
        accuracy = accuracy_of(model, seen, labels[-TEST_SAMPLES:].to(ctx.device))
        ctx.report(phase="evaluate", accuracy=accuracy)
        if ctx.is_main:
            print(f"accuracy {accuracy:.4f} on {TEST_SAMPLES} images not trained on")
    elif ctx.is_main:
        print("asked to stop: saved; the same command continues from here")
    if ctx.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
