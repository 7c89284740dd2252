"""The page in a real browser: each page, each action, live updates, and the permissions of users."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from orchestrator.api.views import ProgressView
from tests.integration.page.accessibility import AXE_RULES, excess_width, violations
from tests.support.page_story import HOSTILE, MATRIX, recorded, tell_hostile, tell_related, tell_story
from tests.support.served_page import PHONE, ServedPage
from tests.support.stack import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

    from orchestrator.api.views import HealthView

OTHER_UID = 54321


def addresses(job_id: str, failed_id: str) -> list[str]:
    return [
        "/",
        "/?gpus=memory",
        "/jobs",
        "/jobs?state=failed",
        f"/jobs/{job_id}",
        f"/jobs/{failed_id}?q=nan",
        f"/jobs/{job_id}/cancel",
        f"/jobs/{job_id}/rerun",
        f"/jobs/{job_id}?from=1&to=1e10",
        "/nodes/node-a",
        "/nodes/node-a?gpu=GPU-1",
        "/nodes/node-b/uncordon",
        f"/compare?job={job_id}&job={failed_id}&by=time",
        "/compare",
        "/submit",
        "/jobs/none",
    ]


def story(served: ServedPage) -> list[str]:
    job_id = served.do(tell_story)
    failed = served.do(lambda service: next(key for key in service._jobs if key.startswith("broken")))
    return [f"{served.address}{one}" for one in addresses(job_id, failed)]


@pytest.mark.parametrize(
    ("size", "scheme", "other_scheme"),
    [("desk", "light", "dark"), pytest.param("phone", "dark", "light", marks=pytest.mark.rare)],
)
def test_no_page_has_a_violation_of_accessibility_or_is_wider_than_the_screen(
    served: ServedPage,
    new_page: Callable[..., Page],
    axe: str,
    size: str,
    scheme: str,
    other_scheme: str,
    errors: list[str],
) -> None:
    """All rules are checked in one color scheme at each size, and the rule about contrast in the other scheme."""
    pages = story(served)
    page = new_page(color_scheme=scheme, reduced_motion="reduce", **({"viewport": PHONE} if size == "phone" else {}))
    for address in pages:
        page.goto(address)
        page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        page.evaluate(axe)
        assert violations(page, "tag", AXE_RULES) == [], address
        page.emulate_media(color_scheme=other_scheme)
        assert violations(page, "rule", ["color-contrast"]) == [], (address, other_scheme)
        page.emulate_media(color_scheme=scheme)
        assert excess_width(page) <= 0, address
    errors[:] = [one for one in errors if "404" not in one]  # the page of a job that does not exist


@pytest.mark.rare
def test_long_paths_in_problems_and_notes_fit_a_phone(
    served: ServedPage, new_page: Callable[..., Page], errors: list[str]
) -> None:
    path = "/srv/" + "a-directory-with-a-long-name/" * 4
    plain = served.service.health

    async def health() -> HealthView:
        return replace(await plain(), problems=(f"{path} is full",))

    served.service.health = health  # type: ignore[method-assign]  # the fake has no problem
    job = served.do(lambda service: service.add("digits", state="RUNNING", reason=f"waits for {path}"))
    page = new_page(viewport=PHONE)
    for address in (
        f"/?note={path}",
        f"/jobs/{job.id}",
        f"/jobs/{job.id}/cancel",
        f"/jobs/{path.replace('/', '-')}/cancel",
    ):
        page.goto(f"{served.address}{address}")
        assert excess_width(page) <= 0, address
    errors[:] = [one for one in errors if "404" not in one]  # the job that does not exist


def test_no_script_of_a_name_or_a_log_line_runs(served: ServedPage, page: Page) -> None:
    job_id = served.do(tell_hostile)
    for address in (
        "/",
        "/jobs",
        f"/jobs/{job_id}",
        f"/jobs/{job_id}/cancel",
        f"/jobs/{job_id}?q=%3Cscript%3E&note=%3Cb%3E",
        f"/compare?job={job_id}&by=time",
        "/nodes/node-a",
    ):
        page.goto(f"{served.address}{address}")
        expect(page.locator("main")).to_contain_text("script" if "cancel" not in address else "img")
        expect(page.locator("script")).to_have_count(1)
        expect(page.locator("[onerror], [onload], [style], img[src='x']")).to_have_count(0)
    page.goto(f"{served.address}/jobs/{job_id}")
    expect(page.locator("#connection")).to_have_text("live")
    served.do(lambda service: service.write(job_id, HOSTILE + " again"))
    expect(page.locator("#log")).to_contain_text("again")
    expect(page.locator("#log img, #log script, #log svg")).to_have_count(0)


@pytest.mark.rare
def test_the_policy_refuses_a_script_that_got_into_the_page_all_the_same(
    served: ServedPage, page: Page, errors: list[str]
) -> None:
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=\"x\" onerror=\"window.ran = 1\">')")
    page.evaluate(
        "const s = document.createElement('script'); s.textContent = 'window.ran = 2'; document.body.append(s)"
    )
    page.evaluate(
        "const s = document.createElement('style'); s.textContent = '*{display:none}'; document.body.append(s)"
    )
    wait_until("the picture was tried", lambda: page.evaluate("document.querySelector('img[src=x]').complete"))
    assert page.evaluate("window.ran") is None
    expect(page.locator("main")).to_be_visible()
    while len([one for one in errors if "Content Security Policy" in one]) < 3:
        page.wait_for_event("console")
    errors.clear()


def test_an_open_overview_follows_jobs(served: ServedPage, page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("live")
    job = served.do(lambda service: service.add("fresh", reason="waits for 2 GPUs"))
    expect(page.locator("#part-queue")).to_contain_text("waits for 2 GPUs")
    served.do(lambda service: service.set(job.id, state="RUNNING", progress=ProgressView(step=1, fraction=0.25)))
    expect(page.locator("#part-running")).to_contain_text("25%")
    expect(page.locator("#part-queue")).to_contain_text("Nothing waits")


def test_an_open_page_connects_again_after_a_restart_of_the_daemon(
    served: ServedPage, page: Page, errors: list[str]
) -> None:
    job = served.do(lambda service: service.add("digits", state="RUNNING", num_workers=2))
    page.goto(f"{served.address}/jobs/{job.id}")
    expect(page.locator("#connection")).to_have_text("live")
    served.stop()
    expect(page.locator("#connection")).to_have_text("reconnecting")
    served.start()
    served.do(lambda service: service.write(job.id, "after the restart"))
    served.do(lambda service: service.set(job.id, reason="goes on"))
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#part-head")).to_contain_text("goes on")
    expect(page.locator("#log")).to_contain_text("after the restart")
    errors[:] = [one for one in errors if not re.search("ERR_|EventSource", one)]


@pytest.mark.parametrize(
    ("verb", "state", "after"),
    [("cancel", "RUNNING", "CANCELLED"), ("pause", "RUNNING", "SUSPENDED"), ("resume", "SUSPENDED", "PENDING")],
)
def test_an_action_is_confirmed_and_done_by_keyboard(
    served: ServedPage, page: Page, verb: str, state: str, after: str
) -> None:
    job = served.do(lambda service: service.add("digits", state=state))
    page.goto(f"{served.address}/jobs/{job.id}")
    page.get_by_role("link", name=verb.capitalize(), exact=True).focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{served.address}/jobs/{job.id}/{verb}")
    assert served.service.calls == []
    page.get_by_role("button", name=verb.capitalize(), exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#part-head")).to_contain_text(after)
    expect(page.locator(".note")).to_contain_text(job.id)
    assert [one for one, _ in served.service.calls if one != "outlook"] == [verb]


def test_rerun_leads_to_the_new_job(served: ServedPage, page: Page) -> None:
    job = served.do(lambda service: service.add("digits", state="FAILED"))
    page.goto(f"{served.address}/jobs/{job.id}/rerun")
    page.get_by_label("Changes").fill("priority=60")
    page.get_by_role("button", name="Rerun").click()
    page.wait_for_url(re.compile("note="))
    expect(page).not_to_have_url(re.compile(rf"/jobs/{job.id}"))


@pytest.mark.rare
def test_a_dialog_can_be_left_without_acting(served: ServedPage, page: Page) -> None:
    job = served.do(lambda service: service.add("digits", state="RUNNING"))
    page.goto(f"{served.address}/jobs/{job.id}/cancel")
    page.locator("main").get_by_role("link").click()
    expect(page).to_have_url(f"{served.address}/jobs/{job.id}")
    assert served.service.calls == []


def test_two_users_each_act_on_jobs_of_their_own(
    served: ServedPage, new_page: Callable[..., Page], errors: list[str]
) -> None:
    job = served.do(lambda service: service.add("digits", state="RUNNING", uid=OTHER_UID, user="grace"))
    others = served.do(lambda service: service.add("vision", state="RUNNING", uid=4242, user="linus"))
    owner, grace = new_page(), new_page(OTHER_UID)
    for page, may in ((owner, 2), (grace, 1)):
        page.goto(f"{served.address}/jobs/{job.id}")
        expect(page.locator(".actions").get_by_role("link", name="Cancel")).to_have_count(1)
        page.goto(f"{served.address}/jobs/{others.id}")
        expect(page.locator(".actions").get_by_role("link", name="Cancel")).to_have_count(may - 1)
    refused = grace.goto(f"{served.address}/jobs/{others.id}/cancel")
    assert refused is not None
    assert refused.status == 403
    expect(grace.locator("main")).to_contain_text("linus")
    errors[:] = [one for one in errors if "403" not in one]


def test_a_link_signs_in_once_with_a_cookie_that_scripts_and_other_sites_do_not_get(
    served: ServedPage, new_page: Callable[..., Page], errors: list[str]
) -> None:
    page = new_page()
    link = served.link()
    page.context.clear_cookies()
    page.goto(link)
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert page.evaluate("document.cookie") == ""
    expect(page).not_to_have_url(re.compile("link="))
    again = page.goto(link)
    assert again is not None
    assert again.status == 401
    page.goto(served.address)
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("main")).to_contain_text("Signed out")
    refused = page.goto(served.address)
    assert refused is not None
    assert refused.status == 401
    errors[:] = [one for one in errors if "401" not in one]


@pytest.mark.rare
def test_the_page_is_in_no_frame(served: ServedPage, new_page: Callable[..., Page], errors: list[str]) -> None:
    page = new_page()
    page.goto("about:blank")
    page.set_content(f"<iframe src='{served.address}/'></iframe>")
    wait_until(
        "it is another origin's", lambda: page.evaluate("document.querySelector('iframe').contentDocument === null")
    )
    (frame,) = page.frames[1:]
    expect(frame.locator("main")).to_have_count(0)
    errors.clear()


def test_the_log_follows_and_is_searched_by_rank(served: ServedPage, page: Page) -> None:
    job_id = served.do(tell_story)
    page.goto(f"{served.address}/jobs/{job_id}")
    expect(page.locator("#log .line")).to_have_count(4)
    served.do(lambda service: service.write(job_id, "loss 0.25", rank=2, attempt=2))
    expect(page.locator("#log .line").last).to_contain_text("loss 0.25")
    page.locator("select[name=rank]").select_option("2")
    page.get_by_label("Contains").fill("LOSS")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url(re.compile("rank=2.*q=LOSS"))
    expect(page.locator("#log .line")).to_have_count(1)


@pytest.mark.rare
def test_the_first_tab_stop_leads_past_the_navigation(served: ServedPage, page: Page) -> None:
    page.goto(served.address)
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to content")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#main$"))


def test_a_page_works_without_javascript(served: ServedPage, new_page: Callable[..., Page]) -> None:
    job_id = served.do(tell_story)
    page = new_page(java_script_enabled=False)
    page.goto(f"{served.address}/jobs/{job_id}")
    expect(page.locator("#log .line")).to_have_count(4)
    page.get_by_role("link", name="Pause").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#part-head")).to_contain_text("SUSPENDED")


def charted(served: ServedPage, page: Page) -> str:
    job_id: str = served.do(tell_story)
    page.goto(f"{served.address}/jobs/{job_id}")
    expect(page.locator(".chart")).to_have_count(6)
    return job_id


def test_pointing_at_one_chart_shows_the_figures_of_that_time_in_all(served: ServedPage, page: Page) -> None:
    charted(served, page)
    load = page.locator(".chart", has_text="GPU load")
    last = load.locator(".value").first.inner_text()
    load.locator(".plot").hover()
    expect(load.locator(".at")).to_have_text(re.compile(r"^\d\d:\d\d:\d\d$"))
    expect(load.locator(".value").first).not_to_have_text(last)
    time, place = load.locator(".at").inner_text(), load.locator(".cursor").get_attribute("d")
    assert place
    for chart in page.locator(".chart").all():
        expect(chart.locator(".at")).to_have_text(time)
        expect(chart.locator(".cursor")).to_have_attribute("d", place)
    page.mouse.move(5, 5)
    expect(load.locator(".value").first).to_have_text(last)


@pytest.mark.rare
def test_dragging_over_a_chart_leads_to_the_address_of_that_part_and_back(served: ServedPage, page: Page) -> None:
    job_id = charted(served, page)
    plot = page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile(r"from=\d+.*to=\d+.*#charts"))
    whole = served.service.recorded[job_id]
    since, until = served.service.curve_queries[-1].since, served.service.curve_queries[-1].until
    assert since is not None
    assert until is not None
    length = whole.end - whole.begin
    assert (since, until) == pytest.approx((whole.begin + 0.25 * length, whole.begin + 0.5 * length), abs=0.02 * length)
    page.get_by_role("link", name="All", exact=True).click()
    page.wait_for_url(re.compile(r"/jobs/[^?]*#charts$"))


@pytest.mark.rare
def test_a_chart_is_read_by_keyboard(served: ServedPage, page: Page) -> None:
    charted(served, page)
    plot = page.locator(".chart", has_text="GPU power").locator(".plot")
    plot.focus()
    page.keyboard.press("Home")
    announcement = page.locator("#announcement")
    expect(announcement).to_have_text(
        re.compile(r"^\d\d:\d\d:\d\d: GPU 0 [\d.]+, GPU 1 [\d.]+, GPU 2 [\d.]+, GPU 3 [\d.]+$")
    )
    first = announcement.inner_text()
    page.keyboard.press("Shift+ArrowRight")
    expect(announcement).not_to_have_text(first)
    page.keyboard.press("Escape")
    expect(page.locator(".chart .at").first).to_have_text("")


@pytest.mark.rare
def test_a_chart_that_is_pointed_at_stays_so_when_newer_ones_come(served: ServedPage, page: Page) -> None:
    job_id = charted(served, page)
    page.locator(".chart", has_text="GPU load").locator(".plot").hover()
    expect(page.locator(".chart .at").first).not_to_have_text("")
    served.do(lambda service: service.recorded.update({job_id: recorded(job_id, service.now - 3600, gpus=2)}))
    served.do(lambda service: service.set(job_id, reason="goes on"))
    expect(page.locator(".chart", has_text="GPU load").locator(".legend li")).to_have_count(2)
    expect(page.locator(".chart .cursor").first).not_to_have_attribute("d", "")
    expect(page.locator(".chart .at").first).not_to_have_text("")


@pytest.mark.rare
def test_a_node_is_cordoned_and_uncordoned_in_the_page(served: ServedPage, page: Page) -> None:
    served.do(tell_story)
    page.goto(served.address)
    page.get_by_role("link", name="node-a", exact=True).click()
    for verb, state in (("Cordon", "CORDONED"), ("Uncordon", "READY")):
        page.get_by_role("link", name=verb, exact=True).click()
        page.get_by_role("button", name=verb, exact=True).click()
        expect(page.locator("#part-head")).to_contain_text(state)
    assert [one for one, _ in served.service.calls if one != "outlook"] == ["cordon", "uncordon"]
    page.get_by_role("link", name="1", exact=True).first.click()
    page.wait_for_url(re.compile("gpu=GPU-1"))
    expect(page.locator("#part-uses tbody tr")).to_have_count(1)


@pytest.mark.rare
def test_jobs_are_chosen_and_compared(served: ServedPage, page: Page) -> None:
    served.do(tell_story)
    page.goto(f"{served.address}/jobs")
    for name in ("broken", "digits"):
        page.get_by_label(re.compile(f"compare {name}")).check()
    page.get_by_role("button", name="Compare the chosen jobs").click()
    expect(page.locator(".chart").first.locator(".legend li")).to_have_count(2)
    page.get_by_role("link", name="by time").click()
    page.wait_for_url(re.compile("by=time"))
    page.locator(".plot").first.hover()
    expect(page.locator(".chart .at").first).to_have_text(re.compile(r"^\d+s$"))


@pytest.mark.rare
def test_a_job_leads_to_comparisons_with_what_is_related_to_it(served: ServedPage, page: Page) -> None:
    job_id = served.do(tell_related)
    for link, jobs in (
        (f"Compare it with 2 of {MATRIX}", ("sweep-1", "sweep-0")),
        ("Compare it with 1 earlier of its name", ("digits",)),
        ("What it changes of digits", ("digits",)),
    ):
        page.goto(f"{served.address}/jobs/{job_id}")
        page.get_by_role("link", name=re.compile(link)).click()
        page.wait_for_url(re.compile(r"/compare\?job="))
        rows = page.locator("table.jobs tbody a")
        expect(rows).to_have_count(len(jobs) + 1)
        shown = rows.all_inner_texts()
        assert job_id in shown
        assert {one.rpartition("-")[0] for one in shown if one != job_id} == set(jobs)


@pytest.mark.rare
def test_the_report_of_a_job_is_linked_when_it_is_written(
    served: ServedPage, page: Page, tmp_path: Path, errors: list[str]
) -> None:
    report = tmp_path / "report.html"
    report.write_text("<!doctype html><title>r</title><h1>What it did</h1><script>document.title = 'ran'</script>")
    job = served.do(lambda service: service.add("digits", state="RUNNING"))
    page.goto(f"{served.address}/jobs/{job.id}")
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.get_by_role("link", name="Report")).to_have_count(0)
    served.do(lambda service: service.set(job.id, state="SUCCEEDED", report=str(report)))
    page.get_by_role("link", name="Report").click()
    expect(page.locator("h1")).to_have_text("What it did")
    expect(page).to_have_title("r")
    while not errors:
        page.wait_for_event("console")
    assert ["Blocked script execution" in one for one in errors] == [True]
    errors.clear()


def test_a_job_with_an_error_is_mended_checked_and_submitted(served: ServedPage, page: Page, errors: list[str]) -> None:
    page.goto(f"{served.address}/submit")
    page.get_by_label("job.yaml", exact=True).fill("name: new\n")
    page.get_by_role("button", name="Check").click()
    expect(page.locator(".numbered .wrong")).to_contain_text("is missing")
    page.get_by_label("job.yaml", exact=True).fill("name: new\nentrypoint: python train.py\n")
    page.get_by_role("button", name="Check").click()
    expect(page.locator("main")).to_contain_text("two GPUs are free on node-a")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile("/jobs/new-"))
    expect(page.locator(".note")).to_contain_text("was submitted")
    errors[:] = [one for one in errors if "422" not in one]
