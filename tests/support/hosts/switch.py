"""Carries Ethernet frames between the hosts. Each direction of each pair of hosts is a link with faults of its own.

It emulates the kernel's netem, which not every kernel has, and one-way cuts; all choices follow from one seed.
"""

from __future__ import annotations

import heapq
import itertools
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

MAX_FRAME_BYTES: Final = 65_600
ALL_PROTOCOLS: Final = 3
IGNORE_OUTGOING: Final = 23  # PACKET_IGNORE_OUTGOING: a socket does not receive the frames that it has sent itself
BUFFER_BYTES: Final = 8 * 2**20
MAX_AT_ONCE: Final = 64
MAC_BYTES: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Faults of the link from one host to another. At most ``jitter`` seconds are added to ``delay``, so frames may overtake."""

    cut: bool = False
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for impossible values."""
        shares, seconds = (self.loss, self.duplicate), (self.delay, self.jitter)
        if not all(0 <= share <= 1 for share in shares) or not all(0 <= each <= 60 for each in seconds):
            raise ValueError(f"loss and duplicate are shares, delay and jitter at most 60 s: {self}")

    def delays(self, dice: random.Random) -> tuple[float, ...]:
        """Return the delays, in seconds, with which a frame arrives: none if it is lost, two if it is duplicated."""
        if self.cut or (self.loss and dice.random() < self.loss):
            return ()
        copies = 2 if self.duplicate and dice.random() < self.duplicate else 1
        return tuple(self.delay + (self.jitter * dice.random() if self.jitter else 0.0) for _ in range(copies))


def mac(host: int) -> str:
    """Return the address of a host's network device."""
    return f"02:00:00:00:00:{host:02x}"


def receivers(frame: bytes, source: int, hosts: Mapping[int, object]) -> list[int]:
    """Return the receivers of a frame: one host, or for a broadcast all others."""
    if frame[0] & 1:
        return [host for host in hosts if host != source]
    host = frame[MAC_BYTES - 1]
    return (
        [host]
        if host in hosts and host != source and frame[:MAC_BYTES] == bytes.fromhex(mac(host).replace(":", ""))
        else []
    )


@dataclass(slots=True)
class Switch:
    """Holds the links, and the frames in transit."""

    dice: random.Random
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    ports: dict[int, socket.socket] = field(default_factory=dict)
    _underway: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def plug(self, host: int, device: str) -> socket.socket:
        """Open the port of a host."""
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        port.setsockopt(263, IGNORE_OUTGOING, 1)  # SOL_PACKET
        port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        port.bind((device, 0))
        port.setblocking(False)
        self.ports[host] = port
        return port

    def unplug(self, host: int) -> socket.socket | None:
        """Close the port of a host that has ended; frames in transit to it are lost."""
        port = self.ports.pop(host, None)
        if port is not None:
            port.close()
        return port

    def read(self, host: int) -> None:
        """Take the frames that a host has sent, and pass on those that are due at once."""
        port = self.ports[host]
        for _ in range(MAX_AT_ONCE):
            try:
                frame = port.recv(MAX_FRAME_BYTES)
            except OSError:  # no more for now, or the device is gone
                return
            for target in receivers(frame, host, self.ports):
                for delay in self.links.get((host, target), Link()).delays(self.dice):
                    if delay:
                        heapq.heappush(self._underway, (time.monotonic() + delay, next(self._numbers), target, frame))
                    else:
                        self._pass_on(target, frame)

    def deliver(self) -> float | None:
        """Pass on the frames that are due; return in how many seconds the next one is, None without any."""
        now = time.monotonic()
        while self._underway and self._underway[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._underway)
            self._pass_on(target, frame)
        return max(0.0, self._underway[0][0] - now) if self._underway else None

    def _pass_on(self, target: int, frame: bytes) -> None:
        port = self.ports.get(target)
        if port is None:
            return
        try:
            port.send(frame)
        except OSError:  # a full queue loses frames, as in any switch, and so does a device that is down
            return
