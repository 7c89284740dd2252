"""The content of the pages, and the actions on them."""

from __future__ import annotations

import os
import time
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote

import pytest

from orchestrator.api.errors import DaemonStoppingError
from orchestrator.api.queue_views import OutlookView
from orchestrator.api.views import (
    AttemptView,
    CheckpointView,
    FailureView,
    FindingView,
    NodeView,
    ProgressView,
    RankView,
)
from orchestrator.store.errors import StoreClosedError
from orchestrator.web.overview import gpus_by_node
from orchestrator.web.rendering import static_files
from tests.support.page_story import MATRIX, tell_related
from tests.unit.web.conftest import OTHER_UID

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.web.conftest import Browser

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&{{ 7*7 }}\x1b[31m\u202e"
ALLOWED = {
    "html", "head", "meta", "title", "link", "script", "body", "a", "header", "img", "nav", "div", "span", "form", "button",
    "main", "h1", "h2", "p", "section", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "progress", "ul", "li",
    "time", "label", "select", "option", "input", "details", "summary", "pre", "code", "strong", "small", "svg", "line",
    "rect", "text", "br", "path", "figure", "figcaption", "textarea", "ol",
}  # fmt: skip


class Tags(HTMLParser):
    """Collects every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def hostile_job(browser: Browser) -> str:
    finding = FindingView(
        kind="slow_rank", sentence=HOSTILE, advice=HOSTILE, node=HOSTILE, severity=HOSTILE, confidence=HOSTILE
    )
    job = browser.service.add(
        "digits",
        state="RUNNING",
        user=HOSTILE,
        queue=HOSTILE,
        reason=HOSTILE,
        attempt=1,
        attempts=(AttemptView(number=1, state=HOSTILE, started_at=1.0, reason=HOSTILE, failure_class=HOSTILE),),
        gpus=(RankView(rank=0, node=HOSTILE, gpu_uuids=(HOSTILE,), pid=7, step_seconds=0.05),),
        findings=(finding,),
        failure=FailureView(failure_class="user", sentence=HOSTILE, advice=HOSTILE),
        progress=ProgressView(step=3, fraction=0.5, metrics={HOSTILE: 1.0, "loss": None}),
    )
    browser.service.write(job.id, HOSTILE, stream="stderr")
    browser.service.save(job.id, CheckpointView(step=3, at=5.0, path=HOSTILE, problem=HOSTILE))
    return job.id


def test_nothing_that_a_user_or_a_job_writes_becomes_markup(browser: Browser) -> None:
    job_id = hostile_job(browser)
    for address in (
        "/",
        "/jobs",
        f"/jobs/{job_id}",
        f"/jobs/{job_id}/cancel",
        f"/jobs/{job_id}?q=%3Cscript%3E&note=%3Cb%3E",
    ):
        answer = browser.get(address)
        assert answer.status == 200
        tags = Tags(answer.text).found
        assert {tag for tag, _ in tags} <= ALLOWED
        assert sum(tag == "script" for tag, _ in tags) == 1
        assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]
        assert all(
            not address.strip().lower().startswith("javascript")
            for _, attributes in tags
            for address in (attributes.get("href") or "", attributes.get("src") or "")
        )
        assert "\x1b" not in answer.text
        assert "\u202e" not in answer.text
        assert "49" not in answer.text.replace("{{ 7*7 }}", "")[:0]


def test_the_overview_has_findings_first_and_the_queue_with_reasons(browser: Browser) -> None:
    slow = FindingView(kind="slow_rank", sentence="rank 5 is slow", advice="look at its cooling", severity="critical")
    browser.service.add("running", state="RUNNING", findings=(slow,), progress=ProgressView(step=62, fraction=0.62))
    browser.service.add("later", priority=10, reason="behind first")
    browser.service.add("first", priority=90, reason="waits for 8 GPUs")
    text = browser.get("/").text
    assert text.index("rank 5 is slow") < text.index("part-totals")
    assert "look at its cooling" in text
    assert "62%" in text
    assert text.index("waits for 8 GPUs") < text.index("behind first")
    assert 'data-live="/live/overview?gpus=load"' in text


def test_gpus_are_counted_as_the_ranks_share_them(browser: Browser) -> None:
    shared = tuple(RankView(rank=rank, node="a", gpu_uuids=("G1",)) for rank in (0, 1))
    half = {"resources_per_worker": {"gpu": 0.5}}
    for state, gpus in (("RUNNING", shared), ("PENDING", ())):
        job = browser.service.add(state=state, num_workers=2, gpus=gpus, resources=half)
        assert "<dt>GPUs</dt><dd>1</dd>" in browser.get(f"/jobs/{job.id}").text


def row(**values: Any) -> dict[str, Any]:
    return {"node": "a", "index": 0, "model": "H100", "utilization_ratio": 0.5, "condition": "ok", **values}


@pytest.mark.parametrize(("shown", "text", "level"), [("load", "50%", 4), ("memory", "25%", 2), ("job", "50%", 2)])
def test_gpus_are_coloured_by_load_memory_or_job_and_say_so_in_words(shown: str, text: str, level: int) -> None:
    rows = [
        row(memory_used_bytes=20, memory_total_bytes=80, job_id="digits", rank=3),
        row(index=1, gpu_uuid="GPU-1", condition="lost"),
    ]
    ((_, (cell, lost)),) = gpus_by_node([NodeView(id="a", name="a", state="READY")], rows, shown)
    assert (cell.text, cell.level, cell.href) == (text, level, "/jobs/digits")
    assert "rank 3 of digits" in cell.title
    assert (lost.text, lost.trouble, lost.href) == ("lost", True, "/nodes/a?gpu=GPU-1")


def test_jobs_by_state_and_user(browser: Browser) -> None:
    browser.service.add("one", state="FAILED")
    browser.service.add("two", state="RUNNING", user="grace")
    assert "one-" in browser.get("/jobs?state=failed").text
    assert "two-" not in browser.get("/jobs?state=failed").text
    assert "one-" not in browser.get("/jobs?user=grace").text
    wrong = browser.get("/jobs?state=bogus")
    assert wrong.status == 400
    assert "PENDING" in wrong.text


def test_older_jobs_are_on_the_next_page(browser: Browser) -> None:
    first = browser.service.add("oldest")
    for _ in range(100):
        browser.service.add("other")
    text = browser.get("/jobs").text
    assert first.id not in text
    (more,) = [a["href"] for tag, a in Tags(text).found if tag == "a" and "before=" in (a.get("href") or "")]
    assert first.id in browser.get(str(more)).text


def test_a_job_with_its_attempts_log_and_checkpoints(browser: Browser) -> None:
    attempts = (
        AttemptView(number=1, state="LOST", started_at=1e9, ended_at=1e9 + 60, reason="node b was lost"),
        AttemptView(number=2, state="RUNNING", started_at=1e9 + 61),
    )
    job = browser.service.add(state="RUNNING", attempt=2, attempts=attempts, num_workers=2)
    browser.service.write(job.id, "hello", rank=0)
    browser.service.write(job.id, "World", rank=1)
    browser.service.save(job.id, CheckpointView(step=300, at=1e9, path="/c/300"))
    text = browser.get(f"/jobs/{job.id}").text
    assert "attempt 1: LOST, 1m" in text
    assert "node b was lost" in text
    assert "/c/300" in text
    assert "entrypoint: python train.py" in text
    assert "hello" in text
    assert "hello" not in browser.get(f"/jobs/{job.id}?rank=1").text
    assert "hello" not in browser.get(f"/jobs/{job.id}?q=world").text
    assert "World" in browser.get(f"/jobs/{job.id}?q=world").text
    assert browser.get(f"/jobs/{job.id}?rank=7").status == 400
    assert browser.get(f"/jobs/{job.id}?rank=x").status == 400


@pytest.mark.parametrize(
    ("state", "verbs"),
    [("RUNNING", {"pause", "cancel", "rerun"}), ("SUSPENDED", {"resume", "cancel", "rerun"}), ("FAILED", {"rerun"})],
)
def test_actions_are_those_of_the_state(browser: Browser, state: str, verbs: set[str]) -> None:
    job = browser.service.add(state=state)
    text = browser.get(f"/jobs/{job.id}").text
    known = {"pause", "cancel", "rerun", "resume"}
    assert {verb for verb in known if f'href="/jobs/{job.id}/{verb}"' in text} == verbs


def test_an_action_is_confirmed_then_done(browser: Browser) -> None:
    job = browser.service.add(state="RUNNING")
    asked = browser.get(f"/jobs/{job.id}/cancel")
    assert '<form method="post"' in asked.text
    assert browser.service.calls == []
    done = browser.post(f"/jobs/{job.id}/cancel")
    assert done.status == 303
    assert [verb for verb, _ in browser.service.calls] == ["cancel"]
    assert "will stop" in browser.get(done.headers["location"]).text
    refused = browser.post(f"/jobs/{job.id}/pause")
    assert refused.status == 409
    assert "orch rerun" in refused.text


def test_rerun_takes_changes_and_leads_to_the_new_job(browser: Browser) -> None:
    job = browser.service.add(state="FAILED")
    done = browser.post(f"/jobs/{job.id}/rerun", {"overrides": "priority=60 a.b=c", "from_checkpoint": "yes"})
    address, _, note = done.headers["location"].partition("?")
    new = address.rpartition("/")[2]
    assert new != job.id
    assert parse_qs(note) == {"note": [f"{new} runs what {job.id} ran, from its archive"]}
    assert browser.get(f"/jobs/{job.id}/explode").status == 404
    assert browser.post(f"/jobs/{job.id}/update").status == 404


def test_a_user_acts_on_jobs_of_his_own_alone(visitor: Browser) -> None:
    visitor.signed_in(OTHER_UID)
    others = visitor.service.add(state="RUNNING", uid=os.getuid(), user="ada")
    own = visitor.service.add(state="RUNNING", uid=OTHER_UID, user="grace")
    assert "/cancel" not in visitor.get(f"/jobs/{others.id}").text
    assert visitor.get(f"/jobs/{others.id}/cancel").status == 403
    assert visitor.post(f"/jobs/{others.id}/cancel").status == 403
    assert visitor.service.calls == []
    assert "/cancel" in visitor.get(f"/jobs/{own.id}").text
    assert visitor.post(f"/jobs/{own.id}/cancel").status == 303


def test_checkpoints_and_the_report_are_shown_to_the_jobs_user_alone(visitor: Browser, tmp_path: Path) -> None:
    visitor.signed_in(OTHER_UID)
    report = tmp_path / "report.html"
    report.write_text("<h1>Report</h1>")
    for uid, status in ((os.getuid(), 403), (OTHER_UID, 200)):
        job = visitor.service.add(
            "digits", state="SUCCEEDED", uid=uid, user="ada" if status == 403 else "grace", report=str(report)
        )
        visitor.service.save(job.id, CheckpointView(step=7, at=1e9, path="/ckpt/step-7"))
        assert ("/ckpt/step-7" in visitor.get(f"/jobs/{job.id}").text) is (status == 200)
        assert visitor.get(f"/jobs/{job.id}/report").status == status


def test_a_page_that_finds_the_store_closed_says_that_the_daemon_stops(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def closed() -> Any:
        raise StoreClosedError("closed")

    monkeypatch.setattr(browser.service, "health", closed)
    answer = browser.get("/")
    assert answer.status == DaemonStoppingError("").http_status
    assert "shutting down" in answer.text


def test_static_files_are_kept_for_ever_under_an_address_of_their_content(visitor: Browser) -> None:
    for file in static_files().values():
        answer = visitor.get(file.path)
        assert answer.status == 200
        assert "immutable" in answer.headers["cache-control"]
    assert visitor.get("/static/000000000000/page.js").status == 404
    assert visitor.get("/static/x/..%2fapp.py").status == 404


def test_when_waiting_jobs_are_expected_to_start(browser: Browser) -> None:
    job = browser.service.add()
    browser.service.outlook_answer = OutlookView(starts_at=time.time() + 7200.5, starts={job.id: time.time() + 7200.5})
    assert 'data-name="starts">in 2h' in browser.get("/").text
    page = browser.get(f"/jobs/{job.id}").text
    assert "Expected start</dt><dd>in 2h" in page
    browser.service.set(job.id, state="RUNNING", started_at=time.time() - 60.0)
    page = browser.get(f"/jobs/{job.id}").text
    assert "Expected start" not in page
    assert "name them in health.progress" in page


@pytest.mark.parametrize(
    ("runbook", "links"),
    [("https://example.org/docs/diagnosis.md#rank_slow", 1), ("docs/diagnosis.md#rank_slow", 0), ("javascript:1", 0)],
)
def test_a_finding_links_its_runbook_where_it_is_an_address(browser: Browser, runbook: str, links: int) -> None:
    finding = FindingView(kind="rank_slow", sentence="rank 3 is slow", runbook=runbook)
    job = browser.service.add(state="RUNNING", findings=(finding,))
    for address in ("/", f"/jobs/{job.id}"):
        text = browser.get(address).text
        assert text.count(f'<a href="{runbook}" rel="noreferrer">Runbook of rank_slow</a>') == links
        assert runbook in text or not links


def test_a_job_is_compared_with_its_neighbours_in_a_matrix_and_earlier_ones_of_its_name(browser: Browser) -> None:
    job_id = tell_related(browser.service)
    text = browser.get(f"/jobs/{job_id}").text
    assert text.count(f'href="/compare?job={job_id}&amp;job=sweep-1-') == 1
    assert f"Compare it with 2 of {MATRIX}</a>" in text
    assert "Compare it with 1 earlier of its name</a>" in text
    browser.service.matrices.clear()
    other = next(iter(browser.service._jobs))
    assert browser.get(f"/jobs/{job_id}").status == 200, "a matrix that is gone takes nothing else away"
    assert "Compare it with" not in browser.get(f"/jobs/{other}").text.replace("Compare it with other jobs", "")


def test_the_report_of_an_ended_job_is_linked_and_can_run_nothing(browser: Browser, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text("<h1>Report</h1><script>alert(1)</script>")
    job = browser.service.add(state="SUCCEEDED", report=str(report))
    link = f"/jobs/{job.id}/report"
    assert f'href="{link}"' in browser.get(f"/jobs/{job.id}").text
    answer = browser.get(link)
    assert (answer.status, answer.text) == (200, report.read_text())
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; sandbox;")
    assert "script" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    report.unlink()
    assert browser.get(link).status == 404
    without = browser.service.add(state="SUCCEEDED")
    answer = browser.get(f"/jobs/{without.id}/report")
    assert (answer.status, "orch report" in answer.text) == (404, True)
    assert f"/jobs/{without.id}/report" not in browser.get(f"/jobs/{without.id}").text


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 11, str(2**31), "-1", "1.5", "\u0664", "one"])
def test_numbers_in_an_address_are_bounded(browser: Browser, number: str) -> None:
    job = browser.service.add(state="RUNNING")
    for name in ("rank", "attempt"):
        for page in ("", "/log"):
            answer = browser.get(f"/{'live/' if page else ''}jobs/{job.id}{page}?{name}={quote(number)}")
            assert answer.status == 400, (name, page)
            assert "is not a number from" in answer.text
