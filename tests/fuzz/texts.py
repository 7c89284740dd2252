"""Readers of texts that users write, and of data from clients of the exporters and from drivers."""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
from collections.abc import Callable
from http.client import LineTooLong
from pathlib import Path
from typing import Any, cast

from orchestrator.analysis.runs import SourceError, read_run
from orchestrator.gpu.drivers.amd import parse_metrics
from orchestrator.gpu.exporter import HttpSettings, _Handler, _protected, _Server
from orchestrator.spec.globs import GlobError, Globs
from orchestrator.spec.importing import import_line, import_script, job_text
from orchestrator.spec.job import from_dict, parse_job, parse_jobs
from orchestrator.spec.problems import BadValueError, SpecError
from orchestrator.spec.queues import parse_queues
from orchestrator.spec.reader.reading import to_dict
from orchestrator.spec.units import parse_duration, parse_memory
from tests.fuzz.reader import Reader

MAX_SENT = 64 * 1024
"""More than a head may have, and less than a socket holds."""
PATHS = ("a", "a/b", "a/b/c.py", "build/x.o", ".git/config", "ä/ö", "a b", "x" * 300, "[a]", "-")
WHOLE_JOB = b"""version: 1
name: digits
entrypoint: python train.py --epochs 5
outputs: ["out/**", "!out/tmp"]
env: {A: "1", B: &b text, C: *b}
resources:
  num_workers: {min: 2, max: 8}
  resources_per_worker: {gpu: 0.5, cpu: 2, memory: 8GB}
min_runtime: 10m
max_duration: 24h
depends_on: [{job: prepare, on: success}]
retry: {max_restarts: {user: 0, preemption: unlimited}, exit_codes: {retry: [75]}, log_policies: [{pattern: "a.*b", action: fail}]}
health: {startup_timeout: 10m, progress: {pattern: 'step (\\d+)'}}
checkpoint: {keep: 3, keep_best: 1, score_attribute: loss, score_order: min, interval: auto}
notify: [{url: "https://example.org/hook", on: [FAILED]}]
labels: {team: a}
"""
MATRIX = b"""name: m
entrypoint: python t.py --lr ${matrix.lr} -n ${matrix.n}
matrix: {parameters: {lr: [0.1, 1e-3], n: [1, 2]}, exclude: [{lr: 0.1, n: 1}], max_concurrent: 2}
"""
SCRIPT = b"""#!/bin/bash
#SBATCH --job-name=x --nodes=2
#SBATCH --gres=gpu:a100:4
#SBATCH --time=1-02:03:04
#SBATCH --mem=8G
export A=1
N=$SLURM_NNODES
srun torchrun --nproc_per_node 4 train.py --a "$A" 'b c'
"""


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _read_job(data: bytes) -> bool:
    """Parse jobs; check that each is the same after storing and reading it."""
    text, accepted = _text(data), False
    with contextlib.suppress(SpecError):
        for _, spec in parse_jobs(text).jobs:
            assert from_dict(to_dict(spec)) == spec, "a job is stored otherwise than it was read"
        accepted = True
    with contextlib.suppress(SpecError):
        parse_job("name: a\nentrypoint: python a.py\n", overrides=[text])
    return accepted


def _read_globs(data: bytes) -> bool:
    """Match the patterns of an ignore file or of ``outputs`` against some paths."""
    try:
        globs = Globs(_text(data).splitlines())
    except GlobError:
        return False
    for path in PATHS:
        for is_dir in (False, True):
            globs.matches(path, is_dir=is_dir)
            globs.last(path, is_dir=is_dir)
    return len(globs) > 0


def _read_launch_line(data: bytes) -> bool:
    """Convert a command line or a batch script to a job file."""
    text = _text(data)
    try:
        found = import_script(text) if "#SBATCH" in text else import_line(text)
    except BadValueError:
        return False
    with contextlib.suppress(SpecError):
        parse_jobs(job_text(found.job))
    return True


def _read_values(data: bytes) -> bool:
    """Parse values of settings and options: queues, durations, sizes."""
    text, accepted = _text(data), 0
    for read in (parse_queues, parse_duration, parse_memory):
        with contextlib.suppress(ValueError):
            cast("Any", read)(text)
            accepted += 1
    return accepted > 0


# -- recordings


def _recordings() -> list[bytes]:
    return [b'{"at": 1700000000.0, "step": 1, "metrics": {"loss": 0.5}}\n{"at": 1700000001.0, "step": 2}\n']


def _read_recording(data: bytes) -> bool:
    """Read a file of a job's directory as a run, as a GPU recording and as progress."""
    accepted = False
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        for name in ("metrics.jsonl", "gpu.json", "gpu.csv"):
            folder = Path(place) / name.replace(".", "-")
            folder.mkdir()
            path = folder / name
            path.write_bytes(data)
            for one in (path, folder):
                with contextlib.suppress(SourceError):
                    read_run(one)
                    accepted = True
    return accepted


# -- data from the network and from drivers


def _read_exporter_request(data: bytes) -> bool:
    def page(_environ: object, start: Callable[..., object]) -> list[bytes]:
        start("200 OK", [("Content-Type", "text/plain")])
        return [b"metrics of the exporter\n"]

    server = _Server(HttpSettings(token="secret"), _protected(page, "secret"))
    server.server_name, server.server_port = "localhost", 1
    server.setup_environ()
    server.set_app(server.served)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data[:MAX_SENT])
        ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(LineTooLong):  # raised within the request line, where the server only closes
            _Handler(theirs, ("127.0.0.1", 1), server)
        theirs.close()
        with contextlib.suppress(ConnectionResetError):  # what was sent was not read to its end
            answer = b"".join(iter(lambda: ours.recv(65536), b""))
            assert b"metrics of the exporter" not in answer or b"Bearer secret" in data, "metrics without the token"
            return answer.startswith(b"HTTP/1.0 200")
    return False


def _read_amd_table(data: bytes) -> bool:
    return parse_metrics(data) is not None


READERS = (
    Reader("job-yaml", _read_job, lambda: [WHOLE_JOB, MATRIX], ("orchestrator.spec",)),
    Reader(
        "ignore-patterns",
        _read_globs,
        lambda: [b"*.o\n/build/\n!a/b\na/**/c.py\n[a-z]*\\ \n"],
        ("orchestrator.spec.globs",),
    ),
    Reader(
        "launch-line",
        _read_launch_line,
        lambda: [SCRIPT, b"CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node=4 train.py --lr 0.1"],
        ("orchestrator.spec.importing", "orchestrator.spec.entrypoint"),
    ),
    Reader(
        "values",
        _read_values,
        lambda: [b"a guaranteed=2 ; b maximum=4 weight=2.5", b"1h30m", b"8GB"],
        ("orchestrator.spec.queues", "orchestrator.spec.units"),
    ),
    Reader("recording", _read_recording, _recordings, ("orchestrator.analysis.runs", "orchestrator.gpu.recording")),
    Reader(
        "exporter-request",
        _read_exporter_request,
        lambda: [
            b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer secret\r\n\r\n",
            b"GET /healthz HTTP/1.0\r\n\r\n",
        ],
        ("orchestrator.gpu.exporter",),
    ),
    Reader(
        "amd-metrics",
        _read_amd_table,
        lambda: [struct.pack("<HBB", 120, 1, 3) + bytes(116)],
        ("orchestrator.gpu.drivers.amd",),
    ),
)
