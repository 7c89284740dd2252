"""Records nodes as their agents last reported them, and finds the dead nodes that other nodes have replaced.

Ray keeps a dead node's resources, and gives a host that joins again a new node id. The data that only agents report,
and when they answered, are kept in a file, which outlives the daemon.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.core.codec import RecordError, from_plain, to_plain

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from orchestrator.runtime.nodes.agent import NodeReport
    from orchestrator.runtime.nodes.control_plane import RayNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A node as in its agent's newest report. The agent first answered in round ``first``, last in round ``last``."""

    name: str
    shares_home: bool
    gpu_models: tuple[str, ...]
    simulated: bool
    first: int
    last: int


class LastSeen:
    """The newest sighting of every node that Ray still lists, kept in the file ``path``; None: in memory only.

    Rounds are counted from the home's first daemon on: they order events without a clock.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._sightings, self._round = _read(path)
        self._answered: frozenset[str] = frozenset()
        self._unwritten = False

    def get(self, node_id: str) -> Sighting | None:
        """Return how the node was last seen; None when its agent never answered."""
        return self._sightings.get(node_id)

    def note(self, raw: Mapping[str, RayNode], reports: Mapping[str, NodeReport], answered: Collection[str]) -> None:
        """Record a round, in which the agents of ``answered`` reported. A node that Ray no longer lists is removed."""
        self._round += 1
        before = {node_id: replace(seen, last=0) for node_id, seen in self._sightings.items()}
        now_answered = frozenset(answered) & reports.keys() & raw.keys()
        for node_id in now_answered:
            self._sightings[node_id] = self._sighting(node_id, reports[node_id])
        self._sightings = {node_id: seen for node_id, seen in self._sightings.items() if node_id in raw}
        after = {node_id: replace(seen, last=0) for node_id, seen in self._sightings.items()}
        # The last round of a node is written when it no longer answers, not in each round.
        self._unwritten = self._unwritten or before != after or now_answered != self._answered
        self._answered = now_answered

    def _sighting(self, node_id: str, report: NodeReport) -> Sighting:
        known = self._sightings.get(node_id)
        return Sighting(
            name=report.hostname,
            shares_home=report.home_shared,
            gpu_models=tuple(sorted({gpu.model for gpu in report.gpus})),
            simulated=any(gpu.simulated for gpu in report.gpus),
            first=known.first if known else self._round,
            last=self._round,
        )

    def write(self) -> None:
        """Write the file if it is out of date. Blocks. On a full disk, a later call writes it."""
        if self._path is None or not self._unwritten:
            return
        nodes = {node_id: to_plain(seen) for node_id, seen in self._sightings.items()}
        text = json.dumps({"round": self._round, "nodes": nodes})
        new = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(OSError):
            new.write_text(text)
            new.replace(self._path)
            self._unwritten = False

    def superseded(self, raw: Mapping[str, RayNode]) -> set[str]:
        """Return the dead nodes that another node on the same host has replaced.

        Raylets that were up at the same time are different nodes, also where they share a host. A raylet that started
        on a host after another had ended takes the place of that one, and of no other.
        """
        hosts: dict[tuple[str, str], list[RayNode]] = {}
        for node in sorted(raw.values(), key=lambda node: (node.started, node.id)):
            hosts.setdefault((node.hostname, node.address), []).append(node)
        gone: set[str] = set()
        for joined in hosts.values():
            places: list[RayNode] = []
            for node in joined:
                left = [other for other in places if self._ended_before(other, node)]
                if left:
                    before = max(left, key=lambda other: (_size(other) == _size(node), other.started))
                    places.remove(before)
                    gone.add(before.id)
                places.append(node)
        return gone

    def _ended_before(self, one: RayNode, other: RayNode) -> bool:
        """Whether ``one`` ended before ``other`` joined: by their agents' answers, or else by Ray's times."""
        if one.alive:
            return False
        seen, then = self._sightings.get(one.id), self._sightings.get(other.id)
        if seen is not None and then is not None:
            return seen.last < then.first
        return 0 < one.ended <= other.started


def _size(node: RayNode) -> tuple[float, float]:
    return node.total.get("CPU", 0.0), node.total.get("GPU", 0.0)


def _read(path: Path | None) -> tuple[dict[str, Sighting], int]:
    """Return what an earlier daemon wrote; nothing if the file is damaged, which affects only dead nodes."""
    if path is None:
        return {}, 0
    try:
        stored: Any = json.loads(path.read_text())
        return {node_id: from_plain(Sighting, seen) for node_id, seen in stored["nodes"].items()}, int(stored["round"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecordError):
        return {}, 0
