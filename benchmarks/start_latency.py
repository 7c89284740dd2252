"""Measures the time from the start of ``orch submit`` (the whole process) to rank 0's first optimizer step: 2 ranks, gloo, a small MLP; or 1 on a GPU.

Warm: the daemon runs, as it usually does. Cold: no daemon; ``orch submit`` starts one. Peers start as their users start
them; there is no warm torchrun.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from benchmarks import contenders
from benchmarks.measure import interleave, parser, report, result, summary

STEPS = 100_000
SETTLE_SECONDS = 3.0  # a person does not submit at once after the last job's end; meanwhile Ray starts idle workers again, 1.6 s of processor time each


def main() -> None:
    """Measure and report."""
    options = parser(__doc__ or "", pairs=10)
    options.add_argument("--cold", type=int, default=3, help="cold starts of ours, beside the pairs")
    contenders.add_shape(options)
    arguments = options.parse_args()
    shape = contenders.shape_of(options, arguments)
    orch = contenders.Orch()
    orch.up()
    try:

        def ours() -> float:
            time.sleep(SETTLE_SECONDS)
            with orch.submit(STEPS, 0.01, arguments=f"10 {shape.device}", shape=shape) as run:
                return run.first_step_seconds()

        def peer_torchrun() -> float:
            with contenders.torchrun(STEPS, 0.01, shape=shape) as run:
                return run.first_step_seconds()

        def peer_ray() -> float:
            with contenders.ray_train(STEPS, 0.01) as run:
                return run.first_step_seconds()

        every = {"torchrun": peer_torchrun, "ray_train": peer_ray}
        arms = {"ours": ours} | {name: every[name] for name in arguments.peers.split(",") if name}
        found = interleave(arms, arguments.pairs)
    finally:
        orch.close()
    cold = [_cold(shape) for _ in range(arguments.cold)]
    values = dict(found.values)
    mine = values.pop("ours")
    more = {"cold": summary(cold)} if cold else {}
    report(
        result(
            "start_latency_gpu" if arguments.gpu else "start_latency",
            "s",
            "lower",
            mine,
            values,
            failures=found.failures,
            shape=asdict(shape),
            **more,
        ),
        arguments.json,
    )


def _cold(shape: contenders.Shape) -> float:
    orch = contenders.Orch()
    try:
        with orch.submit(STEPS, 0.01, arguments=f"10 {shape.device}", shape=shape) as run:
            return run.first_step_seconds()
    finally:
        orch.close()


if __name__ == "__main__":
    main()
