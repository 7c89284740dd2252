"""Takes the pictures of the page in docs/pictures: ``make pictures``. Needs chromium, and no daemon.

A digest of their sources is stored beside them: templates, style and the story. A test compares it, so that the
pictures are taken again when one of these changes.
"""

from __future__ import annotations

import hashlib
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from PIL import Image

from orchestrator.api.errors import InvalidSpecError, Problem
from tests.support.page_story import tell_story
from tests.support.served_page import ServedPage, started_chromium
from tests.support.stack import PATIENCE_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from orchestrator.api.views import PlanReply

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "docs" / "pictures"
DIGEST: Final = FOLDER / "digest"
SCHEMES: Final = ("light", "dark")
NAMES: Final = ("overview", "jobs", "job", "node", "compare", "submit")
COLOURS: Final = 160
SIZE: Final = {"width": 1100, "height": 700}
WRONG: Final = "version: 1\nname: digits\nentrypiont: python train.py\nresources:\n  num_workers: two\n"


def digest() -> str:
    """Return the digest of the pictures' sources, in hexadecimal."""
    web = ROOT / "orchestrator" / "web"
    files = [
        *web.glob("templates/*.html"),
        web / "static" / "page.css",
        Path(__file__),
        ROOT / "tests/support/page_story.py",
    ]
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def picture(name: str, scheme: str) -> Path:
    """Return the path of a picture."""
    return FOLDER / f"page-{name}-{scheme}.png"


def take(browser: Browser, served: ServedPage, scheme: str) -> None:
    """Take a picture of every page in one colour scheme."""
    job_id = served.do(tell_story)
    broken = served.do(lambda service: next(key for key in service._jobs if key.startswith("broken")))
    addresses = {
        "overview": "/",
        "jobs": "/jobs",
        "job": f"/jobs/{job_id}",
        "node": "/nodes/node-a",
        "compare": f"/compare?job={broken}&job={job_id}&by=time",
        "submit": "/submit",
    }
    served.service.plan = _refuse  # type: ignore[method-assign]  # the fake has no schema
    context = browser.new_context(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]  # light or dark
    context.set_default_timeout(1000.0 * PATIENCE_SECONDS)
    tab = context.new_page()
    tab.goto(served.link())
    for name in NAMES:
        tab.goto(f"{served.address}{addresses[name]}")
        if name == "submit":
            tab.get_by_label("job.yaml", exact=True).fill(WRONG)
            tab.get_by_role("button", name="Check").click()
            tab.locator(".wrong").first.wait_for()
        elif name in ("overview", "job", "node"):
            tab.locator("#connection[data-state=live]").wait_for()
        if tab.locator(".plot").count():
            tab.locator(".plot").first.hover(position={"x": 130, "y": 60})
        seen = Image.open(BytesIO(tab.screenshot(full_page=True)))
        seen.convert("RGB").quantize(COLOURS).save(picture(name, scheme), optimize=True)
    context.close()


async def _refuse(*_: object) -> PlanReply:
    problems = [
        Problem("there is no such key", "entrypiont", 3, 1, "did you mean entrypoint?", "job.yaml"),
        Problem("expected a whole number from 1 on, found two", "resources.num_workers", 5, 16, "", "job.yaml"),
    ]
    raise InvalidSpecError("job.yaml has 2 errors", problems=problems)


def main() -> None:
    """Take all pictures, and write their digest."""
    FOLDER.mkdir(exist_ok=True)
    with started_chromium() as browser:
        for scheme in SCHEMES:
            with ServedPage().running() as served:
                take(browser, served, scheme)
    DIGEST.write_text(f"{digest()}\n")


if __name__ == "__main__":
    main()
