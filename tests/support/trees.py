"""Syntax trees of sources."""

from __future__ import annotations

import ast


def tree_of(source: str) -> ast.Module:
    """Call ``ast.parse``, twice if CPython 3.11 miscounts its recursion (gh-106905): a finaliser that parses too may run meanwhile."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)
