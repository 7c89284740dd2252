"""Reading a training configuration from text: a mapping (YAML), job.yaml's `trainer:`, the command line.

Owns the conversion of each field's text to its type and the listing of everything that is wrong with it. What the
values mean together is checked by the configuration itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import typing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from orchestrator.spec.problems import BadValueError
from orchestrator.spec.units import format_duration, parse_duration
from orchestrator.train.errors import ConfigError, fail_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from orchestrator.train.trainer.config.settings import TrainingSettings

TRAINER_VARIABLE = "ORCH_TRAINER"
"""Holds job.yaml's `trainer:` as JSON; the runtime sets it for every rank."""

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class _BadTextError(ValueError):
    """A text that is no value of its field's type."""


def read_everything(
    config: type[TrainingSettings], arguments: Sequence[str] | None, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Command line over job.yaml over `defaults`, as constructor arguments. Exits with 2 on a bad command line."""
    from_job = job_settings(os.environ)
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_arguments(parser, config)
    given = vars(parser.parse_args(arguments))
    return read_mapping(config, {**defaults, **from_job, **given})


def job_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """What job.yaml says under `trainer:`; empty outside of orch."""
    text = environ.get(TRAINER_VARIABLE, "")
    if not text:
        return {}
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise fail_once(ConfigError(f"{TRAINER_VARIABLE} is not JSON ({error}): unset it, or correct it")) from error
    if not isinstance(settings, dict):
        raise fail_once(ConfigError(f"{TRAINER_VARIABLE} is not a JSON object: unset it, or correct it"))
    return settings


def add_arguments(parser: argparse.ArgumentParser, config: type[TrainingSettings]) -> None:
    """Add `--batch-size` and the like, one for each field, with unit and default in the help."""
    group = parser.add_argument_group("training system")
    for field in settings_of(config):
        unit, help_text = field.metadata["unit"], field.metadata["help"]
        shown = "" if field.default is None else f" [{show_value(field.default)}]"
        switch = {"nargs": "?", "const": "true"} if unit == "yes/no" else {}
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            metavar=unit.upper().replace(" ", "_"),
            help=f"{help_text}{shown}".replace("%", "%%"),
            **typing.cast("Any", switch),
        )


def read_mapping(config: type[TrainingSettings], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` as constructor arguments. Raises ConfigError with every unknown name and every bad text."""
    values, problems = sort_out(config, settings)
    if problems:
        raise fail_once(ConfigError(*problems.values()))
    return values


def settings_of(config: type[TrainingSettings]) -> list[dataclasses.Field[Any]]:
    """The fields that can be set."""
    return [field for field in dataclasses.fields(config) if field.init]


def sort_out(config: type[TrainingSettings], settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """`settings` as constructor arguments, as far as they can be read; what is wrong with the others, by name."""
    types = typing.get_type_hints(config)
    fields = [field.name for field in settings_of(config)]
    values, problems = {}, {}
    for name, value in settings.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/training.md lists the settings"
            problems[str(name)] = f"there is no setting {name!r}: {hint}"
            continue
        try:
            values[name] = _convert(value, types[name])
        except (_BadTextError, BadValueError) as error:
            problems[name] = f"{name} is {value!r}: {error}"
    return values, problems


def _convert(value: Any, wanted: Any) -> Any:
    kinds = set(typing.get_args(wanted)) or {wanted}
    if value is None or (isinstance(value, str) and value in ("none", "null") and type(None) in kinds):
        return None
    if timedelta in kinds:
        return value if isinstance(value, timedelta) else parse_duration(str(value))
    if any(typing.get_origin(kind) is tuple for kind in kinds) or wanted is tuple:
        return _numbers(value)
    if not isinstance(value, str):
        return value
    for kind, read in _READERS.items():
        if kind in kinds:
            return read(value)
    return value


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return tuple(int(part) for part in value.strip("[]").split(","))
        except ValueError as error:
            raise _BadTextError("write numbers with commas between them, such as 0,1") from error
    return tuple(value) if isinstance(value, list) else value


def _switch(text: str) -> bool:
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    raise _BadTextError("write true or false")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise _BadTextError("write a whole number") from error


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise _BadTextError("write a number") from error


_READERS: dict[type, Callable[[str], Any]] = {bool: _switch, int: _whole, float: _real}


def show_value(value: Any) -> str:
    """A value the way YAML would have it."""
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
