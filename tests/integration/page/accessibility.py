"""What axe-core finds on a page, and how much wider than the screen it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from playwright.sync_api import Page

AXE_RULES: Final = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def violations(page: Page, kind: str, names: list[str]) -> list[Any]:
    """What the rules, or those that have one of the tags, find; axe-core has been loaded into the page."""
    only = {"type": kind, "values": names}
    found = page.evaluate("(only) => axe.run(document, {runOnly: only})", only)
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]]


def excess_width(page: Page) -> int:
    """By how many pixels the page is wider than the screen."""
    root = "document.documentElement"
    return int(page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))
