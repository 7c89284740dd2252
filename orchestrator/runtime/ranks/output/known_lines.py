"""Steps in the lines that common trainers print: Hugging Face and Accelerate (tqdm), Lightning, nanoGPT and similar. Pure.

For scripts that report nothing and name no `health.progress`. A recognised step is shown, but no decision uses it. Each
pattern searches a bounded line and cannot take long: no part of it repeats what another part of it may match.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MOST_CHARACTERS: Final = 500
_NUMBER: Final = r"([0-9][0-9,_]{0,17})"

_BAR: Final = re.compile(
    rf"^\s{{0,8}}([^|%]{{0,60}}?)[ ]{{0,3}}[0-9]{{1,3}}%\|[^|]{{0,200}}\|[ ]{{0,3}}{_NUMBER}/{_NUMBER} \["
)
"""A bar of tqdm, also within Hugging Face's Trainer and Lightning: description, percent, bar, n/total, times."""

_RICH: Final = re.compile(rf"^Epoch {_NUMBER}/{_NUMBER} [━╸╺ ]{{1,200}} {_NUMBER}/{_NUMBER} ")
"""Lightning's other bar."""

_EPOCH: Final = re.compile(rf"^(?:Epoch|epoch|Training epoch)[ :]{{1,2}}{_NUMBER}(?:/{_NUMBER})?:?$")

_COUNTED: Final = re.compile(
    rf"\b(?:step|iter|iteration|global_step)[ =:#]{{0,3}}{_NUMBER}(?:[ ]?(?:/|of)[ ]?{_NUMBER})?(?![0-9.%])",
    re.IGNORECASE,
)
"""`iter 100: loss 2.45, time 30ms` and `step 00010/01000 | loss: 2.4`: a counter, in a line with a loss."""

_LOSS: Final = re.compile(r"\bloss\b", re.IGNORECASE)
_TRAINING: Final = frozenset(("", "train", "training", "training:", "train:", "steps", "steps:"))
"""Descriptions of bars that count optimizer steps; `Map:` and `Loading weights:` count something else."""


@dataclass(frozen=True, slots=True)
class KnownStep:
    """A step, its total where the line has one, and the kind of line, which is the same for all steps of a job."""

    step: int
    total: int | None
    kind: str


def may_match(line: str) -> bool:
    """Whether a line may report a step: a quick check, false for most lines."""
    return "%|" in line or "━" in line or "loss" in line or "Loss" in line


def known_step(line: str) -> KnownStep | None:
    """Return the step that a trainer's line reports; None for any other line."""
    line = line[-MOST_CHARACTERS:] if "\r" not in line else line.rsplit("\r", 1)[-1][:MOST_CHARACTERS]
    if "%|" in line:
        return _bar(line)
    if "━" in line:
        return _rich(line)
    if _LOSS.search(line) is None or (found := _COUNTED.search(line)) is None:
        return None
    step, total = _whole(found[1]), _whole(found[2])
    if step is None or (total is not None and step > total):
        return None
    return KnownStep(step, total, "counter")


def _bar(line: str) -> KnownStep | None:
    found = _BAR.match(line)
    if found is None:
        return None
    step, total, label = _whole(found[2]), _whole(found[3]), found[1].strip()
    if step is None or total is None or step > total:
        return None
    epoch = _EPOCH.match(label)
    if epoch is not None:
        return _in_epoch(_whole(epoch[1]), _whole(epoch[2]), step, total)
    return KnownStep(step, total, f"bar of {total}") if label.lower() in _TRAINING else None


def _rich(line: str) -> KnownStep | None:
    found = _RICH.match(line)
    if found is None:
        return None
    step, total = _whole(found[3]), _whole(found[4])
    return None if step is None or total is None else _in_epoch(_whole(found[1]), None, step, total)


def _in_epoch(epoch: int | None, epochs: int | None, step: int, total: int) -> KnownStep | None:
    """Return the step over all epochs, which count from 1 where their number is given (`Epoch 1/3:`), else from 0."""
    if epoch is None or step > total:
        return None
    done = max(0, epoch - (epochs is not None))
    return KnownStep(done * total + step, None if epochs is None else epochs * total, f"epochs of {total}")


def _whole(text: str | None) -> int | None:
    digits = (text or "").replace(",", "").replace("_", "")
    return int(digits) if digits.isdecimal() and len(digits) <= 15 else None
