"""The page beyond this machine: TLS, sign-in with the token and its limits, and names of the network."""

from __future__ import annotations

import asyncio
import http.client
import os
import ssl
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from orchestrator.api.errors import RefusedError
from orchestrator.api.launch import ServeOptions
from orchestrator.api.server.listeners import ApiServer, bind_tcp
from orchestrator.api.server.testing import FakeService
from orchestrator.spec.paths import PageFiles
from orchestrator.web.serving import LazyPage, page_place, page_tls, reach_of, shown_address, sign_in_of
from orchestrator.web.sign_in import MAX_TRIES, TRY_SECONDS, Reach, SignIn
from tests.support.stack import PATIENCE_SECONDS
from tests.unit.web.conftest import HOST, Browser

if TYPE_CHECKING:
    from tests.unit.web.conftest import Clock

TOKEN = "the-daemon-s-token"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Make a self-signed certificate for localhost, and its key; return their paths."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    files = ["-keyout", str(key), "-out", str(cert), "-days", "1"]
    subprocess.run(["openssl", "req", "-x509", *curve, *files, *subject], check=True, capture_output=True)
    return str(cert), str(key)


def network(clock: Clock, *, tls: bool) -> Browser:
    reach = Reach(tls=tls, network=True)
    return Browser(FakeService(), SignIn(b"k" * 32, clock, token=TOKEN, owner_uid=os.getuid(), reach=reach))


def test_a_browser_signs_in_with_the_token_over_tls(tmp_path: Path, pair: tuple[str, str]) -> None:
    options = ServeOptions(page_cert=pair[0], page_key=pair[1], token_file="t")
    sign_in = sign_in_of(PageFiles.of(tmp_path), token=TOKEN, reach=reach_of(options))

    def visit(port: int) -> None:
        context = ssl.create_default_context(cafile=pair[0])

        def ask(
            method: str, path: str, form: dict[str, str] | None = None, cookie: str = ""
        ) -> tuple[int, dict[str, str], str]:
            connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=PATIENCE_SECONDS)
            headers = {"origin": f"https://localhost:{port}", "content-type": "application/x-www-form-urlencoded"}
            connection.request(
                method, path, urlencode(form or {}), {**headers, **({"cookie": cookie} if cookie else {})}
            )
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            text = answer.read().decode()
            connection.close()
            return answer.status, found, text

        status, headers, _ = ask("GET", "/")
        assert (status, headers["location"]) == (303, "/signin")
        status, headers, text = ask("GET", "/signin")
        assert status == 200
        assert 'type="password"' in text
        assert headers["strict-transport-security"] == "max-age=31536000"
        assert ask("POST", "/signin", {"token": "guess"})[0] == 401
        status, headers, _ = ask("POST", "/signin", {"token": TOKEN})
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert cookie.startswith("__Host-orch_")
        assert {"httponly", "secure", "samesite=strict", "path=/"} <= {
            part.strip().lower() for part in cookie.split(";")
        }
        status, _, text = ask("GET", "/", cookie=cookie.partition(";")[0])
        assert (status, "<h1" in text) == (200, True)

    async def run() -> None:
        sock = bind_tcp("127.0.0.1", 0)
        port = sock.getsockname()[1]
        page = LazyPage(FakeService(), sign_in, asyncio.Event())
        server = ApiServer(page, [sock], tls=page_tls(options))
        await server.start()
        try:
            assert shown_address(sock, options) == f"https://127.0.0.1:{port}/"
            await asyncio.to_thread(visit, port)
        finally:
            await server.stop()

    asyncio.run(run())


def test_guesses_are_limited_by_address_and_keep_out_nobody_who_has_the_token(clock: Clock) -> None:
    sign_in = network(clock, tls=True).sign_in

    def tried(token: str, address: str) -> str:
        try:
            return "in" if sign_in.user_of(sign_in.redeem_token(token, address)) == os.getuid() else "wrong"
        except Exception as error:
            return type(error).__name__

    wrong = ["UnauthenticatedError"] * MAX_TRIES
    assert [tried("guess", "a") for _ in range(MAX_TRIES + 1)] == [*wrong, "TooManyTriesError"]
    assert tried(f" {TOKEN}\n", "a") == "in", "at once, from the same address"
    for number in range(2000):
        tried("guess", f"c{number}")
    assert tried(TOKEN, "d") == "in"
    clock.now += TRY_SECONDS
    assert tried("guess", "a") == "UnauthenticatedError"


def test_the_form_says_what_is_wrong_and_never_shows_the_token(clock: Clock) -> None:
    visitor = network(clock, tls=False)
    answer = visitor.post("/signin", {"token": "<b>guess</b>"})
    assert answer.status == 401
    assert "not the daemon" in answer.text
    assert "guess" not in answer.text
    for _ in range(MAX_TRIES):
        answer = visitor.post("/signin", {"token": ""})
    assert answer.status == 429
    clock.now += TRY_SECONDS
    answer = visitor.post("/signin", {"token": TOKEN}, {"origin": f"https://{HOST}"})
    assert (answer.status, "Secure" in answer.headers["set-cookie"]) == (303, True), "a proxy in front encrypts"
    assert "strict-transport-security" not in answer.headers


@pytest.mark.parametrize(("tls", "scheme", "status"), [(True, "http", 403), (True, "https", 303), (False, "http", 303)])
def test_names_of_the_network_are_taken_and_other_pages_are_not(
    clock: Clock, tls: bool, scheme: str, status: int
) -> None:
    visitor = network(clock, tls=tls)
    host = {"host": "gpu-box.example:8265"}
    assert visitor.get("/signin", host).status == 200
    answer = visitor.post("/signin", {"token": TOKEN}, {**host, "origin": f"{scheme}://gpu-box.example:8265"})
    assert answer.status == status
    assert visitor.post("/signin", {"token": TOKEN}, {**host, "origin": "https://evil.example"}).status == 403
    assert visitor.get("/signin", {"host": ""}).status == 403


def test_streams_and_actions_are_not_redirected_to_the_form(clock: Clock) -> None:
    visitor = network(clock, tls=True)
    assert visitor.get("/live/overview").status == 401
    assert visitor.post("/jobs/x/cancel", {}, {"origin": f"https://{HOST}"}).status == 401
    assert visitor.get("/jobs").status == 303


@pytest.mark.parametrize("change", ["missing", "swapped", "readable"])
def test_files_that_cannot_be_used_are_named(pair: tuple[str, str], tmp_path: Path, change: str) -> None:
    cert, key = pair
    if change == "missing":
        key = str(tmp_path / "none.pem")
    elif change == "swapped":
        cert, key = key, cert
    else:
        readable = tmp_path / "key.pem"
        readable.write_text(Path(key).read_text())
        readable.chmod(0o644)
        key = str(readable)
    with pytest.raises(RefusedError) as caught:
        page_tls(ServeOptions(page_cert=cert, page_key=key))
    assert key in caught.value.message
    assert caught.value.hint


def test_an_address_of_the_network_is_taken_with_token_and_encryption() -> None:
    options = ServeOptions(page_listen="0.0.0.0:8265", page_cert="c", page_key="k", token_file="t")
    assert page_place(options) == ("0.0.0.0", 8265)
    assert reach_of(options) == Reach(tls=True, network=True)
    plain = ServeOptions(page_listen="[::]:8265", page_plain=True, token_file="t")
    assert reach_of(plain) == Reach(tls=False, network=True)
