"""The typer application: one group whose commands are loaded on use.

Help and usage errors are plain text: importing rich takes a third of a second.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from orchestrator.cli.console import Console
from orchestrator.cli.outcome import guarded
from orchestrator.cli.registry import LazyCommands

HELP = """Runs training jobs on the GPUs of one machine or of a Ray cluster.

Begin with `orch demo`, or `orch init train.py` and `orch submit job.yaml`. A JOB is an id, the beginning of one, or a
name (its newest job).
"""
COMPLETION_VARIABLE = "_ORCH_COMPLETE"
EPILOG = (
    "Exit codes: 0 done, 1 the job failed, 2 bad input, 3 not found, 4 the daemon cannot be reached, 5 refused, "
    "6 done for some of several jobs."
)


class OrchGroup(TyperGroup):
    """Group of all commands: runs one with error handling, lists them by section."""

    as_json = False

    def invoke(self, ctx: Any) -> Any:
        """Run the command; print its errors as sentences and return an exit code."""
        console = Console(os.environ)
        return guarded(lambda: int(super(OrchGroup, self).invoke(ctx) or 0), console, as_json=self.as_json)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - click's signature
        """List the commands by section."""
        assert isinstance(self.commands, LazyCommands)
        for section, entries in self.commands.sections().items():
            with formatter.section(section):
                formatter.write_dl([(entry.name, entry.summary) for entry in entries])


def _version(wanted: bool) -> None:
    if wanted:
        from orchestrator import __version__

        typer.echo(f"orch {__version__}")
        raise typer.Exit


def command(*, as_json: bool = False) -> Any:
    """Return the whole command line as a click group; with ``as_json`` errors are problem documents."""
    app = typer.Typer(
        name="orch",
        no_args_is_help=True,
        cls=OrchGroup,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback(help=HELP, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
    def orch(
        _version_wanted: Annotated[
            bool,
            typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version),
        ] = False,
    ) -> None:
        pass

    if COMPLETION_VARIABLE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()  # typer does so only for applications with its own --install-completion
    group = typer.main.get_command(app)
    group.commands = LazyCommands()  # type: ignore[attr-defined]  # an attribute that Typer's group does not declare
    group.as_json = as_json  # type: ignore[attr-defined]  # an attribute that Typer's group does not declare
    return group
