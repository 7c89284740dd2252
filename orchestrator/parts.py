"""The installable parts of orch: the modules of each, and the command that installs it.

The client is always installed. Everything else is an extra of the distribution (`pyproject.toml`), and a test compares
this table with those lists. Checking for a part does not import it.
"""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

DISTRIBUTION: Final = "orchd"
"""The name that installers know; the command is `orch`, the import `orchestrator`."""

_TRAIN = ("cattrs", "fsspec", "numpy", "safetensors", "torch", "torchdata")

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "train": _TRAIN,
    "daemon": (
        *_TRAIN,
        *("fastapi", "jinja2", "grpc", "prometheus_client", "ray", "structlog", "uvicorn"),
    ),
    "plots": ("matplotlib", "numpy"),
    "top": ("textual",),
    "stacks": (),  # py-spy, a program without a module
    "runtime-env": ("virtualenv",),
    "dashboards": ("grafanalib",),
    "search": ("optuna", "numpy"),
    "s3": ("s3fs",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Each extra with the modules that it adds, as they are imported."""


def missing_modules(part: str, parts: Mapping[str, tuple[str, ...]] = PARTS) -> tuple[str, ...]:
    """Return the modules of this part that this interpreter lacks."""
    return tuple(module for module in parts[part] if find_spec(module) is None)


def part_of(module: str) -> str | None:
    """Return the smallest part with this module; None for a module of no part."""
    top = module.partition(".")[0]
    having = [part for part, modules in PARTS.items() if top in modules]
    return min(having, key=lambda part: len(PARTS[part]), default=None)


def install_line(part: str) -> str:
    """The line that adds a part to this installation, whichever tool made it.

    An installer that finds the distribution installed asks an index for the part's packages alone.
    """
    wanted = shlex.quote(f"{DISTRIBUTION}[{part}]")
    python = shlex.quote(sys.executable)
    if find_spec("pip") is None:
        return f"uv pip install --python {python} {wanted}"
    return f"{python} -m pip install {wanted}"
