"""Fixtures for tests of the training side."""

import pytest

from orchestrator.train.script.progress import ProgressPage


@pytest.fixture
def page(tmp_path):
    """Yield a progress page for one test."""
    page = ProgressPage.create(tmp_path / "page")
    yield page
    page.close()
