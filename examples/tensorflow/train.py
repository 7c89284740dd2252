"""Train a TensorFlow model on several ranks with MultiWorkerMirroredStrategy; one line sets `TF_CONFIG`.

    orch submit job.yaml
    torchrun --nproc-per-node 2 train.py
    python train.py

Steps, loss and weights are reported and saved through `orchestrator.train.context()`, so a killed rank loses only the
steps since the last checkpoint. Needs `pip install tensorflow` (or `tensorflow-cpu`) in addition to torch, which the
ranks use to exchange their addresses.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.train import context

if TYPE_CHECKING:
    from orchestrator.train import Context

SLOPES, OFFSET = (2.0, -1.0, 0.5), 3.0
BATCH = 32


def batch(step: int, rank: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the inputs of a rank's step, and targets on a plane; the same after a restart."""
    generator = np.random.default_rng((step, rank))
    inputs = generator.normal(size=(BATCH, len(SLOPES))).astype(np.float32)
    return inputs, inputs @ np.array([SLOPES], np.float32).T + np.float32(OFFSET)


def make_strategy(ctx: Context) -> Any:
    """Return the strategy for this job's ranks. TF_CONFIG must be set before it is created."""
    if ctx.world_size > 1:
        from orchestrator.train.integrations.tensorflow import set_tf_config

        set_tf_config()
    try:
        import tensorflow as tf
    except ImportError as error:
        raise SystemExit("this example needs TensorFlow: pip install tensorflow") from error
    return tf.distribute.MultiWorkerMirroredStrategy() if ctx.world_size > 1 else tf.distribute.get_strategy()


class Model:
    """A plane, fitted by gradient descent on every rank with the mean of the ranks' gradients."""

    def __init__(self, strategy: Any, lr: float) -> None:
        import tensorflow as tf

        self._strategy = strategy
        with strategy.scope():
            self.weights = tf.Variable(tf.zeros((len(SLOPES), 1)))
            self.offset = tf.Variable(tf.zeros(()))

        def one_step(inputs: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((inputs @ self.weights + self.offset - targets) ** 2)
            replica = tf.distribute.get_replica_context()
            own = tape.gradient(loss, [self.weights, self.offset])
            mean = replica.all_reduce(tf.distribute.ReduceOp.MEAN, own)
            for variable, gradient in zip((self.weights, self.offset), mean, strict=True):
                variable.assign_sub(lr * gradient)
            return replica.all_reduce(tf.distribute.ReduceOp.MEAN, loss)

        self._step = tf.function(lambda inputs, targets: strategy.run(one_step, args=(inputs, targets)))

    def step(self, inputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> float:
        """Train on a batch of this rank and return the mean loss of all ranks."""
        losses = self._strategy.experimental_local_results(self._step(inputs, targets))
        return float(losses[0])

    def state(self) -> dict[str, Any]:
        """Return the weights as numbers, the same on every rank."""
        return {"weights": self.weights.numpy().ravel().tolist(), "offset": float(self.offset.numpy())}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from saved weights."""
        self.weights.assign(np.array([state["weights"]], np.float32).T)
        self.offset.assign(state["offset"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    ctx = context()
    model = Model(make_strategy(ctx), args.lr)
    checkpoint = ctx.load()
    if checkpoint is not None:
        model.load(checkpoint.state)
        print(f"rank {ctx.rank} goes on after step {checkpoint.step}")
    for step in range(1 if checkpoint is None else checkpoint.step + 1, args.steps + 1):
        loss = model.step(*batch(step, ctx.rank))
        ctx.report(step=step, total_steps=args.steps, samples=step * BATCH * ctx.world_size, loss=loss)
        if step % 50 == 0 or step == args.steps:  # the same step on every rank
            ctx.save(model.state(), step=step, metrics={"loss": loss})
    found = ", ".join(f"{value:.3f}" for value in (*model.state()["weights"], model.state()["offset"]))
    print(f"rank {ctx.rank} of {ctx.world_size}: {found}")


if __name__ == "__main__":
    main()
