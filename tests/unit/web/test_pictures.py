"""The pictures in docs/pictures are there, and show the page as it is."""

from __future__ import annotations

import re

import pytest

from tests.support.page_pictures import DIGEST, FOLDER, NAMES, ROOT, SCHEMES, digest, picture


def test_pictures_show_the_page_as_it_is() -> None:
    assert DIGEST.read_text().strip() == digest(), "the page was changed: make pictures"


@pytest.mark.parametrize("name", NAMES)
def test_each_page_has_a_picture_light_and_dark_that_the_documents_show(name: str) -> None:
    shown = re.findall(r"pictures/([\w.-]+\.png)", (ROOT / "docs" / "page.md").read_text())
    for scheme in SCHEMES:
        assert picture(name, scheme).read_bytes().startswith(b"\x89PNG")
        assert picture(name, scheme).name in shown


def test_no_other_picture_lies_there() -> None:
    assert {path.name for path in FOLDER.glob("page-*")} == {picture(n, s).name for n in NAMES for s in SCHEMES}
