"""Fixtures: a fake orch behind real sockets, and a client for each of its endpoints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from orchestrator.api.client import Client
from orchestrator.api.server.testing import ServedFake, serve_fake

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "a-token-of-the-owner"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedFake]:
    with serve_fake(tmp_path, owner_uid=os.getuid(), token=TOKEN) as fake:
        yield fake


@pytest.fixture
def client(served: ServedFake) -> Client:
    return Client(served.endpoint, environ={"PATH": "/usr/bin", "HF_TOKEN": "hf-secret"}, deadline_seconds=300)
