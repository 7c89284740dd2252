"""Process tree that is hard to kill: writes its process ids to the first argument, then acts as the second says.

A child that ignores SIGTERM, SIGINT, SIGHUP and SIGQUIT; a daemon (double fork, setsid); a child in a session of its
own with a child of its own; a shell with a child.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

pids = Path(sys.argv[1])


def note(name):
    with pids.open("a") as file:
        file.write(f"{name} {os.getpid()}\n")


def sleep():
    while True:
        time.sleep(60)


def stubborn():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    note("stubborn")
    sleep()


def daemon():
    os.setsid()
    if os.fork() == 0:
        os.setsid() if os.getpid() == os.getpgid(0) else None
        note("daemon")
        sleep()
    os._exit(0)


def session():
    os.setsid()
    if os.fork() == 0:
        note("grandchild")
        sleep()
    note("session")
    sleep()


def fork(call):
    if os.fork() == 0:
        call()
        os._exit(0)


def wait_for(count):
    while len(pids.read_text().splitlines()) < count:
        time.sleep(0.005)


note("main")
for call in (stubborn, daemon, session):
    fork(call)
shell = subprocess.Popen(["sh", "-c", f"echo shell $$ >> {pids}; sleep 1000 & echo sleeper $! >> {pids}; wait"])
wait_for(7)
if sys.argv[2] == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(f"{pids}.ready").touch()
match sys.argv[2]:
    case "sleep" | "ignore":
        sleep()
    case "exit":
        sys.exit(5)
    case "fail":
        raise RuntimeError("with a tree below")
