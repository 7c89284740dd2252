"""What tests of the training side share."""

import pytest

from orchestrator.train.script.progress import ProgressPage


@pytest.fixture
def page(tmp_path):
    """A progress page of the test's own."""
    page = ProgressPage.create(tmp_path / "page")
    yield page
    page.close()
