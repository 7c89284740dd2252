"""The commands and their modules. A module is imported when its command runs, or for help."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """A command: its name, the module under ``cli.commands``, the section of the help, and the function if not named so."""

    name: str
    module: str
    section: str
    function: str = ""


JOBS, MACHINE, FILES = "Jobs", "Daemon and machine", "Files and shell"

ENTRIES = (
    Entry("submit", "submit", JOBS),
    Entry("run", "submit", JOBS),
    Entry("status", "status", JOBS),
    Entry("show", "show", JOBS),
    Entry("diff", "show", JOBS),
    Entry("wait", "status", JOBS),
    Entry("logs", "logs", JOBS),
    Entry("exec", "sessions.exec", JOBS, "exec_beside"),
    Entry("attach", "sessions.attach", JOBS),
    Entry("port-forward", "sessions.port_forward", JOBS, "port_forward"),
    Entry("cancel", "jobs.actions", JOBS),
    Entry("pause", "jobs.actions", JOBS),
    Entry("resume", "jobs.actions", JOBS),
    Entry("rerun", "jobs.actions", JOBS),
    Entry("update", "jobs.actions", JOBS),
    Entry("events", "history", JOBS),
    Entry("explain", "history", JOBS),
    Entry("queue", "queues", JOBS),
    Entry("checkpoints", "history", JOBS),
    Entry("get", "runs.get", JOBS),
    Entry("drill", "drill", JOBS),
    Entry("profile", "profile", JOBS),
    Entry("stacks", "stacks", JOBS),
    Entry("hold", "jobs.holding", JOBS),
    Entry("release", "jobs.holding", JOBS),
    Entry("matrix", "runs.matrix", JOBS),
    Entry("estimate", "runs.estimate", JOBS),
    Entry("usage", "runs.usage", JOBS),
    Entry("report", "runs.report", JOBS),
    Entry("compare", "runs.compare", JOBS),
    Entry("trackio", "runs.trackio", JOBS, "show_trackio"),
    Entry("up", "machine", MACHINE),
    Entry("down", "machine", MACHINE),
    Entry("serve", "machine", MACHINE),
    Entry("doctor", "machine", MACHINE),
    Entry("demo", "machine", MACHINE),
    Entry("login", "sessions.login", MACHINE),
    Entry("ui", "machine", MACHINE),
    Entry("nodes", "nodes", MACHINE),
    Entry("gpus", "gpu", MACHINE),
    Entry("top", "gpu", MACHINE),
    Entry("record", "gpu", MACHINE),
    Entry("replay", "gpu", MACHINE),
    Entry("bench", "bench", MACHINE),
    Entry("advise", "bench", MACHINE),
    Entry("simulate", "runs.simulate", MACHINE),
    Entry("dashboards", "dashboards", MACHINE),
    Entry("prune", "machine", MACHINE),
    Entry("backup", "keeping.backup", MACHINE),
    Entry("restore", "keeping.backup", MACHINE),
    Entry("init", "files", FILES),
    Entry("import", "jobs.importing", FILES, "import_job"),
    Entry("schema", "files", FILES),
    Entry("completion", "files", FILES),
    Entry("help", "files", FILES),
)

ALIASES = {
    "job": "status",
    "jobs": "status",
    "log": "logs",
    "event": "events",
    "queues": "queue",
    "matrices": "matrix",
    "checkpoint": "checkpoints",
    "stack": "stacks",
    "drills": "drill",
    "profiles": "profile",
    "node": "nodes",
    "gpu": "gpus",
    "dashboard": "dashboards",
    "schemas": "schema",
    "completions": "completion",
}
"""The other number of a command's noun, and names from other tools; help and completion list the command alone."""


class LazyCommands(MutableMapping[str, Any]):
    """The commands by name, each created on first use."""

    def __init__(self, entries: tuple[Entry, ...] = ENTRIES) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        name = ALIASES.get(name, name)
        if name not in self._made:
            entry = self._entries[name]
            module = import_module(f"orchestrator.cli.commands.{entry.module}")
            self._made[name] = _command(module, name, entry.function or name)
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        self._made.pop(name, None)
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def sections(self) -> dict[str, list[str]]:
        """Return names by the section of the help, in order."""
        found: dict[str, list[str]] = {}
        for entry in self._entries.values():
            found.setdefault(entry.section, []).append(entry.name)
        return found


def _command(module: Any, name: str, function: str) -> Any:
    """Return the click command of ``module.function``, which is a function with typer's annotations or a whole Typer."""
    import typer

    found = getattr(module, function)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = getattr(module, "CONTEXT_SETTINGS", {}).get(name)
        single.command(name, context_settings=settings)(found)
        found = single
    command = typer.main.get_command(found)
    command.name = name
    return command
