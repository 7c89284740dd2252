"""Budgets of the whole package: how much there is to read, and how far it reaches into Ray and torch. `make lint` prints them.

The files of the flows are those that docs/architecture.md lists; `tests/integration/test_flows.py` follows them with a tracer.

A budget is lowered when its figure has fallen. One that has to rise does so in the commit that needs it, which says what for.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import flows
from tests.support.trees import tree_of

PACKAGE = Path(__file__).parents[2] / "orchestrator"

BUDGETS = {
    "lines of orchestrator/": 104_100,  # with the reader of shell text of `orch import`
    "Python files of orchestrator/": 428,
    "private names of Ray": 6,
    "files with private names of Ray": 2,
    "names of torch that are replaced": 3,
    "private names of torch that are replaced": 0,
    "files from `orch submit` to a first line": 113,
    "forms of a submission": 10,
    "files from a death to the next attempt": 81,
    "files from a sample to its alert": 20,
}

PRIVATE = re.compile(r"\._(?!_)|\.core\.generated\b")
BY_CONVENTION = {"torch": "torch", "distributed": "torch.distributed"}
"""What a parameter of this name is, where no import says so."""


class Names(ast.NodeVisitor):
    """The private names of Ray that a file uses, and the names of torch that it replaces.

    Private are names that begin with an underscore or are below one that does, and generated modules. What is read of an imported private
    name counts as that name. A name of Ray that is replaced counts as private: Ray does not document what calls it.
    """

    def __init__(self, source: str) -> None:
        self.private_of_ray: set[str] = set()
        self.replaced_of_torch: set[str] = set()
        self._known = dict(BY_CONVENTION)
        self.visit(tree_of(source))

    def full_name(self, node: ast.expr | None) -> str:
        """Return the dotted name of a value, from its package on; empty if it is none that is known."""
        match node:
            case ast.Name(id=name):
                return self._known.get(name, "")
            case (
                ast.Attribute(value=owner, attr=name)
                | ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_])
            ):
                known = self.full_name(owner)
                return f"{known}.{name}" if known else ""
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                return name if ast.unparse(function) in {"importlib.import_module", "sys.modules.get"} else ""
        return ""

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self._use(name.name)
            top = name.name.partition(".")[0]
            self._known[name.asname or top] = name.name if name.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names if not node.level else ():
            self._use(f"{node.module}.{name.name}")
            self._known[name.asname or name.name] = f"{node.module}.{name.name}"

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                self._assign(part, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._assign(target, None)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, name, *_]) if known := self.full_name(
                owner
            ):
                self._replace(f"{known}.{name.value if isinstance(name, ast.Constant) else '*'}")
        self._use(self.full_name(node))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        self._use(self.full_name(root))
        if not PRIVATE.search(self.full_name(root)):
            self._use(self.full_name(node))
        if not isinstance(root, ast.Name):
            self.visit(root)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and re.fullmatch(r"ray(\.\w+)+", node.value):
            self._use(node.value)

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name) and (known := self.full_name(value)):
            self._known[target.id] = known
        elif isinstance(target, ast.Attribute):
            self._replace(self.full_name(target))

    def _use(self, name: str) -> None:
        if name.startswith("ray.") and PRIVATE.search(name):
            self.private_of_ray.add(name)

    def _replace(self, name: str) -> None:
        if name.startswith("ray.") and not PRIVATE.search(name):
            self.private_of_ray.add(name)
        elif name.startswith("torch."):
            self.replaced_of_torch.add(name)


@functools.cache
def found() -> Mapping[str, int | dict[str, list[str]]]:
    """Return each figure; of names, the files of each."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    of_ray: dict[str, list[str]] = {}
    of_torch: dict[str, list[str]] = {}
    for path, source in sources.items():
        if "ray" in source or "torch" in source:
            names = Names(source)
            for used, files in ((names.private_of_ray, of_ray), (names.replaced_of_torch, of_torch)):
                for name in used:
                    files.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    by_file: dict[str, list[str]] = {}
    for name, files in of_ray.items():
        for file in files:
            by_file.setdefault(file, []).append(name)
    figures = (
        sum(source.count("\n") for source in sources.values()),
        len(sources),
        of_ray,
        by_file,
        of_torch,
        {name: files for name, files in of_torch.items() if PRIVATE.search(name)},
        len(flows.listed(flows.SUBMIT)),
        len(flows.rows(flows.FORMS)),
        len(flows.listed(flows.DEATH)),
        len(flows.listed(flows.SAMPLE)),
    )
    return dict(zip(BUDGETS, figures, strict=True))


def figure(of: int | dict[str, list[str]]) -> int:
    return of if isinstance(of, int) else len(of)


@pytest.mark.parametrize("what", BUDGETS)
def test_a_budget_is_kept(what: str) -> None:
    of = found()[what]
    assert figure(of) <= BUDGETS[what], of


if __name__ == "__main__":
    over = []
    for what, budget in BUDGETS.items():
        of = found()[what]
        print(f"{what:42} {figure(of):7,}  of at most {budget:,}")
        if figure(of) > budget:
            over.append(what)
            if isinstance(of, dict):
                print("".join(f"  {name}: {', '.join(where)}\n" for name, where in sorted(of.items())), end="")
    if over:
        sys.exit(f"beyond its budget: {'; '.join(over)}")
