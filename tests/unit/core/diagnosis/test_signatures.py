"""Every named failure is recognised by real libraries' messages; those that a CPU can cause are caused here."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from orchestrator.core.diagnosis.signatures import missing_file
from orchestrator.core.events import Exit
from orchestrator.core.facts.faults import ChildKilled, KernelMessage, OomCount, OomKill, Xid
from orchestrator.core.lifecycle.failure import ClassifiedFailure, classify
from orchestrator.core.states import FailureClass
from tests.support.records import replace
from tests.unit.core.builders import T0, after, exited, make_spec, pending, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any

    from orchestrator.core.events import Failure

USER, INFRA = FailureClass.USER, FailureClass.INFRA


def told(**fields: Any) -> Failure:
    """Return the failure of a job of one rank that ended in this way."""
    job = running(pending(make_spec(workers=1)))
    found = classify(after(job, exited(job, **fields)), T0 + 20)
    assert isinstance(found, ClassifiedFailure)
    return found.failure


def raised(function: Callable[[], object]) -> dict[str, str]:
    """Return the fork server's report of the exception that ``function`` raises."""
    with pytest.raises(BaseException) as caught:
        function()
    kind = type(caught.value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return {"error_type": name, "error_message": str(caught.value)}


def _bind_twice() -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen()
        second.bind(first.getsockname())


def _serve_store_twice() -> None:
    with socket.socket() as first:
        first.bind(("", 0))
        first.listen()
        TCPStore("127.0.0.1", first.getsockname()[1], 1, is_master=True)


def _write_to_a_full_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def _diverge() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        (torch.sqrt(torch.zeros(1, requires_grad=True)) * 0).sum().backward()  # type: ignore[no-untyped-call]


def _clip_nothing() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([float("nan")])
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def _load_other_optimizer() -> None:
    one, two = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    torch.optim.Adam(one.parameters()).load_state_dict(torch.optim.Adam(two.parameters()).state_dict())


REAL: list[tuple[str, FailureClass, Callable[[], object]]] = [
    ("shape_mismatch", USER, lambda: torch.ones(2, 3) @ torch.ones(2, 3)),
    ("shape_mismatch", USER, lambda: torch.ones(2, 3) + torch.ones(4)),
    ("shape_mismatch", USER, lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4)])),
    ("shape_mismatch", USER, lambda: torch.ones(6).view(4)),
    ("shape_mismatch", USER, lambda: torch.stack([torch.ones(2), torch.ones(3)])),
    ("shape_mismatch", USER, lambda: nn.CrossEntropyLoss()(torch.ones(4, 3), torch.zeros(5, dtype=torch.long))),
    ("shape_mismatch", USER, lambda: nn.Conv2d(3, 4, 3)(torch.ones(1, 1, 8, 8))),
    ("shape_mismatch", USER, lambda: np.ones((2, 3)) + np.ones((2, 4))),
    ("device_assert", USER, lambda: nn.CrossEntropyLoss()(torch.ones(4, 3), torch.full((4,), 7))),
    ("checkpoint_mismatch", USER, lambda: nn.Linear(4, 2).load_state_dict(nn.Linear(5, 2).state_dict())),
    ("checkpoint_mismatch", USER, lambda: nn.Linear(4, 2).load_state_dict({"a": torch.ones(2)})),
    ("checkpoint_mismatch", USER, _load_other_optimizer),
    ("missing_file", USER, lambda: torch.load("/nowhere/model.pt")),
    ("permission", USER, lambda: (_ for _ in ()).throw(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/x"))),
    ("disk_full", INFRA, _write_to_a_full_disk),
    ("disk_full", INFRA, lambda: torch.save(torch.ones(1000), "/dev/full")),
    ("port_in_use", INFRA, _bind_twice),
    ("port_in_use", INFRA, _serve_store_twice),
    ("import_error", USER, lambda: __import__("no_such_module")),
    ("import_error", USER, lambda: exec("from torch import no_such_name")),
    ("import_error", USER, lambda: __import__("ctypes").CDLL("libnosuch.so.1")),
    ("nonfinite_loss", USER, _diverge),
    ("nonfinite_loss", USER, _clip_nothing),
    ("nonfinite_loss", USER, lambda: torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)),
    ("nonfinite_loss", USER, lambda: torch.distributions.Normal(torch.tensor(float("nan")), 1.0, validate_args=True)),
    ("host_memory", INFRA, lambda: torch.empty(10**15)),
    ("host_memory", INFRA, lambda: bytearray(10**15)),
]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize(("code", "failure_class", "function"), REAL)
def test_an_error_of_the_real_library_is_recognised(
    code: str, failure_class: FailureClass, function: Callable[[], object]
) -> None:
    fields = raised(function)
    failure = told(**fields)
    assert (failure.code, failure.failure_class) == (code, failure_class), fields
    assert failure.sentence().startswith("rank 0: ")
    assert "\n" not in failure.sentence()
    assert failure.advice("job")


def test_a_broken_file_is_told_from_one_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04garbage")
    (tmp_path / "x.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0garbage")
    assert told(**raised(lambda: torch.load(tmp_path / "x.pt"))).code == "checkpoint_broken"
    assert told(**raised(lambda: load_file(tmp_path / "x.safetensors"))).code == "checkpoint_broken"


# Messages of libraries that need a GPU, a second rank or a special kernel, as they print them.
PRINTED: list[tuple[str, FailureClass, dict[str, Any]]] = [
    (
        "cuda_oom",
        USER,
        {
            "error_type": "torch.OutOfMemoryError",
            "error_message": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB",
        },
    ),
    (
        "gpu_ecc",
        INFRA,
        {
            "error_type": "torch.AcceleratorError",
            "error_message": "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported",
        },
    ),
    (
        "gpu_lost",
        INFRA,
        {"error_type": "RuntimeError", "error_message": "CUDA error: unknown error"},
    ),
    (
        "device_assert",
        USER,
        {"error_type": "torch.AcceleratorError", "error_message": "CUDA error: device-side assert triggered"},
    ),
    (
        "nccl_timeout",
        INFRA,
        {
            "signal": 6,
            "log_tail": (
                (
                    "[rank1]:[E ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: "
                    "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=10000) ran for 10009 "
                    "milliseconds before timing out."
                ),
            ),
        },
    ),
    (
        "peer_lost",
        INFRA,
        {
            "error_type": "torch.distributed.DistBackendError",
            "error_message": "NCCL communicator was aborted on rank 1.",
        },
    ),
    (
        "gloo_timeout",
        INFRA,
        {
            "error_type": "RuntimeError",
            "error_message": "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete",
        },
    ),
    (
        "gloo_timeout",
        INFRA,
        {"error_type": "RuntimeError", "error_message": "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms"},
    ),
    (
        "peer_lost",
        INFRA,
        {
            "error_type": "RuntimeError",
            "error_message": "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:54412.",
        },
    ),
    (
        "rendezvous_timeout",
        INFRA,
        {
            "error_type": "torch.distributed.DistNetworkError",
            "error_message": "The client socket has timed out after 1000ms while trying to connect to (127.0.0.1, 1).",
        },
    ),
    (
        "shared_memory",
        USER,
        {
            "signal": 7,
            "log_tail": (
                "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
            ),
        },
    ),
    ("host_oom_kill", INFRA, {"signal": 9, "evidence": (OomCount(path="/x/memory.events", before=0, count=1),)}),
    (
        "host_oom_kill",
        INFRA,
        {"signal": 9, "evidence": (OomKill(pid=4242, process="python3"),)},
    ),
    (
        "gpu_lost",
        INFRA,
        {
            "signal": 6,
            "evidence": (Xid(number=79, bus_id="0000:3b:00"),),
        },
    ),
    ("gpu_ecc", INFRA, {"signal": 6, "evidence": (Xid(gpu_uuid="GPU-1", number=48, seconds_before=2.0),)}),
    (
        "gpu_xid",
        INFRA,
        {
            "error_type": "RuntimeError",
            "error_message": "CUDA error: an illegal memory access was encountered",
            "evidence": (Xid(gpu_uuid="GPU-1", number=119, seconds_before=3.0),),
        },
    ),
    ("nonfinite_loss", USER, {"log_tail": ("Loss is nan, stopping training",)}),
    (
        "nonfinite_loss",
        USER,
        {"error_type": "orchestrator.train.errors.NonFiniteLossError", "error_message": "10 steps in a row"},
    ),
    ("nonfinite_loss", USER, {"error_type": "AssertionError", "error_message": "loss is inf"}),
]


@pytest.mark.parametrize(("code", "failure_class", "fields"), PRINTED)
def test_an_error_that_was_printed_is_recognised(
    code: str, failure_class: FailureClass, fields: dict[str, Any]
) -> None:
    failure = told(**fields)
    assert (failure.code, failure.failure_class) == (code, failure_class)
    assert failure.log_tail == fields.get("log_tail", ())


@pytest.mark.parametrize(
    "fields",
    [
        {"error_type": "ValueError", "error_message": "the loss function is information"},
        {
            "error_type": "ValueError",
            "error_message": "boom",
            "evidence": (Xid(gpu_uuid="GPU-1", number=79, seconds_before=50.0),),
        },
        {"error_type": "ValueError", "error_message": "boom", "evidence": (OomCount(path="/x", before=0, count=1),)},
        {"signal": 11, "evidence": (Xid(gpu_uuid="GPU-1", number=31, seconds_before=1.0),)},
    ],
    ids=["no loss", "a GPU that was not used", "somebody else's memory", "an Xid that the program caused"],
)
def test_what_stands_beside_a_failure_is_not_taken_for_its_cause(fields: dict[str, Any]) -> None:
    assert told(**fields).code in ("exception", "signal")


def test_of_several_facts_the_gravest_that_explains_the_end_is_its_cause() -> None:
    xid, gone = Xid(gpu_uuid="GPU-1", number=119), Xid(gpu_uuid="GPU-2", number=79)
    oom = OomCount(path="/x", before=0, count=1)
    assert told(signal=9, evidence=(oom, xid, gone)).cause == replace(gone, rank=0)
    assert told(signal=9, evidence=(KernelMessage(said="apparmor"), oom)).cause == replace(oom, rank=0)
    assert told(signal=9, evidence=(KernelMessage(said="Out of memory: Killed process 7"),)).code == "signal"


CAUSED = (
    "Traceback (most recent call last):",
    '  File "dataloader.py", line 1321, in _try_get_data',
    "RuntimeError: DataLoader worker (pid 71) is killed by signal: {signal}. ",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    "Traceback (most recent call last):",
    '  File "train.py", line 9, in <module>',
    "{last}",
)


def chained(signal: str, last: str) -> tuple[str, ...]:
    return tuple(line.replace("{signal}", signal).replace("{last}", last) for line in CAUSED)


def error(kind: str, message: str, *printed: str) -> dict[str, Any]:
    return {"error_type": kind, "error_message": message, "log_tail": printed}


VAGUE = "DataLoader worker (pid(s) 71) exited unexpectedly"


@pytest.mark.parametrize(
    ("signal", "fields"),
    [
        (9, error("RuntimeError", "DataLoader worker (pid 71) is killed by signal: Killed. ")),
        (9, error("RuntimeError", VAGUE, *chained("Killed", f"RuntimeError: {VAGUE}"))),
        (9, {"log_tail": chained("Killed", f"RuntimeError: {VAGUE}")}),
        (9, error("ConnectionResetError", "[Errno 104] Connection reset by peer", *chained("Killed", "Connection"))),
        (0, error("RuntimeError", VAGUE)),
        *(
            (0, error(kind, said, "Traceback (most recent call last):", "line 1291, in _try_get_data", kind))
            for kind, said in [
                ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
                ("EOFError", ""),
                ("FileNotFoundError", "[Errno 2] No such file or directory"),
            ]
        ),
        (0, error("EOFError", "Caught EOFError in pin memory thread for device 0.")),
        (0, error("RuntimeError", "Pin memory thread exited unexpectedly")),
        (
            0,
            error(
                "concurrent.futures.process.BrokenProcessPool",
                "A process in the process pool was terminated abruptly while the future was running or pending.",
            ),
        ),
        (
            9,
            error(
                "joblib.externals.loky.process_executor.TerminatedWorkerError",
                "A worker process managed by the executor was unexpectedly terminated.\n\n"
                "The exit codes of the workers are {SIGKILL(-9)}",
            ),
        ),
        (
            9,
            error("torch.multiprocessing.spawn.ProcessExitedException", "process 1 terminated with signal SIGKILL"),
        ),
        (9, error("subprocess.CalledProcessError", "Command '['a']' died with <Signals.SIGKILL: 9>.")),
        (9, {"log_tail": ("exitcode  : -9 (pid: 71)", "traceback : Signal 9 (SIGKILL) received by PID 71", "====")}),
        (7, error("RuntimeError", "DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that")),
        (7, error("RuntimeError", VAGUE, "ERROR: Unexpected bus error encountered in worker. This might be caused by")),
        (11, error("RuntimeError", "DataLoader worker (pid 71) is killed by signal: Segmentation fault. ")),
        (11, error("RuntimeError", VAGUE, "ERROR: Unexpected segmentation fault encountered in worker.")),
    ],
)
def test_a_process_of_the_rank_that_was_killed_is_told_in_all_wordings_and_never_as_more_than_that(
    signal: int, fields: dict[str, Any]
) -> None:
    failure = told(**fields)
    cause = failure.cause
    assert isinstance(cause, ChildKilled), failure.sentence()
    assert cause.signal == signal
    code, failure_class = ("shared_memory", USER) if signal == 7 else ("signal", INFRA)
    assert (failure.code, failure.failure_class) == (code, failure_class)
    assert "memory ran out" not in failure.sentence()
    assert failure.advice("job")
    oom = OomCount(path="/x/memory.events", before=0, count=1)
    assert (told(**fields, evidence=(oom,)).code == "host_oom_kill") is (signal in (0, 9)), "the kernel's evidence"


def test_a_worker_that_ended_by_itself_was_not_killed() -> None:
    said = "DataLoader worker (pid 71) exited unexpectedly with exit code 1. Details are lost due to multiprocessing."
    assert told(**error("RuntimeError", said)).code == "exception"
    assert told(**error("RuntimeError", VAGUE, f"RuntimeError: {said}")).failure_class is USER
    own = "Caught FileNotFoundError in DataLoader worker process 0.\nFileNotFoundError: [Errno 2] No such file: 'x'"
    assert told(**error("FileNotFoundError", own)).code == "missing_file"
    handled = (*chained("Killed", "ValueError: handled")[:3], "the script went on")
    assert told(**error("ValueError", "boom", *handled)).code == "exception"


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("not_executable", error("CannotExecute", "cannot execute './run.sh': it is a directory")),
        ("not_executable", {"exit_code": 127, "log_tail": ("run.sh: line 2: torchrun: command not found",)}),
        ("not_executable", {"exit_code": 126, "log_tail": ("sh: 1: ./x: Permission denied", "")}),
        ("not_executable", {"exit_code": 2, "log_tail": ("run.sh: line 2: $'\\r': command not found",)}),
        ("not_executable", {"exit_code": 127, "log_tail": ("/usr/bin/env: ‘python\\r’: No such file or directory",)}),
        ("import_error", {"exit_code": 127, "log_tail": ("./x: libx.so: cannot open shared object file",)}),
        ("missing_file", {"exit_code": 1, "log_tail": ("cat: x: No such file or directory",)}),
        ("exit_code", {"exit_code": 127}),
        ("shared_memory", error("RuntimeError", "unable to write to file </torch_7_1>: No space left on device (28)")),
        ("exception", error("RuntimeError", "unable to open shared memory object </t> : Too many open files (24)")),
    ],
)
def test_what_a_shell_or_the_system_says_is_told_as_what_it_is(code: str, fields: dict[str, Any]) -> None:
    failure = told(**fields)
    assert (failure.code, failure.failure_class) == (code, USER), failure.sentence()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'", "data/train.bin"),
        ("cat: meta.pkl: No such file or directory", "meta.pkl"),
        ("ls: cannot access 'data/x.bin': No such file or directory", "data/x.bin"),
        ("run.sh: line 3: ./tool: No such file or directory", "./tool"),
        ("ValueError: nothing of files", ""),
    ],
)
def test_the_file_that_a_program_did_not_find_is_read_from_its_last_lines(line: str, name: str) -> None:
    ended = Exit(rank=0, at=1.0, exit_code=1, signal=None, log_tail=("before", line))
    assert missing_file(ended) == name
    assert missing_file(replace(ended, exit_code=0)) == ""
    assert missing_file(replace(ended, exit_code=None, signal=9)) == ""
    assert missing_file(replace(ended, error_type="ValueError")) == "", "it reported what it failed of"


CUDA_ASSERT = (
    "../aten/src/ATen/native/cuda/Indexing.cu:1553: block: [0,0,0], thread: [4,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
    "Traceback (most recent call last):",
    '  File "train.py", line 40, in <module>',
    "    table(indices)",
    "torch.AcceleratorError: CUDA error: {said}",
    "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/ for more information.",
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "",
)
"""Output of torch 2.11 on an H100 in a fresh interpreter, which reports no exception; its reason precedes the last five lines."""


def test_a_fresh_interpreters_long_message_is_read_from_its_beginning() -> None:
    lines = tuple(line.replace("{said}", "device-side assert triggered") for line in CUDA_ASSERT)
    assert told(exit_code=1, log_tail=lines).cause.code == "device_assert"


def test_a_fresh_interpreters_exception_is_named_as_any_other() -> None:
    lines = tuple(line.replace("{said}", "an illegal memory access was encountered") for line in CUDA_ASSERT)
    failure = told(exit_code=1, log_tail=lines)
    assert failure.failure_class is USER
    assert "torch.AcceleratorError: CUDA error: an illegal memory access was encountered" in failure.sentence()


@pytest.mark.parametrize("after_it", [["a line that the script printed later"] * 20, ["    indented"] * 3])
def test_a_traceback_that_the_script_outlived_is_not_why_it_ended(after_it: list[str]) -> None:
    handled = ["Traceback (most recent call last):", '  File "train.py", line 1', "FileNotFoundError: data.bin"]
    lines = (*(handled if len(after_it) > 5 else handled[:2]), *after_it)
    assert told(exit_code=3, log_tail=lines).cause.code == "exit_code"
