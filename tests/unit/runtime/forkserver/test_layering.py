"""The server side runs in the user's interpreter: it may import the standard library and torch, and nothing of orch."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import orchestrator.runtime.forkserver as package
from tests.support.trees import tree_of

FOLDER = Path(package.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


def test_imports() -> None:
    assert FILES
    for path in FILES:
        imported = set()
        for node in ast.walk(tree_of(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add((node.module or "").partition(".")[0])
        assert imported <= sys.stdlib_module_names | {"torch"}, path.name
