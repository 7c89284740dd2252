"""The wheel in a separate environment with only the client's dependencies, without a download."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from orchestrator import parts

ROOT = Path(__file__).parents[2]


def build_wheel(directory: Path) -> Path:
    """Build the wheel of this repository; return its path."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


def install(wheel: Path, directory: Path) -> Path:
    """Create an environment with the wheel and its plain dependencies, linked from here; return its `orch`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = directory / "bin" / "python"
    line = ["pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run([sys.executable, "-m", *line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (site,) = (directory / "lib").glob("python*/site-packages")
    for name in needed(requirements_of(site)):
        _link(distribution(name), site)
    return directory / "bin" / "orch"


def requirements_of(site: Path) -> list[str]:
    """Return the requirements of the installed wheel."""
    (metadata,) = site.glob(f"{parts.DISTRIBUTION}-*.dist-info")
    return Distribution.at(metadata).requires or []


def needed(requirements: list[str]) -> set[str]:
    """Return the distributions that these requirements need, directly or through others."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    rest = [(text, "") for text in requirements]
    while rest:
        text, extra = rest.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        found.add(name)
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                rest += [(needs, wanted) for needs in distribution(name).requires or []]
    return found


def _link(package: Distribution, site: Path) -> None:
    for file in package.files or ():
        source = Path(str(package.locate_file(file)))
        target = site / str(file)
        if ".." in file.parts or not source.is_file():
            continue  # programs, which are outside of site-packages
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.link(source, target) if source.stat().st_dev == site.stat().st_dev else target.write_bytes(
                source.read_bytes()
            )


def packed(names: set[str], directory: Path) -> None:
    """Write a wheel of each of these installed distributions into a directory, for installers that must use no index."""
    directory.mkdir(exist_ok=True)
    for name in names:
        package = distribution(name)
        files = [file for file in package.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
        tags = re.findall(r"^Tag: (\S+)-(\S+)-(\S+)", package.read_text("WHEEL") or "", re.MULTILINE)
        tag = "-".join(".".join(sorted(set(parts_of_tags))) for parts_of_tags in zip(*tags, strict=True))
        plain = re.sub(r"[-_.]+", "_", package.metadata["Name"])
        with zipfile.ZipFile(directory / f"{plain}-{package.version}-{tag}.whl", "w") as wheel:
            for file in files:
                if file.name not in {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}:
                    wheel.writestr(str(file), Path(str(package.locate_file(file))).read_bytes())
            (metadata,) = {file.parts[0] for file in files if file.parts[0].endswith(".dist-info")}
            record = [f"{inside},," for inside in [*wheel.namelist(), f"{metadata}/RECORD"]]
            wheel.writestr(f"{metadata}/RECORD", "\n".join(record) + "\n")
