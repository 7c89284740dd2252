"""Durations and amounts of memory, as people write them and as programs hold them.

Durations: `1h30m`, `90s`, `500ms`; a number without a unit is refused. Memory: KB, MB, GB, TB, PB (or K, M, G, T, P) are powers
of 1000; KiB ... PiB (or Ki ... Pi) are powers of 1024; a bare number is bytes. Pure; names no key.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal

from orchestrator.spec.problems import BadValueError, quoted

MAX_DURATION = timedelta(days=3650)
MAX_MEMORY_BYTES = 10**18

_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,9})?"
_UNIT_SECONDS = {
    "w": Decimal(604_800),
    "d": Decimal(86_400),
    "h": Decimal(3600),
    "m": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
}
# Largest unit first, each at most once: `30m1h` is more likely a mistake than intended. Also the schema's pattern, so
# it uses nothing that only Python's `re` supports.
DURATION_PATTERN = (
    r"^(?:" + "".join(f"(?:{_NUMBER}{unit} ?)?" for unit in ("w", "d", "h", "m", "s")) + f"(?:{_NUMBER}ms)?)$"
)
MEMORY_PATTERN = r"^([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMGTPkmgtp]?)(i?)([bB]?)$"

_DURATION = re.compile(DURATION_PATTERN)
_PART = re.compile(rf"({_NUMBER})(ms|[wdhms])")
_BARE_NUMBER = re.compile(_NUMBER)
_MEMORY = re.compile(MEMORY_PATTERN)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_duration(text: str) -> timedelta:
    """Read a duration. Exact to the microsecond.

    Raises:
        BadValueError: not a duration, a number without a unit, or longer than MAX_DURATION (ten years).

    """
    if _BARE_NUMBER.fullmatch(text):
        raise BadValueError(f"{quoted(text)} has no unit", f"write {text}s, {text}m or {text}h")
    if not text or not _DURATION.fullmatch(text):
        raise BadValueError(f"{quoted(text)} is not a duration", _duration_hint(text))
    parts = _PART.findall(text)
    seconds = sum((Decimal(amount) * _UNIT_SECONDS[unit] for amount, unit in parts), Decimal(0))
    if seconds > Decimal(int(MAX_DURATION.total_seconds())):
        raise BadValueError(f"{quoted(text)} is longer than ten years", "write less, or leave the key out for no limit")
    return timedelta(microseconds=int((seconds * 1_000_000).to_integral_value()))


def format_duration(duration: timedelta) -> str:
    """Write a duration so that `parse_duration` gives back the same one: `1h30m`, `1.5s`, `250ms`, `0s`."""
    microseconds = duration // timedelta(microseconds=1)
    days, rest = divmod(microseconds, 86_400_000_000)
    hours, rest = divmod(rest, 3_600_000_000)
    minutes, rest = divmod(rest, 60_000_000)
    text = "".join(f"{amount}{unit}" for amount, unit in ((days, "d"), (hours, "h"), (minutes, "m")) if amount)
    if rest and rest < 1_000_000 and rest % 1000 == 0:
        return f"{text}{rest // 1000}ms"
    if rest:
        seconds, fraction = divmod(rest, 1_000_000)
        text += f"{seconds}.{fraction:06d}".rstrip("0").rstrip(".") + "s"
    return text or "0s"


def parse_memory(text: str) -> int:
    """Read an amount of memory, in bytes: `8GB` is 8 * 10**9, `8GiB` is 8 * 2**30, a bare number is bytes.

    Raises:
        BadValueError: not an amount of memory, not whole bytes, or more than MAX_MEMORY_BYTES.

    """
    match = _MEMORY.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise BadValueError(f"{quoted(text)} is not an amount of memory", "write 8GB (10^9 bytes) or 8GiB (2^30 bytes)")
    base = 1024 if match[3] else 1000
    amount = Decimal(match[1]) * base ** _POWERS[match[2].lower()]
    if amount > MAX_MEMORY_BYTES:
        raise BadValueError(f"{quoted(text)} is more than any machine has", "write 8GB (10^9 bytes) or 8GiB (2^30)")
    return int(amount)


def format_memory(count: int) -> str:
    """Write an amount of memory so that `parse_memory` gives back the same one, as short as can be: `8GB`, `8GiB`, `1.5GB`."""
    texts = [f"{count}B"]
    for base, suffix in ((1000, "B"), (1024, "iB")):
        for unit, power in _POWERS.items():
            amount = Decimal(count) / base**power
            if unit and amount >= 1 and amount == round(amount, 3):
                texts.append(f"{amount.normalize():f}{unit.upper()}{suffix}")
    return min(texts, key=len)


def _duration_hint(text: str) -> str:
    clock = re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,6}):([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if clock is not None:
        days, first, second, third = clock.groups()
        hours, minutes, seconds = (first, second, third) if third is not None else ("0", first, second)
        parts = ((days or "0", "d"), (hours, "h"), (minutes, "m"), (seconds, "s"))
        return "write " + ("".join(f"{int(n)}{unit}" for n, unit in parts if int(n)) or "0s")
    if text.startswith("-"):
        return "a duration is not negative; leave the key out for no limit"
    return "write 10m, 1h30m, 90s or 500ms"
