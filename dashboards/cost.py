"""Panels of energy and of cost, at the prices that are entered at the top of a board."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import words
from dashboards.promql import of_chosen_jobs, on_gpus_of_jobs
from dashboards.widgets import Look, Query, number, text_variable
from orchestrator import catalogue as c

if TYPE_CHECKING:
    from grafanalib import core as g

JOULES_PER_KWH = 3_600_000
STEP_SECONDS = 15
MONEY = Look(unit="short", decimals=2, low=0)
PRICED = "vector($price_gpu_hour + $price_kwh) > 0"


def prices() -> tuple[g.Template, ...]:
    """Return the variables of the two prices, in any currency; 0 until they are set."""
    return (
        text_variable("price_gpu_hour", "Price of a GPU hour", "0"),
        text_variable("price_kwh", "Price of a kWh", "0"),
    )


def job_energy() -> g.Panel:
    """Return the panel of the energy of each job while it held its GPUs."""
    return number(
        "Energy in this time range",
        "Energy of the job's GPUs while it held them, in kWh, from their power. A GPU that two jobs share counts for both.",
        Query(expr=of_chosen_jobs(_job_kwh()), legend="{{job_id}}", now=True),
        missing=words.NO_EXPORTER,
        look=Look(unit="kwatth", decimals=3, low=0),
        graph=False,
    )


def job_cost() -> g.Panel:
    """Return the panel of the cost of each job: its GPU hours and its energy."""
    hours = f"sum by (job_id) (increase({c.JOB_GPU_TIME.name}[$__range])) / 3600"
    # without GPU samples a job costs its GPU hours alone
    cost = f"({hours}) * $price_gpu_hour + (({_job_kwh()}) * $price_kwh or ({hours}) * 0)"
    return number(
        "Cost in this time range",
        "GPU hours and energy at the prices at the top of the board.",
        Query(expr=f"{of_chosen_jobs(f'({cost})')} and on () ({PRICED})", legend="{{job_id}}", now=True),
        missing=words.NO_PRICES,
        look=MONEY,
        graph=False,
    )


def cluster_cost(gpu_seconds: str, joules: str) -> g.Panel:
    """Return the panel of the cost of the chosen queues and nodes; both arguments are sums over the time range."""
    energy = f"(({joules}) / {JOULES_PER_KWH} * $price_kwh or vector(0))"
    return number(
        "Cost in this time range",
        "GPU hours that jobs held and energy of all GPUs, at the prices at the top of the board.",
        Query(
            expr=f"(({gpu_seconds}) / 3600 * $price_gpu_hour + {energy}) and on () ({PRICED})", legend="cost", now=True
        ),
        missing=words.NO_PRICES,
        look=MONEY,
        graph=False,
        width=6,
    )


def _job_kwh() -> str:
    held = on_gpus_of_jobs(c.GPU_POWER.name)
    added = f"sum_over_time(({held})[$__range:{STEP_SECONDS}s])"
    return f"sum by (job_id) ({added}) * {STEP_SECONDS} / {JOULES_PER_KWH}"
