"""NCCL settings worth trying on a machine: algorithm, protocol, P2P and channels, by how its GPUs are linked. Pure.

The links are read from the matrix of ``nvidia-smi topo -m``: NV# is NVLink, PIX and PXB are PCIe switches, PHB, NODE and SYS go
through a processor's host bridge, between its bridges, or between sockets.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_GPU_ROW: Final = re.compile(r"^\s*GPU\d+\s")
_LINK: Final = re.compile(r"^(?:NV\d{1,3}|PIX|PXB|PHB|NODE|SYS)$")
_MOST_LINES: Final = 256
CHANNELS: Final = (4, 16)
_FEWEST_FOR_TREE: Final = 4


class Link(enum.StrEnum):
    """Kinds of links between two GPUs, the fastest first."""

    NVLINK = "NVLink"
    SWITCH = "PCIe switch"
    HOST = "PCIe host bridge"
    SOCKETS = "between sockets"


_KINDS: Final = {"PIX": Link.SWITCH, "PXB": Link.SWITCH, "PHB": Link.HOST, "NODE": Link.HOST, "SYS": Link.SOCKETS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Settings that are tried together, as environment variables. The first candidate has none: NCCL's own choice."""

    name: str
    variables: Mapping[str, str]


def links_of(topology: str | None) -> frozenset[Link]:
    """Return the kinds of links between GPUs in the matrix; none where there is no matrix, or it has another form."""
    found = set()
    for line in (topology or "").splitlines()[:_MOST_LINES]:
        if _GPU_ROW.match(line):
            # One column for each GPU, then those of network cards and affinities.
            cells = [cell for cell in line.split()[1:] if _LINK.match(cell)]
            found |= {Link.NVLINK if cell.startswith("NV") else _KINDS[cell] for cell in cells}
    return frozenset(found)


def candidates(gpus: int, links: frozenset[Link]) -> tuple[Candidate, ...]:
    """Return the candidates for this many GPUs; NCCL's own choice first."""
    found = [Candidate(name="NCCL's own choice", variables={})]
    algorithms = ("Ring", "Tree") if gpus >= _FEWEST_FOR_TREE else ("Ring",)
    found += [Candidate(name=f"algorithm {one}", variables={"NCCL_ALGO": one}) for one in algorithms]
    # LL128 needs links that keep the order of 128 bytes: according to NCCL, NVLink.
    protocols = ("Simple", "LL", "LL128") if Link.NVLINK in links else ("Simple", "LL")
    found += [Candidate(name=f"protocol {one}", variables={"NCCL_PROTO": one}) for one in protocols]
    if Link.NVLINK not in links:
        found.append(Candidate(name="no P2P, through host memory", variables={"NCCL_P2P_DISABLE": "1"}))
    if Link.SOCKETS in links:
        found.append(Candidate(name="P2P also between sockets", variables={"NCCL_P2P_LEVEL": "SYS"}))
    for count in CHANNELS:
        both = {"NCCL_MIN_NCHANNELS": str(count), "NCCL_MAX_NCHANNELS": str(count)}
        found.append(Candidate(name=f"{count} channels", variables=both))
    return tuple(found)
