"""A program that cannot be executed: the kernel's few errors become the true reason, with what to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.runtime.forkserver.launch import why_not_executed

ELF = Path("/proc/self/exe").read_bytes()[:64]


def reason(path: Path) -> str:
    """Return what is said of a program that the kernel really refuses."""
    with pytest.raises(OSError, match=r"Errno") as refused:
        subprocess.run([path], check=False, timeout=60)
    return why_not_executed(str(path), str(path) if os.path.lexists(path) else None, refused.value)


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"#!/bin/bash\r\necho hi\r\n", 0o755, "names the interpreter '/bin/bash\\r', which does not exist"),
        (b"#! /no/such/program -x\n", 0o755, "names the interpreter '/no/such/program', which does not exist"),
        (b"#!/etc/passwd\n", 0o755, "names the interpreter '/etc/passwd', which is not executable"),
        (b"#!\n", 0o755, "names no interpreter"),
        (b"echo hi\n", 0o755, "its first line names no interpreter, as #!/bin/bash does"),
        (b"\xef\xbb\xbf#!/bin/bash\n", 0o755, "a byte order mark precedes its first line"),
        (b"", 0o755, "the file is empty"),
        (ELF[:18] + b"\x00\x00" + ELF[20:], 0o755, "for another kind of processor"),
        (b"#!/bin/bash\n", 0o644, "it is not executable: chmod +x "),
    ],
    ids=["CRLF", "missing", "not executable", "none named", "no first line", "BOM", "empty", "processor", "mode"],
)
def test_the_reason_is_the_files_own(tmp_path: Path, content: bytes, mode: int, said: str) -> None:
    program = tmp_path / "run.sh"
    program.write_bytes(content)
    program.chmod(mode)
    assert said in reason(program)


def test_what_stands_at_the_path_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/no/such/python")
    assert reason(tmp_path / "link") == "it is a link to '/no/such/python', which does not exist on this machine"
    assert reason(tmp_path) == "it is a directory"
    assert reason(tmp_path / "absent").startswith("No such file or directory; a relative path begins at")
    error = FileNotFoundError(2, "No such file or directory")
    assert why_not_executed("absent", None, error) == "No such file or directory; is it in the job's PATH?"


@pytest.mark.parametrize(
    "content", [b"#!/bin/sh\r\nexit 0\r\n", b"\xef\xbb\xbf#!/bin/sh\nexit 0\n"], ids=["CRLF", "BOM"]
)
def test_the_remedy_for_a_file_from_windows_works(tmp_path: Path, content: bytes) -> None:
    program = tmp_path / "a run.sh"
    program.write_bytes(content)
    program.chmod(0o755)
    command = "sed -i" + reason(program).split("sed -i")[1].rsplit(" removes ", 1)[0]
    subprocess.run(command, shell=True, check=True)
    subprocess.run([program], check=True, timeout=60)


def test_the_remedy_for_a_file_without_the_permission_works(tmp_path: Path) -> None:
    program = tmp_path / "run.sh"
    program.write_text("#!/bin/sh\nexit 0\n")
    subprocess.run(reason(program).split(": ")[1], shell=True, check=True)
    subprocess.run([program], check=True, timeout=60)
