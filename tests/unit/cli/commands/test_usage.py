"""`orch usage`: the usage of resources as a table, CSV and JSON."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.usage_views import UsageReport, UsageRow

if TYPE_CHECKING:
    from orchestrator.api.server.testing import FakeService, ServedFake
    from tests.unit.cli.conftest import Orch

PHASES = {"productive": 2.0, "lost": 0.5, "starting": 0.25, "draining": 0.25, "uncommitted": 0.0}
ROW = UsageRow(
    keys={"user": "=ada", "queue": "lab"}, jobs=3, gpu_hours=3.0, waiting_gpu_hours=0.01, phases=PHASES, energy_kwh=1.5,
    measured=2, cost=6.0,
)  # fmt: skip
OTHER = UsageRow(keys={"user": "bob", "queue": ""}, jobs=1, gpu_hours=0.0, waiting_gpu_hours=1.0)


def used(service: FakeService) -> None:
    total = UsageRow(keys={}, jobs=4, gpu_hours=3.0, waiting_gpu_hours=1.01, phases=PHASES, energy_kwh=1.5, cost=6.0)
    service.used = UsageReport(since=0.0, until=9.0, by=("user", "queue"), rows=(ROW, OTHER), total=total)


def test_a_table_with_the_sum(orch: Orch, served: ServedFake) -> None:
    served.do(used)
    lines = [line.split() for line in orch("usage", "--by", "user,queue", "--since", "30d").out.splitlines()]
    assert lines[0][:5] == ["USER", "QUEUE", "JOBS", "GPU", "HOURS"]
    assert lines[1] == ["=ada", "lab", "3", "3.00", "2.00", "0.50", "0.50", "0.00", "0.0100", "1.500", "6.00"]
    assert lines[2] == ["bob", "-", "1", "0.00", "0.00", "0.00", "0.00", "0.00", "1.00"]
    assert lines[3][:2] == ["total", "4"]
    ((_, query),) = served.do(lambda service: [c for c in service.calls if c[0] == "usage"])
    assert (query.by, query.until, query.price) == (("user", "queue"), None, None)


def test_csv_has_every_phase_and_no_formula(orch: Orch, served: ServedFake) -> None:
    served.do(used)
    first, second = csv.DictReader(io.StringIO(orch("usage", "--csv").out))
    assert (first["user"], first["gpu_hours"], first["starting"], first["cost"]) == ("'=ada", "3.0", "0.25", "6.0")
    assert (second["energy_kwh"], second["cost"], second["waiting_gpu_hours"]) == ("", "", "1.0")
    assert orch("usage", "--json").json["rows"][0]["measured"] == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--csv", "--json"), "two forms of the answer"),
        (("--since", "someday"), "--since 'someday' is not a time"),
        (("--price", "-1"), "Invalid value for '--price'"),
        (("--price", "nan"), "Invalid value for '--price'"),
    ],
)
def test_what_cannot_be_meant_is_refused(orch: Orch, served: ServedFake, line: tuple[str, ...], words: str) -> None:
    served.do(used)
    done = orch("usage", *line)
    assert done.code == 2
    assert words in done.err
