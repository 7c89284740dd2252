"""Nested state is encoded to a tree and tensors and decoded unchanged: same types, same values, same sharing."""

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.errors import CorruptCheckpointError, UnsupportedStateError
from orchestrator.checkpoint.format import codec, tensorfile


def round_trip(state):
    encoded = codec.encode(state)
    raw = bytearray().join(encoded.tensor_file() or (tensorfile.header((), {}),))
    parsed, data = tensorfile.parse(raw)
    return codec.decode(json.loads(encoded.text), parsed, data)


def same(left, right):
    """Return whether two states are equal in value and type at every level; NaN equals NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, torch.Tensor):
        return (
            (left.dtype, left.shape, left.requires_grad) == (right.dtype, right.shape, right.requires_grad)
            and raw_bytes(left) == raw_bytes(right)
        )  # fmt: skip
    if isinstance(left, np.ndarray | np.generic):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, float):
        return (left == right and math.copysign(1, left) == math.copysign(1, right)) or (
            left != left and right != right
        )
    return left == right


def raw_bytes(tensor):
    return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.binary(min_size=1500, max_size=1600),
    st.complex_numbers(),
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.text(), st.integers()))
TORCH_DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(SHAPES)
    count = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    return tensor.transpose(0, -1) if tensor.dim() >= 2 and draw(st.booleans()) else tensor


@st.composite
def arrays(draw):
    dtype = np.dtype(
        draw(
            st.sampled_from(
                [
                    "<f8",
                    "<f4",
                    "<f2",
                    ">f4",
                    "<c8",
                    "<c16",
                    "<i8",
                    ">i2",
                    "|i1",
                    "<u8",
                    "|u1",
                    "|b1",
                    "<U3",
                    "|S4",
                    "<M8[s]",
                ]
            )
        )
    )
    shape = draw(SHAPES)
    count = math.prod(shape)
    if dtype.kind in "US":
        items = draw(
            st.lists(st.text("abcé" if dtype.kind == "U" else "abc", max_size=3), min_size=count, max_size=count)
        )
        return np.array(items, dtype).reshape(shape)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    raw = bytes(byte & 1 for byte in raw) if dtype.kind == "b" else raw
    array = np.frombuffer(raw, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


NUMPY_SCALARS = st.one_of(
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.booleans().map(np.bool_),
)
STATES = st.recursive(
    st.one_of(SCALARS, tensors(), arrays(), NUMPY_SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(STATES)
def test_any_state_comes_back_as_it_was(state):
    assert same(round_trip(state), state)


@given(st.sets(KEYS), st.lists(st.integers(), min_size=60, max_size=70))
def test_sets_and_long_integer_sequences_come_back(items, numbers):
    state = {"set": items, "frozen": frozenset(items), "list": numbers, "tuple": tuple(numbers)}
    assert same(round_trip(state), state)


@pytest.mark.parametrize(
    "value",
    [
        -0.0, math.nan, math.inf, -math.inf, 5e-324, 2**5000, -(2**70), "\ud800 lone", "", "$", {"$": 1}, {"": {"": 1}},
        {1: "a", "1": "b", False: "c"}, {(1, "a"): 2}, torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1"),
        np.str_("a\0b"), np.bytes_(b"x"), np.datetime64("2026-11-21"), np.longdouble(1) / 3, bytearray(b"ab"), (), [], {},
    ],
)  # fmt: skip
def test_odd_values_come_back(value):
    assert same(round_trip({"value": value})["value"], value)


def test_an_optimizers_state_continues_the_same_training():
    def train(model, optimizer, steps):
        torch.manual_seed(3)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 5)).square().sum().backward()
            optimizer.step()

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = made()
    train(model, optimizer, 3)
    state = round_trip({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert list(state["optimizer"]["state"]) == [0, 1, 2, 3, 4, 5]
    assert state["model"]._metadata == model.state_dict()._metadata
    other, other_optimizer = made()
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)
    for left, right in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(left, right)


def test_random_states_continue_the_same_sequences():
    generator, rng = torch.Generator().manual_seed(5), np.random.default_rng(6)
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "numpy_generator": rng.bit_generator.state,
        "torch": torch.get_rng_state(),
        "generator": generator.get_state(),
    }
    draws = [random.random(), np.random.random(), rng.random(), torch.rand(1), torch.rand(1, generator=generator)]  # noqa: NPY002
    back = round_trip(state)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])  # noqa: NPY002
    rng.bit_generator.state = back["numpy_generator"]
    torch.set_rng_state(back["torch"])
    generator.set_state(back["generator"])
    assert draws == [
        random.random(),
        np.random.random(),  # noqa: NPY002
        rng.random(),
        torch.rand(1),
        torch.rand(1, generator=generator),
    ]


def test_tied_weights_are_stored_once_and_stay_tied():
    weight = torch.nn.Parameter(torch.randn(3, 4))
    state = {
        "encoder": weight,
        "decoder": weight,
        "views": [weight.detach(), weight.data.view(3, 4)],
        "transposed": weight.t().detach(),
    }
    assert len(codec.encode(state).leaves) == 2
    back = round_trip(state)
    assert back["encoder"] is back["decoder"]
    assert isinstance(back["encoder"], torch.nn.Parameter)
    assert back["views"][0] is back["views"][1]
    assert back["views"][0].data_ptr() == back["encoder"].data_ptr()
    assert torch.equal(back["transposed"], weight.t())


def test_lazily_conjugated_and_expanded_tensors_keep_their_values():
    number = torch.tensor([1 + 2j, 3 - 4j])
    state = [number.conj(), number, number.conj().imag, torch.ones(1, 3).expand(4, 3)]
    back = round_trip(state)
    assert all(torch.equal(left, right) for left, right in zip(back, state, strict=True))


def test_leaves_that_require_gradients_still_do():
    back = round_trip(
        {
            "a": torch.zeros(2, requires_grad=True),
            "b": torch.zeros(2),
            "c": torch.nn.Parameter(torch.zeros(1), requires_grad=False),
        }
    )
    assert (back["a"].requires_grad, back["b"].requires_grad, back["c"].requires_grad) == (True, False, False)


def test_restored_values_may_be_written_to():
    back = round_trip({"tensor": torch.zeros(3), "array": np.zeros(3)})
    back["tensor"] += 1
    back["array"] += 1
    assert back["tensor"].sum() == back["array"].sum() == 3


class Custom:
    pass


class Weird(torch.Tensor):
    pass


Point = namedtuple("Point", "x y")  # noqa: PYI024
LOOP: list = []
LOOP.append(LOOP)
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Custom(), "Custom cannot be stored without pickle"),
        (torch.nn.Linear(1, 1), r"pass the state of .*Linear, not the object: \.state_dict\(\)"),
        (torch.Generator(), r"not the object: \.get_state\(\)"),
        (np.random.default_rng(0), r"not the object: \.bit_generator\.state"),
        (Point(1, 2), r"would come back as tuple; convert it with tuple\(\)"),
        (Counter("aab"), "would come back as dict"),
        (defaultdict(list), "would come back as dict"),
        (torch.zeros(2, 2).to_sparse(), "only dense tensors"),
        (torch.zeros(2, device="meta"), "only dense tensors"),
        (torch.zeros(2).as_subclass(Weird), "a Weird cannot be stored"),
        (np.array([Custom()]), "arrays of type object"),
        (np.zeros(2, [("a", "i4")]), "arrays of type"),
        (np.ma.masked_array([1, 2]), "a MaskedArray cannot be stored"),
        ({Custom(): 1}, "key of type Custom"),
        ({(1, Custom()): 1}, "key of type tuple"),
        ({Custom()}, "a set of other than text and numbers"),
        (LOOP, "contains itself"),
        (DEEP, "nested too deeply"),
        (print, "cannot be stored without pickle"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_only_pickle_could_store_is_refused_with_the_way_out(value, message):
    with pytest.raises(UnsupportedStateError, match=message) as caught:
        codec.encode({"outer": [value]})
    if value is not DEEP:
        assert str(caught.value).startswith("outer.0")


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "tensor", "n": "missing"}, {"$": "unknown", "n": "w"}, {"$": "unknown"}, {"$": "dict", "v": 3},
        {"$": "float", "v": "zz"}, {"$": "tensor", "n": "w", "d": "float99"}, {"$": "tensor", "n": "w", "s": [9]},
        {"$": "ints", "n": "w", "c": "list"}, {"$": "numpy", "d": "nonsense", "v": ""}, {"$": "dict", "v": [[[], 1]]},
    ],
)  # fmt: skip
def test_a_tree_that_no_version_wrote_is_corrupt(tree):
    entries = tensorfile.plan([("w", "F32", (3,))])
    with pytest.raises(CorruptCheckpointError, match="state tree cannot be restored"):
        codec.decode(tree, entries, memoryview(bytearray(12)))
