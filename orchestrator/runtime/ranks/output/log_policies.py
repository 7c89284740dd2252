"""Matches the log policies of a job against the end of a failed rank's output, within a bounded time.

The patterns are the user's, and a regular expression can take practically for ever. The search therefore runs in its
own process, which the kernel ends when it has used its processor time: on a busy machine no quick pattern is left
out. Neither the daemon nor the rank's actor waits longer than `PATIENCE_SECONDS`. Without policies, nothing runs.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import TYPE_CHECKING, Final

from orchestrator.core.facts.notes import PoliciesLeftOut

if TYPE_CHECKING:
    from collections.abc import Sequence

SEARCH_SECONDS: Final = 2.0
"""Processor time of the whole search."""
PATIENCE_SECONDS: Final = 30.0
"""Longest time that the end of a rank waits for the search, where the machine gives the search no processor time."""
MOST_CHARACTERS: Final = 64 * 1024
_SEARCH: Final = """
import json, re, signal, sys
seconds, patterns, text = json.load(sys.stdin)
signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # nothing catches its signal: a search does not come back to Python
for number, pattern in enumerate(patterns):
    print("at", number, flush=True)
    if re.search(pattern, text):
        print("found", number, flush=True)
        break
"""


async def match_policies(
    policies: Sequence[tuple[str, str]],
    text: str,
    *,
    seconds: float = SEARCH_SECONDS,
    patience: float = PATIENCE_SECONDS,
) -> tuple[str, PoliciesLeftOut | None]:
    """Return the action of the first of ``policies`` (pattern, action) that matches the end of ``text``; empty when none does.

    A search that takes more than ``seconds`` of processor time, or whose process does not end within ``patience``, is ended. After
    that or an error the action is empty and the second part gives the reason.
    """
    if not policies:
        return "", None
    question = json.dumps([seconds, [pattern for pattern, _ in policies], text[-MOST_CHARACTERS:]])
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _SEARCH),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:  # no process can be started: the rank's end is reported anyway
        return "", PoliciesLeftOut(said=error.strerror or "")
    assert process.stdin is not None
    assert process.stdout is not None
    last = ["", "0"]
    try:
        async with asyncio.timeout(patience):
            process.stdin.write(question.encode())
            process.stdin.close()
            async for line in process.stdout:
                last = line.decode().split()
            code = await process.wait()
    except TimeoutError:
        return "", PoliciesLeftOut(seconds=patience)
    except (OSError, ConnectionError):
        return "", PoliciesLeftOut()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == -signal.SIGVTALRM and last[0] != "found":
        return "", PoliciesLeftOut(pattern=policies[int(last[1])][0], seconds=seconds)
    return (policies[int(last[1])][1], None) if last[0] == "found" else ("", None)
