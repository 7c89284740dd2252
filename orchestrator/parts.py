"""The installable parts of orch: the modules of each, and the line that adds it to an installation.

The client is always installed. Everything else is an extra of the distribution (`pyproject.toml`), and a test compares
this table with those lists. Checking for a part does not import it.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

DISTRIBUTION: Final = "orchd"
"""Name of the distribution, for installers; the command is `orch`, the import `orchestrator`."""

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
    """Return the modules of this part that this interpreter does not have."""
    return tuple(module for module in parts[part] if find_spec(module) is None)


def part_of(module: str) -> str | None:
    """Return the smallest part with this module; None for a module of no part."""
    top = module.partition(".")[0]
    having = [part for part, modules in PARTS.items() if top in modules]
    return min(having, key=lambda part: len(PARTS[part]), default=None)


@dataclass(frozen=True, slots=True)
class Installation:
    """An environment in which orch is installed."""

    python: str
    prefix: Path
    """Directory of the environment; pipx and uv keep their records of it there."""
    editable: str | None
    """The checkout that an editable installation runs; None for a copy."""
    has_pip: bool


def this_installation() -> Installation:
    """Return the environment that this process runs in."""
    return Installation(sys.executable, Path(sys.prefix), _checkout(), find_spec("pip") is not None)


def install_line(part: str, installation: Installation | None = None) -> str:
    """Return the line that adds a part to this installation, for the tool that made it: uv, pipx or pip.

    No line installs the distribution itself from an index: an installer that finds it installed adds only the part's
    packages.
    """
    where = this_installation() if installation is None else installation
    if (receipt := _uv_receipt(where.prefix)) is not None:
        return _uv_tool_line(part, receipt)
    if (where.prefix / "pipx_metadata.json").exists():
        everyone = "--global " if where.prefix.parent == _pipx_of_everyone() / "venvs" else ""
        return f"pipx inject {everyone}{shlex.quote(where.prefix.name)} {_named(part)}"
    python = shlex.quote(where.python)
    install = f"{python} -m pip install" if where.has_pip else f"uv pip install --python {python}"
    if where.editable is not None:
        return f"{install} --editable {shlex.quote(f'{where.editable}[{part}]')}"
    return f"{install} {_named(part)}"


def _named(*parts: str) -> str:
    return shlex.quote(f"{DISTRIBUTION}[{','.join(parts)}]")


def _checkout() -> str | None:
    """Return the directory of an editable installation from its installer's record (PEP 610); else None."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution  # takes 25 ms, and only an error needs it
    from urllib.parse import unquote, urlsplit

    try:
        record: Any = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    url = urlsplit(record.get("url", ""))
    return unquote(url.path) if url.scheme == "file" and record.get("dir_info", {}).get("editable") else None


def _pipx_of_everyone() -> Path:
    return Path(os.environ.get("PIPX_GLOBAL_HOME", "/opt/pipx"))


def _uv_receipt(prefix: Path) -> Mapping[str, Any] | None:
    """Return the receipt of `uv tool install`; None if it did not create the environment."""
    import tomllib

    try:
        text = (prefix / "uv-receipt.toml").read_text(encoding="utf-8")
        tool: Mapping[str, Any] = tomllib.loads(text).get("tool", {})
    except (OSError, ValueError):
        return None
    return tool


def _uv_tool_line(part: str, receipt: Mapping[str, Any]) -> str:
    """Return the line that reinstalls the tool with its present extras and the part: uv removes all others."""
    requirements = [entry for entry in receipt.get("requirements", ()) if isinstance(entry, dict)]
    own = [entry for entry in requirements if entry.get("name") == DISTRIBUTION]
    had = sorted({extra for entry in own for extra in entry.get("extras", ())} - {part})
    words = ["uv tool install"]
    if "python" in receipt:
        words.append(f"--python {shlex.quote(str(receipt['python']))}")
    words.append(f"--with {_named(*had, part)}")
    words += [f"--with {shlex.quote(_uv_requirement(entry))}" for entry in requirements if entry not in own]
    source = next((source for entry in own if (source := _uv_source(entry))), DISTRIBUTION)
    if any("editable" in entry for entry in own):
        words.append("--editable")
    return " ".join([*words, shlex.quote(source)])


def _uv_requirement(entry: Mapping[str, Any]) -> str:
    extras = f"[{','.join(entry['extras'])}]" if entry.get("extras") else ""
    source = _uv_source(entry)
    return f"{entry.get('name', '')}{extras}" + (f" @ {source}" if source else str(entry.get("specifier", "")))


def _uv_source(entry: Mapping[str, Any]) -> str:
    """Return the source from which uv took a requirement; empty for an index, and for a file that no longer exists."""
    for kind in ("path", "editable", "directory"):
        if kind in entry:
            return str(entry[kind]) if Path(str(entry[kind])).exists() else ""
    return f"git+{entry['git']}" if "git" in entry else str(entry.get("url", ""))
