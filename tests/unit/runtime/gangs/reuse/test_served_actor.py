"""Each call of a gang's handle names the gang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from orchestrator.runtime.gangs.reuse.served_actor import handle_of, served


def test_every_call_names_the_gang() -> None:
    calls: list[Any] = []
    handle = SimpleNamespace(
        serve=SimpleNamespace(remote=lambda *args, **kwargs: calls.append((args, kwargs)) or "ref")
    )
    actor = served(handle, "a-g1")
    assert actor.look.remote(3, stacks=True) == "ref"
    assert calls == [(("a-g1", "look", 3), {"stacks": True})]
    assert handle_of(actor) is handle


def test_an_actor_of_an_earlier_version_is_called_as_it_was() -> None:
    handle = SimpleNamespace(look="its own")
    assert served(handle, "a-g1") is handle
    assert handle_of(handle) is handle
