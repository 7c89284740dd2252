"""Writes all that a training script can see of itself to a JSON file; run under torchrun and under the fork server."""

# ruff: noqa: E402, ICN001, NPY002, SIM115 - imports and files are what is observed
import sys

_names_at_start = sorted(set(vars()) - {"sys"})
_modules_at_start = set(sys.modules)

import json
import locale
import os
import random
import resource
import signal
import threading
from pathlib import Path

_open_at_start = sorted(int(n) for n in os.listdir("/proc/self/fd"))
_environment_at_start = dict(os.environ)
_tasks_at_start = len(os.listdir("/proc/self/task"))

import keeper  # a module of the user's, beside the script, named like one of the harness's
import server
import utils.wire as user_wire


class Point:
    """Class of __main__, where pickle must find it again."""

    def __init__(self, x):
        self.x = x


def double(point):
    return Point(point.x * 2), os.environ["RANK"]


def in_child(queue, point):
    queue.put((double(point)[0].x, __name__, os.getcwd(), sys.path[0]))


def stream(file):
    return {
        "encoding": file.encoding,
        "errors": file.errors,
        "line_buffering": file.line_buffering,
        "write_through": file.write_through,
        "newlines": file.newlines,
        "fileno": file.fileno(),
        "name": file.name,
        "mode": file.mode,
        "raw": type(file.buffer).__name__,
    }


def status(*keys):
    lines = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {key: lines[key].strip() for key in keys}


def namespace():
    main = sys.modules["__main__"]
    return {
        "name": __name__,
        "file": __file__,
        "spec": repr(__spec__ and __spec__.name),
        "package": __package__,
        "loader": [type(__loader__).__name__, getattr(__loader__, "name", None), getattr(__loader__, "path", None)],
        "cached": repr(globals().get("__cached__", "absent")),
        "builtins": repr(__builtins__),
        "doc": (__doc__ or "")[:20],
        "names": _names_at_start,
        "is_main": vars(main) is globals(),
        "main_repr": repr(main),
    }


def interpreter():
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "executable": sys.executable,
        "prefixes": [sys.prefix, sys.base_prefix, sys.exec_prefix],
        "warnoptions": sys.warnoptions,
        "xoptions": repr(sys._xoptions),
        "bytecode": sys.dont_write_bytecode,
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, len(sys.meta_path)],
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "encodings": [
            sys.getfilesystemencoding(),
            sys.getdefaultencoding(),
            locale.getpreferredencoding(),
            locale.getlocale(),
        ],
        "streams": [stream(sys.stdin) | {"read": sys.stdin.read()}, stream(sys.stdout), stream(sys.stderr)],
        "same_streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    }


def process():
    return {
        "cwd": os.getcwd(),
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "open": _open_at_start,
        "tasks": _tasks_at_start,
        "umask": status("Umask"),
        "nice": os.nice(0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "comm": Path("/proc/self/comm").read_text(),
        "limits": [resource.getrlimit(getattr(resource, n)) for n in sorted(dir(resource)) if n.startswith("RLIMIT_")],
        "affinity": sorted(os.sched_getaffinity(0)),
        "signals": {s.name: repr(signal.getsignal(s)) for s in signal.valid_signals() if isinstance(s, signal.Signals)},
        "kernel_signals": status("SigBlk", "SigIgn", "SigCgt", "SigPnd"),
        "wakeup": signal.set_wakeup_fd(-1),
        "timers": [signal.getitimer(signal.ITIMER_REAL), signal.getitimer(signal.ITIMER_PROF)],
    }


def threads():
    import torch

    main = threading.main_thread()
    seen = []
    worker = threading.Thread(target=lambda: seen.append(threading.current_thread() is not main))
    worker.start()
    worker.join()
    return {
        "torch": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "active": threading.active_count(),
        "main": [
            main.name,
            main.native_id == os.getpid(),
            main is threading.current_thread(),
            main.ident == threading.get_ident(),
        ],
        "worker": seen,
        "blas": [entry["num_threads"] for entry in blas_pools()],
    }


def blas_pools():
    """Return the thread counts of numpy's OpenBLAS, read through its C functions."""
    import ctypes

    import numpy  # noqa: F401

    pools = []
    for path in {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"):
            if hasattr(library, name):
                pools.append({"num_threads": getattr(library, name)()})
                break
    return pools


def collector():
    import gc

    return [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)]


def children():
    import multiprocessing

    found = {"default": multiprocessing.get_start_method(), "parent": multiprocessing.parent_process() is None}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=in_child, args=(queue, Point(21)))
        child.start()
        found[method] = [queue.get(), child.join(), child.exitcode]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        point, rank = pool.apply(double, (Point(4),))
        found["pool"] = [point.x, type(point) is Point, rank]
    return found


class Numbers:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, random.random(), os.getpid()


def loaders():
    import torch

    found = {}
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method)
        rows = list(loader)
        found[method] = {
            "indices": sorted(int(i) for batch in rows for i in batch[0]),
            "workers": len({int(p) for batch in rows for p in batch[2]}),
            "distinct": len({float(r) for batch in rows for r in batch[1]}),
        }
    return found


def seeds():
    import tempfile
    import uuid

    import numpy
    import torch

    return {
        "python": random.random(),
        "numpy": float(numpy.random.rand()),
        "generator": float(numpy.random.default_rng().random()),
        "torch": float(torch.rand(1)),
        "initial": torch.initial_seed(),
        "uuid": str(uuid.uuid4()),
        "temporary": next(tempfile._get_candidate_names()),
        "authkey": __import__("multiprocessing").current_process().authkey.hex(),
    }


def training():
    import torch
    import torch.distributed as dist

    torch.manual_seed(7)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 2)).backward()
        optimizer.step()
    found = [dist.get_rank(), dist.get_world_size(), dist.is_torchelastic_launched()]
    dist.destroy_process_group()
    return {"ranks": found, "weights": [parameter.tolist() for parameter in model.parameters()]}


def imports():
    import subprocess

    return {
        "beside": [keeper.WHO, server.WHO, user_wire.WHO],
        "files": [keeper.__file__, server.__file__, user_wire.__file__],
        "subprocess": subprocess.run(
            [sys.executable, "-c", "import sys, os; print(sys.path[1:], os.environ['RANK'], os.getcwd())"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout,
        "temporary": __import__("tempfile").gettempdir(),
        "torch_version": __import__("torch").__version__,
        "strangers": sorted(
            m for m in sys.modules if "orch" in m and not m.startswith(("torch", "orch.")) and "torch" not in m
        ),
    }


def main():
    destination = Path(sys.argv[1])
    sections = (namespace, interpreter, process, seeds, threads, collector, children, loaders, training, imports)
    report = {section.__name__: section() for section in sections}
    report["environment"] = _environment_at_start
    (destination / f"{os.environ['RANK']}.json").write_text(json.dumps(report, default=repr))
    sys.stdout.write(f"out {os.environ['RANK']}\n")
    sys.stderr.write(f"err {os.environ['RANK']}\n")
    leave_open(destination)
    import atexit

    atexit.register(lambda: (destination / f"{os.environ['RANK']}.atexit").write_text("ran"))
    threading.Thread(target=late, args=(destination,)).start()


class Holder:
    """Object that holds a file in a cycle, which only the collector can break."""

    def __init__(self, file):
        self.file = file
        self.self = self


def leave_open(destination):
    """Leave files open, held in every way there is: the interpreter flushes them when it ends."""
    import torch

    def opened(holder):
        file = open(destination / f"{os.environ['RANK']}.open-{holder}", "w")
        file.write("flushed")
        return file

    globals()["left_open"] = opened("main")
    globals()["left_in_cycle"] = Holder(opened("cycle"))
    keeper.left_open = opened("module")
    Holder.left_open = opened("class")
    torch.left_open = opened("torch")
    torch.left_in_cycle = Holder(opened("torch-cycle"))


def late(destination):
    """Write a file after the main module has ended: a script ends only when its threads have."""
    import time

    time.sleep(0.2)
    (destination / f"{os.environ['RANK']}.thread").write_text("done")


if __name__ == "__main__":
    main()
