"""`orch show`, `orch diff`, and `orch rerun --set`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.server.testing import ServedFake
    from tests.unit.cli.conftest import Outcome

    Orch = Callable[..., Outcome]


def test_show(orch: Orch, served: ServedFake) -> None:
    job = served.do(lambda service: service.add())
    done = orch("show", "digits")
    assert (done.code, done.err) == (0, "")
    assert "python3 train.py" in done.out
    assert "entrypoint: python train.py" in done.out
    assert orch("show", job.id, "--yaml").out == "name: digits\nentrypoint: python train.py\n"
    assert orch("show", job.id, "--json").json["job_id"] == job.id
    assert orch("show", "nothing").code == 3


def test_diff(orch: Orch, served: ServedFake) -> None:
    first = served.do(lambda service: service.add())
    other = served.do(lambda service: service.add("other"))
    assert orch("diff", first.id, other.id).out == "name  digits -> other\n"
    assert orch("diff", first.id, first.id).out == f"{first.id} and {first.id} run the same\n"
    assert orch("diff", first.id, other.id, "--json").json["values"][0]["key"] == "name"
    assert orch("diff", first.id, "nothing").code == 3


def test_rerun_changes_values(orch: Orch, served: ServedFake) -> None:
    job = served.do(lambda service: service.add())
    assert orch("rerun", job.id, "--set", "priority=60").code == 0
