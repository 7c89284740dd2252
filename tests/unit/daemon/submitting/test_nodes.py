"""Nodes and labels of a job that a cluster refuses."""

from __future__ import annotations

import pytest

from orchestrator.api.errors import RefusedError
from orchestrator.daemon.submitting.submission import Checked, check_fits
from orchestrator.spec.job import parse_job
from tests.support.records import replace
from tests.unit.core.builders import node, nodes

THERE = nodes(node("a", gpus=8), node("b", gpus=2))


def asked(ranks: int, *names: str) -> Checked:
    text = f"name: digits\nentrypoint: python train.py\nresources: {{num_workers: {ranks}, nodes: {list(names)}}}\n"
    return Checked(spec=parse_job(text), python="", directory=None)


def test_a_node_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(RefusedError, match="there is no node 'c', 'd'; the nodes are a, b") as caught:
        check_fits(asked(1, "a", "c", "d"), THERE)
    assert "orch nodes" in str(caught.value.hint)


def test_nodes_that_are_too_small_are_refused_with_the_remedy() -> None:
    with pytest.raises(RefusedError, match="no node can fit 3 ranks") as caught:
        check_fits(asked(3, "b"), THERE)
    assert "resources.nodes" in str(caught.value.hint)
    check_fits(asked(8, "a"), THERE)


def test_a_job_for_a_node_that_is_down_is_taken_and_waits() -> None:
    down = {**THERE, "a": replace(THERE["a"], alive=False)}
    check_fits(asked(8, "a"), down)
    check_fits(asked(8), down)
    with pytest.raises(RefusedError):
        check_fits(asked(9, "a"), down)


def test_what_no_node_could_hold_is_refused_also_while_all_are_down() -> None:
    """Such a job must not be accepted, because it would wait for ever."""
    down = {name: replace(each, alive=False) for name, each in THERE.items()}
    check_fits(asked(10), down)
    with pytest.raises(RefusedError, match=r"no node can fit 11 ranks .*\(a: .*8 GPUs; b: .*2 GPUs\)"):
        check_fits(asked(11), down)
    apart = {name: replace(each, shares_home=False) for name, each in down.items()}
    with pytest.raises(RefusedError, match="needs a, b, which do not share ORCH_HOME"):
        check_fits(asked(10), apart)


def test_a_job_waits_for_the_only_node_with_gpus() -> None:
    known = nodes(node("a", gpus=0), node("b", gpus=2))
    check_fits(asked(1), {**known, "b": replace(known["b"], alive=False)})
    with pytest.raises(RefusedError, match="this cluster has none"):
        check_fits(asked(1), {"a": known["a"]})


def labelled(labels: str) -> Checked:
    text = f"name: digits\nentrypoint: python train.py\nresources: {{node_labels: {labels}}}\n"
    return Checked(spec=parse_job(text), python="", directory=None)


@pytest.mark.parametrize(
    ("asked_for", "said"),
    [
        ("{dsk: nvme}", "no node has the label dsk (did you mean disk?)"),
        ("{disk: nvmee}", "no node has the label disk=nvmee (did you mean nvme?)"),
        ("{disk: tape, colour: red}", "no node has the label disk=tape (there is nvme); no node has the label colour"),
        ("{disk: nvme, net: ib}", "no node has all of the labels disk=nvme, net=ib"),
    ],
)
def test_a_label_that_no_node_has_is_refused_with_what_may_have_been_meant(asked_for: str, said: str) -> None:
    there = nodes(node("a", labels={"disk": "nvme"}), node("b", labels={"net": "ib"}))
    with pytest.raises(RefusedError) as caught:
        check_fits(labelled(asked_for), there)
    assert str(caught.value.message) == said
    assert "orch nodes label" in str(caught.value.hint)
    check_fits(labelled("{disk: nvme}"), there)
    check_fits(labelled("{net: ib}"), {**there, "b": replace(there["b"], alive=False)})
