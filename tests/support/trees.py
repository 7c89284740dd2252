"""Syntax trees of sources."""

from __future__ import annotations

import ast


def tree_of(source: str) -> ast.Module:
    """``ast.parse``, once more where CPython miscounts (gh-106905, in 3.11): when garbage is collected meanwhile whose end parses something too."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)
