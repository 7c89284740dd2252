"""The mapping `env` of job.yaml, and the names and patterns of its list `pass`. Part of `model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.spec.fields.kinds import Text
from orchestrator.spec.fields.records import Keyed
from orchestrator.spec.fields.rules import looks_secret, user_variable
from orchestrator.spec.problems import BadValueError, quoted

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

    from orchestrator.spec.fields.kinds import Schema

KEY: Final = "pass"
MOST_PATTERNS: Final = 100


def _pattern(text: str) -> None:
    """Refuse a pattern that matches everything, a secret, or a variable that orch sets."""
    if not any(character.isalnum() for character in text):
        raise BadValueError(f"{quoted(text)} matches every variable", "name what the job needs, such as HF_*")
    if looks_secret(text):
        hint = "secrets: takes names, without *" if "*" in text else f"write secrets: [{text}]"
        raise BadValueError(f"{quoted(text)} looks like a secret, which env would store readably", hint)
    user_variable(text)


PATTERN: Final = Text(
    "a name or pattern of variables",
    pattern=r"[A-Za-z_*][A-Za-z0-9_*]{0,254}",
    remedy="letters, digits, underscores and *, not beginning with a digit",
    max_length=255,
    check=_pattern,
)


def described() -> Schema:
    """Return the JSON Schema of the key: the list, or the text of a variable of this name."""
    names = {"type": "array", "items": PATTERN.describe(), "uniqueItems": True, "maxItems": MOST_PATTERNS}
    text = {"type": ["string", "number"]}
    meaning = "names and patterns (HF_HOME, WANDB_*) of variables to take from the submitter's environment"
    return {"description": meaning, "default": [], "anyOf": [names, text]}


class Variables(Keyed):
    """Variables by name. The list of `pass` is taken out before they are read; it is only described here."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return {**super().__get_pydantic_json_schema__(schema, handler), "properties": {KEY: described()}}
