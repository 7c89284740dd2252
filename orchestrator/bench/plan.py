"""The plan of a benchmark: its validated cells (ranks and batch size), and the order of its runs.

A batch size is *global* (all ranks together) or *per rank*; a cell always has both. Speed-up is defined between cells
of one global batch. Pure: values in, values out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class BenchError(Exception):
    """The benchmark cannot be run as requested; the message gives the reason, ``hint`` what to change."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RankError(BenchError):
    """A rank failed at a command or ended; the ranks must be restarted. The message contains the rank's own error."""


MODELS: Final = ("medium", "large", "conv", "transformer")
MODES: Final = ("single", "multi", "auto")
PRECISIONS: Final = ("fp32", "bf16", "fp16")
DEVICES: Final = ("auto", "cpu", "cuda")
SCOPES: Final = ("global", "per-rank")
MAX_RANKS: Final = 64
MAX_BATCH: Final = 1 << 20
MAX_RUNS: Final = 1000
MAX_STEPS: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """One configuration: a number of ranks that share a global batch. Empty fields take the request's values."""

    batch: int
    ranks: int
    model: str = ""
    precision: str = ""
    accumulate: int = 1
    """Number of passes into which a rank's part of the batch is cut."""
    gpus: int = 0
    """Number of GPUs to which one rank hands its batch (DataParallel); 0: each rank computes on its own device."""

    @property
    def per_rank(self) -> int:
        """Return the samples of each rank in a step."""
        return self.batch // self.ranks

    @property
    def name(self) -> str:
        """The cell's name in file names."""
        more = [self.precision, f"accumulate{self.accumulate}" if self.accumulate > 1 else ""]
        more += [f"gpus{self.gpus}" if self.gpus else ""]
        return "_".join((f"ranks{self.ranks}_batch{self.batch}", *(one for one in more if one)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """The options of `orch bench`. ``ranks`` empty: determined by the machine."""

    model: str = "medium"
    gpu_mode: str = "auto"
    batch_sizes: tuple[int, ...] = (16, 32, 64, 128)
    scope: str = "global"
    ranks: tuple[int, ...] = ()
    runs: int = 30
    steps: int = 100
    precision: str = "fp32"
    device: str = "auto"
    threads: int = 1
    memory_limit_bytes: int | None = None
    price_per_gpu_hour: float | None = None
    output: Path = Path("results")
    seed: int = 42

    @property
    def model_name(self) -> str:
        """The model's part of a file name; for a factory in a file, both names."""
        return name_of(self.model)


def name_of(model: str) -> str:
    """Return a model's part of a file name."""
    path, colon, factory = model.rpartition(":")
    return f"{Path(path).stem}_{factory}" if colon else model


def check(request: BenchRequest) -> None:
    """Raise BenchError for the first invalid value."""
    _one_of("--model", request.model, MODELS, more="FILE.py:factory" if ":" not in request.model else None)
    for option, value, allowed in (
        ("--gpu-mode", request.gpu_mode, MODES),
        ("--precision", request.precision, PRECISIONS),
        ("--device", request.device, DEVICES),
        ("--batch-scope", request.scope, SCOPES),
    ):
        _one_of(option, value, allowed)
    _numbers("--batch-sizes", request.batch_sizes, 1, MAX_BATCH)
    if request.ranks:
        _numbers("--ranks", request.ranks, 1, MAX_RANKS)
    for option, number, most in (
        ("--runs", request.runs, MAX_RUNS),
        ("--steps", request.steps, MAX_STEPS),
        ("--threads", request.threads, 1024),
    ):
        _numbers(option, (number,), 1, most)
    price = request.price_per_gpu_hour
    if price is not None and not 0 <= price < float("inf"):
        raise BenchError(f"--price is {price}", hint="write the price of one GPU for an hour, 0 or more")


def _one_of(option: str, value: str, allowed: Sequence[str], more: str | None = None) -> None:
    if option == "--model" and more is None:
        path, _, factory = value.rpartition(":")
        if not path.endswith(".py") or not factory.isidentifier():
            raise BenchError(f"--model {value} names no factory", hint="write FILE.py:function")
        return
    if value not in allowed:
        raise BenchError(
            f"{option} {value} is not known", hint=f"one of: {', '.join((*allowed, *([more] if more else [])))}"
        )


def _numbers(option: str, values: Sequence[int], least: int, most: int) -> None:
    if not values:
        raise BenchError(f"{option} is empty", hint="write whole numbers separated by commas, like 32,64")
    for value in values:
        if not least <= value <= most:
            raise BenchError(f"{option} has {value}", hint=f"write whole numbers from {least} to {most}")
    if len(set(values)) < len(values):
        raise BenchError(f"{option} names a number twice: {','.join(map(str, values))}", hint="name each once")


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse the whole numbers of ``32,64,128``. Raises BenchError."""
    found = []
    for part in text.split(","):
        word = part.strip()
        if not word.isdecimal() or len(word) > 9:
            raise BenchError(
                f"{option} {text!r}: {word!r} is not a whole number", hint="separate whole numbers by commas: 32,64"
            )
        found.append(int(word))
    return tuple(found)


def parse_size(option: str, text: str) -> int:
    """Parse the bytes of ``12GB``, ``800MiB`` or a plain number. Raises BenchError."""
    match = re.fullmatch(r"(\d{1,18})([KMGT]?)(i?)B?", text.strip(), re.ASCII)
    size = 0 if match is None else int(match[1]) * (1024 if match[3] else 1000) ** "_KMGT".index(match[2] or "_")
    if not 0 < size <= 10**18:
        raise BenchError(f"{option} {text!r} is not a size", hint="write one like 12GB, 800MiB or 1000000")
    return size


def device_of(request: BenchRequest, *, gpus: int) -> str:
    """Return ``cuda`` or ``cpu``, on a machine with this many GPUs. Raises BenchError if the device cannot do it."""
    device = ("cuda" if gpus else "cpu") if request.device == "auto" else request.device
    if device == "cuda" and not gpus:
        raise BenchError(
            "--device cuda: torch sees no GPU", hint="`orch doctor` searches for the reason; or use --device cpu"
        )
    if device == "cpu" and request.precision == "fp16":
        raise BenchError("--precision fp16 needs a GPU", hint="processors compute bf16: --precision bf16")
    if device == "cpu" and request.memory_limit_bytes is not None:
        raise BenchError("--memory-limit limits GPUs, and the ranks compute on processors", hint="leave it out")
    return device


def ranks_of(request: BenchRequest, *, gpus: int) -> tuple[int, ...]:
    """Return the numbers of ranks to measure, ascending, for this many GPUs (0: ranks compute on processors)."""
    given = request.ranks or tuple(n for n in (1, 2, 4, 8, 16, 32, 64) if n <= (gpus or 2))
    if gpus and (many := [n for n in given if n > gpus]):
        raise BenchError(
            f"--ranks has {many[0]}, and this machine has {plural(gpus, 'GPU')}",
            hint="each rank needs a GPU of its own; --device cpu measures on processors",
        )
    if request.gpu_mode == "single":
        return (1,)
    several = sorted(n for n in given if n > 1)
    if request.gpu_mode == "multi":
        if not several:
            raise BenchError(
                "multi-GPU mode needs at least 2 ranks", hint="name them: --ranks 2,4; or --gpu-mode single"
            )
        return tuple(several)
    return (1, *several)


def cells_of(request: BenchRequest, ranks: Sequence[int]) -> tuple[Cell, ...]:
    """Return the configurations by global batch and ranks. With batches per rank, one rank measures each global batch too."""
    cells = set()
    for size in request.batch_sizes:
        for n in ranks:
            if request.scope == "per-rank":
                cells.add(Cell(batch=size * n, ranks=n))
                if 1 in ranks:
                    cells.add(Cell(batch=size * n, ranks=1))
            elif size % n:
                raise BenchError(
                    f"a global batch of {size} cannot be shared equally by {n} ranks",
                    hint="choose multiples of the number of ranks, or --batch-scope per-rank",
                )
            else:
                cells.add(Cell(batch=size, ranks=n))
    return tuple(sorted(cells))


def rounds(cells: Sequence[Cell], runs: int) -> Iterator[tuple[int, Cell]]:
    """Yield every run: all cells once per round, in reverse order in every other round, so that drift favours none."""
    for run in range(runs):
        for cell in cells if run % 2 == 0 else reversed(cells):
            yield run, cell
