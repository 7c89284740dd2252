"""The exporter's text: a golden page, catalogued names only, and no lines for missing values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from orchestrator import catalogue
from orchestrator.gpu.exporter.exposition import (
    FAMILIES,
    PROCESS_PART,
    SAMPLE_PARTS,
    STATUS_PARTS,
    ExporterStatus,
    Renderer,
    compose,
    escape,
    names,
)
from orchestrator.gpu.sample import GpuProcess, Sample, Throttle, XidCount
from tests.unit.gpu.support import gpu_info, sample

IDENTITY = (
    'orch_gpu_info{gpu_uuid="GPU-a",gpu="0",node="node1",vendor="nvidia",model="NVIDIA H100",'
    'pci_bus_id="0000:01:00.0",driver_version="580.65.06"} 1'
)
UP = ExporterStatus(up=True, last_success=1.7e9, read_errors=0)


def full_sample() -> Sample:
    """Return a sample with every possible value."""
    return sample(
        duration_seconds=0.0012,
        utilization=0.5,
        memory_activity=0.25,
        memory_used_bytes=10 << 30,
        memory_total_bytes=80 << 30,
        power_watts=300.5,
        power_limit_watts=700.0,
        energy_joules=1234.5,
        fan=0.4,
        pcie_transmit_bytes=2**53,
        pcie_receive_bytes=7,
        temperatures=(("gpu", 55.0), ("memory", 62.0)),
        temperature_limits=(("gpu", "slowdown", 89.0),),
        clocks=(("sm", 1.98e9),),
        throttle=((Throttle.THERMAL, True), (Throttle.POWER_CAP, False)),
        throttle_seconds=((Throttle.THERMAL, 2.5),),
        ecc_errors=(("uncorrected", "volatile", 3),),
        remapped_rows=(("pending", 1),),
        nvlinks=((0, 1024, 2048), (1, None, 4096)),
        xids=(XidCount(code=79, count=2, last_timestamp=1.7e9),),
        processes=(GpuProcess(pid=4711, memory_bytes=5), GpuProcess(pid=4712, memory_bytes=None)),
    )


def page(value: Sample | None, status: ExporterStatus = UP) -> bytes:
    return compose([Renderer(gpu_info(), "node1", processes=True).block(value, status)])


CHANGES: list[dict[str, object]] = [
    {"utilization": None},
    {"utilization": 0.0, "power_watts": math.nan},
    {"temperatures": (("gpu", 56.0),), "energy_joules": 1240.25},
    {"nvlinks": (), "xids": (), "ecc_errors": (("uncorrected", "volatile", 4),)},
    {"throttle": ((Throttle.THERMAL, False), (Throttle.POWER_CAP, True)), "processes": ()},
    {"temperatures": (), "clocks": (("sm", 1.2e9), ("memory", 9e8)), "fan": None},
    {},
]


@given(
    story=st.lists(
        st.tuples(
            st.sampled_from([*CHANGES, None]), st.booleans(), st.integers(0, 2), st.sampled_from([None, 1.7e9, 1.8e9])
        ),
        max_size=12,
    )
)
def test_a_renderer_that_keeps_lines_says_what_a_new_one_would(
    story: list[tuple[dict[str, Any] | None, bool, int, float | None]],
) -> None:
    used = Renderer(gpu_info(), "node1", processes=True)
    for change, up, errors, at in story:
        value = None if change is None else replace(full_sample(), **change)
        status = ExporterStatus(up=up, last_success=at, read_errors=errors)
        assert compose([used.block(value, status)]) == page(value, status)


def test_every_family_is_made_by_one_part() -> None:
    parts = [metric for part in (*SAMPLE_PARTS, PROCESS_PART, *STATUS_PARTS) for metric in part.families]
    assert len(parts) == len(set(parts))
    assert {*parts, catalogue.GPU_INFO, catalogue.EXPORTER_UP} == set(FAMILIES)
    attributes = [part.attribute for part in (*SAMPLE_PARTS, PROCESS_PART, *STATUS_PARTS)]
    assert len(attributes) == len(set(attributes))


def test_processes_have_a_series_only_when_asked_for() -> None:
    text = compose([Renderer(gpu_info(), "node1").block(full_sample(), UP)]).decode()
    assert "orch_gpu_process_memory_bytes" not in text


def test_every_gpu_metric_of_the_catalogue_is_exported_and_no_other() -> None:
    assert list(names(page(full_sample()))) == sorted(metric.name for metric in FAMILIES)
    assert {metric.owner for metric in FAMILIES} == {"gpu"}


def test_the_page_parses_with_the_catalogues_types_labels_and_help() -> None:
    by_name = {metric.name: metric for metric in catalogue.METRICS}
    families = list(text_string_to_metric_families(page(full_sample()).decode()))
    for family in families:
        metric = by_name.get(family.name) or by_name[f"{family.name}_total"]
        assert (family.type, family.documentation) == (metric.type, metric.help)
        for row in family.samples:
            assert tuple(row.labels) == metric.labels
    assert len(families) == len(FAMILIES)


def test_values_in_base_units() -> None:
    lines = page(full_sample()).decode().splitlines()
    for line in (
        IDENTITY,
        'orch_gpu_utilization_ratio{gpu_uuid="GPU-a"} 0.5',
        'orch_gpu_power_watts{gpu_uuid="GPU-a"} 300.5',
        'orch_gpu_pcie_transmit_bytes_total{gpu_uuid="GPU-a"} 9007199254740992',
        'orch_gpu_temperature_celsius{gpu_uuid="GPU-a",sensor="memory"} 62.0',
        'orch_gpu_throttle_active{gpu_uuid="GPU-a",reason="thermal"} 1',
        'orch_gpu_throttle_active{gpu_uuid="GPU-a",reason="power_cap"} 0',
        'orch_gpu_xid_errors_total{gpu_uuid="GPU-a",xid="79"} 2',
        'orch_gpu_process_memory_bytes{gpu_uuid="GPU-a",pid="4711"} 5',
        'orch_exporter_up{gpu_uuid="GPU-a",gpu="0",node="node1"} 1',
    ):
        assert line in lines


def test_what_is_absent_has_no_line() -> None:
    text = page(sample(power_watts=300.0)).decode()
    assert "orch_gpu_power_watts{" in text
    for name in ("utilization", "temperature", "energy", "xid", "ecc", "fan"):
        assert f"orch_gpu_{name}" not in text
    assert 'link="1"' not in "".join(
        line for line in page(full_sample()).decode().splitlines() if line.startswith("orch_gpu_nvlink_transmit")
    )


def test_a_gpu_that_is_down_leaves_only_the_exporters_own_series() -> None:
    text = page(None, ExporterStatus(up=False, last_success=1.7e9, read_errors=4)).decode()
    assert list(names(text.encode())) == [
        "orch_exporter_last_success_timestamp_seconds",
        "orch_exporter_read_errors_total",
        "orch_exporter_up",
    ]
    assert 'orch_exporter_up{gpu_uuid="GPU-a",gpu="0",node="node1"} 0' in text
    assert 'orch_exporter_read_errors_total{gpu_uuid="GPU-a"} 4' in text


def test_families_of_several_gpus_stand_together() -> None:
    blocks = [Renderer(gpu_info(f"GPU-{i}", i), "n").block(sample(f"GPU-{i}", power_watts=1.0), UP) for i in range(3)]
    seen: list[str] = []
    for line in compose(blocks).decode().splitlines():
        name = line.split()[2] if line.startswith("#") else line.partition("{")[0]
        if not seen or seen[-1] != name:
            seen.append(name)
    assert len(seen) == len(set(seen)), "a family's lines must not be scattered"


def test_labels_are_escaped() -> None:
    assert escape('a"b\\c\nd') == 'a\\"b\\\\c\\nd'
    info = gpu_info(model='weird "GPU"\\')
    text = compose([Renderer(info, "n").block(sample(), UP)]).decode()
    rows = [row for family in text_string_to_metric_families(text) for row in family.samples]
    (identity,) = [row for row in rows if row.name == "orch_gpu_info"]
    assert identity.labels["model"] == 'weird "GPU"\\'
