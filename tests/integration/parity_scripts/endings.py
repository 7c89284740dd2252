"""Script that ends in the way that its first argument names."""

import atexit
import os
import signal
import sys
import threading
import warnings


class OddError(Exception):
    """An exception whose text cannot be shown."""

    def __str__(self):
        raise ValueError("no text")


def deeper(call):
    return call()


def fail():
    raise ValueError("boo")


def chained():
    try:
        fail()
    except ValueError as error:
        raise RuntimeError("while handling") from error


def during():
    try:
        fail()
    except ValueError:
        {}["missing"]


def group():
    raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])


def odd():
    raise OddError


def recurse():
    recurse()


def hooked():
    sys.excepthook = lambda kind, error, trace: print(
        "hook",
        kind.__name__,
        error,
        trace.tb_frame.f_code.co_name,
        trace.tb_next.tb_frame.f_code.co_name,
        flush=True,
    )
    fail()


def broken_hook():
    def hook(kind, error, trace):
        raise OSError("the hook failed")

    sys.excepthook = hook
    fail()


def thread():
    worker = threading.Thread(target=fail, name="worker")
    worker.start()
    worker.join()


def exit_in_thread():
    worker = threading.Thread(target=sys.exit, args=(5,))
    worker.start()
    worker.join()


def late_thread():
    threading.Timer(0.1, lambda: print("late", flush=True)).start()
    sys.exit(4)


def broken_atexit():
    atexit.register(fail)
    atexit.register(print, "first")


def unraisable():
    class Broken:
        def __del__(self):
            raise ValueError("in __del__")

    Broken()


def warn():
    warnings.warn("careful", stacklevel=1)
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def kill(number):
    os.kill(os.getpid(), number)
    signal.pause()


def interrupt():
    signal.raise_signal(signal.SIGINT)


def write():
    print("text: grüß ☃", end="")
    sys.stdout.buffer.write(b"\xff raw")
    print("to stderr", file=sys.stderr, end="")
    os.write(1, b"|direct|")
    print(input if False else repr(sys.stdin.readline()))


def inner_exit():
    try:
        sys.exit(9)
    finally:
        print("finally")


def close_all():
    """Close every descriptor from 3 on, then fail."""
    os.closerange(3, 1024)
    fail()


def child_fails():
    """Fail in a forked child: the exception is the child's, not the script's."""
    pid = os.fork()
    if pid == 0:
        fail()
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


ENDINGS = {
    "end": lambda: None,
    "none": sys.exit,
    "zero": lambda: sys.exit(0),
    "three": lambda: sys.exit(3),
    "true": lambda: sys.exit(True),
    "big": lambda: sys.exit(263),
    "negative": lambda: sys.exit(-1),
    "huge": lambda: sys.exit(1 << 70),
    "text": lambda: sys.exit("that was it"),
    "object": lambda: sys.exit(["a", 1]),
    "empty": lambda: sys.exit(""),
    "inner_exit": inner_exit,
    "hard": lambda: os._exit(6),
    "fail": fail,
    "chained": chained,
    "during": during,
    "group": group,
    "odd": odd,
    "recurse": recurse,
    "generator_exit": lambda: (_ for _ in ()).throw(GeneratorExit("odd")),
    "hooked": hooked,
    "broken_hook": broken_hook,
    "thread": thread,
    "exit_in_thread": exit_in_thread,
    "late_thread": late_thread,
    "broken_atexit": broken_atexit,
    "unraisable": unraisable,
    "warn": warn,
    "interrupt": interrupt,
    "write": write,
    "close_all": close_all,
    "child_fails": child_fails,
    "abort": os.abort,
    "segv": lambda: kill(signal.SIGSEGV),
    "kill": lambda: kill(signal.SIGKILL),
    "term": lambda: kill(signal.SIGTERM),
    "pipe": lambda: print(signal.getsignal(signal.SIGPIPE)),
}

if __name__ == "__main__":
    deeper(ENDINGS[sys.argv[1]])
