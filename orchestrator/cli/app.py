"""The typer application: the table of commands, and one group that imports a command's module when it runs, or for its help.

Help and usage errors are plain text: importing rich takes a third of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from orchestrator.cli.console import Console
from orchestrator.cli.session import guarded

HELP = """Runs training jobs on the GPUs of one machine or of a Ray cluster.

Begin with `orch demo`, or `orch init train.py` and `orch submit job.yaml`. A JOB is an id, the beginning of one, or a
name (its newest job).
"""
COMPLETION_VARIABLE = "_ORCH_COMPLETE"
EPILOG = (
    "Exit codes: 0 done, 1 the job failed, 2 bad input, 3 not found, 4 the daemon cannot be reached, 5 refused, "
    "6 done for some of several jobs."
)


class Entry(NamedTuple):
    """A command: its name, module under ``cli.commands``, section and line in the help, function if named otherwise.

    The line repeats the beginning of the command's own help, because the list of commands imports no command.
    """

    name: str
    module: str
    section: str
    summary: str
    function: str = ""


JOBS, MACHINE, FILES = "Jobs", "Daemon and machine", "Files and shell"

# fmt: off
ENTRIES = (
    Entry("submit", "submit", JOBS, "Submit jobs; prints the id of each job, or of the matrix for a file with `matrix:`."),
    Entry("run", "submit", JOBS, "Run a command as a job, without a file: orch run -n 2 --gpu 1 -- python train.py --epochs 5."),
    Entry("status", "status", JOBS, "Show the state of jobs: those that have not ended, and the newest of those that ended in the last day."),
    Entry("show", "history", JOBS, "Show exactly what a job runs: command, interpreter, environment, archive, git commit."),
    Entry("diff", "history", JOBS, "Show how job B differs from job A."),
    Entry("wait", "status", JOBS, "Wait until jobs have ended; exit code 0 when all succeeded, 7 when --timeout has passed, else 1."),
    Entry("logs", "logs", JOBS, "Show a job's log; with several ranks each line begins with its rank."),
    Entry("exec", "sessions", JOBS, "Run a command beside a running rank: in its directory, with its environment and GPUs, on its node.", "exec_beside"),
    Entry("attach", "sessions", JOBS, "Attach this terminal to a running rank: its debugger at a breakpoint, or all of an interactive job."),
    Entry("port-forward", "sessions", JOBS, "Make ports of a running job reachable here, such as TensorBoard's (6006) or Jupyter's (8888).", "port_forward"),
    Entry("cancel", "actions", JOBS, "Stop jobs for good: SIGTERM, time to save (stop_duration), then SIGKILL."),
    Entry("pause", "actions", JOBS, "Stop jobs and keep them: they save, give their GPUs back, and wait for `orch resume`."),
    Entry("resume", "actions", JOBS, "Put paused jobs back into the queue; they continue from their last checkpoint."),
    Entry("rerun", "actions", JOBS, "Submit the same jobs again, as they were submitted, with values changed by --set."),
    Entry("update", "actions", JOBS, "Change jobs that are queued or running."),
    Entry("events", "history", JOBS, "Show a job's history, oldest first: all of it, or with --tail its last events."),
    Entry("explain", "history", JOBS, "Explain a job's state: its reason, when it is expected to start and why, the jobs ahead of it."),
    Entry("queue", "queues", JOBS, "List waiting jobs in scheduling order, and the shares of queues and users."),
    Entry("checkpoints", "history", JOBS, "List a job's checkpoints, newest first."),
    Entry("get", "history", JOBS, "Download outputs and checkpoints of a job; an interrupted download resumes where it ended."),
    Entry("drill", "drill", JOBS, "Inject a fault into a running job and report the recovery."),
    Entry("profile", "sessions", JOBS, "Trace the next steps of a running job that trains with orchestrator.train."),
    Entry("stacks", "sessions", JOBS, "Show the Python stacks of a running job's ranks, without stopping them."),
    Entry("hold", "actions", JOBS, "Keep queued jobs from starting until `orch release`; they claim no resources meanwhile."),
    Entry("release", "actions", JOBS, "Put held jobs into the queue, each at the place of its arrival."),
    Entry("matrix", "matrix", JOBS, "Show the jobs of a matrix: state, best value (checkpoint.score_attribute), time left."),
    Entry("estimate", "estimate", JOBS, "Show how long jobs will still run, with a 95 % interval."),
    Entry("usage", "queues", JOBS, "Show GPU hours by phase, GPU hours waited for, energy and cost, from the daemon's record."),
    Entry("report", "runs", JOBS, "Write a report of a job or a recording, or of several side by side."),
    Entry("compare", "runs", JOBS, "Compare jobs or recordings with the first one: means, differences with 95 % intervals."),
    Entry("trackio", "runs", JOBS, "Serve Trackio's dashboard for a job with `trackers: [trackio]` from this machine's files, until Ctrl-C.", "show_trackio"),
    Entry("up", "machine", MACHINE, "Start the daemon in the background and return when it accepts jobs."),
    Entry("down", "machine", MACHINE, "Stop the daemon and return when its process has ended; jobs keep running unless --stop-jobs is given."),
    Entry("serve", "machine", MACHINE, "Run the daemon in the foreground, for systemd and containers."),
    Entry("doctor", "machine", MACHINE, "Check this machine: each problem and how to fix it."),
    Entry("demo", "machine", MACHINE, "Train a small model on two ranks, kill one half-way, and show the recovery; takes about a minute."),
    Entry("login", "machine", MACHINE, "Send every command to a daemon on another machine, with its token."),
    Entry("ui", "machine", MACHINE, "Open the page of jobs, GPUs and nodes in a browser, signed in as you by a link that works once."),
    Entry("nodes", "nodes", MACHINE, "List the nodes: state, GPUs and CPUs as used/total, and the jobs that run there."),
    Entry("gpus", "gpu", MACHINE, "List every GPU of every node: load, memory, power, temperature."),
    Entry("top", "gpu", MACHINE, "Watch GPUs, jobs and processes live."),
    Entry("record", "record", MACHINE, "Record GPUs into a file: orch record --rate 100 --csv -- python train.py."),
    Entry("replay", "gpu", MACHINE, "Play a recording in the view of `orch top`."),
    Entry("bench", "bench", MACHINE, "Compare training on one GPU with training on several: throughput, communication, memory, power."),
    Entry("advise", "bench", MACHINE, "Advise how many GPUs pay off, at which batch size."),
    Entry("simulate", "simulate", MACHINE, "Play a trace of jobs through the scheduler: completion times, waits, use of the GPUs, fairness."),
    Entry("dashboards", "dashboards", MACHINE, "Write the Grafana boards and Prometheus rules to files, or send the boards to a Grafana."),
    Entry("prune", "machine", MACHINE, "Remove logs, working copies, checkpoints and records of jobs that ended long ago."),
    Entry("backup", "machine", MACHINE, "Copy the store to a file while the daemon runs."),
    Entry("restore", "machine", MACHINE, "Restore the store of ORCH_HOME from a backup; there must be no store, and no running daemon."),
    Entry("init", "files", FILES, "Write a commented job.yaml for a script."),
    Entry("import", "files", FILES, "Print the job.yaml for a line with torchrun, accelerate, deepspeed, srun, mpirun or sbatch.", "import_job"),
    Entry("schema", "files", FILES, "Print the JSON Schema of job.yaml, for editors that complete and check it."),
    Entry("completion", "files", FILES, "Print the shell's completion script."),
    Entry("help", "files", FILES, "Show what a command does and its options: `orch help submit` is `orch submit --help`."),
)
# fmt: on

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
"""Singular or plural forms of commands, and names from other tools; help and completion do not list them."""


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

    def sections(self) -> dict[str, list[Entry]]:
        """Return the commands by the section of the help, in order."""
        found: dict[str, list[Entry]] = {}
        for entry in self._entries.values():
            found.setdefault(entry.section, []).append(entry)
        return found


def _command(module: Any, name: str, function: str) -> Any:
    """Return the click command of ``module.function``, which is a function with typer's annotations or a whole Typer."""
    found = getattr(module, function)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = getattr(module, "CONTEXT_SETTINGS", {}).get(name)
        single.command(name, context_settings=settings)(found)
        found = single
    command = typer.main.get_command(found)
    command.name = name
    return command


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
