"""The first process of a host: sets up the host's disks, name and address, then reaps processes until it is killed.

Run as a file, with nothing imported but the standard library, in namespaces that ``site.py`` has made. Its argument is JSON; it
prints ``made`` when it runs, waits for a line (its network device exists then), and prints ``up``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HIDDEN = ("/root", "/home", "/tmp", "/var/tmp", "/dev/shm")
"""Directories of the machine that are hidden from a host; the paths in ``seen`` below them are not."""
BIND, RECURSIVE = 4096, 16384


def bind(source: str, target: str) -> None:
    """Make a file or directory appear in another place too."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), None, BIND | RECURSIVE, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def run(*command: str) -> None:
    """Run a command of the system. Raises CalledProcessError when it fails."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def disks(options: dict[str, Any]) -> None:
    """Hide the machine's directories, and mount the host's."""
    own = Path(options["directory"])
    for number, path in enumerate(options["seen"]):
        place = own / "seen" / str(number)
        place.mkdir(parents=True, exist_ok=True)
        bind(path, str(place))
    for hidden in HIDDEN:
        mode = "0755" if hidden in ("/root", "/home") else "1777"
        run("mount", "-t", "tmpfs", "-o", f"mode={mode},size={options['scratch_mebibytes']}m", "tmpfs", hidden)
    for number, path in enumerate(options["seen"]):
        Path(path).mkdir(parents=True, exist_ok=True)
        bind(str(own / "seen" / str(number)), path)
    home = Path(options["home"])
    home.mkdir(parents=True)
    bind(str(own / "home"), str(home))
    if options["shared"]:
        Path("/home/shared").mkdir()
        bind(options["shared"], "/home/shared")
    for name in ("passwd", "group", "hosts"):
        bind(str(own / name), f"/etc/{name}")


def network(options: dict[str, Any]) -> None:
    """Give the host its name and its address."""
    socket.sethostname(options["name"])
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{options['address']}/24", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")


def reap() -> None:
    """Reap the host's ended processes, for ever."""
    while True:
        signal.sigwait([signal.SIGCHLD])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def main() -> None:
    """Begin a host."""
    options = json.loads(sys.argv[1])
    os.umask(0o022)
    print("made", flush=True)
    sys.stdin.readline()
    disks(options)
    network(options)
    os.chdir("/")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    print("up", flush=True)
    reap()


if __name__ == "__main__":
    main()
