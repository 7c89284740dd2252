"""What keeps a daemon from starting, said before anything is started."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.api.launch import ServeOptions
from orchestrator.api.server.listeners import address_of, bind_tcp
from orchestrator.daemon.process.preflight import (
    LEAST_FILES,
    bind_read,
    check_options,
    check_ports,
    check_ray,
    check_visible_gpus,
)
from orchestrator.daemon.process.serve import serve
from orchestrator.spec.settings import Settings
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        (ServeOptions(listen="127.0.0.1:8265"), "needs a token", "--token-file"),
        (ServeOptions(listen="8265"), "--listen '8265' is not HOST:PORT", "127.0.0.1:"),
        (ServeOptions(listen="127.0.0.1:99999"), "is not HOST:PORT", "127.0.0.1:"),
        (ServeOptions(read_listen="127.0.0.1:x"), "--read-listen '127.0.0.1:x' is not HOST:PORT", "127.0.0.1:"),
        (ServeOptions(read_listen="0.0.0.0:9476"), "open to the network", "token"),
        (ServeOptions(page_listen="0.0.0.0:0"), "in plain text", "ssh -L"),
        (ServeOptions(page_listen="page"), "is not an address for the page", "127.0.0.1:8265"),
        (ServeOptions(token_file="/no/such/token"), "/no/such/token cannot be read", "urandom"),
        (ServeOptions(ray_address="head"), "--ray-address 'head' is not HOST:PORT", "127.0.0.1:6379"),
        (ServeOptions(ray_address="head:port"), "is not HOST:PORT", "127.0.0.1:6379"),
    ],
)
def test_options_that_no_daemon_can_start_with(
    settings: Settings, options: ServeOptions, message: str, hint: str
) -> None:
    with pytest.raises((RefusedError, BadRequestError)) as caught:
        check_options(settings, options)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert not settings.home.exists()


def test_options_that_are_right(settings: Settings) -> None:
    check_options(settings, ServeOptions())
    check_options(settings, ServeOptions(read_listen="", page_listen="", ray_address="auto"))


@pytest.mark.parametrize(("field", "option"), [("listen", "--listen"), ("page_listen", "--page-listen")])
def test_a_port_that_is_given_and_taken_is_refused_with_its_option(field: str, option: str) -> None:
    with closing(bind_tcp("127.0.0.1", 0)) as other:
        taken = address_of(other)
        with pytest.raises(RefusedError, match=f"cannot listen on {taken}") as caught:
            check_ports(ServeOptions(read_listen="", **{field: taken}))
    assert caught.value.hint == f"`{option} 127.0.0.1:0` takes any free port"
    check_ports(ServeOptions(read_listen="", **{field: taken}))


def test_a_default_port_that_is_taken_gives_way_and_a_chosen_one_does_not() -> None:
    with closing(bind_tcp("127.0.0.1", 0)) as other:
        taken = address_of(other)
        with closing(bind_read(ServeOptions(read_listen=taken))) as free:
            assert address_of(free) not in (taken, "127.0.0.1:0")
        check_ports(ServeOptions(read_listen=taken))
        with pytest.raises(RefusedError, match="cannot listen on") as caught:
            check_ports(ServeOptions(read_listen=taken, read_fixed=True))
    assert "--read-listen" in caught.value.hint


@pytest.mark.parametrize("shape", ["{}", "ray://{}"])
def test_nothing_at_the_address_of_ray(shape: str) -> None:
    with closing(bind_tcp("127.0.0.1", 0)) as sock:
        address = shape.format(address_of(sock))
        check_ray(address)
    with pytest.raises(RefusedError, match="Connection refused") as caught:
        check_ray(address, seconds=0.1)
    assert caught.value.message.startswith(f"no Ray cluster at {address}")
    assert f"ray start --head --port={address.rpartition(':')[2]}" in caught.value.hint


def test_a_cluster_that_starts_at_the_same_time_is_waited_for() -> None:
    with closing(bind_tcp("127.0.0.1", 0)) as sock:
        host, _, port = address_of(sock).rpartition(":")
    errors: list[Exception] = []

    def wait() -> None:
        try:
            check_ray(f"{host}:{port}", seconds=PATIENCE_SECONDS)
        except RefusedError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    with closing(bind_tcp(host, int(port))):
        waiter.join(timeout=PATIENCE_SECONDS)
    assert not waiter.is_alive()
    assert errors == []


LIMITED = """
import resource, sys
from orchestrator.api.errors import RefusedError
from orchestrator.daemon.process.preflight import check_limits
for soft, hard in ((64, int(sys.argv[1])), (64, 64)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        check_limits()
    except RefusedError as error:
        print(error.message, error.hint, sep="\\n")
    else:
        print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_too_few_open_files_are_refused_and_a_soft_limit_is_raised() -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > LEAST_FILES, "or the rest says nothing"
    command = [sys.executable, "-c", LIMITED, str(LEAST_FILES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    raised, message, hint = done.stdout.splitlines()
    assert raised == f"{LEAST_FILES} {LEAST_FILES}"
    assert message == f"the limit of open files is 64; orch and Ray need at least {LEAST_FILES}"
    assert f"`ulimit -Hn {LEAST_FILES}`" in hint
    assert "LimitNOFILE=" in hint


@pytest.mark.parametrize(
    ("name", "value", "shown"), [("CUDA_VISIBLE_DEVICES", "0,1", 2), ("HIP_VISIBLE_DEVICES", "", 0)]
)
def test_a_variable_that_hides_gpus_is_refused_with_the_command_that_starts_without_it(
    name: str, value: str, shown: int
) -> None:
    with pytest.raises(RefusedError, match=f"shows {shown} of this machine's 4 GPUs") as caught:
        check_visible_gpus({name: value}, lambda: 4)
    assert caught.value.hint == f"start it without the variable: `env -u {name} orch up`"


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}])
def test_one_that_hides_none_is_accepted(environ: dict[str, str]) -> None:
    check_visible_gpus(environ, lambda: 4)
    check_visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, lambda: 0)


def test_a_daemon_of_root_serves_no_group(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with pytest.raises(RefusedError, match="members of lab would run whatever they submit as root") as caught:
        serve(Settings(home=home, uid=0), ServeOptions(group="lab"))
    assert "an account of its own" in caught.value.hint
    assert not home.exists()


def test_exporters_on_the_network_want_a_token(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with pytest.raises(RefusedError, match="open to the network") as caught:
        serve(Settings(home=home, exporter_address="node"), ServeOptions())
    assert "--token-file" in caught.value.hint
    assert not home.exists()
