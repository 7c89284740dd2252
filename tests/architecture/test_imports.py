"""Allowed imports: the contracts of pyproject.toml, and the modules that a process of each kind really loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_LOADED = """
import importlib, json, pkgutil, sys
import orchestrator
for absent in json.loads(sys.argv[2]):
    sys.modules[absent] = None  # importing it raises ImportError
for name in json.loads(sys.argv[1]):
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        if "__main__" not in found.name and ".integrations." not in found.name:  # these import the user's frameworks
            importlib.import_module(found.name)
print(json.dumps(sorted({name.split(".")[0] for name, module in sys.modules.items() if module is not None})))
"""


def loaded_with(*names: str, absent: tuple[str, ...] = ()) -> set[str]:
    """Return the top-level modules that a new process has loaded after importing ``names`` and modules below them."""
    command = [sys.executable, "-c", _LOADED, json.dumps(names), json.dumps(absent)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout.splitlines()[-1]))


def test_the_contracts_hold() -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "0 broken" in ended.stdout


def test_the_core_is_pure() -> None:
    third_party = {"ray", "torch", "numpy", "pydantic", "structlog", "fastapi", "sqlite3", "asyncio"}
    assert not loaded_with("orchestrator.core") & third_party


def test_the_store_needs_neither_ray_nor_torch() -> None:
    assert not loaded_with("orchestrator.store") & {"ray", "torch", "numpy", "fastapi"}


def test_a_bare_gpu_machine_needs_no_ray() -> None:
    """Each module of each package can be imported without Ray: a module that cannot is in the traceback."""
    packages = ("gpu", "train", "checkpoint", "analysis", "bench", "spec", "catalogue")
    assert "ray" not in loaded_with(*(f"orchestrator.{package}" for package in packages), absent=("ray",))


def test_the_command_line_loads_neither_ray_nor_torch() -> None:
    heavy = {"ray", "torch", "numpy", "pydantic", "fastapi", "sqlite3"}
    command = (
        "import sys, json, orchestrator.cli.main; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert not set(json.loads(ended.stdout)) & heavy
