"""The fork server's use of torch before it forks, and its restrictions with a build for GPUs."""

from __future__ import annotations

import threading

import pytest

from orchestrator.runtime.forkserver import warm


def test_threads_that_an_import_left_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    monkeypatch.setattr(warm, "_thread_name", lambda number: f"thread {number}")
    try:
        with pytest.raises(warm.NotServableError, match=f"thread {thread.native_id}"):
            warm._check_servable()
    finally:
        over.set()
        thread.join()
