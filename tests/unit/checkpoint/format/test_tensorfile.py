"""The tensor files are safetensors files: the package reads ours, and we read the package's."""

import json
import struct

import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import tensorfile

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
PLANS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(tensorfile.ITEM_BYTES)), SHAPES),
    max_size=8,
)


def build(tensors, metadata=None):
    entries = tensorfile.plan([(name, dtype, shape) for name, (dtype, shape) in tensors.items()])
    size = entries[-1].end if entries else 0
    return entries, tensorfile.header(entries, metadata or {}) + bytes(n % 2 for n in range(size))


@given(PLANS)
def test_the_package_accepts_what_is_written_and_sees_the_same(tensors):
    entries, raw = build(tensors, {"format": "pt"})
    seen = dict(safetensors.deserialize(raw))
    assert {name: (value["dtype"], tuple(value["shape"])) for name, value in seen.items()} == tensors
    for entry in entries:
        start = len(raw) - entries[-1].end
        assert bytes(seen[entry.name]["data"]) == raw[start + entry.begin : start + entry.end]


def test_a_file_of_the_package_is_read():
    tensors = {
        "w": torch.randn(3, 4, dtype=torch.bfloat16),
        "b": torch.arange(5),
        "s": torch.tensor(2.5),
        "e": torch.empty(0, 2),
    }
    entries, data = tensorfile.parse(bytearray(safetensors.torch.save(tensors, {"note": "x"})))
    assert {entry.name: (entry.dtype, entry.shape) for entry in entries} == {
        "w": ("BF16", (3, 4)), "b": ("I64", (5,)), "s": ("F32", ()), "e": ("F32", (0, 2)),
    }  # fmt: skip
    scalar = next(entry for entry in entries if entry.name == "s")
    assert struct.unpack("<f", data[scalar.begin : scalar.end]) == (2.5,)


def file_with(header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "unreadable header"),
        (b"\1\0\0\0\0\0\0", "unreadable header"),
        (struct.pack("<Q", 100) + b"{}", "header of 100 bytes in a file of 10"),
        (file_with(b"{"), "unreadable header"),
        (file_with(b"[]"), "unreadable header"),
        (file_with(b"\xff"), "unreadable header"),
        (file_with({"a": 1}), "unreadable header"),
        (file_with({"a": {"dtype": "F32", "shape": [1]}}), "unreadable header"),
        (file_with({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}), "unreadable header"),
        (file_with({"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}), "entry 'a' is malformed"),
        (file_with({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "unknown type 'F99'"),
        (file_with({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(3)), "outside its file"),
        (file_with({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "outside its file"),
        (file_with({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, bytes(4)), "outside its file"),
    ],
)
def test_a_damaged_file_is_refused(raw, message):
    with pytest.raises(CorruptCheckpointError, match=message):
        tensorfile.parse(raw)


def test_a_header_beyond_the_formats_limit_is_refused():
    entries = tensorfile.plan([(f"tensor{n}", "F32", (1,)) for n in range(10)])
    with pytest.raises(ValueError, match="safetensors allows 100 MB"):
        tensorfile.header(entries, {}, most_bytes=100)
