"""Objects stay small: limits for the methods and attributes of a class, the lines of a file, the modules of a folder.

Larger ones are listed with their sizes. A listed size may only shrink, and an entry is removed when it is not needed.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.support.trees import tree_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "orchestrator"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)

MOST_METHODS = 16
MOST_ATTRIBUTES = 12
MOST_LINES = 400
MOST_MODULES = 16

METHODS: dict[str, int] = {
    "api/client.py:Client": 28,
    "api/server/testing.py:FakeService": 28,
    "checkpoint/storage/object_storage.py:ObjectStorage": 19,
    "checkpoint/storage/storage.py:LocalStorage": 21,
    "cli/top/app.py:TopApp": 18,
    "core/job/record.py:Job": 30,
    "daemon/loop.py:Loop": 19,
    "gpu/drivers/nvidia/device.py:Device": 25,
    "runtime/forkserver/keeper.py:Keeper": 26,
    "runtime/forkserver/serve.py:Server": 17,
    "runtime/memory/cluster.py:MemoryCluster": 20,
    "runtime/memory/gangs.py:MemoryGangs": 25,
    "runtime/nodes/agent.py:NodeAgent": 18,
    "spec/paths.py:Paths": 24,
    "store/memory.py:MemoryStore": 29,
    "store/sqlite.py:SqliteStore": 31,
    "train/script/progress.py:ProgressPage": 22,
    "train/script/training_context.py:Context": 21,
    "train/trainer/engine/trainer.py:MultiGPUTrainer": 28,
    "train/trainer/loop/manager.py:MultiGPUTrainingManager": 19,
}
ATTRIBUTES: dict[str, int] = {
    "api/server/testing.py:FakeService": 14,
    "api/server/testing.py:ServedFake": 13,
    "daemon/loop.py:Loop": 18,
    "gpu/sampler.py:Sampler": 16,
    "runtime/forkserver/keeper.py:Keeper": 20,
    "train/script/progress.py:ProgressPage": 24,
    "train/script/save_schedule.py:SaveSchedule": 14,
    "train/trainer/loop/manager.py:MultiGPUTrainingManager": 16,
    "runtime/ranks/output/log_progress.py:LogProgress": 13,
    "train/trainer/loop/reporting.py:Reporter": 13,
    "train/trainer/measure/metrics.py:MetricsCollector": 14,
}
LINES: dict[str, int] = {
    "api/server/testing.py": 465,
    "api/views.py": 492,
    "core/lifecycle/fold.py": 430,
    "runtime/forkserver/keeper.py": 474,
    "train/trainer/engine/trainer.py": 425,
}


def classes(path: Path) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield every class that is not a port: the methods of a port follow from its users."""
    for node in ast.walk(tree_of(path.read_text())):
        if isinstance(node, ast.ClassDef) and "Protocol" not in {b.id for b in node.bases if isinstance(b, ast.Name)}:
            yield f"{path.relative_to(PACKAGE)}:{node.name}", node


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that ``__init__`` assigns to ``self``."""
    return {
        target.attr
        for method in methods(node)
        if method.name == "__init__"
        for part in ast.walk(method)
        if isinstance(part, ast.Assign | ast.AnnAssign)
        for whole in (part.targets if isinstance(part, ast.Assign) else [part.target])
        for target in ast.walk(whole)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def unlisted(sizes: dict[str, int], most: int, listed: dict[str, int]) -> dict[str, int]:
    """Return the sizes above the limit, and the entries of the list that are no longer needed."""
    grown = {name: size for name, size in sizes.items() if size > max(most, listed.get(name, 0))}
    return grown | {name: sizes.get(name, 0) for name in listed if sizes.get(name, 0) <= most}


@functools.cache
def measured() -> dict[str, tuple[int, int]]:
    """Return the numbers of methods and attributes of each class."""
    return {name: (len(methods(node)), len(attributes(node))) for path in MODULES for name, node in classes(path)}


def test_a_class_has_few_methods() -> None:
    sizes = {name: size for name, (size, _) in measured().items()}
    assert unlisted(sizes, MOST_METHODS, METHODS) == {}, "make parts with few collaborators, or shorten the list"


def test_a_class_has_few_attributes() -> None:
    sizes = {name: size for name, (_, size) in measured().items()}
    assert unlisted(sizes, MOST_ATTRIBUTES, ATTRIBUTES) == {}, "make parts with few collaborators, or shorten the list"


def test_a_file_is_short() -> None:
    sizes = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in MODULES}
    assert unlisted(sizes, MOST_LINES, LINES) == {}, "split it, or shorten the list"


def test_a_folder_holds_few_modules() -> None:
    folders = {path.parent for path in MODULES}
    sizes = {str(f.relative_to(PACKAGE)): len([p for p in f.glob("*.py") if p.name != "__init__.py"]) for f in folders}
    assert unlisted(sizes, MOST_MODULES, {}) == {}, "make sub-packages"


def test_the_rule_counts_what_a_class_has() -> None:
    text = "class A:\n def __init__(self):\n  self.a, self._b = 1, 2\n  self.c: int = 3\n  other.d = 4\n def m(self): self.e = 5\n"
    (node,) = tree_of(text).body
    assert isinstance(node, ast.ClassDef)
    assert (attributes(node), len(methods(node))) == ({"a", "_b", "c"}, 2)
