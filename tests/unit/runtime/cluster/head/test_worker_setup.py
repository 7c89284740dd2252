"""A worker without a ``runtime_env`` starts at once; any other is left to Ray's own program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from orchestrator.runtime.cluster.head.worker_setup import command

from orchestrator.runtime.cluster.head import worker_setup

WORKER = ["-s", "/ray/workers/default_worker.py", "--node-ip-address=127.0.0.1", "--worker-id", "7"]
PLAIN = {
    "command_prefix": [],
    "env_vars": {},
    "py_executable": "/py",
    "override_worker_entrypoint": None,
    "java_jars": [],
}


@pytest.mark.parametrize(
    "context",
    [(), ("--serialized-runtime-env-context={}",), (f"--serialized-runtime-env-context={json.dumps(PLAIN)}",)],
)
@pytest.mark.parametrize("language", [("--language=PYTHON",), ("--language", "PYTHON")])
def test_a_plain_worker_is_executed_with_its_own_arguments(context: tuple[str, ...], language: tuple[str, ...]) -> None:
    assert command([*context, *language, *WORKER], "/py") == ["/py", *WORKER]
    assert command([*WORKER, *language, *context], "/py") == ["/py", *WORKER]


@pytest.mark.parametrize(
    "given",
    [
        ["--language=JAVA"],
        ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps({**PLAIN, 'py_executable': '/other'})}"],
        ["--language=PYTHON", "--serialized-runtime-env-context", json.dumps({**PLAIN, "env_vars": {"A": "1"}})],
        ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps({**PLAIN, 'command_prefix': ['x']})}"],
        ["--language=PYTHON", '--serialized-runtime-env-context={"of a later Ray": 1}'],
        ["--language=PYTHON", "--serialized-runtime-env-context=[1]"],
        ["--language=PYTHON", "--serialized-runtime-env-context=no JSON"],
        [],
    ],
)
def test_what_has_to_be_prepared_is_left_to_ray(given: list[str]) -> None:
    assert command([*given, *WORKER], "/py") == ["/py", "/ray/workers/setup_worker.py", *given, *WORKER]


def test_run_by_its_path_it_becomes_the_worker(tmp_path: Path) -> None:
    worker = tmp_path / "default_worker.py"
    worker.write_text("import json, os, sys\nprint(json.dumps([os.getpid(), sys.argv, sorted(sys.modules)]))\n")
    process = subprocess.Popen(
        [sys.executable, worker_setup.__file__, "--language=PYTHON", str(worker), "--a=b"],
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, arguments, modules = json.loads(process.communicate()[0])
    assert (pid, arguments) == (process.pid, [str(worker), "--a=b"])
    assert not [name for name in modules if name.split(".")[0] in ("ray", "orchestrator")]
