"""Code run as another user of the machine, in a fork: the interpreter itself may be where that user cannot read."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become different users")


def as_user(uid: int, action: Callable[[], object]) -> str:
    """Run ``action`` as ``uid``; return its result as text, or the exception that it raised (its type and message).

    ``action`` must not import anything: everything it uses has been imported by the caller.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            try:
                output = f"{action()}"
            except Exception as error:
                output = f"{type(error).__name__}: {error}"
            os.write(writer, output.encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        output = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, output
    return output
