"""Parent process of all hosts: ``unshare --mount --net python site.py JSON``.

It reads commands from its standard input, one JSON object a line, answers each with one, and runs the switch meanwhile. When its
input ends, it ends itself and the hosts.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.hosts.switch import Link, Switch, mac

SIOCETHTOOL: Final = 0x8946
OFFLOADS: Final = {"checksums": 0x17, "scatter": 0x19, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}
"""Work of a network card for the kernel. The switch sees frames before: each must be complete and of the link's size."""
MTU: Final = 9000
INIT: Final = Path(__file__).with_name("init.py")


def run(*command: str) -> None:
    """Run a command of the system."""
    done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass(slots=True)
class Site:
    """The hosts that run, and the switch between them."""

    options: dict[str, Any]
    switch: Switch
    readers: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    running: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return Path(self.options["directory"])

    def prepare(self) -> None:
        """Mount the disks that outlive a host's processes."""
        run("mount", "--make-rprivate", "/")
        for name, mebibytes, owner in self.options["disks"]:
            place = self.directory / name
            place.mkdir(parents=True, exist_ok=True)
            mode = "1777" if name == "shared" else "0700"
            run(
                "mount",
                "-t",
                "tmpfs",
                "-o",
                f"mode={mode},size={mebibytes}m,uid={owner},gid={owner}",
                "tmpfs",
                str(place),
            )

    def boot(self, host: int, init: dict[str, Any], unshare: list[str]) -> dict[str, Any]:
        """Start a host's first process; return its process id on the machine."""
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
        ]
        command += ["--mount-proc", *unshare, sys.executable, "-I", "-S", str(INIT), json.dumps(init)]
        with (self.directory / f"host{host}" / "log").open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdin is not None
        self.running[host] = process
        self._hear(host, "made")
        pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        self.first[host] = pid
        device = f"host{host}"
        run(
            "ip",
            "link",
            "add",
            device,
            "mtu",
            str(MTU),
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "address",
            mac(host),
            "mtu",
            str(MTU),
            "netns",
            str(pid),
        )
        without_offloads(device)
        run(
            "nsenter",
            "--target",
            str(pid),
            "--net",
            sys.executable,
            "-I",
            "-S",
            str(Path(__file__)),
            "--without-offloads",
            "eth0",
        )
        run("ip", "link", "set", device, "up")
        self.readers.register(self.switch.plug(host, device), selectors.EVENT_READ, host)
        process.stdin.write("go\n")
        process.stdin.flush()
        self._hear(host, "up")
        return {"pid": pid}

    def _hear(self, host: int, word: str) -> None:
        process = self.running[host]
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if line != word:
            log_text = (self.directory / f"host{host}" / "log").read_text()
            raise OSError(f"host {host} said {line!r} and not {word!r}; it ended with {process.wait()}: {log_text}")

    def end(self, host: int) -> dict[str, Any]:
        """Kill every process of a host at the same moment, as a power cut does."""
        process = self.running.pop(host)
        port = self.switch.ports.get(host)
        if port is not None:
            self.readers.unregister(port)
            self.switch.unplug(host)
        with contextlib.suppress(ProcessLookupError):  # the first process may have ended already
            os.kill(self.first.pop(host, process.pid), signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        with contextlib.suppress(OSError):  # it is removed with the host's network
            run("ip", "link", "delete", f"host{host}")
        return {}

    def link(self, source: int, target: int, link: dict[str, Any]) -> dict[str, Any]:
        """Change one direction between two hosts."""
        self.switch.links[source, target] = Link(**link)
        return {}

    def obey(self, line: str) -> str:
        """Run a command; return the answer, or the error, as JSON."""
        asked = json.loads(line)
        try:
            answer = {"boot": self.boot, "end": self.end, "link": self.link}[asked.pop("do")](**asked)
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
        return json.dumps(answer)

    def serve(self) -> None:
        """Switch frames and run commands until the standard input ends."""
        self.readers.register(sys.stdin, selectors.EVENT_READ, None)
        while True:
            for key, _ in self.readers.select(self.switch.deliver()):
                if key.data is not None:
                    if key.data in self.switch.ports:
                        self.switch.read(key.data)
                    continue
                line = sys.stdin.readline()
                if not line:
                    return
                print(self.obey(line), flush=True)


def without_offloads(device: str) -> None:
    """Make the kernel build complete frames itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS.values():
            value = array.array("B", struct.pack("II", command, 0))
            fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))


def main() -> None:
    """Serve until the standard input ends."""
    options = json.loads(sys.argv[1])
    site = Site(options, Switch(random.Random(options["seed"])))
    try:
        site.prepare()
        print("{}", flush=True)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    try:
        site.serve()
    finally:
        for host in list(site.running):
            site.end(host)


if __name__ == "__main__":
    if sys.argv[1] == "--without-offloads":
        without_offloads(sys.argv[2])
    else:
        main()
    sys.stdout.flush()
    os._exit(0)
