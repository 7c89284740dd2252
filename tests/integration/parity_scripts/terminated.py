"""Script that waits for SIGTERM: rank 0 saves and exits with 17; another rank has no handler and dies of it."""

import os
import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
rank = os.environ["RANK"]


def save(number, frame):
    (folder / f"{rank}.saved").write_text(f"{signal.Signals(number).name} in {frame.f_code.co_name}")
    sys.exit(17)


if rank == "0":
    signal.signal(signal.SIGTERM, save)
(folder / f"{rank}.ready").write_text(str(os.getpid()))


def wait():
    while True:
        time.sleep(0.1)  # a signal that arrives just before this call does not end it: Python runs the handler after it


wait()
