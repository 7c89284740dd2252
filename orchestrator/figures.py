"""Formats measured numbers for people. Imports nothing slow: every command line loads it."""

from __future__ import annotations


def figure(number: float, digits: int = 4, sign: str = "") -> str:
    """Return a measured number with ``digits`` significant digits, or with all those before the point: ``0.52``, ``12345``.

    Only numbers below 0.0001 and above 10^15 have an exponent.
    """
    if 10 ** (digits - 1) <= abs(number) < 1e15:
        return f"{number:{sign}.0f}"
    return f"{number:{sign}.{digits}g}"
