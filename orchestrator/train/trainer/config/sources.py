"""A training configuration from a mapping, from job.yaml's `trainer:` in a rank's environment, and from a command line.

Each value is read by the kind that its setting has in ``spec.trainer``, without importing pydantic. What the values mean together
is checked by the configuration itself.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import cache
from typing import TYPE_CHECKING, Any

from orchestrator.spec.fields.kinds import Boolean, Duration
from orchestrator.spec.fields.records import keys_of
from orchestrator.spec.fields.values import python_node, typed_node
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
    """Every setting, by its name."""
    return keys_of(TrainingSettings)


def read_everything(arguments: Sequence[str] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Command line over job.yaml over `defaults`, as constructor arguments. Exits with 2 on a bad command line."""
    from_job = job_settings(os.environ)
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_arguments(parser)
    given = vars(parser.parse_args(arguments))
    return read_mapping({**defaults, **from_job, **given})


def job_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """What job.yaml says under `trainer:`; empty outside of orch."""
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
    """A setting's default the way YAML would have it."""
    value = key.write(key.default)
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_mapping(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` as constructor arguments. Raises ConfigError with every unknown name and every bad value."""
    values, problems = sort_out(given, typed=True)
    if problems:
        raise fail_once(ConfigError(*map(sentence, problems.items())))
    return values


def sort_out(given: Mapping[str, Any], *, typed: bool) -> tuple[dict[str, Any], dict[str, BadValueError]]:
    """The values of `given`, as far as they can be read, and what is wrong with the others, by name.

    ``typed``: text is read as a command line has it, where `8` is a number.
    """
    values, problems = {}, {}
    for name, value in given.items():
        try:
            values[name] = _value(name, value, typed=typed)
        except BadValueError as error:
            problems[str(name)] = error
    return values, problems


def sentence(problem: tuple[str, BadValueError]) -> str:
    """A setting that is wrong, and what is to be done."""
    name, error = problem
    return f"{name}: {error}"


def _value(name: str, value: Any, *, typed: bool) -> Any:
    key = settings().get(name)
    if key is None:
        raise unknown_key(("trainer",), str(name), list(settings()), ())
    if isinstance(key.kind, Duration) and isinstance(value, int | float) and not isinstance(value, bool):
        value = (
            f"{value}s"  # a number of Python's is seconds, as the standard library has it; in a text it needs its unit
        )
    node = python_node(value)
    if typed and isinstance(value, str):
        node = typed_node(_SWITCHES.get(value, value) if isinstance(key.kind, Boolean) else value)
    return key.read(node)
