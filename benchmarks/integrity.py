"""Damages checkpoints thousands of times, and counts damage that is not detected and good states that are lost; also for ``torch.save``.

Each trial makes a directory with two checkpoints of known content, damages it in one way, and loads the newest good
state. A trial fails when the loaded state is not bit for bit one of the states that were saved (*undetected*), or
when no state is loaded (*lost*). Damages: ``flip`` of one random bit, ``truncate`` a file, ``remove`` a file, ``full``
(a third save finds no more room at a random byte; a file size limit stands in for the disk), ``kill`` (SIGKILL at a random moment of a third save).

The peer is what scripts do by hand: ``torch.save`` to a temporary file, fsync, rename, and a loader that takes the newest
file that ``torch.load`` accepts.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import measure
from orchestrator.checkpoint.repository.repository import CheckpointRepository

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARES = {"flip": 0.6, "truncate": 0.15, "remove": 0.1, "full": 0.1, "kill": 0.05}
_NUMBERS = 400


def state_of(step: int) -> dict[str, Any]:
    """Return a small training state that is different at every step."""
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(_NUMBERS, generator=generator)
    return {"model": {"w": weights}, "optimizer": {"m": weights * 2, "step": step}, "seed": [step, 1.5, "text"]}


def same(found: Any, step: int) -> bool:
    """Return whether ``found`` is bit for bit the state of ``step``."""
    wanted = state_of(step)
    try:
        return bool(
            found["seed"] == wanted["seed"]
            and found["optimizer"]["step"] == step
            and torch.equal(found["model"]["w"], wanted["model"]["w"])
            and torch.equal(found["optimizer"]["m"], wanted["optimizer"]["m"])
        )
    except (LookupError, TypeError, RuntimeError):  # not even the same structure
        return False


class Orch:
    """``context().save`` without a daemon: straight to storage."""

    name = "orch"

    def save(self, folder: Path, step: int) -> None:
        """Store one checkpoint."""
        CheckpointRepository(folder, attempt=1).save(state_of(step), step=step)

    def load(self, folder: Path) -> tuple[int, Any] | None:
        """Return the newest good one, as a new attempt loads it."""
        loaded = CheckpointRepository(folder, attempt=2).load_latest()
        return None if loaded is None else (loaded.step, loaded.state)

    def files(self, folder: Path) -> list[Path]:
        """Return the files that may be damaged: the newest checkpoint."""
        newest = max(folder.glob("step-*"))
        return sorted(newest.iterdir())


class Peer:
    """``torch.save`` to a temporary file, fsync, rename."""

    name = "torch.save with rename"

    def save(self, folder: Path, step: int) -> None:
        """Store one checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / "draft"
        with draft.open("wb") as file:
            torch.save(state_of(step), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / f"step-{step:06d}.pt")

    def load(self, folder: Path) -> tuple[int, Any] | None:
        """Return the newest one that torch.load accepts."""
        for path in sorted(folder.glob("step-*.pt"), reverse=True):
            try:
                return int(path.stem[5:]), torch.load(path, weights_only=True)
            except Exception:
                continue
        return None

    def files(self, folder: Path) -> list[Path]:
        """Return the files that may be damaged: the newest checkpoint."""
        return [max(folder.glob("step-*.pt"))]


def damage(kind: str, arm: Orch | Peer, folder: Path, dice: random.Random) -> None:
    """Damage a directory with two checkpoints in one way."""
    if kind == "kill":
        _kill_in_a_save(arm, folder, dice)
    elif kind == "full":
        _fill_the_disk_in_a_save(arm, folder, dice)
    else:
        victim = dice.choice(arm.files(folder))
        content = bytearray(victim.read_bytes())
        if kind == "remove":
            victim.unlink()
        elif kind == "truncate":
            victim.write_bytes(content[: dice.randrange(len(content))])
        else:
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            victim.write_bytes(content)


def _kill_in_a_save(arm: Orch | Peer, folder: Path, dice: random.Random) -> None:
    child = os.fork()
    if child == 0:
        try:
            arm.save(folder, 3)
        finally:
            os._exit(0)
    time.sleep(dice.random() * 0.012)
    os.kill(child, 9)
    os.waitpid(child, 0)


def _fill_the_disk_in_a_save(arm: Orch | Peer, folder: Path, dice: random.Random) -> None:
    """Save in a child with a limit of file size: a write ends short at a random byte, and the next one fails."""
    import resource
    import signal

    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = dice.randrange(1, 5000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            arm.save(folder, 3)
        except (OSError, RuntimeError) as error:
            os._exit(3 if getattr(error, "errno", errno.EFBIG) in (errno.EFBIG, errno.ENOSPC) else 4)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def trial(kind: str, arm: Orch | Peer, folder: Path, dice: random.Random) -> str:
    """Damage a fresh copy, and load the newest good state; return ``good``, ``undetected`` or ``lost``."""
    damage(kind, arm, folder, dice)
    found = arm.load(folder)
    if found is None:
        return "lost"
    return "good" if same(found[1], found[0]) and found[0] in (1, 2, 3) else "undetected"


def kinds(trials: int, dice: random.Random) -> Iterator[str]:
    """Yield the kind of damage of each trial."""
    yield from dice.choices(list(SHARES), weights=list(SHARES.values()), k=trials)


def campaign(make: Callable[[], Orch | Peer], trials: int, seed: int, place: Path) -> dict[str, Any]:
    """Run all trials of one arm, with the same dice for each arm."""
    arm, dice = make(), random.Random(seed)
    template = place / f"{arm.name.split()[0]}-template"
    for step in (1, 2):
        arm.save(template, step)
    counts: dict[str, dict[str, int]] = {kind: {"good": 0, "undetected": 0, "lost": 0} for kind in SHARES}
    began = time.monotonic()
    for kind in kinds(trials, dice):
        folder = Path(tempfile.mkdtemp(dir=place)) / "checkpoints"
        shutil.copytree(template, folder)
        counts[kind][trial(kind, arm, folder, random.Random(dice.getrandbits(64)))] += 1
        shutil.rmtree(folder.parent)
    bad = {name: sum(count[name] for count in counts.values()) for name in ("undetected", "lost")}
    return {"trials": trials, **bad, "by_damage": counts, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    """Run and report; return exit code 1 when a trial failed under orch."""
    options = measure.parser(str(__doc__).partition("\n")[0], 1)
    options.add_argument("--trials", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=20_261_121)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    place = Path(tempfile.mkdtemp(prefix="integrity-", dir=base))
    try:
        arms = {arm.name: campaign(arm, chosen.trials, chosen.seed, place) for arm in (Orch, Peer)}
    finally:
        shutil.rmtree(place)
    ours = arms[Orch.name]
    measure.report(
        {
            "measure": "integrity",
            "unit": "trials that ended with a wrong state or none",
            "better": "lower",
            "ours": {**ours, "median": ours["undetected"] + ours["lost"], "n": chosen.trials},
            "peers": {
                name: {**found, "median": found["undetected"] + found["lost"], "n": chosen.trials}
                for name, found in arms.items()
                if name != Orch.name
            },
            "target": "none",
            "met": ours["undetected"] + ours["lost"] == 0,
            "seed": chosen.seed,
            "machine": measure.machine(),
            "commit": measure.commit(),
            "date": time.strftime("%Y-%m-%d"),
        },
        chosen.json,
    )
    return 1 if ours["undetected"] + ours["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
