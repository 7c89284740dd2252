"""A script in a fork ends, fails and prints exactly like one that was started by hand.

Each case runs twice: as `python -u …`, and in a fork. Output, exit code and signal must be equal to the byte.
"""

from __future__ import annotations

import asyncio
import os
import py_compile
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import read_exit_record
from tests.integration.forkserver_fixture import ENVIRONMENT, RunningServer, running_server
from tests.integration.forkserver_ranks import Rank, start_rank
from tests.integration.parity_scripts.endings import ENDINGS
from tests.support.stack import PATIENCE_SECONDS

SCRIPTS = Path(__file__).parent / "parity_scripts"
# May name another interpreter, with or without torch, to try a new version of Python.
PYTHON = os.environ.get("ORCH_TEST_PYTHON", sys.executable)
BENIGN = "print(__name__, __file__, __import__('sys').argv, __import__('sys').path[0])\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(PYTHON) as running:
        yield running


def by_hand(place: Path, *arguments: str) -> tuple[int, bytes, bytes]:
    """Return the exit code (negative: the signal), stdout and stderr."""
    outcome = subprocess.run(
        [PYTHON, "-u", *arguments],
        cwd=place,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
        check=False,
        start_new_session=True,
    )
    return outcome.returncode, outcome.stdout, _without_chance(outcome.stderr)


def in_fork(server: RunningServer, place: Path, logs: Path, target: str, *arguments: str, mode: str = "script") -> Rank:
    async def run() -> Rank:
        request = SpawnRequest(
            mode=mode,  # type: ignore[arg-type]
            target=target,
            args=arguments,
            cwd=str(place),
            env=ENVIRONMENT,
            exit_record=str(logs / "exit.json"),
        )
        return await (await start_rank(server.client, logs, request)).finish()

    return asyncio.run(run())


def seen(rank: Rank) -> tuple[int, bytes, bytes]:
    exited = rank.exited
    code = -exited.signal if exited.signal is not None else exited.exit_code
    assert code is not None
    return code, rank.stdout_path.read_bytes(), _without_chance(rank.stderr_path.read_bytes())


def _without_chance(text: bytes) -> bytes:
    """Replace addresses and the depth of a recursion: in a fork, one frame of orch lies below the script."""
    text = re.sub(rb"0x[0-9a-f]{6,}", b"0x", text)
    return re.sub(rb"repeated \d+ more times", b"repeated n more times", text)


@pytest.mark.rare
@pytest.mark.parametrize("ending", ENDINGS)
def test_ending(server: RunningServer, tmp_path: Path, ending: str) -> None:
    rank = in_fork(server, SCRIPTS, tmp_path, "endings.py", ending)
    assert seen(rank) == by_hand(SCRIPTS, "endings.py", ending)
    assert rank.started.cold is None


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("fail", ("ValueError", "boo")),
        ("chained", ("RuntimeError", "while handling")),
        ("hooked", ("ValueError", "boo")),
        ("close_all", ("ValueError", "boo")),
        ("interrupt", ("KeyboardInterrupt", "")),
        ("odd", ("__main__.OddError", "(its text cannot be shown)")),
        ("text", ("SystemExit", "that was it")),
        ("three", None),
        ("empty", ("SystemExit", "")),
        ("end", None),
        ("thread", None),
        ("child_fails", None),
        ("kill", None),
    ],
)
def test_error_reported(server: RunningServer, tmp_path: Path, ending: str, error: tuple[str, str] | None) -> None:
    """The exception that ends the main thread is reported before the process is gone, and kept in its exit record."""
    rank = in_fork(server, SCRIPTS, tmp_path, "endings.py", ending)
    assert (None if rank.error is None else (rank.error.type, rank.error.message)) == error
    record = read_exit_record(rank.record_path)
    assert record is not None
    assert record.error == rank.error
    if rank.error is not None:
        assert rank.error.at <= rank.exited.at
        assert "forkserver" not in rank.error.traceback


@pytest.mark.rare
def test_long_error_is_cut(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("raise ValueError('x' * 1_000_000)\n")
    rank = in_fork(server, tmp_path, tmp_path, "long.py")
    assert rank.error is not None
    assert len(rank.error.message) < 10_000
    assert len(rank.error.traceback) < 100_000
    assert rank.error.traceback.startswith("Traceback (most recent call last):")
    assert "characters left out" in rank.error.message


FORMS = [
    "plain.py",
    "./plain.py",
    "sub/inner.py",
    "sub/../plain.py",
    "link.py",
    "folder",
    "archive.zip",
    "compiled.pyc",
    "foreign.pyc",
    "latin.py",
]
FORMS += [
    "bom.py",
    "no_suffix",
    "missing.py",
    "syntax.py",
    "empty_folder",
    "broken_import.py",
    "unreadable.py",
]


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with everything that `python X` accepts, and some files that it does not."""
    place = tmp_path_factory.mktemp("forms")
    for name in ("plain.py", "sub/inner.py", "folder/__main__.py", "no_suffix", "real/script.py"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(BENIGN)
    (place / "link.py").symlink_to("real/script.py")
    with zipfile.ZipFile(place / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", BENIGN)
    (place / "compile_me.py").write_text(BENIGN)
    py_compile.compile(str(place / "compile_me.py"), cfile=str(place / "compiled.pyc"), doraise=True)
    (place / "foreign.pyc").write_bytes(b"\x17\r\r\n" + (place / "compiled.pyc").read_bytes()[4:])
    (place / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nprint('grüß')\n".encode("latin-1"))
    (place / "bom.py").write_bytes(b"\xef\xbb\xbfprint('bom')\n")
    (place / "syntax.py").write_text("x = 1\nif x\n    print('never')\n")
    (place / "empty_folder").mkdir()
    (place / "broken_import.py").write_text("import syntax\n")
    (place / "unreadable.py").mkdir()
    return place


@pytest.mark.parametrize("form", FORMS)
def test_form_of_script(server: RunningServer, forms: Path, tmp_path: Path, form: str) -> None:
    rank = in_fork(server, forms, tmp_path, form, "an argument", "--flag")
    assert seen(rank) == by_hand(forms, form, "an argument", "--flag")


@pytest.mark.rare
def test_null_bytes_are_a_syntax_error(server: RunningServer, tmp_path: Path) -> None:
    """The message differs from that of `python X`, which tokenizes the file in C."""
    (tmp_path / "nulls.py").write_bytes(b"print(1)\n\0\n")
    code, out, err = seen(in_fork(server, tmp_path, tmp_path, "nulls.py"))
    assert (code, out) == (1, b"")
    assert b"cannot contain null bytes" in err


@pytest.mark.rare
def test_script_from_standard_input(server: RunningServer, tmp_path: Path) -> None:
    rank = in_fork(server, tmp_path, tmp_path, "-")
    assert seen(rank) == by_hand(tmp_path, "-")
    assert rank.started.cold == "script from standard input"


@pytest.mark.rare
def test_one_frame_of_ours_lies_below_the_script(server: RunningServer, tmp_path: Path) -> None:
    """This frame is the one difference that a script can find, by looking below its own outermost frame."""
    (tmp_path / "depth.py").write_text("import sys\nprint(sys._getframe().f_back.f_back)\n")
    assert seen(in_fork(server, tmp_path, tmp_path, "depth.py"))[1] == b"None\n"


@pytest.mark.rare
def test_absolute_script(server: RunningServer, forms: Path, tmp_path: Path) -> None:
    assert seen(in_fork(server, tmp_path, tmp_path, str(forms / "plain.py"))) == by_hand(
        tmp_path, str(forms / "plain.py")
    )


@pytest.mark.parametrize("module", ["pkg_without_main", "no.such.module", "plain", "json.tool"])
def test_module(server: RunningServer, forms: Path, tmp_path: Path, module: str) -> None:
    (forms / "pkg_without_main").mkdir(exist_ok=True)
    (forms / "pkg_without_main" / "__init__.py").write_text("")
    rank = in_fork(server, forms, tmp_path, module, "--help", mode="module")
    assert seen(rank) == by_hand(forms, "-m", module, "--help")


@pytest.mark.rare
def test_failing_module_shows_runpy_and_none_of_ours(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("def f():\n    raise ValueError('boo')\nf()\n")
    rank = in_fork(server, tmp_path, tmp_path, "failing", mode="module")
    assert seen(rank) == by_hand(tmp_path, "-m", "failing")


@pytest.mark.rare
def test_exec_replaces_the_process(server: RunningServer, tmp_path: Path) -> None:
    """A script that executes another program is still watched to its end."""
    (tmp_path / "become.py").write_text("import os\nos.execvp('sh', ['sh', '-c', 'echo became; exit 21'])\n")
    assert seen(in_fork(server, tmp_path, tmp_path, "become.py")) == (21, b"became\n", b"")
