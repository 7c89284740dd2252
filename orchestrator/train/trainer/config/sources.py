"""Reads a training configuration from a mapping, from job.yaml's `trainer:` in a rank's environment, and from a command line.

Each value is read by the kind of its setting in ``spec.trainer``, without importing pydantic. The configuration itself
checks the values together.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import cache
from typing import TYPE_CHECKING, Any

from orchestrator.spec.fields.kinds import Boolean, Duration, python_node, typed_node
from orchestrator.spec.fields.records import keys_of
from orchestrator.spec.problems import BadValueError
from orchestrator.spec.reader.key_aliases import unknown_key
from orchestrator.spec.trainer import TrainingSettings
from orchestrator.train.errors import ConfigError, fail_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.spec.fields.records import Key

TRAINER_VARIABLE = "ORCH_TRAINER"
"""Holds job.yaml's `trainer:` as JSON; the runtime sets it for every rank."""

_SWITCHES = {"1": "true", "0": "false"}


@cache
def settings() -> Mapping[str, Key]:
    """Return every setting, by its name."""
    return keys_of(TrainingSettings)


def read_everything(arguments: Sequence[str] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return command line over job.yaml over `defaults`, as constructor arguments. Exits with 2 on a bad command line."""
    from_job = job_settings(os.environ)
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_arguments(parser)
    given = vars(parser.parse_args(arguments))
    return read_mapping({**defaults, **from_job, **given})


def job_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return job.yaml's `trainer:`; empty outside of orch."""
    text = environ.get(TRAINER_VARIABLE, "")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise fail_once(ConfigError(f"{TRAINER_VARIABLE} is not JSON ({error}): unset it, or correct it")) from error
    if not isinstance(found, dict):
        raise fail_once(ConfigError(f"{TRAINER_VARIABLE} is not a JSON object: unset it, or correct it"))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--batch-size` and the like, one for each setting, with unit and default in the help."""
    group = parser.add_argument_group("training system")
    for name, key in settings().items():
        shown = "" if key.default is None else f" [{show_default(key)}]"
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if isinstance(key.kind, Boolean) else {}
        group.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar=key.doc.unit.upper().replace(" ", "_"),
            help=f"{key.doc.text}{shown}".replace("%", "%%"),
            **switch,
        )


def show_default(key: Key) -> str:
    """Return a setting's default as YAML would write it."""
    value = key.write(key.default)
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_mapping(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` as constructor arguments. Raises ConfigError with every unknown name and every invalid value."""
    values, problems = sort_out(given, typed=True)
    if problems:
        raise fail_once(ConfigError(*map(sentence, problems.items())))
    return values


def sort_out(given: Mapping[str, Any], *, typed: bool) -> tuple[dict[str, Any], dict[str, BadValueError]]:
    """Return the readable values of `given`, and the errors of the others, by name.

    ``typed``: text is read as on a command line, where `8` is a number.
    """
    values, problems = {}, {}
    for name, value in given.items():
        try:
            values[name] = _value(name, value, typed=typed)
        except BadValueError as error:
            problems[str(name)] = error
    return values, problems


def sentence(problem: tuple[str, BadValueError]) -> str:
    """Return a sentence about an invalid setting, and what to do."""
    name, error = problem
    return f"{name}: {error}"


def _value(name: str, value: Any, *, typed: bool) -> Any:
    key = settings().get(name)
    if key is None:
        raise unknown_key(("trainer",), str(name), list(settings()), ())
    if isinstance(key.kind, Duration) and isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value}s"  # a Python number is seconds, as in the standard library; text needs a unit
    node = python_node(value)
    if typed and isinstance(value, str):
        node = typed_node(_SWITCHES.get(value, value) if isinstance(key.kind, Boolean) else value)
    return key.read(node)
