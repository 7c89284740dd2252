"""`orch doctor` reports the memory limits of the daemon, not those of this shell."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.launch import Finding, Level
from orchestrator.api.server.testing import FakeService, serve_fake
from orchestrator.daemon.process import doctor
from orchestrator.spec.settings import Settings
from orchestrator.store.sql.schema import connect
from orchestrator.store.store import Store
from tests.unit.store.lives import add

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.api.views import HealthView

OWN = "/sys/fs/cgroup/of-this-shell"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(doctor, "memory_group", lambda: OWN)
    return Settings(home=tmp_path)


def answer(service: FakeService, memory_limits: str | None) -> None:
    plain = service.health

    async def health() -> HealthView:
        return replace(await plain(), memory_limits=memory_limits)

    service.health = health  # type: ignore[method-assign]  # the fake says nothing of groups


def asked(settings: Settings, memory_limits: str | None) -> Finding:
    with serve_fake(settings.socket.parent, owner_uid=os.getuid()) as served:
        served.do(lambda service: answer(service, memory_limits))
        (found,) = doctor._memory_limits(settings)
    return found


def test_the_daemon_s_groups_are_told_where_it_runs(settings: Settings) -> None:
    held = asked(settings, "/sys/fs/cgroup/orch.service")
    assert held.level is Level.OK
    assert held.what.endswith("(the daemon's, below /sys/fs/cgroup/orch.service)")
    none = asked(settings, "")
    assert none.level is Level.WARNING
    assert "cannot be made by the daemon that runs" in none.what


def test_without_a_daemon_or_with_one_that_does_not_say_this_shell_s_are(settings: Settings) -> None:
    for found in (asked(settings, None), *doctor._memory_limits(settings)):
        assert found.what.endswith(f"(below {OWN})")


def test_without_groups_here_nothing_is_promised(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_group", lambda: "")
    (found,) = doctor._memory_limits(settings)
    assert found.level is Level.WARNING
    assert "cannot be made here" in found.what


def test_damaged_records_are_named_without_a_daemon(settings: Settings) -> None:
    async def two_jobs() -> None:
        store = Store.open(settings.paths.store, reserve=None, min_free_bytes=0)
        for name in ("one-aaaaaa", "two-aaaaaa", "three-aaaaaa"):
            await add(store, name)
        store.close()

    asyncio.run(two_jobs())
    assert [found.level for found in doctor._store(settings)] == [Level.OK]
    with closing(connect(settings.paths.store)) as connection:
        connection.execute("UPDATE jobs SET record = '{' WHERE sequence < 3")
        connection.execute("DELETE FROM events WHERE job = 1")
    gone, rebuilt = doctor._store(settings)
    assert (gone.level, rebuilt.level) == (Level.ERROR, Level.WARNING)
    assert "one-aaaaaa is damaged" in gone.what
    assert "restore a backup" in gone.remedy
    assert "job two-aaaaaa is damaged, and is read from its events" in rebuilt.what
