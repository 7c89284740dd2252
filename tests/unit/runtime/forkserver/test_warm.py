"""The fork server's use of torch before it forks, and its restrictions with a build for GPUs."""

from __future__ import annotations

import threading

import pytest
import torch

from orchestrator.runtime.forkserver import warm


class BackwardError(Exception):
    """A backward pass was called."""


def _no_backward(*_: object, **__: object) -> None:
    raise BackwardError


def test_a_build_for_gpus_is_warmed_without_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100, a backward pass opened the driver and left two threads, and every rank was started cold."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.Tensor, "backward", _no_backward)
    warm._train_once(torch)


def test_a_build_for_processors_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.Tensor, "backward", _no_backward)
    with pytest.raises(BackwardError):
        warm._train_once(torch)


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
