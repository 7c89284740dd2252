"""Checks when the alert on a finding fires, by the real rules in promtool: findings as Prometheus would scrape them.

A finding that opens is in the next scrape; its alert must not fire before its ``for`` is over, and must have fired, with the finding's rank
and GPU in its labels, at the first evaluation after it.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from dashboards import rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCRAPE_SECONDS: Final = 15
ALERT: Final = next(alert for alert in rules.ALERTS if alert.name == "OrchFinding")
FOR_SECONDS: Final = int(ALERT.wait.removesuffix("s"))
LATEST_SECONDS: Final = SCRAPE_SECONDS + FOR_SECONDS
"""Longest time from the finding to the alert: the next scrape, and the alert's ``for``."""


def fired_at(opened_at: float) -> int:
    """Return the time at which the alert on a finding opened at this time fires, in seconds of the trace."""
    return math.ceil(opened_at / SCRAPE_SECONDS) * SCRAPE_SECONDS + FOR_SECONDS


def check(opened: Sequence[dict[str, Any]]) -> int:
    """Return the number of findings (``labels``, and ``at``) whose alert fires when it must. Raises RuntimeError without promtool.

    promtool names each test that failed, so the tests that it does not name have passed.
    """
    tool = shutil.which("promtool")
    if tool is None:
        raise RuntimeError("promtool is not installed; run .ci/install-test-tools")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "rules.yml").write_text(yaml.safe_dump(_bare_rules()), encoding="utf-8")
        tests = [_test(number, one) for number, one in enumerate(opened)]
        document = {"rule_files": ["rules.yml"], "evaluation_interval": f"{SCRAPE_SECONDS}s", "tests": tests}
        (folder / "tests.yml").write_text(yaml.safe_dump(document), encoding="utf-8")
        done = subprocess.run(
            [tool, "test", "rules", "tests.yml"], cwd=folder, capture_output=True, text=True, check=False
        )
    output = done.stdout + done.stderr
    failed = {number for number in range(len(opened)) if f"name: case-{number}," in output}
    if done.returncode != 0 and not failed:
        raise RuntimeError(f"promtool did not run the tests: {output[-2000:]}")
    return len(opened) - len(failed)


def _bare_rules() -> dict[str, Any]:
    """Return the alert's rule alone, without texts: promtool compares those word for word."""
    document = rules.document()
    found = [rule for group in document["groups"] for rule in group["rules"] if rule.get("alert") == ALERT.name]
    bare = [{name: value for name, value in rule.items() if name != "annotations"} for rule in found]
    return {"groups": [{"name": "findings", "interval": f"{SCRAPE_SECONDS}s", "rules": bare}]}


def _test(number: int, one: dict[str, Any]) -> dict[str, Any]:
    labels = dict(one["labels"])
    shown = ",".join(f'{name}="{value}"' for name, value in labels.items())
    missed = math.ceil(one["at"] / SCRAPE_SECONDS)
    fires = fired_at(one["at"])
    alert = {"severity": ALERT.severity, "component": ALERT.component, **{k: v for k, v in labels.items() if v}}
    return {
        "name": f"case-{number}",
        "interval": f"{SCRAPE_SECONDS}s",
        "input_series": [{"series": f"orch_finding{{{shown}}}", "values": _values(missed)}],
        "alert_rule_test": list(_expected(fires, alert)),
    }


def _values(missed: int) -> str:
    return f"_x{missed} 1x8" if missed else "1x8"


def _expected(fires: int, alert: dict[str, str]) -> Iterator[dict[str, Any]]:
    before = {"eval_time": f"{fires - SCRAPE_SECONDS}s", "alertname": ALERT.name, "exp_alerts": []}
    after = {"eval_time": f"{fires}s", "alertname": ALERT.name, "exp_alerts": [{"exp_labels": alert}]}
    yield from (before, after)
