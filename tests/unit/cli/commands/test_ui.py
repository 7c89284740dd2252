"""`orch ui`."""

from __future__ import annotations

import webbrowser
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


def test_a_link_is_printed(orch: Orch, served: ServedFake) -> None:
    done = orch("ui", "--print")
    assert done.code == 0
    assert done.out.startswith("http://127.0.0.1:8270/signin?link=")
    assert "10m" in done.err
    assert orch("ui", "--json").json["address"] == "http://127.0.0.1:8270/"


def test_a_browser_is_opened_or_the_link_is_printed(
    orch: Orch, served: ServedFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: not opened.append(url))
    assert orch("ui").out == "opened http://127.0.0.1:8270/\n"
    assert "signin?link=" in opened[0]

    def none(url: str) -> bool:
        raise webbrowser.Error("no browser")

    monkeypatch.setattr(webbrowser, "open", none)
    assert orch("ui").out.startswith("http://127.0.0.1:8270/signin?link=")
