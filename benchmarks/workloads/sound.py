"""A healthy job that mostly sleeps, as one that waits for its GPU does: ranks that meet at every step, in one of several manners.

usage: sound.py SECONDS STEP_SECONDS MANNER
"""

from __future__ import annotations

import os
import random
import sys
import time

import torch
import torch.distributed as dist

from orchestrator.train import context

EVALUATE_EVERY, SAVE_EVERY = 40, 60


def main(seconds: float, step_seconds: float, manner: str) -> None:
    """Train for ``seconds``."""
    training = context()
    if training.world_size > 1:
        dist.init_process_group("gloo")
    rnd = random.Random(os.environ["ORCH_JOB_ID"])
    weight, step, ends = torch.zeros(64, 64), 0, time.time() + seconds
    if manner == "long start":
        time.sleep(20.0)
    while True:
        step += 1
        pause = step_seconds * (rnd.uniform(0.4, 1.6) if manner == "varied" else 1.0)
        weight = (weight + torch.randn(64, 64) @ torch.randn(64, 64)).tanh()
        time.sleep(pause)
        over = torch.tensor([float(time.time() >= ends)])
        if training.world_size > 1:
            dist.all_reduce(over)
        if manner == "evaluates" and step % EVALUATE_EVERY == 0:
            training.report(step=step, phase="evaluate")
            time.sleep(8.0 * step_seconds)
        if manner == "saves" and step % SAVE_EVERY == 0:
            training.save({"weight": weight, "step": step}, step=step)
        if manner != "silent":
            training.report(step=step, phase="train", loss=2.0 / step + rnd.random())
        if float(over[0]):
            return


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3].replace("_", " "))
