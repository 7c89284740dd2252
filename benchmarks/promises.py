"""Checks what orch promises: each bar is a command that gives a figure, which has a limit. Exits with 1 beyond a limit.

    python -m benchmarks.promises                         # every bar in a short form
    python -m benchmarks.promises --bars start,recovery   # some of them
    python -m benchmarks.promises --long                  # thousands of disturbances and of simulated faults: hours
    python -m benchmarks.promises --against COMMIT        # both commits side by side, in turns

Run it on an otherwise idle machine: most figures are times. ``--against`` measures a commit by its own benchmarks, in a worktree with an
environment that has the same packages as this one. docs/figures.md lists the bars.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import commit, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HERE: Final = Path(__file__).parents[1]
THIS: Final = "figure"
LONGEST_SECONDS: Final = 3 * 3600.0
"""A command in its short form that takes longer hangs."""


class NoFigureError(Exception):
    """A command gave no figure; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a bar's command and its limit: the path of its keys in the command's JSON, from the outermost key on."""

    label: str
    limit: float
    keys: tuple[str, ...] = ("ours", "median")
    unit: str = "s"
    at_least: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value keeps the promise."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True, slots=True)
class Bar:
    """Figures of one command, as arguments of the interpreter; ``long`` are those of ``--long``. ``read`` makes JSON of what the command printed.

    ``compared``: the figure is how many ``names`` of the other commit this one lacks, so the bar needs ``--against``.
    """

    command: tuple[str, ...]
    figures: tuple[Figure, ...]
    long: tuple[str, ...] = ()
    compared: bool = False
    read: Callable[[int, str], Any] = lambda _status, printed: json.loads(printed)


def _failed(status: int, printed: str) -> dict[str, int]:
    """Return the number of failed tests. Raises NoFigureError where no test ran."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", printed)}
    if status not in (0, 1) or not counts:
        raise NoFigureError(printed[-500:])
    return {"failed": counts.get("failed", 0) + counts.get("error", 0)}


def _tests(label: str, *paths: str) -> Bar:
    """Return the bar of tests that all have to pass."""
    command = ("-m", "pytest", "-q", "-n", "0", "-p", "no:randomly", *paths)
    return Bar(command, (Figure(label, 0, ("failed",), "failed"),), read=_failed)


def _disturbed(number: int, *places: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.disturbances", "--disturbances", str(number), *places)


def _simulated(faults: int) -> tuple[str, ...]:
    return ("-m", "tests.simulation", "run", "--first", "1000000", "--faults", str(faults))


def _benchmark(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", *arguments)


INSIGHT: Final = """
import json, math, sys
from benchmarks.insight import run
seeds = int(sys.argv[1])
wanted = [unit for unit in run.units(seeds, seeds) if unit.what != "month"]
done = run.work(wanted, None, math.inf)
faults = [done[unit.key] for unit in wanted if unit.what == "fault"]
false = sum(len(done[unit.key]) for unit in wanted if unit.what == "healthy")
print(json.dumps({"unnamed": sum(not one["right"] for one in faults), "false": false}))
"""
SURFACE: Final = """
import contextlib, io, json
import click
from orchestrator import catalogue
from orchestrator.cli.app import command
from orchestrator.cli.commands.files import schema

def commands(one, name, context):
    yield name
    for parameter in one.params:
        yield from (f"{name} {option}" for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("-"))
    for inner in one.list_commands(context) if hasattr(one, "list_commands") else ():
        yield from commands(one.get_command(context, inner), f"{name} {inner}", context)

def keys(tree, path):
    # References are followed, as deep as keys of job.yaml are nested.
    if isinstance(tree, list):
        for one in tree:
            yield from keys(one, path)
    if not isinstance(tree, dict) or path.count(".") > 8:
        return
    for name, value in tree.items():
        if name == "$ref":
            yield from keys(whole_schema["$defs"][value.rpartition("/")[2]], path)
        elif name == "properties":
            for key, inner in value.items():
                yield f"{path}.{key}"
                yield from keys(inner, f"{path}.{key}")
        elif name != "$defs":
            yield from keys(value, path)

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    schema()
whole, whole_schema = command(), json.loads(printed.getvalue())
names = {*commands(whole, "orch", click.Context(whole)), *keys(whole_schema, "job.yaml")}
print(json.dumps({"names": sorted({*names, *(metric.name for metric in catalogue.METRICS)})}))
"""

PEER: Final = "torch.save with fsync"
BARS: Final[Mapping[str, Bar]] = {
    "start": Bar(
        _benchmark("start_latency", "--pairs", "3", "--cold", "0", "--peers", "torchrun"),
        (
            Figure("submit to the first step, warm daemon", 0.3),
            Figure("the same, of torchrun's", 0.1, ("ratio", "torchrun", "median"), "x"),
        ),
    ),
    "recovery": Bar(
        _benchmark("recovery", "--pairs", "3", "--peers", ""),
        (Figure("SIGKILL of a rank to the next new step", 0.2),),
    ),
    "hang": Bar(
        _benchmark("hang", "--pairs", "2", "--peers", "", "--healthy", "30"),
        (
            Figure("SIGSTOP of a rank to its proof", 5.0),
            Figure("false alarms about a healthy job", 0, ("false_alarms", "alarms"), "alarms"),
        ),
    ),
    "torchrun": _tests("scripts for torchrun run unchanged", "tests/integration/test_torchrun_parity.py"),
    "adoption": _tests(
        "kill -9 of daemon, agent, fork server, head: jobs go on",
        "tests/faults/test_daemon_killed.py",
        "tests/faults/test_actors_and_services.py",
        "tests/faults/test_ray_and_power.py",
    ),
    "disturbances": Bar(
        _disturbed(20, "--places", "1", "--clusters", "0"),
        (Figure("jobs lost, doubled, wrong, leaked: one node", 0, unit="problems"),),
        long=_disturbed(2_000, "--places", "1", "--clusters", "0"),
    ),
    "disturbed_cluster": Bar(
        _disturbed(10, "--places", "0", "--clusters", "1"),
        (Figure("the same on three nodes", 0, unit="problems"),),
        long=_disturbed(500, "--places", "0", "--clusters", "1"),
    ),
    "simulation": Bar(
        _simulated(500),
        (Figure("simulated faults: an invariant did not hold", 0, ("broken",), "runs"),),
        long=_simulated(20_000),
        read=lambda status, _: {"broken": status},
    ),
    "insight": Bar(
        ("-c", INSIGHT, "1"),
        (
            Figure("faults that are not named rightly", 0, ("unnamed",), "faults"),
            Figure("findings about healthy jobs", 0, ("false",), "findings"),
        ),
        long=("-c", INSIGHT, "3"),
    ),
    "overwritten": _tests("one overwritten file resumes", "tests/unit/checkpoint/external"),
    "save": Bar(
        _benchmark("checkpoint_stall", "--pairs", "4", "--sizes", "2M,7M"),
        (
            Figure(f"`save()` of 2 M parameters, of {PEER}", 0.05, ("sizes", "2M", "ratio", PEER, "median"), "x"),
            Figure(f"`save()` of 7 M parameters, of {PEER}", 0.05, ("sizes", "7M", "ratio", PEER, "median"), "x"),
        ),
    ),
    "trainer": Bar(
        _benchmark("trainer_overhead", "--pairs", "8", "--steps", "60"),
        (Figure("a step of the trainer, of the loop by hand", 1.01, ("ratio", "torch", "median"), "x"),),
    ),
    "record": Bar(
        _benchmark("record_rate", "--pairs", "2"),
        (Figure("recording at 100 Hz", 99.9, unit="Hz", at_least=True),),
    ),
    "scrape": Bar(
        _benchmark("exporter_cost", "--pairs", "1", "--hang-seconds", "1"),
        (Figure("a scrape of a GPU's exporter", 0.005),),
    ),
    "idle": Bar(
        _benchmark("idle", "--pairs", "3"),
        (Figure("idle beside a job, of a bare Ray", 3.0, ("beside_a_job_over_bare_ray", "median"), "x"),),
    ),
    "scheduler": Bar(
        _benchmark("simulate_scale", "--jobs", "100000", "--queued", "10000", "--pairs", "100"),
        (
            Figure("100,000 jobs through the simulator", 30.0),
            Figure("p99 of a decision, 10,000 queued jobs", 0.020, ("decision", "p99")),
        ),
    ),
    "surface": Bar(
        ("-c", SURFACE),
        (Figure("commands, options, keys and metrics that are gone", 0, ("gone",), "names"),),
        compared=True,
    ),
}
ROW: Final = "{:<58} {:>14} {:>14} {:>14}  {}"


def main(arguments: Sequence[str] | None = None, bars: Mapping[str, Bar] = BARS) -> int:
    """Measure and print; return 1 when a figure is beyond its limit or could not be measured, else 0."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    options = _parser(bars).parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        sides = {THIS: HERE}
        if options.against:
            sides = {options.against: stack.enter_context(worktree(options.against)), THIS: HERE}
        print(ROW.format("bar", options.against or "", THIS, "limit", "ok"), flush=True)
        for name in options.bars:
            if bars[name].compared and not options.against:
                print(f"{name}: needs --against", flush=True)
                continue
            for row in measured(name, bars[name], sides, rounds=options.rounds, long=options.long):
                rows.append(row)
                print(shown(row), flush=True)
    if options.json:
        found = {"measure": "promises", "rows": rows, "machine": machine(), "commit": commit()}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in rows) else 1


def _parser(bars: Mapping[str, Bar]) -> argparse.ArgumentParser:
    def names(text: str) -> list[str]:
        wanted = [name for name in text.split(",") if name]
        if unknown := [name for name in wanted if name not in bars]:
            raise argparse.ArgumentTypeError(f"no bar is named {', '.join(unknown)}; there are: {', '.join(bars)}")
        return wanted

    made = argparse.ArgumentParser(prog="python -m benchmarks.promises", description=str(__doc__).partition("\n")[0])
    made.add_argument("--bars", type=names, default=list(bars), help=f"by comma, which of: {', '.join(bars)}")
    made.add_argument("--long", action="store_true", help="with thousands of disturbances and simulated faults: hours")
    made.add_argument("--against", metavar="COMMIT", help="measure this commit as well")
    made.add_argument("--rounds", type=int, default=1, help="of each bar; the median counts (default 1)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    return made


def measured(
    name: str, bar: Bar, sides: Mapping[str, Path], *, rounds: int = 1, long: bool = False
) -> Iterator[dict[str, Any]]:
    """Run a bar's command for each side in turns, in reverse order in every other round; yield a row for each of its figures."""
    command = (bar.long if long else ()) or bar.command
    found: dict[str, list[Any]] = {side: [] for side in sides}
    problems: dict[str, str] = {}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(list(sides)):
            try:
                found[side].append(_run(bar, command, sides[side], None if bar.long and long else LONGEST_SECONDS))
            except NoFigureError as error:
                problems[side] = str(error)
    if bar.compared:
        _count_gone(found)
    for figure in bar.figures:
        values = {side: _median(figure, each) for side, each in found.items()}
        mine = values.pop(THIS)
        yield {
            "bar": name,
            "label": figure.label,
            "unit": figure.unit,
            "limit": figure.limit,
            "at_least": figure.at_least,
            "before": values,
            "figure": mine,
            "ok": mine is not None and THIS not in problems and figure.holds(mine),
            "problems": problems,
        }


def _run(bar: Bar, command: Sequence[str], checkout: Path, seconds: float | None) -> Any:
    """Return what a command gave, in the environment of its checkout. Raises NoFigureError."""
    python = checkout / ".venv" / "bin" / "python" if checkout != HERE else Path(sys.executable)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ORCH_", "RAY_"))}
    environ |= {"PATH": f"{python.parent}{os.pathsep}{environ.get('PATH', '')}", "PYTHONPATH": str(checkout)}
    process = subprocess.Popen(
        [str(python), *command],
        cwd=checkout,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoFigureError(f"it took longer than {seconds:g} s") from None
    finally:
        if process.poll() is None:
            process.terminate()  # a benchmark ends the daemons that it has started
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks of a launcher that was ended outlive it
    try:
        return bar.read(process.returncode, printed)
    except ValueError:
        raise NoFigureError(f"exit status {process.returncode}: {errors[-500:]}") from None


def _median(figure: Figure, results: Sequence[Any]) -> float | None:
    values = []
    for result in results:
        value: Any = result
        for key in figure.keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float):
            values.append(float(value))
    return statistics.median(values) if values else None


def _count_gone(found: Mapping[str, list[Any]]) -> None:
    """Add to each result the number of names that the other side has and this one lacks, and print them."""
    names = {side: {name for result in results for name in result["names"]} for side, results in found.items()}
    gone = sorted(set().union(*names.values()) - names[THIS])
    if gone:
        print(f"gone: {', '.join(gone)}", file=sys.stderr)
    for side, results in found.items():
        for result in results:
            result["gone"] = len(gone) if side == THIS else 0


def shown(row: Mapping[str, Any]) -> str:
    """Return a row of the table, with the problems below it."""
    limit = f"{'>=' if row['at_least'] else '<='} {row['limit']:g} {row['unit']}"
    before = " ".join(_cell(value) for value in row["before"].values())
    line = ROW.format(row["label"], before, _cell(row["figure"]), limit, "yes" if row["ok"] else "NO")
    return "\n".join([line, *(f"  {side}: {text}" for side, text in row["problems"].items())])


def _cell(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


@contextlib.contextmanager
def worktree(of: str) -> Iterator[Path]:
    """Give a worktree of a commit, with an environment of its own that has this one's packages; both are removed in the end."""
    with tempfile.TemporaryDirectory(prefix="orch-promises-") as folder:
        place = Path(folder) / "checkout"
        git = ["git", "-C", str(HERE), "worktree"]
        added = subprocess.run([*git, "add", "--detach", str(place), of], capture_output=True, text=True, check=False)
        if added.returncode:
            raise SystemExit(f"no worktree of {of}: {added.stderr.strip()}")
        try:
            _environment(place)
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], capture_output=True, check=False)


def _environment(place: Path) -> None:
    """Make ``.venv`` with this interpreter's packages and scripts, in which ``place`` comes first: an install would take minutes."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(place / ".venv")
    own = Path(sysconfig.get_path("purelib", vars={"base": str(place / ".venv"), "platbase": str(place / ".venv")}))
    # Only paths: the .pth files of the packages named here are not read, so this checkout is not imported.
    (own / "promises.pth").write_text(f"{place}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    ours, theirs = Path(sys.executable).parent, place / ".venv" / "bin"
    for script in ours.iterdir():
        target = theirs / script.name
        if target.exists() or target.is_symlink() or script.name.startswith(("python", "activate")):
            continue
        head = script.read_bytes()[:2] if script.is_file() else b""
        if head == b"#!":
            target.write_bytes(script.read_bytes().replace(bytes(ours), bytes(theirs), 1))
            target.chmod(0o755)
        else:
            target.symlink_to(script)


if __name__ == "__main__":
    began = time.monotonic()
    status = main()
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    sys.exit(status)
