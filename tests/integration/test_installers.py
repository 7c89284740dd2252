"""The light client installed by pipx and by uv: its commands, and the line that adds a part, typed as it is printed.

Both take every package from wheels that are made of what is installed here; without pipx or uv there is nothing to test.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator import parts
from tests.support import light_client
from tests.support.stack import PATIENCE_SECONDS

pytestmark = pytest.mark.rare

PART = "top"
"""A small part, of which nothing is in the light client."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One installer with directories of its own."""

    name: str
    root: Path
    wheel: Path

    @property
    def orch(self) -> Path:
        return self.root / "bin" / "orch"

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command line, as a user whose PATH has the installer and what it installed."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("ORCH_", "PYTHON", "PIP", "UV_", "VIRTUAL_ENV"))
        }
        own = {
            "PATH": f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "ORCH_HOME": str(self.root / "home"),
            "PIPX_HOME": str(self.root / "pipx"),
            "PIPX_BIN_DIR": str(self.root / "bin"),
            "PIPX_DEFAULT_BACKEND": "uv" if shutil.which("uv") else "pip",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheel.parent),
            "UV_TOOL_DIR": str(self.root / "tools"),
            "UV_TOOL_BIN_DIR": str(self.root / "bin"),
            "UV_CACHE_DIR": str(self.root / "cache"),
            "UV_OFFLINE": "1",
            "UV_NO_INDEX": "1",
            "UV_NO_CONFIG": "1",
            "UV_FIND_LINKS": str(self.wheel.parent),
            "UV_PYTHON_DOWNLOADS": "never",
        }
        return subprocess.run(
            shlex.split(line),
            env={**kept, **own},
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wheels = tmp_path_factory.mktemp("wheels")
    built = light_client.build_wheel(wheels)
    light_client.packed(light_client.needed([parts.DISTRIBUTION, "textual"]) - {parts.DISTRIBUTION}, wheels)
    return built


@pytest.fixture(params=["pipx install", "uv tool install"])
def tool(request: pytest.FixtureRequest, tmp_path: Path, wheel: Path) -> Tool:
    name = request.param.split()[0]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    made = Tool(name, tmp_path, wheel)
    done = made.run(f"{request.param} {wheel}")
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_the_light_client_works_and_a_part_comes_by_the_line_that_an_error_names(tool: Tool) -> None:
    shown = tool.run("orch --help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "submit" in shown.stdout

    alone = tool.run("orch status")
    assert (alone.returncode, alone.stdout) == (4, "")
    said, hint = alone.stderr.splitlines()
    assert said.startswith("orch: no daemon answers at ")
    assert "`orch login http://HOST:PORT`" in hint

    lacking = tool.run("orch top")
    assert lacking.returncode == 5
    said, hint = lacking.stderr.splitlines()
    assert f"needs the part '{PART}'" in said
    line = hint.partition("next: ")[2]
    assert line.startswith(tool.name)

    added = tool.run(line)
    assert added.returncode == 0, added.stdout + added.stderr
    there = tool.run("orch top")
    assert f"needs the part '{PART}'" not in there.stderr
    assert "`orch top` needs a terminal" in there.stderr
