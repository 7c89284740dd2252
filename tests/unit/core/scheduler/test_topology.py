"""Gangs are placed on as few groups of a topology label as possible."""

from __future__ import annotations

import pytest

from orchestrator.core.cluster import Node
from orchestrator.core.scheduler.placement import free_on, place, topology_of
from tests.unit.core.builders import make_spec, node, nodes, pending


def on(name: str, gpus: int, **labels: str) -> Node:
    return node(name, gpus=gpus, labels={f"topology.{key}": value for key, value in labels.items()})


RACKS = (on("a", 4, rack="r1"), on("b", 3, rack="r2"), on("c", 3, rack="r2"), on("d", 2, rack="r1"))


def put(workers: int, *known: Node, strategy: str = "PACK") -> tuple[str, ...] | None:
    """Return the placement of a gang."""
    return place(pending(make_spec(workers=workers, strategy=strategy)), free_on(known, ()), nodes(*known))


@pytest.mark.parametrize(
    ("workers", "strategy", "expected"),
    [
        (4, "PACK", ("a",) * 4),  # one node is nearer than one rack
        (5, "PACK", ("a",) * 4 + ("d",)),  # the roomiest nodes alone would be a and b, of two racks
        (8, "PACK", ("a",) * 4 + ("d",) * 2 + ("b",) * 2),  # r1 and r2 are equally large: in the order of their names
        (2, "SPREAD", ("a", "d")),
        (3, "SPREAD", ("a", "d", "b")),
        (5, "SPREAD", ("a", "a", "b", "c", "d")),  # more ranks than nodes: over all of them
        (2, "STRICT_SPREAD", ("a", "d")),
        (5, "STRICT_SPREAD", None),
        (13, "PACK", None),
    ],
)
def test_the_fewest_racks(workers: int, strategy: str, expected: tuple[str, ...] | None) -> None:
    assert put(workers, *RACKS, strategy=strategy) == expected


def test_the_label_with_the_fewest_values_is_the_widest_level() -> None:
    known = (
        on("a", 3, rack="r1", zone="z1"),
        on("b", 1, rack="r2", zone="z1"),
        on("c", 2, rack="r3", zone="z2"),
        on("d", 2, rack="r4", zone="z2"),
        on("e", 4, rack="r4", zone="z2"),
    )
    assert put(6, *known) == ("e",) * 4 + ("d",) * 2, "one rack of one zone"
    assert put(7, *known) == ("e",) * 4 + ("d",) * 2 + ("c",), "one zone before more room elsewhere"


def test_a_node_without_the_label_is_a_group_of_its_own() -> None:
    assert put(5, on("a", 4), on("b", 3, rack="r1"), on("c", 2, rack="r1")) == ("b", "b", "b", "c", "c")
    assert put(5, on("a", 4), on("b", 3)) == ("a",) * 4 + ("b",)
    assert topology_of((on("a", 4), node("b", labels={"disk": "nvme"}))) == {}
