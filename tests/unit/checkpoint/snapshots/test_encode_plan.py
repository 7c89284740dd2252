"""A plan copies the next state of the same structure without re-encoding it, and detects every other structure."""

import copy
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.format import codec
from orchestrator.checkpoint.snapshots.encode_plan import PartPlan


def reference(state):
    """Return the bytes of tree and tensor file that the codec alone produces."""
    encoded = codec.encode(state)
    return encoded.text, b"".join(encoded.tensor_file() or ())


def stored(plan):
    return plan.tree, plan.header + b"".join(bytes(codec.memory(source)) for source in plan.sources)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(),
    st.text(max_size=2),
    st.binary(max_size=2),
    st.binary(min_size=1030, max_size=1032),
    st.lists(st.integers(-5, 5), min_size=63, max_size=66),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]).map(lambda dtype: torch.ones(2, 3, dtype=dtype)),
    st.integers(0, 3).map(torch.ones),
    st.integers(1, 3).map(np.arange),
    st.integers(0, 5).map(np.int16),
    st.complex_numbers(),
    st.just(torch.nn.Parameter(torch.zeros(2))),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 0, 1, True, None, "$"]), inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2).map(OrderedDict),
        st.sets(st.integers(0, 3)),
    ),
    max_leaves=8,
)


@given(STATES, st.lists(STATES, max_size=3))
def test_whatever_follows_is_stored_as_if_it_were_the_first(first, later):
    plan = PartPlan(first)
    assert stored(plan) == reference(first)
    for state in [copy.deepcopy(first), *later, first]:
        if not plan.update(state):
            plan = PartPlan(state)
        assert stored(plan) == reference(state)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.float64)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, requires_grad=True)}),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": True}),
        ({1: "x"}, {True: "x"}),
        ([1], (1,)),
        ({"a": 1}, OrderedDict(a=1)),
        (b"x" * 2000, b"x" * 2001),
        ({"a": torch.zeros(2)}, {"a": np.zeros(2, np.float32)}),
        ({"a": {1}}, {"a": {1}}),
    ],
)
def test_another_structure_needs_another_plan(first, second):
    assert not PartPlan(first).update(second)


def test_weights_that_are_no_longer_tied_need_another_plan():
    weight = torch.ones(3)
    plan = PartPlan([weight, weight])
    assert plan.update([weight, weight])
    assert not plan.update([weight, torch.zeros(3)])
