"""Fixtures for tests of the training side."""

import pytest

from tests.support.pages import BothSides


@pytest.fixture
def page(tmp_path):
    """Yield a progress page for one test."""
    page = BothSides.create(tmp_path / "page")
    yield page
    page.close()
