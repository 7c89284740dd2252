"""The manifest verifies itself: a change of any byte is detected."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.errors import CorruptCheckpointError
from orchestrator.checkpoint.format import layout
from orchestrator.checkpoint.format.layout import FileRecord, Manifest

SAMPLE = Manifest(
    step=40,
    attempt=2,
    job_id="digits-k3f9q2",
    world_size=2,
    created_at=1795231219.25,
    ranks=(0, 1),
    metrics={"loss": 0.125},
    files={"state.json": FileRecord(bytes=12, sha256="ab" * 32)},
)
MANIFESTS = st.builds(
    Manifest,
    step=st.integers(0, 2**63 - 1),
    attempt=st.integers(0, 10**6),
    job_id=st.text(),
    world_size=st.integers(1, 10**4),
    created_at=st.floats(0, 1e11),
    ranks=st.lists(st.integers(0, 100)).map(tuple),
    metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
    files=st.dictionaries(
        st.text(), st.builds(FileRecord, bytes=st.integers(0, 2**60), sha256=st.text("0123456789abcdef"))
    ),
)


@given(MANIFESTS)
def test_what_is_rendered_is_parsed(sample):
    assert layout.parse_manifest(layout.render_manifest(sample)) == sample


def test_scores_that_are_no_numbers_survive_and_the_text_stays_json():
    raw = layout.render_manifest(
        Manifest(
            **{**{name: getattr(SAMPLE, name) for name in SAMPLE.__struct_fields__}, "metrics": {"loss": math.nan}}
        )
    )
    assert json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["metrics"] == {"loss": "nan"}
    assert math.isnan(layout.parse_manifest(raw).metrics["loss"])


def test_every_single_bit_counts():
    pristine = layout.render_manifest(SAMPLE)
    for bit in range(8 * len(pristine)):
        damaged = bytearray(pristine)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError, match="manifest: "):
            layout.parse_manifest(damaged)


def test_every_truncation_counts():
    pristine = layout.render_manifest(SAMPLE)
    for length in range(len(pristine)):
        with pytest.raises(CorruptCheckpointError, match="manifest: "):
            layout.parse_manifest(pristine[:length])


def test_a_format_of_another_time_is_told_as_such():
    body = json.loads(layout.render_manifest(SAMPLE))
    with pytest.raises(CorruptCheckpointError, match="read it with the orch that wrote it"):
        layout.parse_manifest(json.dumps({**body, "version": 2}).encode())
