"""Settings from the environment, and the names of all files under the home."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.errors import BadRequestError
from orchestrator.api.transport.endpoint import control_socket
from orchestrator.spec.settings import MAX_SOCKET_BYTES, Settings, SettingsError


def test_nothing_set_gives_the_defaults_under_the_users_home(tmp_path: Path) -> None:
    settings = Settings.from_environ({"HOME": str(tmp_path)})
    assert settings == Settings(home=tmp_path / ".orch")
    assert (settings.metrics_address, settings.metrics_port) == ("127.0.0.1", 9476)
    assert (settings.exporter_address, settings.exporter_ports) == ("127.0.0.1", (9477, 9599))
    assert (settings.log_max_bytes, settings.log_keep_files) == (33_554_432, 3)
    assert (settings.snapshot_max_bytes, settings.reserve_bytes) == (500_000_000, 16_777_216)
    assert (settings.log_level, settings.log_format) == ("info", "auto")


def test_without_a_home_variable_the_user_database_is_asked() -> None:
    assert Settings.from_environ({}).home == Path.home() / ".orch"
    assert Settings.from_environ({"HOME": "relative"}).home == Path.home() / ".orch"


def test_every_variable_is_read(tmp_path: Path) -> None:
    settings = Settings.from_environ(
        {
            "HOME": str(tmp_path),
            "ORCH_HOME": "~/state",
            "XDG_RUNTIME_DIR": str(tmp_path / "run"),
            "ORCH_METRICS_ADDRESS": "0.0.0.0",
            "ORCH_METRICS_PORT": "0",
            "ORCH_EXPORTER_ADDRESS": "node",
            "ORCH_EXPORTER_PORTS": "9500-9515",
            "ORCH_EXPORTER_PROCESSES": "yes",
            "ORCH_LOG_MAX_BYTES": "1MiB",
            "ORCH_LOG_KEEP_FILES": "7",
            "ORCH_SNAPSHOT_MAX_BYTES": "2GB",
            "ORCH_RESERVE_BYTES": "0",
            "ORCH_LOG_LEVEL": "DEBUG",
            "ORCH_LOG_FORMAT": "json",
        }
    )
    assert settings == Settings(
        home=tmp_path / "state",
        runtime_dir=tmp_path / "run",
        metrics_address="0.0.0.0",
        metrics_port=0,
        exporter_address="node",
        exporter_ports=(9500, 9515),
        exporter_processes=True,
        log_max_bytes=1_048_576,
        log_keep_files=7,
        snapshot_max_bytes=2_000_000_000,
        reserve_bytes=0,
        log_level="debug",
        log_format="json",
    )


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "ORCH_HOME": "", "ORCH_METRICS_PORT": "", "XDG_RUNTIME_DIR": ""}
    assert Settings.from_environ(environ) == Settings(home=tmp_path / ".orch")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ORCH_HOME", "state", "not an absolute path"),
        ("ORCH_HOME", "~other/x", "not an absolute path"),
        ("ORCH_HOME", "/a\0b", "NUL"),
        ("ORCH_METRICS_PORT", "65536", "from 0 to 65535"),
        ("ORCH_METRICS_PORT", "-1", "from 0 to 65535"),
        ("ORCH_METRICS_PORT", "http", "from 0 to 65535"),
        ("ORCH_METRICS_PORT", "9" * 5000, "from 0 to 65535"),
        ("ORCH_METRICS_ADDRESS", "a b", "not an address"),
        ("ORCH_EXPORTER_PORTS", "9599-9477", "9477-9599"),
        ("ORCH_EXPORTER_PORTS", "0-5", "9477-9599"),
        ("ORCH_EXPORTER_PROCESSES", "perhaps", "one of yes, no"),
        ("ORCH_EXPORTER_PORTS", "1-65536", "9477-9599"),
        ("ORCH_METRICS_ADDRESS", "http://x", "not an address"),
        ("ORCH_LOG_MAX_BYTES", "4095", "from 4096 on"),
        ("ORCH_LOG_MAX_BYTES", "lots", "32MiB"),
        ("ORCH_LOG_KEEP_FILES", "1.5", "from 0 to 1000"),
        ("ORCH_SNAPSHOT_MAX_BYTES", "-1", "number of bytes"),
        ("ORCH_RESERVE_BYTES", "999999999999999T", "number of bytes"),
        ("ORCH_PASS_ENV", "SITE_*, ***", "not a name or a pattern"),
        ("ORCH_PASS_ENV", "A=1", "not a name or a pattern"),
        ("ORCH_LOG_LEVEL", "loud", "one of debug, info, warning, error"),
        ("ORCH_LOG_FORMAT", "xml", "one of auto, console, json"),
    ],
)
def test_a_bad_value_names_its_variable(variable: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environ({variable: value})
    assert str(caught.value).startswith(f"{variable}=")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250


def test_all_bad_values_are_one_error() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environ({"ORCH_HOME": "x", "ORCH_METRICS_PORT": "y", "ORCH_LOG_LEVEL": "z"})
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == [
        "ORCH_HOME",
        "ORCH_METRICS_PORT",
        "ORCH_LOG_LEVEL",
    ]


def test_a_runtime_directory_that_is_not_absolute_is_ignored_as_its_standard_says(tmp_path: Path) -> None:
    assert Settings.from_environ({"HOME": str(tmp_path), "XDG_RUNTIME_DIR": "run"}).runtime_dir is None


def test_two_spellings_of_a_home_are_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    homes = {Settings.from_environ({"ORCH_HOME": f"{tmp_path}/{name}"}).home for name in ("real", "link", "x/../real/")}
    assert homes == {tmp_path / "real"}


def test_the_socket_lies_in_the_home_while_its_path_is_short_enough() -> None:
    fits = Path("/" + "h" * (MAX_SOCKET_BYTES - len("//run/orch.sock")))
    assert Settings(home=fits).socket == fits / "run" / "orch.sock"
    assert len(str(Settings(home=fits).socket)) == MAX_SOCKET_BYTES
    longer = fits.with_name(fits.name + "h")
    assert Settings(home=longer).socket.parent.parent == Path("/tmp")


def test_a_long_home_has_its_socket_in_the_runtime_directory_or_in_tmp() -> None:
    home, other = Path("/h") / ("x" * 120), Path("/h") / ("y" * 120)
    runtime = Path("/run/user/1000")
    with_runtime = Settings(home=home, runtime_dir=runtime).socket
    assert with_runtime.parent == runtime
    assert with_runtime.name.startswith("orch-")
    assert with_runtime.suffix == ".sock"
    without = Settings(home=home, uid=1234).socket
    assert without.name == "orch.sock"
    assert without.parent.name.startswith("orch-1234-")
    assert Settings(home=other, uid=1234).socket != without
    assert Settings(home=home, runtime_dir=Path("/" + "r" * 120), uid=1234).socket == without


@given(st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=150))
def test_every_homes_socket_fits_into_the_kernels_limit(name: str) -> None:
    assert len(os.fsencode(Settings(home=Path("/home") / name).socket)) <= MAX_SOCKET_BYTES


def test_every_name_lies_in_the_home() -> None:
    home = Path("/h")
    paths = Settings(home=home).paths
    assert paths.socket == home / "run/orch.sock"
    assert paths.store == home / "store.sqlite3"
    assert paths.reserve == home / "reserve"
    assert paths.blobs == home / "blobs"
    assert paths.blob("ab" * 32) == home / "blobs/sha256/ab" / ("ab" * 32)
    assert paths.run == home / "run"
    assert paths.daemon_state == home / "run/daemon.json"
    assert paths.daemon_log == home / "run/daemon.log"
    assert paths.token == home / "run/token"
    assert paths.ray == home / "ray"
    assert paths.jobs == home / "jobs"
    job = home / "jobs/digits-k3f9q2"
    assert paths.job("digits-k3f9q2") == job
    assert paths.work("digits-k3f9q2") == job / "work"
    assert paths.logs("digits-k3f9q2") == job / "logs"
    assert paths.checkpoints("digits-k3f9q2") == job / "checkpoints"
    assert paths.exits("digits-k3f9q2") == job / "exits"
    assert paths.exit_record("digits-k3f9q2", 2, 7) == job / "exits/attempt-2/rank-7.json"
    assert paths.metrics("digits-k3f9q2") == job / "metrics.jsonl"
    assert paths.secrets("digits-k3f9q2") == job / "secrets"


@pytest.mark.parametrize("job_id", ["", "..", "a/b", "../../etc", "/etc", "A-b", "a\n", "a" * 101, "-a"])
def test_no_id_leads_out_of_the_home(job_id: str) -> None:
    with pytest.raises(ValueError, match="not a job's id"):
        Settings(home=Path("/h")).paths.work(job_id)


@pytest.mark.parametrize("digest", ["", "..", "ab/../..", "g" * 64, "AB" * 32])
def test_no_digest_leads_out_of_the_home(digest: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        Settings(home=Path("/h")).paths.blob(digest)


@pytest.mark.parametrize("module", ["settings", "entrypoint", "source", "problems"])
def test_what_the_command_line_imports_is_light(module: str) -> None:
    code = f"import orchestrator.spec.{module}, sys, json; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {os.getcwd()!r}); {code}"],
        capture_output=True,
        check=True,
    )
    loaded = set(json.loads(result.stdout))
    heavy = {"yaml", "pydantic", "ray", "torch", "numpy", "asyncio", "hashlib", "difflib", "decimal", "urllib.request"}
    assert loaded & heavy == set()


def without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user that no account has, as in a container that runs with a number for a user."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)


def test_a_user_without_account_and_home_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_account(monkeypatch)
    with pytest.raises(SettingsError, match="neither ORCH_HOME nor HOME is set"):
        Settings.from_environ({})
    with pytest.raises(BadRequestError, match="neither ORCH_HOME nor HOME is set") as caught:
        control_socket({}, 12345)
    assert "ORCH_HOME" in caught.value.hint
    for name in ("ORCH_HOME", "HOME"):
        assert Settings.from_environ({name: str(tmp_path)}).home.is_relative_to(tmp_path)
