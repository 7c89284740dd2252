"""Durations of a storage's operations, and its free space."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.checkpoint.repository.persister import StorageGauge


class Disk:
    """A storage that reports its free bytes, or fails."""

    def __init__(self, *answers: int | OSError | None) -> None:
        self.answers = list(answers)

    def free_bytes(self) -> int | None:
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def test_a_write_is_measured_while_it_goes_on_and_the_room_after_it() -> None:
    now = [100.0]
    gauge, disk = StorageGauge(clock=lambda: now[0]), Disk(7, 5)
    assert (gauge.busy_seconds, gauge.free_bytes) == (0.0, None)
    storage: Any = disk
    with gauge.writing(storage):
        now[0] += 40.0
        assert gauge.busy_seconds == 40.0
    assert (gauge.busy_seconds, gauge.free_bytes) == (0.0, 7)
    with pytest.raises(ZeroDivisionError), gauge.writing(storage):
        raise ZeroDivisionError
    assert (gauge.busy_seconds, gauge.free_bytes) == (0.0, 5)
