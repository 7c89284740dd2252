"""A training job that records everything it does in a ledger; the fault tests submit this file as their train.py.

Its one argument is JSON: ``ledger`` (the file), and optionally ``steps`` (after which it ends), ``until`` (ends once
that file exists), ``seconds`` per step, ``save_every`` steps, ``collective`` (an all_reduce of the ranks each step),
``deaf`` (ignores stop requests), ``asks`` (false: SIGTERM keeps its default), ``stop_code`` (exit code after a stop),
``stop_seconds`` (of printing before the save of a stop), ``children`` (commands to start), ``gpu`` (the state is on a
GPU, which changes it each step; a checkpoint must contain the state of its own step), and ``faults``: kind, rank,
attempt, and the step before which the fault occurs, or the file that triggers it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.train import context

if TYPE_CHECKING:
    import torch

    from orchestrator.train import Checkpoint

WEIGHTS = 4 * 2**20
EXIT_CODES = {"exit": 1, "tempfail": 75}
SIGNALS = {"sigkill": signal.SIGKILL, "sigsegv": signal.SIGSEGV}


class Job:
    """One rank of one attempt."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.ctx = context()
        self.weights: torch.Tensor | None = None
        self.ledger = os.open(options["ledger"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, what: str, step: int) -> None:
        """Write one line in one write: appended as a whole, in the order of all writers."""
        line = {
            "job": self.ctx.job_id,
            "attempt": self.ctx.attempt,
            "rank": self.ctx.rank,
            "pid": os.getpid(),
            "what": what,
            "step": step,
            "at": time.monotonic(),
        }
        os.write(self.ledger, json.dumps(line).encode() + b"\n")

    def run(self) -> None:
        """Train from the last checkpoint to the end."""
        self.write("start", 0)
        if self.options.get("deaf"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for command in self.options.get("children", []):
            subprocess.Popen([sys.executable, "-c", command])
        if self.options.get("collective"):
            import torch.distributed as dist

            dist.init_process_group("gloo")
        checkpoint = self.ctx.load()
        step = 0 if checkpoint is None else checkpoint.step
        if self.options.get("gpu"):
            self.weights = self.on_gpu(checkpoint)
        self.write("resume", step)
        self.meet()
        while not self.is_over(step):
            time.sleep(self.options.get("seconds", 0.05))
            self.one_step(step + 1)
            step += 1
            asks = self.options.get("asks", True) and not self.options.get("deaf")
            if asks and self.ctx.should_stop():
                self.leave(step)
        self.write("end", step)

    def leave(self, step: int) -> None:
        """Save and end, after a request to stop."""
        until = time.monotonic() + self.options.get("stop_seconds", 0)
        while time.monotonic() < until:
            print("about to save", "." * 10_000, flush=True)
            time.sleep(0.05)
        self.ctx.save(self.state(step), step=step)
        self.write("stopped", step)
        sys.exit(self.options.get("stop_code", 0))

    def meet(self) -> None:
        """Wait until every rank has loaded, like ranks that train together. Each line is parsed once: ledgers grow long."""
        here: set[int] = set()
        with Path(self.options["ledger"]).open("rb") as ledger:
            rest = b""
            while len(here) < self.ctx.world_size:
                *whole, rest = (rest + ledger.read()).split(b"\n")
                lines = [json.loads(line) for line in whole if b'"resume"' in line]
                me = (self.ctx.job_id, self.ctx.attempt)
                here |= {line["rank"] for line in lines if (line["job"], line["attempt"]) == me}
                if len(here) < self.ctx.world_size:
                    time.sleep(0.01)

    def is_over(self, step: int) -> bool:
        """Whether all steps are done, or the file that ends the job exists; ranks with collectives agree on it."""
        steps, until = self.options.get("steps"), self.options.get("until")
        over = (steps is not None and step >= steps) or (until is not None and Path(until).exists())
        if not self.options.get("collective"):
            return over
        import torch
        import torch.distributed as dist

        seen = torch.tensor([float(over)])
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        return bool(seen)

    def one_step(self, step: int) -> None:
        """Inject a fault if one is due, then do the step: write it to the ledger, report it, and save if due."""
        self.suffer(step)
        if self.options.get("collective"):
            import torch
            import torch.distributed as dist

            total = torch.ones(1)
            dist.all_reduce(total)
            assert int(total) == self.ctx.world_size
        if self.weights is not None:
            self.weights += 1
        self.write("step", step)
        self.ctx.report(step=step, total_steps=self.options.get("steps"))
        if step % self.options.get("save_every", 5) == 0 and self.ctx.save(self.state(step), step=step):
            self.write("saved", step)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"step": step} | ({} if self.weights is None else {"weights": self.weights})

    def on_gpu(self, checkpoint: Checkpoint | None) -> torch.Tensor:
        """Return weights on the rank's GPU, each equal to the number of steps that have been done."""
        import torch

        if checkpoint is None:
            return torch.zeros(WEIGHTS, device=self.ctx.device)
        weights: torch.Tensor = checkpoint.state["weights"].to(self.ctx.device)
        assert weights.is_cuda, weights.device
        assert bool((weights == checkpoint.step).all()), (
            f"weights of {weights.unique()} in the checkpoint of {checkpoint.step}"
        )
        return weights

    def suffer(self, step: int) -> None:
        """Inject the scheduled fault of this rank, attempt and step."""
        for fault in self.options.get("faults", []):
            if (fault.get("rank", 0), fault.get("attempt", 1)) != (self.ctx.rank, self.ctx.attempt):
                continue
            if fault.get("step", step) != step or not Path(fault.get("file", "/")).exists():
                continue
            kind = fault["kind"]
            print(f"rank {self.ctx.rank} suffers {kind} before step {step}", flush=True)
            self.write("fault", step)
            if kind in SIGNALS:
                os.kill(os.getpid(), SIGNALS[kind])
            if kind == "exception":
                raise ValueError("a fault of the schedule")
            sys.exit(EXIT_CODES[kind])


if __name__ == "__main__":
    Job(json.loads(sys.argv[1])).run()
