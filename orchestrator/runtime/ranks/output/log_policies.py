"""The log policies of a job: which of its patterns the end of a failed rank's output fits, within a bounded time.

The patterns are the user's, and one regular expression can take longer than the universe has existed. So they are
searched in a process of their own, which is killed at the deadline; neither the daemon nor the rank's actor ever waits
for longer, and a job without policies pays nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

DEADLINE_SECONDS: Final = 2.0
MOST_CHARACTERS: Final = 64 * 1024
_SEARCH: Final = """
import json, re, sys
patterns, text = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    print("at", number, flush=True)
    if re.search(pattern, text):
        print("found", number, flush=True)
        break
"""


async def match_policies(
    policies: Sequence[tuple[str, str]], text: str, *, seconds: float = DEADLINE_SECONDS
) -> tuple[str, str]:
    """The action of the first of ``policies`` (pattern, action) found in the end of ``text``, and a note for people.

    Both are empty when none is found; when the deadline came first, the action is empty and the note says so.
    """
    if not policies:
        return "", ""
    question = json.dumps([[pattern for pattern, _ in policies], text[-MOST_CHARACTERS:]])
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _SEARCH),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:  # no process can be had: the rank's end is told all the same
        return "", f"the log policies could not be searched for: {error.strerror}"
    assert process.stdin is not None
    assert process.stdout is not None
    last = ["", "0"]
    try:
        async with asyncio.timeout(seconds):
            process.stdin.write(question.encode())
            process.stdin.close()
            async for line in process.stdout:
                last = line.decode().split()
            await process.wait()
    except TimeoutError:
        pattern = policies[int(last[1])][0]
        return (
            "",
            f"the log policy {pattern!r} took longer than {seconds:g} s to search for and was left out: simplify it",
        )
    except (OSError, ConnectionError):
        return "", "the log policies could not be searched for"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return (policies[int(last[1])][1], "") if last[0] == "found" else ("", "")
