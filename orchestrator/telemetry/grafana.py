"""The boards in the orch package: written to a folder, or sent to a Grafana over its HTTP API.

Only the standard library, since the command line loads this module. Boards choose their data source themselves, so that
only one folder and its boards change in Grafana. A token is sent to the given address and never displayed.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from orchestrator.telemetry.local_prometheus import bundled_rules

if TYPE_CHECKING:
    from pathlib import Path

FOLDER_UID: Final = "orch"
FOLDER_TITLE: Final = "orch"
RULES_NAME: Final = "orch.rules.yml"
TIMEOUT_SECONDS: Final = 15.0
MAX_ANSWER_BYTES: Final = 1_000_000


class GrafanaError(Exception):
    """Grafana did not accept a board; `hint` says what to do. `unreachable` when there was no answer."""

    def __init__(self, message: str, *, hint: str, unreachable: bool = False) -> None:
        super().__init__(message)
        self.message, self.hint, self.unreachable = message, hint, unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """A board in Grafana: its address, and its version."""

    uid: str
    title: str
    url: str
    version: int


def boards() -> dict[str, str]:
    """Return the boards in the wheel: file name and text."""
    folder = resources.files("orchestrator.data").joinpath("dashboards")
    found = sorted((item for item in folder.iterdir() if item.name.endswith(".json")), key=lambda item: item.name)
    return {item.name: item.read_text(encoding="utf-8") for item in found}


def documented(board: str, docs_url: str) -> str:
    """Return the board's text with the address of the documentation, to which its findings link."""
    document = json.loads(board)
    for variable in document["templating"]["list"]:
        if variable["name"] == "docs":
            variable["query"] = docs_url
            variable["current"] = {"text": docs_url, "value": docs_url}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def export(folder: Path, docs_url: str = "") -> list[Path]:
    """Write boards and rules to `folder`, created if missing; return the files. Raises OSError.

    Findings and alerts link to the documentation at `docs_url`, where it is given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: documented(text, docs_url) for name, text in boards().items()}
    files[RULES_NAME] = bundled_rules(docs_url)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def push(url: str, token: str, docs_url: str = "") -> list[Pushed]:
    """Send every board to the Grafana at `url`, into the folder orch; existing boards are replaced.

    Findings link to the documentation at `docs_url`, where it is given.

    Raises GrafanaError; boards sent before the error stay.
    """
    grafana = _Grafana(url, token)
    grafana.make_folder()
    return [grafana.send(json.loads(documented(text, docs_url))) for text in boards().values()]


class _Grafana:
    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GrafanaError(f"{url!r} is not an address of a Grafana", hint="write it like http://127.0.0.1:3000")
        if parts.username or parts.password:
            raise GrafanaError("the address holds a password", hint="make a service account and pass its token")
        self._url = url.rstrip("/")
        self._token = token
        # Redirects are refused: the token would follow one to any address.
        self._opener = urllib.request.build_opener(_NoRedirect())

    def make_folder(self) -> None:
        status, answer = self._ask("GET", f"/api/folders/{FOLDER_UID}")
        if status == http.client.NOT_FOUND:
            status, answer = self._ask("POST", "/api/folders", {"uid": FOLDER_UID, "title": FOLDER_TITLE})
        if status not in (200, 412):  # 412: another process created it in between
            raise self._refusal(status, answer, f"the folder {FOLDER_TITLE}")

    def send(self, board: dict[str, Any]) -> Pushed:
        body = {"dashboard": board, "folderUid": FOLDER_UID, "overwrite": True, "message": "orch dashboards push"}
        status, answer = self._ask("POST", "/api/dashboards/db", body)
        if status != http.client.OK:
            raise self._refusal(status, answer, board["title"])
        path = str(answer.get("url", f"/d/{board['uid']}"))
        return Pushed(
            uid=board["uid"], title=board["title"], url=self._absolute(path), version=int(answer.get("version", 0))
        )

    def _absolute(self, path: str) -> str:
        parts = urlsplit(self._url)
        below = path if path.startswith(f"{parts.path}/") else parts.path + path
        return f"{parts.scheme}://{parts.netloc}{below}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(self._url + path, method=method)  # noqa: S310 - the scheme was checked
        request.add_header("Accept", "application/json")
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as response:
                return response.status, _document(response.read(MAX_ANSWER_BYTES), self._url)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _document(error.read(MAX_ANSWER_BYTES), self._url, strict=False)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise GrafanaError(
                f"no Grafana answers at {self._url}: {reason}",
                hint="check the address, and that it runs",
                unreachable=True,
            ) from error

    def _refusal(self, status: int, answer: dict[str, Any], what: str) -> GrafanaError:
        message = str(answer.get("message", "no reason given"))[:300]
        return GrafanaError(f"Grafana refused {what} ({status}): {message}", hint=_HINTS.get(status, _OTHER_HINT))


_HINTS: Final = {
    301: "give the address that it redirects to",
    302: "give the address that it redirects to, and a token: this may be its page for logging in",
    307: "give the address that it redirects to",
    308: "give the address that it redirects to",
    401: "pass the token of a service account: --token-file FILE, or the variable GRAFANA_TOKEN",
    403: "give the token's service account the role Editor",
    404: "check that the address is Grafana's, with its path where it has one",
    412: "a provisioned board of this name is there already: leave that to provisioning, or remove it",
}
_OTHER_HINT: Final = "look into Grafana's log"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _document(body: bytes, url: str, *, strict: bool = True) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    if strict:
        raise GrafanaError(f"what answers at {url} is not a Grafana", hint="check the address and its path")
    return {}
