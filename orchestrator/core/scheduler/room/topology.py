"""Groups of nodes that are near one another, by labels ``topology.NAME``. Places gangs in as few groups as possible.

Nodes with the same value of such a label are a group: a rack, a switch, a zone. Where nodes have several of these
labels, the one with the fewest values is the widest level, and the groups of the others divide its groups. A node
without a label of a level is a group of its own. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from orchestrator.core.cluster import Node

PREFIX: Final = "topology."

Group = tuple[str, str]


class Topology(NamedTuple):
    """The group of each node on each level, the widest first."""

    groups: Mapping[str, tuple[Group, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self.groups)


FLAT: Final = Topology()
"""The topology without groups: all nodes are equally near to one another."""


def topology_of(nodes: Iterable[Node]) -> Topology:
    """Return the groups of nodes."""
    labelled = [node for node in nodes if node.labels and any(key.startswith(PREFIX) for key in node.labels)]
    if not labelled:
        return FLAT
    values: dict[str, set[str]] = {}
    for node in labelled:
        for key, value in node.labels.items():
            if key.startswith(PREFIX):
                values.setdefault(key, set()).add(value)
    levels = sorted(values, key=lambda key: (len(values[key]), key))
    return Topology(
        {
            node.id: tuple((node.labels[key], "") if key in node.labels else ("", node.id) for key in levels)
            for node in labelled
        }
    )


def gather(ranks: int, room: Mapping[str, int], topology: Topology, *, spread: bool, level: int = 0) -> tuple[str, ...]:
    """Return the nodes for ``ranks`` ranks in as few groups as possible; with ``spread`` each rank on another node.

    ``room`` is how many ranks fit on each node. Groups that are needed whole are the roomiest; the last one is the
    tightest that holds the rest.
    """
    inner: dict[Group, dict[str, int]] = {}
    for node_id, count in room.items():
        known = topology.groups.get(node_id, ())
        if not known:
            inner["", node_id] = {node_id: count}
        elif level == len(known):
            return _on_nodes(ranks, room, spread=spread)
        else:
            inner.setdefault(known[level], {})[node_id] = count
    sizes = {group: len(there) if spread else sum(there.values()) for group, there in inner.items()}
    placed: tuple[str, ...] = ()
    while ranks:
        whole = [group for group, size in sizes.items() if size >= ranks]
        group = (
            min(whole, key=lambda one: (sizes[one], one)) if whole else min(sizes, key=lambda one: (-sizes[one], one))
        )
        taken = min(ranks, sizes.pop(group))
        there = inner[group]
        deeper = len(there) > 1
        placed += (
            gather(taken, there, topology, spread=spread, level=level + 1)
            if deeper
            else _on_nodes(taken, there, spread=spread)
        )
        ranks -= taken
    return placed


def _on_nodes(ranks: int, room: Mapping[str, int], *, spread: bool) -> tuple[str, ...]:
    """Return the nodes for ranks in one group: the tightest node that holds all of them, else the roomiest ones."""
    roomiest = sorted(room, key=lambda node_id: (-room[node_id], node_id))
    if spread:
        return tuple(roomiest[:ranks])
    whole = [node_id for node_id in roomiest if room[node_id] >= ranks]
    if whole:
        return (min(whole, key=lambda node_id: (room[node_id], node_id)),) * ranks
    placed: list[str] = []
    for node_id in roomiest:
        placed.extend([node_id] * min(room[node_id], ranks - len(placed)))
    return tuple(placed)
