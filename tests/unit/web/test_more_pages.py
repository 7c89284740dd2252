"""Pages of nodes, comparison and submission."""

from __future__ import annotations

import html
import os
import re
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.api.curve_views import ChartView, CurvesView, CurveView, GpuHistoryView, GpuUseView
from orchestrator.api.errors import InvalidSpecError, Problem
from orchestrator.api.views import ReservationView, SubmitReply
from orchestrator.web.submit_page import FIRST
from tests.support.page_story import gpu_row
from tests.unit.web.conftest import OTHER_UID, Browser


def form(browser: Browser, **fields: str) -> dict[str, str]:
    key = re.search(r'name="key" value="(\w+)"', browser.get("/submit").text)
    assert key is not None
    return {"key": key[1], "cwd": "/work", "yaml": "name: new\nentrypoint: python train.py\n", **fields}


def test_a_node_with_its_gpus_their_jobs_and_its_history(browser: Browser) -> None:
    job = browser.service.add("digits", state="RUNNING")
    browser.service.gpu_rows = [gpu_row(0, job.id), gpu_row(7, job.id), {**gpu_row(0, job.id), "node": "elsewhere"}]
    uses = tuple(GpuUseView(gpu_uuid=f"GPU-{n}", job_id=f"old-{n}", begin=1.0, end=2.0) for n in (0, 7))
    browser.service.history = GpuHistoryView(uses=uses, begin=1.0, end=2.0)
    text = browser.get("/nodes/node-a").text
    assert 'GPUs <span class="count">2</span>' in text
    assert "Xid 79" in text
    assert "quarantined" in text
    assert "/jobs/old-7" in text
    one = browser.get("/nodes/node-a?gpu=GPU-0").text
    assert "/jobs/old-0" in one
    assert "/jobs/old-7" not in one
    assert browser.get("/nodes/node-a?gpu=GPU-9").status == 404
    assert browser.get("/nodes/nothing").status == 404
    assert browser.get(f"/nodes/{'a' * 8}").headers["location"] == "/nodes/node-a"


@pytest.mark.parametrize(("verb", "state"), [("cordon", "CORDONED"), ("drain", "DRAINING")])
def test_a_node_is_cordoned_after_a_confirmation(browser: Browser, verb: str, state: str) -> None:
    assert f'href="/nodes/node-a/{verb}"' in browser.get("/nodes/node-a").text
    assert '<form method="post"' in browser.get(f"/nodes/node-a/{verb}").text
    assert browser.service.calls == []
    done = browser.post(f"/nodes/node-a/{verb}")
    assert done.status == 303
    assert [one for one, _ in browser.service.calls] == [verb]
    after = browser.get("/nodes/node-a").text
    assert state in after
    assert 'href="/nodes/node-a/uncordon"' in after
    assert browser.get("/nodes/node-a/explode").status == 404


def test_the_labels_and_reservations_of_a_node_are_shown(browser: Browser) -> None:
    assert "Labels" not in browser.get("/nodes/node-a").text
    one = ReservationView(id="r1", start_at=1_790_000_000.0, end_at=1_790_003_600.0, reason="new <driver>")
    there = browser.service._nodes["node-a"]
    browser.service._nodes["node-a"] = replace(
        there, state="RESERVED", labels={"topology.rack": "r1", "disk": "<nvme>"}, reservations=(one,)
    )
    text = browser.get("/nodes/node-a").text
    assert "topology.rack=r1, disk=&lt;nvme&gt;" in text
    assert ": new &lt;driver&gt;" in text
    assert 'href="/nodes/node-a/drain"' in text
    assert 'href="/nodes/node-a/uncordon"' not in text


def test_nodes_are_the_owners(visitor: Browser) -> None:
    visitor.signed_in(OTHER_UID)
    assert "/cordon" not in visitor.get("/nodes/node-a").text
    assert visitor.get("/nodes/node-a/cordon").status == 403
    assert visitor.post("/nodes/node-a/cordon").status == 403
    assert visitor.service.calls == []


def loss(label: str, begin: float) -> CurveView:
    return CurveView(label=label, x=(begin, begin + 10), values=(1.0, 0.5), lows=(1.0, 0.5), highs=(1.0, 0.5))


def record(browser: Browser, job_id: str, begin: float) -> None:
    charts = (
        ChartView(name="loss", unit="", curves=(loss("loss", begin),)),
        ChartView(name="GPU load", unit="%", curves=(loss("GPU 0", begin), loss("GPU 1", begin))),
    )
    browser.service.recorded[job_id] = CurvesView(job_id=job_id, begin=begin, end=begin + 10, charts=charts)


def test_jobs_are_compared_by_step_and_by_time_from_their_own_begins(browser: Browser) -> None:
    one, two = browser.service.add("one", state="FAILED"), browser.service.add("two", state="RUNNING")
    record(browser, one.id, 100.0)
    record(browser, two.id, 900.0)
    by_time = browser.get(f"/compare?job={one.id}&job=two&by=time").text
    assert by_time.count('data-x="0 1000"') == 2
    assert f'<span class="label">{one.id}</span>' in by_time
    assert "What two" in by_time
    assert '<td class="mono wide">one</td>' in by_time
    assert not [query for query in browser.service.curve_queries if query.by_step or not query.together]
    browser.get(f"/compare?job={one.id}+{two.id}")
    assert all(query.by_step for query in browser.service.curve_queries[-2:])
    browser.get(f"/compare?job={two.id}&by=time&from=2&to=5")
    assert (browser.service.curve_queries[-1].since, browser.service.curve_queries[-1].until) == (902.0, 905.0)


def test_what_cannot_be_compared_is_refused(browser: Browser) -> None:
    assert browser.get("/compare").status == 200
    assert browser.get("/compare?job=none").status == 404
    assert browser.get("/compare?by=colour").status == 400
    names = "&".join(f"job={browser.service.add(f'job-{n}').id}" for n in range(9))
    assert browser.get(f"/compare?{names}").status == 400


def test_a_job_is_checked_then_submitted_once(browser: Browser) -> None:
    assert "entrypoint: python train.py" in browser.get("/submit").text
    fields = form(browser)
    checked = browser.post("/submit", {**fields, "do": "check"})
    assert "two GPUs are free on node-a" in checked.text
    assert fields["key"] in checked.text
    assert browser.service.requests == []
    first = browser.post("/submit", {**fields, "do": "submit"})
    again = browser.post("/submit", {**fields, "do": "submit"})
    assert first.status == again.status == 303
    assert first.headers["location"].partition("?")[0] == again.headers["location"].partition("?")[0]
    (asked, _) = browser.service.requests
    assert (asked.cwd, asked.source, asked.yaml.count("\n")) == ("/work", "job.yaml", 2)


def test_errors_of_a_job_are_at_their_lines_and_the_text_is_kept(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [
        Problem("unknown key", "entrypiont", 2, 1, "did you mean entrypoint?", "job.yaml"),
        Problem("is missing", "name", None, None, "write it", "job.yaml"),
    ]

    async def refuse(*_: Any) -> Any:
        raise InvalidSpecError("job.yaml has 2 errors", problems=problems)

    monkeypatch.setattr(browser.service, "plan", refuse)
    text = "version: 1\nentrypiont: <b>\n\tx: 1\n"
    answer = browser.post("/submit", form(browser, yaml=text.replace("\n", "\r\n"), do="check"))
    assert answer.status == 422
    wrong = re.findall(r'<li class="wrong">.*?</li>', answer.text, re.DOTALL)
    assert len(wrong) == 1
    assert "entrypiont: &lt;b&gt;" in wrong[0]
    assert "did you mean entrypoint?" in wrong[0]
    assert "is missing" in answer.text
    kept = re.search(r"<textarea[^>]*>\n(.*?)</textarea>", answer.text, re.DOTALL)
    assert kept is not None
    assert html.unescape(kept[1]) == text


def test_values_that_are_masked_are_not_submitted_unseen(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    job = browser.service.add("digits")
    plain = browser.service.spec

    async def masked(job_id: Any) -> Any:
        return replace(await plain(job_id), masked=("API_KEY",))

    monkeypatch.setattr(browser.service, "spec", masked)
    assert "API_KEY" in browser.get(f"/submit?from={job.id}").text


def test_a_copy_of_a_job_is_the_beginning_of_a_new_one(browser: Browser) -> None:
    job = browser.service.add("digits", working_dir="/home/ada/digits")
    text = browser.get(f"/submit?from={job.id}").text
    assert "name: digits" in text
    assert 'value="/home/ada/digits"' in text
    assert FIRST not in text
    assert browser.get("/submit?from=none").status == 404


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"cwd": "work"}, "not an absolute directory"),
        ({"cwd": "/a\0b"}, "not an absolute directory"),
        ({"key": ""}, "load the page again"),
        ({"key": "../../etc/passwd-and-more"}, "load the page again"),
        ({"yaml": "x" * 2_000_000}, "KiB is refused"),
        ({"yaml": "name: x"}, "has one error"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused_beside_its_text(
    browser: Browser, fields: dict[str, str], told: str
) -> None:
    answer = browser.post("/submit", {**form(browser), **fields, "do": "submit"})
    assert answer.status in (400, 422)
    assert told in answer.text
    assert browser.service.accepted == {}


def test_secrets_are_not_asked_for_in_a_browser(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wanting(*_: Any) -> SubmitReply:
        return SubmitReply(job_id=None, created=False, state=None, needs_secrets=("HF_TOKEN",))

    monkeypatch.setattr(browser.service, "submit", wanting)
    answer = browser.post("/submit", form(browser, do="submit"))
    assert answer.status == 400
    assert "HF_TOKEN" in answer.text
    assert "orch submit job.yaml" in answer.text


def test_a_job_is_submitted_as_the_user_of_the_browser(visitor: Browser) -> None:
    visitor.signed_in(OTHER_UID)
    done = visitor.post("/submit", form(visitor, do="submit"))
    job_id = done.headers["location"].partition("?")[0].rpartition("/")[2]
    assert {job.uid for key, job in visitor.service._jobs.items() if key == job_id} == {OTHER_UID}
    assert os.getuid() != OTHER_UID


def test_a_form_of_too_many_fields_is_refused(browser: Browser) -> None:
    assert browser.post("/submit", {f"x{n}": "1" for n in range(40)}).status == 400
