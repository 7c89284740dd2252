"""Training from beginning to end: set-up, epochs, validation, checkpoints, metrics.

    with MultiGPUTrainingManager(config) as manager:
        manager.setup_training(model, dataset, val_dataset, loss_fn=loss_fn)
        manager.fit(epochs=10)

Owns the order of operations; trainer.py implements a step, recovery.py the handling of faults. The same script runs as `python`, under torchrun and under orch, and continues where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from orchestrator.train.errors import StopTraining
from orchestrator.train.script.profiling import tracer_of_this_rank
from orchestrator.train.script.training_context import current_context
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.data.loading import Feed, build_feed, step_share
from orchestrator.train.trainer.engine.trainer import make_trainer
from orchestrator.train.trainer.loop.epochs import Collector, check_equal_lengths, evaluate, mean_over_ranks
from orchestrator.train.trainer.loop.recovery import FaultToleranceManager, one_voice
from orchestrator.train.trainer.loop.reporting import Reporter
from orchestrator.train.trainer.loop.training_state import EpochState, Progress, seed_everything
from orchestrator.train.trainer.measure.metrics import MetricsCollector, open_meter
from orchestrator.train.trainer.measure.monitor import comparison_report
from orchestrator.train.trainer.process_group import join_ranks, leave

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from orchestrator.train.script.profiling import FinishedTrace
    from orchestrator.train.script.training_context import Context
    from orchestrator.train.trainer.data.batches import LossFunction
    from orchestrator.train.trainer.engine.trainer import MetricFunction, OptimizerFactory, SchedulerFactory, StepResult
    from orchestrator.train.trainer.measure.metrics import EnergyMeter

NOTHING_LEFT = (
    "an earlier run has completed all of it: train for more epochs or steps, or save to another ORCH_CHECKPOINT_DIR"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """The result of `fit`. `history` has one entry per epoch (also those of earlier starts), `summary` the whole run's figures."""

    history: tuple[Mapping[str, float], ...]
    summary: Mapping[str, float]


class MultiGPUTrainingManager:
    """Everything that one rank needs for training. Create one per process."""

    def __init__(self, config: MultiGPUConfig | None = None, *, ctx: Context | None = None) -> None:
        """Find the rank's place and join the others. Raises ConfigError for settings that do not fit here.

        job.yaml's `trainer:` overrides `config`, unless `from_args` or `from_job` has already included it.

        `ctx` replaces `orchestrator.train.context()`, for tests.
        """
        self.config = (config or MultiGPUConfig()).with_job()
        self.place = join_ranks(self.config, ctx)
        self._ctx = current_context() if ctx is None else ctx
        seed_everything(self.config.seed, self.place.rank)
        with one_voice(self.place, under_orch=bool(self._ctx.job_id)):
            share = step_share(self.config, self._ctx)
        self.trainer = make_trainer(self.config, self.place, share)
        self.fault_tolerance = FaultToleranceManager(self._ctx, self.config, self.place)
        self._epoch = EpochState(self.trainer)
        self.progress = Progress()
        self.metrics: MetricsCollector | None = None
        self._reporter: Reporter | None = None
        self._energy: EnergyMeter | None = None
        self._tracer = tracer_of_this_rank(self.place.device)
        self._feeds: dict[int, Feed] = {}
        self._functions: dict[str, MetricFunction] = {}
        self._replayed: Mapping[str, float] | None = None  # the requested epoch's result in an earlier start
        self._validation: dict[str, float] = {}
        self._max_steps: int | None = None

    # Set-up

    def setup_training(
        self,
        model: nn.Module,
        dataset: Any,
        val_dataset: Any = None,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: Optimizer | OptimizerFactory | None = None,
        scheduler: LRScheduler | SchedulerFactory | None = None,
        metrics: Mapping[str, MetricFunction] | None = None,
    ) -> tuple[nn.Module, Iterable[Any], Iterable[Any] | None]:
        """Prepare everything and restore the last checkpoint; return the wrapped model and the two loaders.

        `dataset` may be a loader of your own. `loss_fn(outputs, targets)` is left out when the model returns its loss.
        `optimizer` and `scheduler` may be functions that make them (of the parameters, of the optimizer). `metrics` are
        functions of (outputs, targets) that give a mean over a batch. Raises ConfigError and DataError, on rank 0 only.
        """
        with one_voice(self.place, under_orch=bool(self._ctx.job_id)):
            wrapped = self.trainer.prepare(model, loss_fn=loss_fn, optimizer=optimizer, scheduler=scheduler)
            self._functions = dict(metrics or {})
            trainer = self.trainer
            train = build_feed(
                dataset, self.config, self.place, training=True, accumulate=trainer.accumulate, share=trainer.share
            )
            validate = None if val_dataset is None else build_feed(val_dataset, self.config, self.place, training=False)
            self._feeds = {id(feed.loader): feed for feed in (train, validate) if feed is not None}
            self._energy = self._energy or open_meter(self.place.device)
            self.metrics = MetricsCollector(self.trainer, energy=self._energy)
            self._reporter = Reporter(self._ctx, self.config, self.place, self.metrics)
            self.fault_tolerance.attach(self.trainer)
            self.progress, saved = self.fault_tolerance.resume()
            self._epoch.restore(saved)
            if self.fault_tolerance.shares is not None:
                self.fault_tolerance.shares.deal(train)
        self._reporter.warn_without_effect(own_loader=train.loader is dataset)
        self._announce(wrapped)
        return wrapped, train.loader, None if validate is None else validate.loader

    def _announce(self, model: nn.Module) -> None:
        assert self._reporter is not None
        self._reporter.event(
            "train.setup",
            mode=str(self.config.training_mode),
            ranks=self.place.world_size,
            device=str(self.place.device),
            precision=self.trainer.precision.name,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            batch_size=self.config.batch_size,
            accumulate=self.trainer.accumulate,
            samples_per_step=self.trainer.samples_per_step,
            resumed_step=self.progress.step or None,
        )

    # Training

    def fit(self, epochs: int | None = None, *, max_steps: int | None = None) -> FitResult:
        """Train up to `epochs` epochs or `max_steps` optimizer steps, counted from the very first start, whichever is first.

        Validates after each epoch, where there is data for it; saves at the end. On a stop, it saves and ends the
        process (StopTraining). Raises TrainError on rank 0 only, ValueError when neither limit is given.
        """
        reporter, _ = self._ready()
        if epochs is None and max_steps is None:
            raise ValueError("fit() would never end: give it epochs, max_steps, or both")
        train, *validate = self._feeds.values()
        limits = [max_steps]
        if epochs is not None and train.batches is not None:
            limits.append(epochs * -(-train.batches // self.trainer.accumulate))
        reporter.total_steps = min((limit for limit in limits if limit is not None), default=None)
        self._max_steps = max_steps
        epoch, first_step = 0, self.progress.step
        while (epochs is None or epoch < epochs) and not (self._at_limit() and epoch >= self.progress.epoch):
            self.train_epoch(train.loader, epoch)
            for feed in validate:
                self.validate_epoch(feed.loader)
            epoch += 1
        self._traced(self._tracer.finish())
        if first_step and self.progress.step == first_step:
            reporter.event("train.nothing_left", step=first_step, advice=NOTHING_LEFT)
        with one_voice(self.place, under_orch=bool(self._ctx.job_id)):
            self._save()
        return FitResult(history=tuple(self.progress.history), summary=self.summary())

    def _at_limit(self) -> bool:
        return self._max_steps is not None and self.progress.step >= self._max_steps

    def train_epoch(self, train_loader: Iterable[Any], epoch: int) -> dict[str, float]:
        """Train one epoch; return its mean loss over all ranks, and its speed. Work of an earlier start is not repeated.

        On a stop, it saves and raises StopTraining, which ends the process. Raises TrainError on rank 0 only.
        """
        progress, self._replayed = self.progress, None
        if epoch < progress.epoch:
            done = progress.history[epoch] if epoch < len(progress.history) else {}
            self._replayed = done
            return {name: value for name, value in done.items() if not name.startswith("val_")}
        if epoch > progress.epoch:
            progress.epoch, progress.position = epoch, 0
        feed = self._feeds.get(id(train_loader)) or Feed(train_loader)
        with one_voice(self.place, under_orch=bool(self._ctx.job_id)):
            return self._run_epoch(feed)

    def _run_epoch(self, feed: Feed) -> dict[str, float]:
        reporter, metrics = self._ready()
        progress, trainer, faults = self.progress, self.trainer, self.fault_tolerance
        shares = faults.shares
        if shares is not None:
            shares.deal(feed)
        trainer.model.train()
        batches = self._epoch.begin(feed, progress, metrics.epoch_loss)
        agree = check_equal_lengths(feed, self.place, self._epoch.used)
        collector = Collector(batches, trainer.accumulate, self.place, agree=agree)
        metrics.pause()
        trainer.measure_norm = not trainer.shards_parameters
        first_step, clock = progress.step, trainer.clock
        while not self._at_limit():
            clock.begin()
            group = collector.take(progress.epoch)
            if not group:
                break
            result = trainer.update(group)
            now = metrics.step_done(result)
            self._epoch.advance(progress, result, len(group))
            if self._tracer.active:
                self._traced(self._tracer.step_done())
            if reporter.after_step(now, progress):
                self._between_steps(group)
            elif trainer.guard.streak:
                faults.check(progress, group, 0)
            stop = faults.should_stop()
            if stop or faults.due(progress.step):
                changed = shares is not None and shares.measure()  # the checkpoint holds the new ones
                self._save(feed)
                metrics.pause()
                if shares is not None and changed:
                    shares.go_on(feed, collector, progress)
                    reporter.event("train.balance", step=progress.step, samples_per_rank=shares.portions)
            if stop:
                reporter.report(progress)
                reporter.event("train.stop", step=progress.step, saved=faults.saved_step == progress.step)
                reporter.close()
                raise StopTraining(progress.step)
        return self._finish_epoch(first_step)

    def _between_steps(self, group: list[Any]) -> None:
        """Do the work that is due at each report: a few times a second, not in every step."""
        reporter, metrics = self._ready()
        metrics.mfu.learn(group[0])
        if reporter.measures_next and not self.trainer.shards_parameters:
            self.trainer.measure_norm = True
        self._tracer.look()
        self.fault_tolerance.check(self.progress, group, metrics.late_streak())

    def _traced(self, trace: FinishedTrace | None) -> None:
        """Report a finished trace, if there is one; the time of writing it counts for no step."""
        if trace is not None:
            reporter, metrics = self._ready()
            reporter.event("train.trace", step=self.progress.step, megabytes=trace.size_bytes / 1e6)
            metrics.pause()

    def _finish_epoch(self, first_step: int) -> dict[str, float]:
        reporter, metrics = self._ready()
        progress = self.progress
        loss_sum, samples = metrics.epoch_loss.sums()
        (loss,) = mean_over_ranks([(loss_sum, samples)], self.place)
        values = {"epoch": float(progress.epoch), "steps": float(progress.step - first_step), "loss": loss}
        if metrics.last is not None and progress.step > first_step:
            reporter.report(progress, measure=True)
            values |= {name: value for name, value in reporter.measured.items() if name not in ("loss", "eta_seconds")}
        reporter.event("train.epoch", **values)
        progress.history.append(values)
        self._epoch.end(progress)
        return values

    def train_step(self, batch: Any) -> StepResult:
        """Run one step of a user's own loop: as MultiGPUTrainer.train_step, counted and reported."""
        reporter, metrics = self._ready()
        if self.fault_tolerance.shares is not None:
            self.fault_tolerance.shares.refuse_own_loop()
        result = self.trainer.train_step(batch)
        if result.updated:
            now = metrics.step_done(result)
            self._epoch.advance(self.progress, result, self.trainer.accumulate)
            if self._tracer.active:
                self._traced(self._tracer.step_done())
            if reporter.after_step(now, self.progress):
                self._between_steps([batch])
            elif self.trainer.guard.streak:
                self.fault_tolerance.check(self.progress, [batch], 0)
        return result

    def validate_epoch(self, val_loader: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss over all ranks' samples, and the mean of each metric. Training's random numbers are unaffected."""
        if self._replayed is not None:
            return {name.removeprefix("val_"): v for name, v in self._replayed.items() if name.startswith("val_")}
        reporter, metrics = self._ready()
        feed = self._feeds.get(id(val_loader)) or Feed(val_loader)
        reporter.report(self.progress, phase="validate")  # in this phase a pause between steps is not a hang
        with one_voice(self.place, under_orch=bool(self._ctx.job_id)):
            values = evaluate(self.trainer, feed, self._functions)
        named = {f"val_{name}": value for name, value in values.items()}
        self._validation = named
        if self.progress.history:
            self.progress.history[-1].update(named)
        reporter.report(self.progress, phase="validate", measured=named)
        reporter.event("train.validate", epoch=self.progress.epoch - 1, **values)
        metrics.pause()
        return values

    # Checkpoints

    def _save(self, feed: Feed | None = None) -> None:
        _, metrics = self._ready()
        own = self._epoch.saved(feed, metrics.epoch_loss)
        scores = dict(self._validation)
        if own["loss_samples"]:
            scores["loss"] = own["loss_sum"] / own["loss_samples"]
        self.fault_tolerance.save(self.progress, own, scores)

    # Results

    def summary(self) -> dict[str, float]:
        """Return the run's figures so far: throughput with its 95 % confidence interval, step time and its parts, memory, MFU."""
        reporter, metrics = self._ready()
        values = {
            name: value for name, value in reporter.measured.items() if name not in ("lr", "grad_norm", "eta_seconds")
        }
        values |= metrics.throughput()
        last = self.progress.history[-1] if self.progress.history else {}
        return {
            **{name: value for name, value in last.items() if name not in ("epoch", "lr", "grad_norm")},
            **values,
            "ranks": float(self.place.world_size),
            "steps": float(self.progress.step),
        }

    def comparison_report(self, results: Mapping[str, FitResult | Mapping[str, float]]) -> str:
        """Return a Markdown table of several runs, compared with the first one, and its interpretation."""
        return comparison_report(
            {name: run.summary if isinstance(run, FitResult) else run for name, run in results.items()}
        )

    # End

    def close(self) -> None:
        """Release everything and leave the other ranks. Idempotent."""
        self._tracer.close()
        if self._reporter is not None:
            self._reporter.close()
        if self._energy is not None:
            self._energy.close()
            self._energy = None
        leave(self.place)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, StopTraining):  # all ranks get here
            self.close()
        elif self._reporter is not None:  # after an error an orderly exit could wait for ever for ranks that have ended
            self._reporter.close()

    def _ready(self) -> tuple[Reporter, MetricsCollector]:
        if self._reporter is None or self.metrics is None:
            raise RuntimeError("call setup_training(model, dataset) first")
        return self._reporter, self.metrics
