"""Memory errors count from the first reading on, and a counter that was reset starts again."""

from __future__ import annotations

from orchestrator.core.diagnosis.figures import NO_ERRORS, ErrorWindow
from orchestrator.core.diagnosis.observation import GpuSeen
from orchestrator.core.thresholds import COUNTED_SECONDS


def gpu(uncorrected: int | None, corrected: int | None = None, remapped: int | None = None) -> GpuSeen:
    return GpuSeen(gpu_uuid="g", rank=0, uncorrected=uncorrected, corrected=corrected, remapped=remapped)


def test_what_was_counted_before_says_nothing_of_the_attempt() -> None:
    window = ErrorWindow()
    window.add(0.0, gpu(7, 1000, 3))
    assert window.errors() == NO_ERRORS
    window.add(2.0, gpu(9, 1005, 4))
    found = window.errors()
    assert (found.uncorrected, found.corrected, found.remapped) == (2, 5, 1)
    window.add(4.0, gpu(0, 0, None))
    window.add(6.0, gpu(1, 2, 4))
    found = window.errors()
    assert (found.uncorrected, found.corrected, found.remapped) == (3, 7, 1)


def test_corrected_errors_are_those_of_the_newest_minutes() -> None:
    window = ErrorWindow()
    window.add(0.0, gpu(None, 0))
    window.add(2.0, gpu(None, 50))
    assert window.errors().corrected == 50
    window.add(3.0 + COUNTED_SECONDS, gpu(None, 51))
    assert window.errors().corrected == 1
