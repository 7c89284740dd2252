"""Has a GPU but computes on a processor, until a file exists: `forgetful.py FILE`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from orchestrator.train import context

ctx = context()
step = 0
while not Path(sys.argv[1]).exists() and not ctx.should_stop():
    time.sleep(0.05)
    step += 1
    ctx.report(step=step)
