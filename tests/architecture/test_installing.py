"""What an installation is made of: pins that a package index has, a Python by any name, and advice that names what exists."""

from __future__ import annotations

import ast
import functools
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.trees import tree_of

ROOT = Path(__file__).parents[2]
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]


# -- the pins


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_pin_is_one_released_version() -> None:
    """An index such as PyPI has no local versions (2.13.0+cpu)."""
    for pin in PINS:
        (specifier,) = pin.specifier
        version = Version(specifier.version)
        assert (specifier.operator, version.local, version.dev, pin.url) == ("==", None, None, None), str(pin)
    assert len({plain(pin.name) for pin in PINS}) == len(PINS)


def write_index(folder: Path) -> None:
    """Write an index of what is installed here, by public version and with metadata only: there is nothing to download."""
    links: dict[str, list[str]] = defaultdict(list)
    for found in distributions():
        name, version = plain(found.name), Version(found.version).public
        wheel = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        text = found.read_text("METADATA")
        assert text is not None, name
        text = re.sub(r"^Version: .*$", f"Version: {version}", text, count=1, flags=re.MULTILINE)
        (folder / f"{wheel}.metadata").write_text(text, encoding="utf-8")
        needs = html.escape(found.metadata.get("Requires-Python") or "")
        digest = hashlib.sha256(text.encode()).hexdigest()
        links[name].append(
            f'<a href="../{wheel}" data-requires-python="{needs}" data-core-metadata="sha256={digest}">{wheel}</a>'
        )
    for name, lines in links.items():
        (folder / name).mkdir()
        (folder / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{' '.join(lines)}</body></html>")


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, and logs nothing."""

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.rare
def test_an_index_without_local_versions_has_everything_that_the_pins_name(tmp_path: Path) -> None:
    """For the first release of this Python, too: Debian 12 has 3.11.2, and some packages need a later one."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert uv is not None, "uv is a package of the extra dev"
    write_index(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    line = [
        uv,
        "pip",
        "compile",
        str(ROOT / "pyproject.toml"),
        "--all-extras",
        "--constraint",
        str(ROOT / "constraints.txt"),
    ]
    line += ["--python", sys.executable, "--python-version", "{}.{}".format(*sys.version_info)]
    line += ["--no-config", "--no-cache", "--no-annotate", "--no-header", "--quiet"]
    line += ["--default-index", f"http://127.0.0.1:{server.server_port}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    try:
        done = subprocess.run(
            line, env={**environ, "NO_PROXY": "127.0.0.1"}, capture_output=True, text=True, check=False
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    resolved = {plain(text.partition("==")[0]) for text in done.stdout.splitlines()}
    assert {"torch", "ray", "typer", "mkdocs-material"} <= resolved
    assert resolved <= {plain(pin.name) for pin in PINS} | UNPINNED, "not pinned"


UNPINNED = {
    plain(found.name) for found in distributions() if found.name.startswith(("nvidia-c", "nvidia-n", "cuda-", "triton"))
}
"""What torch itself pins for its build for CUDA."""


def hashed(name: str) -> list[Requirement]:
    """Return the pins of a file that `make pins` writes; fails for one without a hash."""
    text = re.sub(r"^ *#.*\n", "", (ROOT / "deploy" / name).read_text(), flags=re.MULTILINE).replace("\\\n", "")
    pins = [line.partition(" --hash=") for line in text.splitlines()]
    for pin, _, hashes in pins:
        assert re.fullmatch(r"sha256:[0-9a-f]{64}( +--hash=sha256:[0-9a-f]{64})*", hashes), pin
    return [Requirement(pin) for pin, _, _ in pins]


def needed(name: str, *extras: str) -> set[str]:
    """Return the names of an installed package and of what it needs here, at any depth."""
    waiting, seen = [(name, extras)], set()
    while waiting:
        owner, chosen = waiting.pop()
        if (owner, chosen) not in seen:
            seen.add((owner, chosen))
            below = [Requirement(text) for text in requires(owner) or ()]
            waiting += [
                (plain(one.name), tuple(sorted(one.extras)))
                for one in below
                if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *chosen))
            ]
    return {name for name, _ in seen}


def test_hashes_are_of_the_pinned_versions() -> None:
    """`make pins` writes both files again after a change of the pins."""
    pinned = {plain(pin.name): str(pin.specifier) for pin in PINS}
    image = {plain(pin.name): str(pin.specifier) for pin in hashed("requirements.txt")}
    assert image == {name: pinned.get(name) for name in image}
    build = {plain(pin.name): str(pin.specifier) for pin in hashed("build-requirements.txt")}
    assert {"hatchling", "cyclonedx-bom"} <= build.keys()
    assert {name: version for name, version in build.items() if pinned.get(name, version) != version} == {}


def test_the_image_has_a_hash_for_all_that_its_parts_need_but_torch() -> None:
    (extras,) = re.findall(r"^IN_IMAGE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    image = {plain(pin.name) for pin in hashed("requirements.txt") if pin.marker is None or pin.marker.evaluate()}
    assert image == needed("orchd", *extras.split()) - {"orchd", "torch"} - UNPINNED


# -- the Python


def fake_python(path: Path, change: str = "", *, runs: bool = True) -> Path:
    """Make a command that is this Python, after ``change``."""
    path.parent.mkdir(exist_ok=True)
    body = f"import sys; {change}; exec(sys.argv.pop(1))" if change else "import sys; exec(sys.argv.pop(1))"
    path.write_text(
        f"#!/bin/sh\nshift\nexec '{sys.executable}' -c '{body}' \"$@\"\n" if runs else "#!/bin/sh\nexit 127\n"
    )
    path.chmod(0o755)
    return path


def of(version: tuple[int, int, int]) -> str:
    return f"import collections; sys.version_info = (*{version},)"


NO_VENV = 'sys.modules["ensurepip"] = None'


def choose(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (path / "sort").symlink_to(shutil.which("sort") or "")
    return subprocess.run(
        ["/bin/sh", str(ROOT / ".ci/python"), *arguments],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", ["python3", "python3.13"])
def test_a_python_is_found_by_any_name(tmp_path: Path, name: str) -> None:
    fake_python(tmp_path / name)
    assert choose(tmp_path).stdout == f"{sys.executable}\n"


def test_one_that_is_too_old_has_no_venv_or_does_not_run_is_passed_over(tmp_path: Path) -> None:
    fake_python(tmp_path / "python3", of((3, 9, 2)))
    fake_python(tmp_path / "python", NO_VENV)
    fake_python(tmp_path / "python3.13", runs=False)
    fake_python(tmp_path / "python3.12")
    done = choose(tmp_path)
    assert (done.stdout, done.stderr) == (f"{sys.executable}\n", "")


def test_without_a_good_one_the_error_says_what_was_found(tmp_path: Path) -> None:
    fake_python(tmp_path / "python3", of((3, 9, 2)))
    fake_python(tmp_path / "python3.11", NO_VENV)
    fake_python(tmp_path / "python3.13", runs=False)
    fake_python(tmp_path / "python3.14", of((3, 15, 0)))
    done = choose(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    own = "{}.{}".format(*sys.version_info)
    assert done.stderr.splitlines() == [
        "no Python 3.11 to 3.14 that orch can be installed with; found:",
        "  python3: Python 3.9.2 is not 3.11 to 3.14",
        "  python3.13: does not run",
        f"  python3.11: Python {sys.version.split()[0]} has no venv module (on Debian and Ubuntu: apt-get install python{own}-venv)",
        "  python3.14: Python 3.15.0 is not 3.11 to 3.14",
        "install one, or name another: make PYTHON=/path/to/python3.12 setup",
    ]


def test_a_named_one_is_that_one_or_an_error(tmp_path: Path) -> None:
    fake_python(tmp_path / "python3")
    other = fake_python(tmp_path / "other", of((3, 8, 10)))
    done = choose(tmp_path, str(other))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{other}: Python 3.8.10 is not 3.11 to 3.14" in done.stderr


def test_versions_are_listed_once_each(tmp_path: Path) -> None:
    for name, version in (
        ("python3", (3, 13, 0)),
        ("python3.13", (3, 13, 9)),
        ("python3.12", (3, 12, 1)),
        ("python", (3, 9, 2)),
    ):
        fake_python(tmp_path / name, of(version))
    assert choose(tmp_path, "--versions").stdout == "3.12\n3.13\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [({"TORCH": "cpu"}, "make setup TORCH=cpu TORCH_INDEX_URL="), ({"TORCH": "rocm"}, "TORCH=rocm is unknown")],
)
def test_a_choice_of_torch_that_cannot_be_met_is_refused_at_once(
    tmp_path: Path, given: dict[str, str], message: str
) -> None:
    line = [str(ROOT / ".ci/environment"), str(tmp_path / "venv"), "dev"]
    environ = {"PATH": os.environ["PATH"], **given}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("/bin/zsh", ". .venv/bin/activate"),
        ("/usr/bin/fish", "source .venv/bin/activate.fish"),
        ("/bin/tcsh", "source .venv/bin/activate.csh"),
    ],
)
def test_the_last_line_of_setup_says_how_to_type_orch(tmp_path: Path, shell: str, line: str) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    environ = {"PATH": os.environ["PATH"], "SHELL": shell}
    done = subprocess.run(["make", "setup"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert f"`{line}`" in last
    assert f"{tmp_path}/.venv/bin/orch" in last


# -- what is advised

BARE = re.compile(r"(?:pipx?|uv tool|uv pip) install\b[^\n`]*[\s'\"]orch(?:\[[a-z,-]*\])?(?=[\s'\"`.]|$)", re.MULTILINE)
FILES = sorted(
    path
    for pattern in ("*.md", "Dockerfile", "docs/**/*.md", "examples/**/*.md", "deploy/**/*.md", "orchestrator/**/*.py")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)


def test_nothing_installs_the_bare_name() -> None:
    """On PyPI, `orch` is another project."""
    assert len(FILES) > 100
    lines = {path: BARE.findall(path.read_text(encoding="utf-8")) for path in FILES}
    assert {str(path.relative_to(ROOT)): bare for path, bare in lines.items() if bare} == {}


ON_ITS_MACHINE = {
    "api/errors.py",  # default hints of classes with a client_hint, and of a daemon's process on this machine
    "cli/commands/machine.py",  # the help of the daemon's address
    "cli/reference.py",  # the example of `orch up` in docs/cli.md
    "daemon/process/doctor.py",  # checks that are made where the part `daemon` is installed
    "daemon/process/preflight.py",  # the start of a daemon
    "store/errors.py",  # the daemon's own store
}


def test_orch_up_is_advised_only_where_a_daemon_can_be_started() -> None:
    """A client without the part `daemon` cannot follow that advice, also if a daemon elsewhere gives it."""
    found = set()
    for path in (ROOT / "orchestrator").rglob("*.py"):
        if "orch up" not in (text := path.read_text(encoding="utf-8")):
            continue
        tree = tree_of(text)
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            value = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.search(r"\borch up\b", value) and id(node) not in told:
                found.add(str(path.relative_to(ROOT / "orchestrator")))
    assert found == ON_ITS_MACHINE
