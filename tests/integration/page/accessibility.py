"""Checks of a page: the violations that axe-core finds, and the width beyond the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from playwright.sync_api import Page

AXE_RULES: Final = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def violations(page: Page, kind: str, names: list[str]) -> list[Any]:
    """Return what axe-core, already loaded into the page, finds with the rules named or the rules of the tags."""
    only = {"type": kind, "values": names}
    found = page.evaluate("(only) => axe.run(document, {runOnly: only})", only)
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]]


def excess_width(page: Page) -> int:
    """Return by how many pixels the page is wider than the screen."""
    root = "document.documentElement"
    return int(page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))
