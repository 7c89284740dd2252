"""Dashboards of the wheel: written to files, and sent to a small real HTTP server that behaves like Grafana's API."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import typer

from dashboards import build
from orchestrator.cli.commands.dashboards import dashboards
from orchestrator.cli.console import Console
from orchestrator.cli.session import guarded
from orchestrator.telemetry import grafana

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOKEN = "glsa_for_tests"


class FakeGrafana(ThreadingHTTPServer):
    """A server that keeps folders and boards, requires a token, and can be set to refuse."""

    daemon_threads = True

    def __init__(self, *, prefix: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.prefix = prefix
        self.folders: dict[str, str] = {}
        self.boards: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, int] = {}
        self.answer: tuple[int, dict[str, str], bytes] | None = None
        self.seen: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{self.prefix}"


class Handler(BaseHTTPRequestHandler):
    server: FakeGrafana

    def do_GET(self) -> None:
        uid = self.path.removeprefix(f"{self.server.prefix}/api/folders/")
        if not self.refused():
            found = uid in self.server.folders
            self.reply(200 if found else 404, {"uid": uid} if found else {"message": "folder not found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        if self.path == f"{self.server.prefix}/api/folders":
            self.server.folders[body["uid"]] = body["title"]
            self.reply(200, {"uid": body["uid"]})
        elif self.path == f"{self.server.prefix}/api/dashboards/db":
            self.keep(body)
        else:
            self.reply(404, {"message": "Not found"})

    def keep(self, body: dict[str, Any]) -> None:
        uid = body["dashboard"]["uid"]
        if body["folderUid"] not in self.server.folders:
            self.reply(400, {"message": "folder not found"})
        elif uid in self.server.boards and not body["overwrite"]:
            self.reply(412, {"message": "A dashboard with the same uid already exists"})
        else:
            self.server.boards[uid] = body["dashboard"]
            self.server.versions[uid] = self.server.versions.get(uid, 0) + 1
            self.reply(
                200,
                {
                    "uid": uid,
                    "url": f"{self.server.prefix}/d/{uid}/x",
                    "version": self.server.versions[uid],
                    "status": "success",
                },
            )

    def refused(self) -> bool:
        self.server.seen.append(f"{self.command} {self.path}")
        if self.server.answer is not None:
            status, headers, body = self.server.answer
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return True
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply(401, {"message": "Invalid API key"})
            return True
        return False

    def reply(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(**options: Any) -> Iterator[FakeGrafana]:
    server = FakeGrafana(**options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def server() -> Iterator[FakeGrafana]:
    with serving() as made:
        yield made


@pytest.fixture
def orch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    command = typer.main.get_command(dashboards)

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()

        def run() -> int:
            return int(command.main(list(arguments), "orch dashboards", standalone_mode=False) or 0)

        code = guarded(run, Console({}), as_json="--json" in arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_export_writes_what_is_checked_in(tmp_path: Path, orch: Callable[..., tuple[int, str, str]]) -> None:
    folder = tmp_path / "new" / "boards"
    code, out, _ = orch("export", str(folder))
    assert code == 0
    made = build.files()
    for path in folder.iterdir():
        assert (
            path.read_text(encoding="utf-8")
            == made[f"orchestrator/data/{'dashboards/' * (path.suffix == '.json')}{path.name}"]
        )
    assert sorted(out.split()) == sorted(str(path) for path in folder.iterdir())
    assert len(list(folder.iterdir())) == len(build.BOARDS) + 1


def test_findings_and_alerts_link_to_the_documentation_that_is_given(
    tmp_path: Path, orch: Callable[..., tuple[int, str, str]], server: FakeGrafana
) -> None:
    assert orch("export", str(tmp_path), "--docs-url", "https://example.org/orch/docs/")[0] == 0
    for name in grafana.boards():
        variables = json.loads((tmp_path / name).read_text())["templating"]["list"]
        docs = next(one for one in variables if one["name"] == "docs")
        assert docs["query"] == docs["current"]["value"] == "https://example.org/orch/docs"
        assert "${docs}/diagnosis.md#${__value.raw}" in (tmp_path / name).read_text()
    rules = (tmp_path / "orch.rules.yml").read_text()
    assert "runbook_url: https://example.org/orch/docs/runbooks/OrchGpuLost.md" in rules
    assert "runbook_url: https://example.org/orch/docs/diagnosis.md#{{ $labels.kind }}" in rules
    assert "runbook_url: docs/" not in rules
    assert orch("push", "--url", server.url, "--token", TOKEN, "--docs-url", "http://docs.example")[0] == 0
    assert "http://docs.example" in json.dumps(server.boards["orch-job"])


@pytest.mark.parametrize("url", ["docs", "ftp://example.org", "https://example.org/a b", "https://x/#y", 'https://x/"'])
def test_a_documentation_address_that_is_none_is_refused(
    tmp_path: Path, orch: Callable[..., tuple[int, str, str]], url: str
) -> None:
    code, _, err = orch("export", str(tmp_path / "new"), "--docs-url", url)
    assert code == 2
    assert "is not an address" in err
    assert not (tmp_path / "new").exists()


def test_push_makes_the_folder_and_replaces_boards(server: FakeGrafana) -> None:
    first = grafana.push(server.url, TOKEN)
    assert server.folders == {"orch": "orch"}
    assert {board.uid for board in first} == set(server.boards) == {board.uid for board in build.BOARDS}
    assert first[0].url == f"{server.url}/d/{first[0].uid}/x"
    again = grafana.push(server.url + "/", TOKEN)
    assert [board.version for board in again] == [2] * len(first)
    assert server.boards["orch-job"] == json.loads(grafana.boards()["orch-job.json"])


def test_a_grafana_below_a_path() -> None:
    with serving(prefix="/grafana") as server:
        pushed = grafana.push(server.url, TOKEN)
        assert pushed[0].url == f"{server.url}/d/{pushed[0].uid}/x"
        with pytest.raises(grafana.GrafanaError, match=r"refused the folder orch \(404\)") as caught:
            grafana.push(server.url.removesuffix("/grafana"), TOKEN)
        assert "with its path" in caught.value.hint


def test_the_command_pushes(server: FakeGrafana, tmp_path: Path, orch: Callable[..., tuple[int, str, str]]) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o644)
    code, _, err = orch("push", "--url", server.url, "--token-file", str(file))
    assert code == 5
    assert f"chmod 600 {file}" in err
    file.chmod(0o600)
    code, out, err = orch("push", "--url", server.url, "--token-file", str(file))
    assert (code, err) == (0, "")
    assert f"orch / Cluster  {server.url}/d/orch-cluster/x" in out
    code, out, _ = orch("push", "--url", server.url, "--token", TOKEN, "--json")
    assert code == 0
    assert {board["version"] for board in json.loads(out)["boards"]} == {2}


def test_a_wrong_token_is_refused_and_not_shown(server: FakeGrafana, orch: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = orch("push", "--url", server.url, "--token", "glsa_wrong")
    assert code == 5
    assert "refused the folder orch (401): Invalid API key" in err
    assert "next: pass the token of a service account" in err
    assert "glsa_wrong" not in out + err


def test_a_token_file_that_is_not_there(tmp_path: Path, orch: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = orch("push", "--token-file", str(tmp_path / "none"))
    assert code == 2
    assert "the token cannot be read" in err


def test_nobody_answers(orch: Callable[..., tuple[int, str, str]]) -> None:
    with serving() as server:
        url = server.url
    code, _, err = orch("push", "--url", url, "--token", TOKEN)
    assert code == 4
    assert f"no Grafana answers at {url}" in err


@pytest.mark.parametrize(
    ("status", "headers", "body", "message", "hint"),
    [
        (403, {}, b'{"message": "Permission denied"}', r"\(403\): Permission denied", "role Editor"),
        (302, {"Location": "/login"}, b"", r"\(302\): no reason given", "page for logging in"),
        (500, {}, b"<html>oops</html>", r"\(500\): no reason given", "Grafana's log"),
        (200, {}, b"<html>welcome</html>", "is not a Grafana", "address and its path"),
        (200, {}, b"[1]", "is not a Grafana", "address and its path"),
    ],
)
def test_other_refusals(
    server: FakeGrafana, status: int, headers: dict[str, str], body: bytes, message: str, hint: str
) -> None:
    server.answer = (status, headers, body)
    with pytest.raises(grafana.GrafanaError, match=message) as caught:
        grafana.push(server.url, TOKEN)
    assert hint in caught.value.hint
    assert len(server.seen) == 1, "a redirect is not followed: it would be given the token"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:3000", "not an address of a Grafana"),
        ("file:///etc/passwd", "not an address"),
        ("http://a:b@c", "holds a password"),
    ],
)
def test_addresses_that_are_none(url: str, message: str) -> None:
    with pytest.raises(grafana.GrafanaError, match=message):
        grafana.push(url, TOKEN)
