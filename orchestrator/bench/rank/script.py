"""Runs an unchanged training script on one rank, for a few optimizer steps, and reports their times.

Started by ``bench/advisor/script_advice.py`` with the script's interpreter, as ``script.py FD LIMITS script|module TARGET ARGS...``; needs torch
and the standard library alone. The script is not changed: a step ends where its first optimizer's ``step()`` returns, backward is the time of
``torch.autograd.backward``. After the last step the process ends at once, whatever the script would do next.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_STEPS: Final = 3
"""Left out of the figures: these steps allocate memory and choose kernels."""


class StepWatch:
    """Times optimizer steps from outside of the script. ``done`` is called with the figures once the limits are reached."""

    def __init__(
        self,
        *,
        most_steps: int,
        most_seconds: float,
        done: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._most_steps, self._most_seconds = most_steps, most_seconds
        self._done, self._clock = done, clock
        self._optimizer: torch.optim.Optimizer | None = None
        self._sizes: list[int] = []
        self._backward = 0.0
        self._last: float | None = None
        self._taken: list[tuple[float, float]] = []
        self._seen = 0

    def install(self) -> None:
        """Time every later optimizer step and backward pass of this process."""
        inner = torch.autograd.backward

        def timed(*args: Any, **kwargs: Any) -> None:
            self._wait()
            began = self._clock()
            inner(*args, **kwargs)
            self._wait()
            self._backward += self._clock() - began

        torch.autograd.backward = timed
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record a step: with several optimizers, from one step of the first optimizer to its next."""
        if self._optimizer is None:
            self._optimizer = optimizer
            # Before the next zero_grad: only now is it known which parameters have gradients.
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._sizes = [p.numel() * p.element_size() for p in parameters]
        if optimizer is not self._optimizer:
            return
        self._wait()
        now = self._clock()
        if self._last is not None:
            self._seen += 1
            if self._seen > FIRST_STEPS:
                self._taken.append((now - self._last, self._backward))
        self._last, self._backward = now, 0.0
        spent = sum(step for step, _ in self._taken)
        if len(self._taken) >= self._most_steps or (self._taken and spent >= self._most_seconds):
            self._done(self.figures())

    def figures(self) -> dict[str, Any]:
        """Return the measurements so far: seconds of steps and backward passes, bytes of each parameter's gradient in the optimizer's order."""
        return {
            "steps": [step for step, _ in self._taken],
            "backwards": [backward for _, backward in self._taken],
            "gradient_bytes": self._sizes,
            "device": self._device,
        }

    @property
    def _device(self) -> str:
        if self._optimizer is None:
            return "cpu"
        return str(next(iter(self._optimizer.param_groups[0]["params"])).device.type)

    def _wait(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """Run the script until its steps are timed; if it ends earlier, report the steps that it made."""
    descriptor, limits, kind, target, *args = arguments

    def report(figures: dict[str, Any]) -> None:
        with os.fdopen(int(descriptor), "wb") as answer:
            answer.write(json.dumps(figures).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    watch = StepWatch(**json.loads(limits), done=report)
    watch.install()
    sys.argv = [target, *args]
    if kind == "module":
        sys.path[0] = str(Path.cwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")
    report(watch.figures())


if __name__ == "__main__":
    main(sys.argv[1:])
