"""Traces: three published formats, bad rows, synthetic traces, arguments of the command line, the chart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orchestrator.analysis.simulation import (
    FAMILIES,
    TraceError,
    compare,
    parse_nodes,
    parse_policies,
    read_trace,
    synthetic_trace,
    write_picture,
)
from orchestrator.core.simulation import TraceJob

if TYPE_CHECKING:
    from pathlib import Path

PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,11cb48\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_philly(tmp_path: Path) -> None:
    path = write(tmp_path, PHILLY + "2017-10-09 06:13:03,2951.0,8,23608.0,6214e9\n")
    assert read_trace(path) == [
        TraceJob(at=1507529583.0, seconds=2951.0, ranks=8, user="6214e9"),
        TraceJob(at=1507532515.0, seconds=66.0, user="11cb48"),
    ]


def test_helios_leaves_jobs_without_gpus_out(tmp_path: Path) -> None:
    head = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    rows = "1,u1,vc1,0,4,1,COMPLETED,2020-04-01 00:00:03,,,10,0\n2,u2,vc1,4,4,1,FAILED,2020-04-01 00:00:05,,,0,0\n"
    assert read_trace(write(tmp_path, head + rows)) == [TraceJob(at=1585699205.0, seconds=1.0, ranks=4, user="u2")]


def test_pai_has_instances_with_parts_of_gpus(tmp_path: Path) -> None:
    text = "job_id,submit_time,user,num_gpu,num_inst,duration\n1,100,u1,0.25,3,60\n2,50,u2,2,1,5\n3,60,u2,,1,5\n"
    assert read_trace(write(tmp_path, text)) == [
        TraceJob(at=50.0, seconds=5.0, ranks=1, gpus=2.0, user="u2"),
        TraceJob(at=100.0, seconds=60.0, ranks=3, gpus=0.25, user="u1"),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("soon,5,1,5,c", "timestamp is 'soon'"),
        ("2017-10-09 07:01:55,-5,1,5,c", "duration is '-5'"),
        ("2017-10-09 07:01:55,nan,1,5,c", "duration is 'nan'"),
        ("2017-10-09 07:01:55,5,many,5,c", "num_gpus is 'many'"),
        ("2017-10-09 07:01:55,5,20000,5,c", "num_gpus is 20000"),
        ("2017-10-09 07:01:55", "num_gpus is ''"),
    ],
)
def test_a_bad_row_is_an_error_with_its_line(tmp_path: Path, row: str, said: str) -> None:
    with pytest.raises(TraceError, match=r"trace\.csv, line 3: " + said):
        read_trace(write(tmp_path, PHILLY + row + "\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "columns of no header"), ("a,b\n1,2\n", "columns a, b"), (PHILLY.splitlines()[0] + "\n", "holds no job")],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as raised:
        read_trace(write(tmp_path, text))
    assert raised.value.hint


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_synthetic_trace_has_its_load_and_its_seed(family: str) -> None:
    trace = synthetic_trace(family, jobs=400, gpus=16, load=0.5, seed=3)
    assert trace == synthetic_trace(family, jobs=400, gpus=16, load=0.5, seed=3)
    assert trace != synthetic_trace(family, jobs=400, gpus=16, load=0.5, seed=4)
    assert len(trace) == 400
    assert max(job.ranks for job in trace) <= 16
    asked = sum(job.seconds * job.ranks for job in trace)
    assert asked / (16 * (trace[-1].at - trace[0].at)) == pytest.approx(0.5, rel=0.2)


def test_nodes_and_policies_are_parsed() -> None:
    assert [node.gpus for node in parse_nodes("2x8,1x4").values()] == [8, 8, 4]
    assert parse_policies("orch, fifo,orch") == ["orch", "fifo"]


@pytest.mark.parametrize("text", ["", "8", "0x8", "8x0", "8x8,", "-1x8", "200000x1"])
def test_nodes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="nodes"):
        parse_nodes(text)


def test_policies_side_by_side_and_their_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = synthetic_trace("large", jobs=60, gpus=16, load=0.9, seed=2)
    results = compare(trace, parse_nodes("2x8"), ["orch", "fifo"])
    assert [result.figures.jobs for result in results] == [60, 60]
    assert results[0].figures.completion.mean < results[1].figures.completion.mean
    assert write_picture(results, tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
