"""The metric table keeps its own conventions, so that everything built on it does."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from orchestrator import catalogue
from orchestrator.catalogue import METRICS
from tests.support.trees import tree_of

UNIT_SUFFIX = {
    "ratio": "_ratio",
    "bytes": "_bytes",
    "watts": "_watts",
    "joules": "_joules",
    "celsius": "_celsius",
    "hertz": "_hertz",
    "seconds": "_seconds",
}
# DESIGN names these without the unit in the name.
UNIT_NOT_IN_NAME = {
    catalogue.JOB_GPU_BALANCE_CV.name,
    catalogue.JOB_GPU_BALANCE_MIN_PER_MEDIAN.name,
    catalogue.GPU_SECONDS_UNCOMMITTED.name,
}


def test_names_types_and_labels_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"orch_[a-z][a-z0-9_]*[a-z0-9]", metric.name)
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        if metric.unit and metric.name not in UNIT_NOT_IN_NAME:
            assert metric.name.removesuffix("_total").endswith(UNIT_SUFFIX[metric.unit]), metric.name
        assert not {"job", "instance", "le", "quantile"} & set(metric.labels), "Prometheus owns these labels"
        assert len(set(metric.labels)) == len(metric.labels), metric.name
        assert metric.help.endswith("."), metric.name
        assert "\n" not in metric.help, metric.name
        assert bool(metric.buckets) == (metric.type == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_every_gpu_series_can_be_joined_on_its_uuid() -> None:
    of_jobs = (catalogue.JOB_GPU, catalogue.FINDING)
    for metric in METRICS:
        assert ("gpu_uuid" in metric.labels) == (metric.owner == "gpu" or metric in of_jobs), metric.name


def test_every_job_series_names_its_job() -> None:
    for metric in METRICS:
        assert ("job_id" in metric.labels) == (metric.owner == "job"), metric.name


def test_imports_nothing_of_the_project_and_no_third_party_package() -> None:
    tree = tree_of(Path(catalogue.__file__).read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert set(modules) <= set(sys.stdlib_module_names)
