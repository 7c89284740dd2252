"""Reports training progress: `context().report()`, one log line now and then, a progress bar on a terminal.

Rank 0 reports for all; every rank reports to orch, which compares them. After the first steps reports are no more
frequent than a person can read.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any

from orchestrator.train.trainer.config.rules import names_of, sentence, without_effect
from orchestrator.units import number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.train.script.training_context import Context
    from orchestrator.train.trainer.config.config import MultiGPUConfig
    from orchestrator.train.trainer.loop.training_state import Progress
    from orchestrator.train.trainer.measure.metrics import MetricsCollector
    from orchestrator.train.trainer.process_group import RankGroup

REPORT_EVERY_SECONDS = 0.05
MEASURE_EVERY_SECONDS = 1.0
FIRST_STEPS = 3
"""Steps that are reported at once: the first shows that training has begun, the next ones the time of a step."""


class Reporter:
    """Reports for one rank."""

    def __init__(self, ctx: Context, config: MultiGPUConfig, place: RankGroup, metrics: MetricsCollector) -> None:
        self._ctx = ctx
        self._metrics = metrics
        self._settings = (config, place)
        self._log_every = config.log_interval.total_seconds()
        self._speaks = place.is_main
        self._wants_bar = config.progress_bar
        self._bar: ProgressBar | None = None
        self._calls = 0
        self._report_at = self._measure_at = 0.0
        self._log_at = perf_counter() + self._log_every
        self.measured: dict[str, float] = {}
        """The last result of MetricsCollector.take."""
        self.total_steps: int | None = None
        """Steps of the whole run, if known."""

    @property
    def measures_next(self) -> bool:
        """Whether the next report measures, so that the step before it should compute its gradient's norm."""
        return perf_counter() + REPORT_EVERY_SECONDS >= self._measure_at

    def after_step(self, now: float, progress: Progress) -> bool:
        """Report if due; return whether it did. `now` is perf_counter's time."""
        self._calls += 1
        if now < self._report_at and self._calls > FIRST_STEPS:
            return False
        self._report_at = now + REPORT_EVERY_SECONDS
        self.report(progress, measure=now >= self._measure_at)
        return True

    def report(
        self,
        progress: Progress,
        *,
        measure: bool = False,
        phase: str = "train",
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """Report the progress and what was `measured`; with `measure`, also the speed."""
        values: dict[str, Any] = dict(measured or {})
        if measure:
            self._measure_at = perf_counter() + MEASURE_EVERY_SECONDS
            self.measured |= self._metrics.take()
            if self.total_steps is not None and "step_seconds" in self.measured:
                self.measured["eta_seconds"] = (self.total_steps - progress.step) * self.measured["step_seconds"]
            values |= self.measured
        current = self._metrics.current()
        self._ctx.report(
            step=progress.step,
            total_steps=self.total_steps,
            epoch=progress.epoch,
            phase=phase,
            samples=progress.samples,
            tokens=progress.tokens or None,
            **current,
            **values,
        )
        if self._speaks:
            self._show_progress(progress, {**self.measured, **current})

    def event(self, name: str, **values: Any) -> None:
        """Write one line to the log, from rank 0."""
        if self._speaks:
            log_event(name, **values)

    def warn_without_effect(self, *, own_loader: bool) -> None:
        """Write one log line for each setting that has no effect in this process."""
        config, place = self._settings
        on_cuda = place.device.type == "cuda"
        for found in without_effect(config, on_cuda=on_cuda, world_size=place.world_size, own_loader=own_loader):
            self.event("train.no_effect", setting=names_of(found)[0], advice=sentence(found))

    def close(self) -> None:
        """End the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show_progress(self, progress: Progress, values: Mapping[str, float]) -> None:
        if self._wants_bar is None:
            self._wants_bar = sys.stderr.isatty()
        if self._wants_bar:
            self._bar = self._bar or ProgressBar(self.total_steps)
            self._bar.show(progress.step, progress.epoch, values)
        now = perf_counter()
        if now >= self._log_at:
            self._log_at = now + self._log_every
            if self._bar is None:
                log_event("train.step", epoch=progress.epoch, step=progress.step, of=self.total_steps, **values)


class ProgressBar:
    """One line at the bottom of the terminal."""

    def __init__(self, total_steps: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,  # drawn only by `show`, without a background thread
        )
        self._progress.start()
        self._task = self._progress.add_task("train", total=total_steps, epoch=0, values="")

    def show(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Draw the line again."""
        names = {"loss": "loss", "samples_per_second": "samples/s", "tokens_per_second": "tokens/s", "mfu": "MFU"}
        text = "  ".join(f"{label} {number(values[name])}" for name, label in names.items() if name in values)
        self._progress.update(self._task, completed=step, epoch=epoch, values=text)
        self._progress.refresh()

    def close(self) -> None:
        """End the bar and keep the line."""
        self._progress.stop()


def log_event(name: str, **values: Any) -> None:
    """Write one structured line: through structlog where the script has set it up, else to stdout.

    On a terminal the line is for people, else it is JSON. Missing values are left out.
    """
    known = {key: _short(value) for key, value in values.items() if value is not None}
    structlog = sys.modules.get("structlog")  # importing it takes a tenth of a second: used only if already imported
    if structlog is not None and structlog.is_configured():
        structlog.get_logger("orchestrator.train").info(name, **known)
    elif sys.stdout.isatty():
        print(name, *(f"{key}={value}" for key, value in known.items()), flush=True)
    else:
        print(json.dumps({"event": name, **known}), flush=True)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
