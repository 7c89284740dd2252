"""A start is warm unless the fork server has read something that would be different now."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from orchestrator.runtime.forkserver import warm
from orchestrator.runtime.forkserver.warm import Baseline, cold_reason

ENVIRON = {"PATH": "/bin", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": "/opt/lib"}


def baseline(modules: dict[str, str | None] | None = None) -> Baseline:
    return Baseline(
        cold=None,
        python="/usr/bin/python3",
        process_name="python3",
        environ=ENVIRON,
        own_modules=(),
        consulted=frozenset({"TORCH_LOGS", "TMPDIR"}),
        startup_modules=frozenset({"os", "site"}),
        modules=modules or {},
        sys_path=(),
        default_threads=2,
        openblas_setters=(),
        torch_version=None,
        warm_seconds=0.0,
        descriptors=frozenset(),
    )


def reason(tmp_path: Path, change: dict[str, str | None], options: tuple[str, ...] = ()) -> str | None:
    env = {name: value for name, value in (ENVIRON | change).items() if value is not None}
    return cold_reason(baseline(), env, options, str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"PATH": "/elsewhere"},
        {
            "MY_SETTING": "1",
            "WANDB_MODE": "offline",
            "RANK": "0",
            "TORCHELASTIC_RUN_ID": "x",
            "TORCH_NCCL_BLOCKING_WAIT": "1",
        },
        {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4", "PYTHONUNBUFFERED": "1", "PYTHONBREAKPOINT": "0"},
        {"LD_LIBRARY_PATH": "/opt/lib"},
    ],
)
def test_warm(tmp_path: Path, change: dict[str, str | None]) -> None:
    assert reason(tmp_path, change) is None


@pytest.mark.parametrize(
    "change",
    [
        {"TORCH_LOGS": "all"},
        {"TMPDIR": "/scratch"},
        {"LD_LIBRARY_PATH": "/opt/other"},
        {"LD_LIBRARY_PATH": None},
        {"PYTHONPATH": "src"},
        {"MKL_NUM_THREADS": "1"},
        {"OMP_PROC_BIND": "true"},
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        {"LANG": "de_DE.UTF-8"},
    ],
)
def test_variable_that_was_read(tmp_path: Path, change: dict[str, str | None]) -> None:
    assert reason(tmp_path, change) == f"environment variable {next(iter(change))}"


def test_options(tmp_path: Path) -> None:
    assert reason(tmp_path, {}, ("-u",)) is None
    assert reason(tmp_path, {}, ("-u", "-W", "error")) == "interpreter option -W"


@pytest.mark.parametrize(
    ("entry", "shadowed"),
    [
        ("queue.py", True),
        ("queue.pyc", True),
        ("queue.cpython-311-x86_64-linux-gnu.so", True),
        ("queue/__init__.py", True),
        ("queue/other.py", False),  # a namespace package never shadows a module
        ("queue.txt", False),
        ("queue.py.bak", False),
        ("os.py", False),  # imported before any script is known
        ("sys.py", False),
        ("mine.py", False),
    ],
)
def test_shadowing(tmp_path: Path, entry: str, shadowed: bool) -> None:
    place = tmp_path / entry
    place.parent.mkdir(exist_ok=True)
    place.touch()
    loaded = {"queue": "/usr/lib/python3/queue.py", "os": "/usr/lib/python3/os.py", "sys": None}
    found = cold_reason(baseline(loaded), ENVIRON, (), str(tmp_path))
    assert found == ("module queue beside the script" if shadowed else None)


def test_module_imported_from_that_very_place_is_no_shadow(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    loaded = {"package": str(tmp_path / "package" / "__init__.py")}
    assert cold_reason(baseline(loaded), ENVIRON, (), str(tmp_path)) is None
    assert cold_reason(baseline(loaded), ENVIRON, (), str(tmp_path / "link")) is None


def test_place_that_cannot_be_listed_shadows_nothing(tmp_path: Path) -> None:
    assert cold_reason(baseline(dict.fromkeys(sys.modules)), ENVIRON, (), str(tmp_path / "archive.zip")) is None


def test_going_through_the_whole_environment_asks_for_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm does so when it is imported, and torch imports tqdm where it is installed."""
    monkeypatch.setattr(warm, "_consulted", set())
    monkeypatch.setenv("SOME_VARIABLE", "1")
    with warm._recorded_environment():
        assert ("SOME_VARIABLE", "1") in os.environ.items()
        assert "1" in os.environ.values()
        assert os.environ.copy()["SOME_VARIABLE"] == "1"
        assert warm._consulted == set()
        assert os.environ.get("SOME_VARIABLE") == "1"
    assert warm._consulted == {"SOME_VARIABLE"}
