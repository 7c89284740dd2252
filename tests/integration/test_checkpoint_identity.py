"""Killed and unkilled runs end with bit-identical weights, and every sample is used exactly once per epoch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.stack import Stack

pytestmark = pytest.mark.rare

SCRIPT = """
import hashlib, json, os, random, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from orchestrator.train import context

seed, width, samples, batch, epochs = int(sys.argv[1]), int(sys.argv[2]), 96, 4, 3
killed = sys.argv[3:]
torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo")
ctx = context()
torch.manual_seed(seed)
random.seed(seed + ctx.rank)
data = torch.randn(samples, 10, generator=torch.Generator().manual_seed(seed))
model = DistributedDataParallel(
    torch.nn.Sequential(
        torch.nn.Linear(10, width), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.Tanh(),
        torch.nn.Linear(width, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
torch.manual_seed(seed * 100 + ctx.rank)
step, used = 0, []
loaded = ctx.load()
if loaded is not None:
    step = loaded.step
    model.load_state_dict(loaded.state["model"])
    optimizer.load_state_dict(loaded.state["optimizer"])
    schedule.load_state_dict(loaded.state["schedule"])
    torch.set_rng_state(loaded.rank_state["torch"])
    random.setstate(loaded.rank_state["python"])
    used = loaded.rank_state["used"]
per_epoch = samples // (batch * ctx.world_size)
while step < per_epoch * epochs:
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1000 + epoch)).tolist()
    begin = (place * ctx.world_size + ctx.rank) * batch
    mine = order[begin : begin + batch]
    loss = model(data[mine] + random.random() * 0.01).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if ctx.attempt == 1 and killed == [str(step), str(ctx.rank), "in_step"]:
        os.kill(os.getpid(), 9)
    optimizer.step()
    schedule.step()
    step += 1
    used += mine
    ctx.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()},
        step=step, rank_state={"torch": torch.get_rng_state(), "python": random.getstate(), "used": used})
    ctx.report(step=step)
    if ctx.attempt == 1 and killed == [str(step), str(ctx.rank), "after_save"]:
        os.kill(os.getpid(), 9)
digest = hashlib.sha256()
for tensor in [*model.state_dict().values(), *(v for s in optimizer.state_dict()["state"].values() for v in s.values())]:
    digest.update(tensor.numpy().tobytes())
json.dump({"digest": digest.hexdigest(), "used": used}, open(f"rank-{ctx.rank}.json", "w"))
"""


def submit(stack: Stack, folder: Path, ranks: int, *arguments: object) -> str:
    spec = {
        "version": 1,
        "name": "exact",
        "entrypoint": " ".join(["python train.py", *map(str, arguments)]),
        "resources": {"num_workers": ranks, "resources_per_worker": {"gpu": 0, "cpu": 0.1}},
        "retry": {"max_restarts": {"infra": 5}},
    }
    return stack.submit(json.dumps(spec), folder, train=SCRIPT)


def result(stack: Stack, job_id: str, ranks: int) -> tuple[str, list[list[int]]]:
    """Return the digest of weights and optimizer, and for each epoch the samples that were used, sorted."""
    job = stack.wait(job_id)
    assert job.state == "SUCCEEDED", (job.failure, stack.log(job_id))
    told = [json.loads((Path(job.working_dir) / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    assert len({rank["digest"] for rank in told}) == 1
    share = len(told[0]["used"]) // 3
    epochs = [sorted(i for rank in told for i in rank["used"][n * share : (n + 1) * share]) for n in range(3)]
    return told[0]["digest"], epochs


@pytest.mark.parametrize(
    ("seed", "where", "ranks", "width"),
    [(1, "in_step", 2, 32), (2, "after_save", 2, 32), (3, "after_save", 1, 512)],
    ids=["in_step", "after_save", "while_the_rest_is_copied"],
)
def test_killed_runs_end_as_if_nothing_had_happened(
    stack: Stack, tmp_path: Path, seed: int, where: str, ranks: int, width: int
) -> None:
    dice = random.Random(random.getrandbits(64))
    jobs = {"unkilled": submit(stack, tmp_path / "plain", ranks, seed, width)}
    step, rank = dice.randrange(8, 35), dice.randrange(ranks)
    name = f"{where} {step} of rank {rank}"
    jobs[name] = submit(stack, tmp_path / where, ranks, seed, width, step, rank, where)
    results = {name: result(stack, job_id, ranks) for name, job_id in jobs.items()}
    assert len({digest for digest, _ in results.values()}) == 1, {n: d for n, (d, _) in results.items()}
    for name, (_, epochs) in results.items():
        assert epochs == [list(range(96))] * 3, name
    killed = [name for name, job_id in jobs.items() if stack.job(job_id).restarts]
    assert killed == list(jobs)[1:]
