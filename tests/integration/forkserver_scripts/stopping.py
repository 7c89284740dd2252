"""Script that creates the file `ready`, then handles SIGTERM as its second argument says."""

import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])


def save(number, _frame):
    (folder / "saved").write_text(str(number))
    sys.exit(17)


def save_slowly(number, frame):
    (folder / "told").touch()
    for _ in range(300):
        print("." * 10_000, flush=True)
        time.sleep(0.005)
    save(number, frame)


def save_too_late(number, frame):
    (folder / "told").touch()
    time.sleep(3600)
    save(number, frame)


match sys.argv[2]:
    case "save":
        signal.signal(signal.SIGTERM, save)
    case "slowly":
        signal.signal(signal.SIGTERM, save_slowly)
    case "too late":
        signal.signal(signal.SIGTERM, save_too_late)
    case "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / "ready").touch()
while True:
    time.sleep(0.1)  # a signal that arrives just before this call does not end it: Python runs the handler after it
