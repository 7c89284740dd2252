"""The local Prometheus: its files pass the real tools and stay below its folder, and missing programs are named."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dashboards import rules
from orchestrator.core.diagnosis.definitions import PRECEDENCE
from orchestrator.spec.settings import Settings, SettingsError
from orchestrator.telemetry import local_prometheus as lp

BOTH = lp.Binaries(prometheus="/usr/bin/prometheus", alertmanager="/usr/bin/prometheus-alertmanager")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: .ci/install-test-tools"
)
needs_amtool = pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is missing: .ci/install-test-tools")


def test_binaries_are_looked_for_by_both_names() -> None:
    debian = {"prometheus": "/usr/bin/prometheus", "prometheus-alertmanager": "/usr/bin/prometheus-alertmanager"}
    assert lp.find_binaries(debian.get) == BOTH
    upstream = {"prometheus": "/opt/prometheus", "alertmanager": "/opt/alertmanager"}
    assert lp.find_binaries(upstream.get).alertmanager == "/opt/alertmanager"
    assert lp.find_binaries({"prometheus": "/opt/prometheus"}.get).alertmanager is None
    with pytest.raises(lp.LocalPrometheusError, match="not on the PATH") as caught:
        lp.find_binaries(lambda _: None)
    assert "apt-get install prometheus" in caught.value.hint


def test_prepare_writes_below_its_folder_and_keeps_what_was_measured(tmp_path: Path) -> None:
    folder = tmp_path / "prometheus"
    stack = lp.prepare(folder, daemon="127.0.0.1:9476", binaries=BOTH)
    (folder / "prometheus-data" / "block").touch()
    password = stack.password_file.read_text()
    again = lp.prepare(folder, daemon="127.0.0.1:9999", binaries=BOTH)
    assert again == stack
    assert (folder / "prometheus-data" / "block").exists()
    assert "127.0.0.1:9999" in (folder / "prometheus.yml").read_text()
    assert {item.name for item in folder.iterdir()} == {
        "prometheus.yml", "orch.rules.yml", "alertmanager.yml", "prometheus-data", "alertmanager-data", "web.yml", "password",
    }  # fmt: skip
    assert again.password_file == folder / "password"
    assert again.password_file.read_text() == password
    assert len(password.strip()) == 32
    assert all(f"--web.config.file={folder / 'web.yml'}" in command for command in stack.commands)
    assert {item.stat().st_mode & 0o777 for item in folder.iterdir() if item.is_file()} == {0o600}
    assert [command[0] for command in stack.commands] == [BOTH.prometheus, BOTH.alertmanager]
    for command in stack.commands:
        assert all("127.0.0.1" in argument for argument in command if "web.listen-address" in argument)
    assert list(tmp_path.iterdir()) == [folder]


def test_alerts_link_to_the_documentation_where_its_address_is_set(tmp_path: Path) -> None:
    docs_url = Settings.from_environ({"HOME": "/h", "ORCH_DOCS_URL": "https://example.org/docs/"}).docs_url
    lp.prepare(tmp_path, daemon="127.0.0.1:9476", binaries=BOTH, docs_url=docs_url)
    links = [line for line in (tmp_path / "orch.rules.yml").read_text().splitlines() if "runbook_url" in line]
    assert len(links) == len(rules.ALERTS)
    assert all("runbook_url: https://example.org/docs/" in line for line in links)
    for text in ("docs", "https://", "file:///x", "https://a b"):
        with pytest.raises(SettingsError, match="ORCH_DOCS_URL"):
            Settings.from_environ({"HOME": "/h", "ORCH_DOCS_URL": text})


def test_without_alertmanager_alerts_are_only_shown(tmp_path: Path) -> None:
    stack = lp.prepare(tmp_path, daemon="127.0.0.1:9476", binaries=lp.Binaries(prometheus="/usr/bin/prometheus"))
    assert stack.alertmanager_url is None
    assert len(stack.commands) == 1
    assert "alerting" not in yaml.safe_load((tmp_path / "prometheus.yml").read_text())


def test_a_token_goes_along_to_targets_discovery_and_exporters() -> None:
    config = lp.prometheus_config(daemon="10.0.0.1:9476", token_file="/run/token")
    daemon, exporters = config["scrape_configs"]
    wanted = {"credentials_file": "/run/token"}
    assert daemon["authorization"] == exporters["authorization"] == wanted
    assert exporters["http_sd_configs"][0]["authorization"] == wanted


def test_the_password_of_both_is_the_token_where_there_is_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-the-owner\n")
    folder = tmp_path / "prometheus"
    assert lp.prepare(folder, daemon="127.0.0.1:9476", binaries=BOTH, token_file=str(token)).password_file == token
    assert not (folder / "password").exists()
    (alertmanager,) = yaml.safe_load((folder / "prometheus.yml").read_text())["alerting"]["alertmanagers"]
    assert alertmanager["basic_auth"] == {"username": "orch", "password_file": str(token)}
    hashed = yaml.safe_load((folder / "web.yml").read_text())["basic_auth_users"]["orch"]
    assert hashed.startswith("$2b$10$")
    assert "a-token" not in hashed
    assert hashed != lp.password_hash("a-token-of-the-owner")  # each has its own salt


def test_without_bcrypt_nothing_is_left_open(tmp_path: Path) -> None:
    with pytest.raises(lp.LocalPrometheusError, match="open to every user") as caught:
        lp.password_hash("password", ("libc.so.6", "libnone.so.1"))
    assert "without --with-prometheus" in caught.value.hint


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(lp.LocalPrometheusError, match="cannot be written") as caught:
        lp.prepare(tmp_path / "file" / "below", daemon="127.0.0.1:9476", binaries=BOTH)
    assert "writable" in caught.value.hint


@needs_promtool
def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    lp.prepare(tmp_path, daemon="127.0.0.1:9476", binaries=BOTH, token_file=str(token))
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules.ALERTS) + len(rules.RECORDS)} rules found" in done.stdout


@needs_amtool
@pytest.mark.parametrize(("webhook", "receiver"), [(None, "none"), ("http://127.0.0.1:9/hook", "webhook")])
def test_amtool_takes_the_configuration_and_routes_to_the_receiver(
    tmp_path: Path, webhook: str | None, receiver: str
) -> None:
    lp.prepare(tmp_path, daemon="127.0.0.1:9476", binaries=BOTH, webhook=webhook)
    done = subprocess.run(
        ["amtool", "check-config", "alertmanager.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for alert in rules.ALERTS:
        labels = [f"severity={alert.severity}", f"component={alert.component}", f"alertname={alert.name}"]
        routed = subprocess.run(
            ["amtool", "config", "routes", "test", "--config.file=alertmanager.yml", *labels],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert routed.stdout.strip() == receiver, alert.name


def test_inhibitions_speak_of_alerts_and_labels_that_exist() -> None:
    by_name = {alert.name: alert for alert in rules.ALERTS}
    for rule in lp.inhibit_rules():
        source, *kinds = rule["source_matchers"]
        source_alert = by_name[source.split('"')[1]]
        assert set(rule["equal"]) <= set(source_alert.labels)
        assert source_alert.name == "OrchFinding" or not kinds
        target, *found = rule["target_matchers"]
        assert {kind for told in (*kinds, *found) for kind in told.split('"')[1].split("|")} <= PRECEDENCE.keys()
        assert all("=~" in told for told in (*kinds, *found) if "|" in told)
        label, names = target.split("=", 1)[0], target.split('"')[1].split("|")
        targets = [a for a in rules.ALERTS if (a.name if label == "alertname" else a.component) in names]
        assert targets
        assert label == "component" or set(names) == {a.name for a in targets}
        for alert in targets:
            assert set(rule["equal"]) <= set(alert.labels), (source_alert.name, alert.name)
