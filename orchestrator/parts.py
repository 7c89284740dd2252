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

_TRAIN = ("fsspec", "numpy", "safetensors", "torch", "torchdata")

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "train": _TRAIN,
    "daemon": (
        *_TRAIN,
        *("fastapi", "jinja2", "grpc", "itsdangerous", "prometheus_client", "ray", "structlog", "uvicorn"),
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


def unmet(part: str) -> list[str]:
    """Return the requirements of this part that the installed versions do not meet: ``ray>=2.56 (2.50.1 is installed)``.

    Every module of the part must be installed; nothing is imported.
    """
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    found = []
    for text in _requirements(part):
        wanted = Requirement(text)
        try:
            present = version(wanted.name)
        except PackageNotFoundError:
            continue  # another distribution has the module
        if not wanted.specifier.contains(present, prereleases=True):
            found.append(f"{wanted.name}{wanted.specifier} ({present} is installed)")
    return found


@dataclass(frozen=True, slots=True)
class Installation:
    """An environment in which orch is installed."""

    python: str
    prefix: Path
    """Directory of the environment; pipx and uv keep their records of it there."""
    editable: str | None
    """The checkout that an editable installation runs; None for a copy."""
    has_pip: bool
    source: str | None = None
    """Address of the wheel, directory or repository that was installed; None for an index. It may no longer exist."""


def this_installation() -> Installation:
    """Return the environment that this process runs in."""
    editable, source = _record()
    return Installation(sys.executable, Path(sys.prefix), editable, find_spec("pip") is not None, source)


def install_line(part: str, installation: Installation | None = None) -> str:
    """Return the line that adds a part to this installation, for the tool that made it: uv, pipx or pip.

    The line names the wheel or the checkout that orch was installed from. Where that no longer exists it names the
    packages of the part: the distribution itself is on an index only if it was installed from one.
    """
    where = this_installation() if installation is None else installation
    if (receipt := _uv_receipt(where.prefix)) is not None and (line := _uv_tool_line(part, receipt)):
        return line
    if where.editable is not None:
        named = f"--editable {shlex.quote(f'{where.editable}[{part}]')}"
    elif where.source is None:
        named = _named(part)
    elif _exists(where.source):
        named = shlex.quote(f"{DISTRIBUTION}[{part}] @ {where.source}")
    else:
        named = shlex.join(_requirements(part))
    if (where.prefix / "pipx_metadata.json").exists():
        everyone = "--global " if where.prefix.parent == _pipx_of_everyone() / "venvs" else ""
        return f"pipx inject {everyone}{shlex.quote(where.prefix.name)} {named}"
    python = shlex.quote(where.python)
    install = f"{python} -m pip install" if where.has_pip else f"uv pip install --python {python}"
    return f"{install} {named}"


def _named(*parts: str) -> str:
    return shlex.quote(f"{DISTRIBUTION}[{','.join(parts)}]")


def _exists(source: str) -> bool:
    from urllib.parse import unquote, urlsplit

    url = urlsplit(source)
    return url.scheme != "file" or Path(unquote(url.path)).exists()


def _requirements(part: str) -> list[str]:
    """Return the packages of a part, with their versions, from the metadata of the installed distribution."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        split = [text.partition(";") for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return []
    return [name.strip() for name, _, marker in split if marker.strip().replace('"', "'") == f"extra == '{part}'"]


def _record() -> tuple[str | None, str | None]:
    """Return the checkout of an editable installation and the source of another, from its installer's record (PEP 610)."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution  # takes 25 ms, and only an error needs it
    from urllib.parse import unquote, urlsplit

    try:
        record: Any = json.loads(distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None, None
    url = record.get("url", "")
    if record.get("dir_info", {}).get("editable"):
        return unquote(urlsplit(url).path), None
    if vcs := record.get("vcs_info"):
        url = f"{vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return None, url or None


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
    """Return the line that reinstalls the tool with its present extras and the part: uv removes all others.

    It is empty for a tool whose source no longer exists.
    """
    requirements = [entry for entry in receipt.get("requirements", ()) if isinstance(entry, dict)]
    own = [entry for entry in requirements if entry.get("name") == DISTRIBUTION]
    had = sorted({extra for entry in own for extra in entry.get("extras", ())} - {part})
    words = ["uv tool install"]
    if "python" in receipt:
        words.append(f"--python {shlex.quote(str(receipt['python']))}")
    words.append(f"--with {_named(*had, part)}")
    words += [f"--with {shlex.quote(_uv_requirement(entry))}" for entry in requirements if entry not in own]
    source = next((source for entry in own if (source := _uv_source(entry))), "")
    if not source and (not own or any(entry.keys() & set(_UV_SOURCES) for entry in own)):
        return ""
    if any("editable" in entry for entry in own):
        words.append("--editable")
    return " ".join([*words, shlex.quote(source or DISTRIBUTION)])


_UV_SOURCES: Final = ("path", "editable", "directory")


def _uv_requirement(entry: Mapping[str, Any]) -> str:
    extras = f"[{','.join(entry['extras'])}]" if entry.get("extras") else ""
    source = _uv_source(entry)
    return f"{entry.get('name', '')}{extras}" + (f" @ {source}" if source else str(entry.get("specifier", "")))


def _uv_source(entry: Mapping[str, Any]) -> str:
    """Return the source from which uv took a requirement; empty for an index, and for a file that no longer exists."""
    for kind in _UV_SOURCES:
        if kind in entry:
            return str(entry[kind]) if Path(str(entry[kind])).exists() else ""
    return f"git+{entry['git']}" if "git" in entry else str(entry.get("url", ""))
