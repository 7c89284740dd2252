"""The pictures in docs/pictures are there, and show the page as it is."""

from __future__ import annotations

from tests.support.page_pictures import DIGEST, digest


def test_pictures_show_the_page_as_it_is() -> None:
    assert DIGEST.read_text().strip() == digest(), "the page was changed: make pictures"
