"""Reads the daemon's and the command line's settings, with errors of the API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.errors import BadRequestError
from orchestrator.spec.settings import Settings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping


def load_settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings. Raises BadRequestError with every invalid variable."""
    try:
        return Settings.from_environ(environ)
    except SettingsError as error:
        raise BadRequestError(str(error), hint="unset the variable, or give it a value of that form") from error
