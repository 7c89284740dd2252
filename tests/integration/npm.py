"""Packages from npm that tests compare with: installed once into the user's cache, by exact version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence


def installed(packages: Sequence[str], scratch: Path) -> Path:
    """Return a folder whose node_modules has these packages; skip the test where npm is missing."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm is missing")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orch-tests"
    folder = cache / re.sub(r"[^a-z0-9.]+", "-", "_".join(packages).lower()).strip("-")
    if not (folder / "complete").is_file():
        (scratch / "package.json").write_text('{"name": "orch-tests", "private": true}')
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock", *packages]
        done = subprocess.run(
            command, cwd=scratch, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )
        assert done.returncode == 0, done.stderr
        (scratch / "complete").touch()
        shutil.rmtree(folder, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        shutil.copytree(scratch, folder, symlinks=True)
    return folder


def typescript(packages: Path, folder: Path) -> str:
    """Return the compiler's errors in the folder's *.ts; empty if there are none."""
    (folder / "node_modules").symlink_to(packages / "node_modules")
    options = (
        '{"compilerOptions": {"strict": true, "noEmit": true, "skipLibCheck": true, "module": "nodenext",'
        ' "target": "es2022", "types": []}, "include": ["*.ts"]}'
    )
    (folder / "tsconfig.json").write_text(options)
    (folder / "package.json").write_text('{"type": "module"}')
    compiler = str(packages / "node_modules/typescript/bin/tsc")
    done = subprocess.run(
        ["node", compiler, "-p", "."], cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    return done.stdout + done.stderr
