"""Records which files of the package run while a window is open, in every Python process that has this file's folder on PYTHONPATH.

A test copies this file into a folder of its own (`tests.support.flows`). Python runs a `sitecustomize` at its start, so the product needs no switch. Each
module of the package is compiled with a call at the start of every function and of every turn of a loop. Another way would be
`sys.setprofile`: it slows all calls of Ray and torch, and misses threads that C++ has started.

The first byte of the file `window` is the number of the open window, 0 for none. The first call in a file appends a line to `seen`, with the
calls that led to it. Code that a module runs while it is imported does not count.
"""

import ast
import builtins
import importlib.machinery
import json
import marshal
import mmap
import os
import sys
import time
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

PLACE = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(PLACE, "root"), encoding="utf-8") as _file:
    ROOT = os.path.join(_file.read().strip(), "")  # the package's folder
with open(os.path.join(PLACE, "window"), "rb") as _window:
    _open_window = mmap.mmap(_window.fileno(), 1, prot=mmap.PROT_READ)  # a fork shares it

_known: set[tuple[int, str]] = set()
_forked: list[int] = []
_compile = importlib.machinery.SourceFileLoader.get_code


def seen(file: str) -> None:
    """Record that a function of ``file`` runs, if a window is open and this process has not recorded it yet."""
    window = _open_window[0]
    if not window or (window, file) in _known:
        return
    stack = list(_stack(sys._getframe(1)))
    if any(name == "<module>" and module != "__main__" for _, name, module in stack):
        return
    # The program of a forked process runs on below its functions: the fork server's is the frame under a training script.
    files = {file, *(path for path, name, _ in stack if _forked and name == "<module>")}
    _known.update((window, path) for path in files)
    calls = [f"{path}:{name}" for path, name, _ in stack]
    line = json.dumps(
        {"window": window, "at": time.time(), "files": sorted(files), "program": sys.orig_argv, "calls": calls}
    )
    handle = os.open(os.path.join(PLACE, "seen"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, line.encode() + b"\n")
    os.close(handle)


def _begin_again() -> None:
    """Record in a forked process what it does itself."""
    _known.clear()
    _forked[:] = [os.getpid()]


def _stack(frame: FrameType | None) -> Iterator[tuple[str, str, str]]:
    """Yield file, function and module of the package's frames, innermost first."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(ROOT):
            yield path[len(ROOT) :], frame.f_code.co_name, frame.f_globals.get("__name__", "")
        frame = frame.f_back


class _Marking(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self._file = file

    def _marked(self, node: Any) -> Any:
        self.generic_visit(node)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        first = 1 if is_function and ast.get_docstring(node, clean=False) is not None else 0
        node.body.insert(first, ast.copy_location(ast.Expr(self._call()), node.body[0]))
        return ast.fix_missing_locations(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        both = ast.Tuple([self._call(), node.body], ast.Load())
        node.body = ast.Subscript(both, ast.Constant(1), ast.Load())
        return ast.fix_missing_locations(node)

    def _call(self) -> ast.Call:
        return ast.Call(ast.Name("__flow_seen__", ast.Load()), [ast.Constant(self._file)], [])

    visit_FunctionDef = visit_AsyncFunctionDef = visit_For = visit_AsyncFor = visit_While = _marked  # noqa: N815 - named by ast


def _marked_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
    path = loader.get_filename(name)
    if not path.startswith(ROOT):
        return _compile(loader, name)
    file = path[len(ROOT) :]
    kept = os.path.join(
        PLACE, "marked", file.replace("/", "+") + ".code"
    )  # all processes of a test run one version of Python
    try:
        with open(kept, "rb") as stored:
            return marshal.loads(stored.read())
    except FileNotFoundError:
        pass
    tree = _Marking(file).visit(ast.parse(loader.get_data(path)))
    code: CodeType = compile(tree, path, "exec", dont_inherit=True)
    with open(f"{kept}.{os.getpid()}", "wb") as new:
        new.write(marshal.dumps(code))
    os.replace(new.name, kept)
    return code


builtins.__flow_seen__ = seen  # type: ignore[attr-defined]
importlib.machinery.SourceFileLoader.get_code = _marked_code  # type: ignore[method-assign]
os.register_at_fork(after_in_child=_begin_again)
