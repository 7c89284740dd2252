"""A campaign's report as lines for the terminal and as an HTML page of its own."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from orchestrator.cli.console import clean
from orchestrator.cli.drills.campaign_report import BudgetReached
from orchestrator.cli.render.table import Cell, Column, render_table
from orchestrator.units import clock, duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.cli.console import Console
    from orchestrator.cli.drills.campaign_report import CampaignReport, Figures, RefusedRepeatedly, Round

HEAD: Final = ("KIND", "DONE", "INTACT", "REFUSED", "DETECTED p50", "max", "RECOVERED p50", "p99", "max", "STEPS LOST")
ROUNDS: Final = ("TIME", "KIND", "JOB", "RANK", "DID", "DETECTED", "RECOVERED", "STEPS LOST", "RESULT")
STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #111; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } .scroll { overflow-x: auto }
th, td { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top } thead th { border-bottom: 1px solid #999 }
.bad { color: #a00; font-weight: 600 }
"""


def round_line(done: Round) -> str:
    """Format a finished drill as a line."""
    if done.refused:
        return f"{clock(done.at)}  {done.kind} on {done.job_id}: not done: {clean(done.refused)}"
    report = done.report
    did = clean(report.did) if report else done.kind.value
    durations = (
        f"detected after {duration(report.detection_seconds) or '-'}, recovered after {duration(report.recovery_seconds) or '-'}"
        if report
        else ""
    )
    result = "intact" if done.intact else "NOT INTACT: " + "; ".join(clean(p) for p in done.problems)
    return "  ".join(part for part in (clock(done.at), f"{done.job_id}: {did}", durations, result) if part)


def outcome(report: CampaignReport) -> str:
    """Format the outcome of the campaign as a line."""
    how = "interrupted" if report.interrupted else report.ended_because or "its time has passed"
    state = ("every job is intact" if report.done else "no fault was injected") if report.intact else "NOT INTACT"
    return f"{report.done} drills in {duration(report.seconds)} ({how}), seed {report.seed}: {state}"


def lines(console: Console, report: CampaignReport) -> list[str]:
    """Format the figures by kind, and the outcome."""
    columns = [Column(title, right=index > 0) for index, title in enumerate(HEAD)]
    rows = [[Cell(text) for text in _cells(one)] for one in report.figures() if one.done or one.refused]
    problems = [f"problem: {clean(problem)}" for problem in report.all_problems()]
    return [*render_table(console, columns, rows), *left_alone(report), *problems, outcome(report)]


def left_alone(report: CampaignReport) -> list[str]:
    """Format the kinds that jobs were not drilled with, and why, as lines."""
    return [f"left alone: {one.job_id}, {', '.join(one.kinds)}: {_reason(one.reason)}" for one in report.left_alone]


def _reason(reason: BudgetReached | RefusedRepeatedly) -> str:
    if not isinstance(reason, BudgetReached):
        return f"refused {reason.times} times in a row"
    kept = "the last one is kept for the job" if reason.used < reason.budget else "none is left"
    used = f"{reason.failure_class} restarts of {reason.job_id} used: {reason.used} of {reason.budget}"
    return f"{used}, and {kept}; a higher retry.max_restarts.{reason.failure_class} allows more"


def page(report: CampaignReport) -> str:
    """Format the report as one HTML page that loads no other file."""
    state = "" if report.intact else ' class="bad"'
    notes = "".join(f'<li class="bad">{escape(problem)}</li>' for problem in report.all_problems())
    notes += "".join(f"<li>{escape(line)}</li>" for line in left_alone(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Campaign of drills</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>Campaign of drills</h1>\n"
        f"<p{state}>{escape(outcome(report))}</p>\n<p>Jobs: {escape(', '.join(report.jobs))}</p>\n"
        + (f"<ul>{notes}</ul>\n" if notes else "")
        + f"<h2>By kind</h2>\n{_table(HEAD, [_cells(one) for one in report.figures()])}\n"
        + f"<h2>Drills</h2>\n{_table(ROUNDS, [_round_cells(done) for done in report.rounds])}\n</body></html>\n"
    )


def _cells(one: Figures) -> list[str]:
    measured = (one.detection_p50, one.detection_max, one.recovery_p50, one.recovery_p99, one.recovery_max)
    counts = [one.kind, str(one.done), str(one.intact), str(one.refused)]
    return [*counts, *(duration(value) or "-" for value in measured), str(one.steps_lost)]


def _round_cells(done: Round) -> list[str]:
    report = done.report
    measured = (report.detection_seconds, report.recovery_seconds) if report else (None, None)
    lost = "-" if report is None or report.steps_lost is None else str(report.steps_lost)
    result = "intact" if done.intact else "; ".join(done.problems) or f"not done: {done.refused}"
    did = report.did if report else ""
    return [clock(done.at), done.kind.value, done.job_id, str(done.rank), did, *(duration(value) or "-" for value in measured), lost, result]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
