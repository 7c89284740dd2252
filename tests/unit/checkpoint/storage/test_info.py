"""Checkpoints that retention removes, and the names of directories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.format import layout
from orchestrator.checkpoint.format.layout import Version
from orchestrator.checkpoint.storage.directory import (
    CheckpointInfo,
    CheckpointStatus,
    Retention,
    best_by_score,
    best_infos,
    removable,
    removable_broken,
)


def info(step, attempt=1, status=CheckpointStatus.COMPLETE, **metrics):
    name = Version(attempt=attempt, step=step).name
    return CheckpointInfo(name=name, path=name, step=step, attempt=attempt, status=status, metrics=metrics)


INFOS = st.lists(
    st.builds(
        info,
        st.integers(0, 30),
        st.integers(1, 3),
        st.sampled_from(CheckpointStatus),
        loss=st.floats(),
    ),
    unique_by=lambda item: item.name,
)
RETENTIONS = st.builds(
    Retention,
    keep=st.one_of(st.none(), st.integers(1, 5)),
    keep_best=st.one_of(st.none(), st.integers(1, 5)),
    score_attribute=st.sampled_from([None, "loss", "unknown"]),
    score_order=st.sampled_from(["min", "max"]),
)


@given(INFOS, RETENTIONS)
def test_the_newest_and_the_best_always_stay_and_only_complete_ones_go(infos, retention):
    gone = removable(infos, retention)
    complete = sorted((item for item in infos if item.status is CheckpointStatus.COMPLETE), key=lambda item: item.order)
    assert all(item in complete for item in gone)
    if complete:
        assert complete[-1] not in gone
    assert best_by_score(infos, retention) not in gone
    kept = [item for item in complete if item not in gone]
    if retention.keep is None:
        assert gone == ()
    else:
        assert min(len(complete), retention.keep) <= len(kept) <= retention.keep + (retention.best_count or 0)
        assert all(item in kept for item in best_infos(complete, retention))


def test_only_the_newest_broken_ones_are_kept():
    broken = [info(step, status=CheckpointStatus.BROKEN) for step in (3, 1, 2)]
    assert [item.step for item in removable_broken(broken)] == [1]


@given(
    st.integers(0, 2**63), st.integers(0, 10**6), st.integers(1, 5), st.from_regex(r"[0-9a-z]{1,12}", fullmatch=True)
)
def test_names_are_read_back(step, attempt, number, token):
    version = Version(attempt=attempt, step=step)
    assert layout.parse_name(version.name) == version
    assert layout.parse_broken(layout.broken_name(version.name, number)) == version
    assert layout.parse_staging(layout.staging_name(version, token)) == (version, token)


@pytest.mark.parametrize(
    "name", ["fence.json", "step-1-a1", "step-000000000001-a1.broken", ".staging-x", "step-000000000001-a1x", ""]
)
def test_other_names_are_no_checkpoints(name):
    assert layout.parse_name(name) is None


def test_names_sort_as_their_steps_do():
    steps = [0, 9, 10, 999_999_999_999]
    names = [Version(attempt=1, step=step).name for step in steps]
    assert names == sorted(names)
