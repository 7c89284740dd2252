"""A rank of a benchmark: reads commands, runs them, answers. Started only by ``bench/processes.py``.

The end of its input ends the process at once: no command will follow, and a collective that waits for an ended rank would wait for ever.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import torch

from orchestrator.bench.rank.commands import COMMANDS
from orchestrator.bench.rank.models import ModelError
from orchestrator.bench.rank.place import Place

if TYPE_CHECKING:
    from typing import BinaryIO


def main(arguments: list[str]) -> None:
    """Serve until the input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the benchmark ends its ranks in order
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_follow, args=(sys.stdin.buffer, commands), daemon=True).start()
    place = Place()
    with os.fdopen(int(arguments[0]), "wb") as answers:
        while True:
            answer = _do(place, json.loads(commands.get()))
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


def _follow(source: BinaryIO, commands: queue.SimpleQueue[bytes]) -> None:
    for line in source:
        commands.put(line)
    os._exit(0)


def _do(place: Place, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": COMMANDS[command.pop("do")](place, **command)}
    except ModelError as error:
        return {"error": str(error)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"error": f"out of memory: {str(error).splitlines()[0] if str(error) else 'no size given'}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv[1:])
