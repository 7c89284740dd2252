"""Where the daemon is, by the environment."""

from __future__ import annotations

import os

import pytest

from orchestrator.api.endpoint import MAX_SOCKET_BYTES, Endpoint, control_socket, endpoint_from, orch_home
from orchestrator.api.errors import BadRequestError
from orchestrator.spec.settings import Settings


def test_the_socket_lies_in_the_home() -> None:
    assert endpoint_from({"ORCH_HOME": "/srv/orch"}) == Endpoint(socket_path="/srv/orch/run/orch.sock")


def test_the_home_is_absolute_and_has_a_default() -> None:
    assert orch_home({"ORCH_HOME": "here"}) == os.path.abspath("here")
    assert orch_home({}) == os.path.expanduser("~/.orch")
    assert orch_home({"ORCH_HOME": ""}) == os.path.expanduser("~/.orch")


def test_a_long_home_moves_the_socket_to_the_runtime_directory() -> None:
    home = "/very" * 30
    path = control_socket(home, "/run/user/7", 7)
    assert path.startswith("/run/user/7/orch-")
    assert path != control_socket(home + "x", "/run/user/7", 7)
    assert control_socket(home, "", 7).startswith("/tmp/orch-7-")
    assert control_socket(home, "/run" * 30, 7).startswith("/tmp/orch-7-")


def test_the_longest_path_is_still_used_and_one_more_is_not() -> None:
    fits = "/" + "h" * (MAX_SOCKET_BYTES - len("//run/orch.sock"))
    assert control_socket(fits, "/run/user/7", 7) == f"{fits}/run/orch.sock"
    assert len(control_socket(fits, "/run/user/7", 7)) == MAX_SOCKET_BYTES
    assert control_socket(fits + "h", "/run/user/7", 7).startswith("/run/user/7/")


@pytest.mark.parametrize("home", ["/srv/orch", "/very" * 30, "/" + "ü" * 60])
@pytest.mark.parametrize("runtime", ["/run/user/7", "", "/run" * 30])
def test_the_command_line_and_the_daemon_agree_on_the_path(home: str, runtime: str) -> None:
    environ = {"ORCH_HOME": home, "XDG_RUNTIME_DIR": runtime, "HOME": "/root"}
    assert endpoint_from(environ).socket_path == str(Settings.from_environ(environ).socket)


def test_length_counts_bytes_not_letters() -> None:
    assert control_socket("/" + "ü" * 60, "/run/user/7", 7).startswith("/run/user/7/")


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
