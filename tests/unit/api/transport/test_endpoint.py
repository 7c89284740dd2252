"""The daemon's address according to the environment; client and daemon must find the same one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.api.errors import BadRequestError, NotPermittedError
from orchestrator.api.transport import endpoint as module
from orchestrator.api.transport.endpoint import Endpoint, control_socket, endpoint_from, orch_home
from orchestrator.spec.settings import MAX_SOCKET_BYTES, Settings, SettingsError

segments = st.text(alphabet="ab.~ü-", min_size=0, max_size=12)
paths = st.builds(
    lambda head, parts: head + "/".join(parts),
    st.sampled_from(["/", "//", "~/", "~", "", "/srv/"]),
    st.lists(segments, max_size=14),
)
environments = st.dictionaries(st.sampled_from(["HOME", "ORCH_HOME", "XDG_RUNTIME_DIR"]), paths)


@given(environments)
@example({"HOME": "/"})
@example({"ORCH_HOME": "/"})
@example({"ORCH_HOME": "~"})
@example({"ORCH_HOME": "/" + "h" * 87})
@example({"ORCH_HOME": "/" + "h" * 86})
@example({"ORCH_HOME": "/" + "h" * 85})
@example({"ORCH_HOME": "/" + "h" * 100, "XDG_RUNTIME_DIR": "/run/user/7"})
@example({"ORCH_HOME": "/" + "h" * 100, "XDG_RUNTIME_DIR": "/" + "r" * 80})
@example({"ORCH_HOME": "/" + "h" * 100, "XDG_RUNTIME_DIR": "run"})
def test_client_and_daemon_find_the_same_socket(environ: dict[str, str]) -> None:
    try:
        daemon = Settings.from_environ(environ)
    except SettingsError:
        with pytest.raises(BadRequestError):
            control_socket(environ, os.getuid())
        return
    assert control_socket(environ, os.getuid()) == str(daemon.socket)
    assert orch_home(environ) == str(daemon.home)


def test_the_bound_is_the_daemon_s() -> None:
    assert module.MAX_SOCKET_BYTES == MAX_SOCKET_BYTES


def test_a_link_and_its_target_are_one_daemon(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert orch_home({"ORCH_HOME": str(tmp_path / "link")}) == str(tmp_path / "real")


def test_a_directory_of_someone_else_in_tmp_is_a_trap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ = {"ORCH_HOME": "/very" * 40}
    found = endpoint_from(environ, shared=str(tmp_path))
    assert found.socket_path.startswith(f"{tmp_path}/orch-{os.getuid()}-"), "nothing is there yet: `orch up` makes it"
    Path(found.socket_path).parent.mkdir()
    assert endpoint_from(environ, shared=str(tmp_path)) == found
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    theirs = endpoint_from(environ, shared=str(tmp_path))
    Path(theirs.socket_path).parent.mkdir()  # created by the uid that runs the test, which is not the uid of the caller
    with pytest.raises(NotPermittedError, match="not a directory of this user alone"):
        endpoint_from(environ, shared=str(tmp_path))


def test_an_address_beats_the_home() -> None:
    environ = {"ORCH_HOME": "/srv", "ORCH_ADDRESS": "http://gpu-box:8265/", "ORCH_TOKEN": "t"}
    assert endpoint_from(environ) == Endpoint(host="gpu-box", port=8265, token="t")
    assert endpoint_from({"ORCH_ADDRESS": "[::1]:80"}).host == "::1"


@pytest.mark.parametrize(
    "address", ["gpu-box", "https://gpu-box:1", "http://:80", "http://h:0", "http://h:99999", "h:x"]
)
def test_a_wrong_address_is_refused_with_the_form_to_write(address: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        endpoint_from({"ORCH_ADDRESS": address})
    assert "http://host:port" in caught.value.hint
