"""The process from which ``warm.py`` forks interpreters: ``python -m tests.support.warm_program FD MODULE...``.

It imports the modules, and forks for each request that arrives at the socket FD. The child runs the code as ``__main__`` and
ends as any interpreter does: exit handlers, threads that are waited for, an exception that nothing catches.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import types
from typing import Any

LARGEST_REQUEST = 1 << 20


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request with its files (stdin, stdout, stderr, the socket for the answer); None at the end."""
    handles = array.array("i")
    data, ancillary, _flags, _address = control.recvmsg(LARGEST_REQUEST, socket.CMSG_SPACE(4 * handles.itemsize))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            handles.frombytes(content)
    return (json.loads(data), list(handles)) if data else None


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; return the request in the child, and None in the parent once the requests end."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    while True:
        for key, _events in selector.select():
            if key.data is not None:  # a child has ended
                selector.unregister(key.fd)
                os.close(key.fd)
                pid, answer = key.data
                _send(answer, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                answer.close()
                continue
            received = receive(control)
            if received is None:
                return None
            request, (*files, reply_handle) = received
            answer = socket.socket(fileno=reply_handle)
            pid = os.fork()
            if pid == 0:
                _leave(selector)
                answer.close()
                become(request, files)
                return request
            for handle in files:
                os.close(handle)
            _send(answer, pid)
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, answer))


def _leave(selector: selectors.BaseSelector) -> None:
    """Close the parent's files, in the child."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        else:
            os.close(key.fd)
            key.data[1].close()
    selector.close()


def _send(answer: socket.socket, number: int) -> None:
    try:
        answer.send(str(number).encode())
    except OSError:  # the client has closed its end
        return


def become(request: dict[str, Any], files: list[int]) -> None:
    """Install the files, the directory, the environment and the arguments of a newly started process."""
    for number, handle in enumerate(files):
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = ["", *filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv[:] = request["argv"]


def main() -> dict[str, Any] | None:
    """Import the modules and serve; return, in the child, the request to run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    return serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _request = main()
    if _request is not None:
        sys.modules["__main__"] = _main = types.ModuleType("__main__")
        exec(compile(_request["code"], _request["argv"][0], "exec"), _main.__dict__)
