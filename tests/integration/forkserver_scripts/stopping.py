"""Says that it is ready, then treats SIGTERM as its second argument says."""

import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])


def save(number, _frame):
    (folder / "saved").write_text(str(number))
    sys.exit(17)


match sys.argv[2]:
    case "save":
        signal.signal(signal.SIGTERM, save)
    case "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / "ready").touch()
while True:
    time.sleep(60)
