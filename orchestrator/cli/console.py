"""Output on the terminal: streams, width and colours. No command logic, no typer, no rich."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

UNLIMITED_WIDTH = 10_000  # output to a file or a pipe is not shortened: its reader may need the whole line
STYLES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
RANK_STYLES = ("cyan", "magenta", "yellow", "green", "blue")


class Console:
    """Standard output for results, standard error for messages about them."""

    def __init__(
        self, environ: Mapping[str, str], *, out: TextIO | None = None, err: TextIO | None = None, quiet: bool = False
    ) -> None:
        self.out = _stream(sys.stdout) if out is None else out
        self.err = _stream(sys.stderr) if err is None else err
        self.quiet = quiet
        self.is_terminal = self.out.isatty()
        self._err_is_terminal = self.err.isatty()
        self.colour = _may_colour(environ, self.out)
        self.err_colour = _may_colour(environ, self.err)
        self.width, self.height = _size(environ, self.out)
        self.unicode = (getattr(self.out, "encoding", None) or "ascii").lower().replace("-", "") == "utf8"
        self.glyphs = UNICODE if self.unicode else ASCII

    def print(self, text: str = "", *, raw: bool = False) -> None:
        """Print one result, with a line break; characters that the stream's encoding lacks are replaced.

        Unless ``raw``, only orch's styles control a terminal: the text may contain output of jobs and of other
        commands.
        """
        if self.is_terminal and not raw:
            text = steerless(text)
        self.out.write(self._encodable(text) + "\n")

    def flush(self) -> None:
        """Flush the output for a reader at the other end of a pipe."""
        self.out.flush()

    def note(self, text: str) -> None:
        """Print a note on standard error; nothing with --quiet."""
        if not self.quiet:
            self.print_error(text)

    def print_error(self, text: str) -> None:
        """Print a message on standard error, also with --quiet."""
        with suppress(OSError):
            self.out.flush()  # keeps the order of both streams; an error is reported when the result is written
        if self._err_is_terminal:
            text = steerless(text)
        self.err.write(text.encode(self.err.encoding or "utf-8", "replace").decode(self.err.encoding or "utf-8") + "\n")
        self.err.flush()

    def style(self, text: str, *names: str) -> str:
        """Return the text in these styles, if standard output supports them."""
        return styled(text, names) if self.colour and names else text

    def err_style(self, text: str, *names: str) -> str:
        """Return the text in these styles, if standard error supports them."""
        return styled(text, names) if self.err_colour and names else text

    def _encodable(self, text: str) -> str:
        if self.unicode:
            return text.encode("utf-8", "replace").decode() if not text.isascii() else text
        encoding = getattr(self.out, "encoding", None) or "ascii"
        return text.encode(encoding, "replace").decode(encoding)


class Glyphs(NamedTuple):
    """Symbols of bars and tables, for one encoding."""

    full: str
    empty: str
    parts: str
    ellipsis: str
    dot: str
    none: str


UNICODE = Glyphs(full="█", empty="░", parts="▏▎▍▌▋▊▉", ellipsis="…", dot="·", none="–")
ASCII = Glyphs(full="#", empty="-", parts="", ellipsis="~", dot="|", none="-")


def styled(text: str, names: tuple[str, ...]) -> str:
    """Return the text between escape sequences."""
    return f"\x1b[{';'.join(STYLES[name] for name in names)}m{text}\x1b[0m"


def _stream(stream: TextIO | None) -> TextIO:
    """Return the stream, or a null stream for one that was closed at the start (``orch ... >&-``)."""
    return open(os.devnull, "w", encoding="utf-8") if stream is None else stream


def _may_colour(environ: Mapping[str, str], stream: TextIO) -> bool:
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and environ.get("TERM") != "dumb"


def _size(environ: Mapping[str, str], stream: TextIO) -> tuple[int, int]:
    columns = environ.get("COLUMNS", "")
    try:
        size = os.get_terminal_size(stream.fileno())
        width, height = size.columns, size.lines
    except (OSError, ValueError):
        width, height = UNLIMITED_WIDTH, 0
    if columns.isdecimal() and int(columns) > 0:
        width = int(columns)
    return max(width, 20), height


# Marks that change the direction of the text around them, and separators that some terminals take for line breaks.
_DIRECTION = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN: dict[int, str] = {
    **{code: f"^{chr(code ^ 0x40)}" for code in (*range(0x20), 0x7F) if chr(code) not in "\n\t"},
    **{code: f"<{code:04X}>" for code in (*range(0x80, 0xA0), *_DIRECTION, 0x2028, 0x2029)},
}


def steerless(text: str, *, keep_styles: bool = True) -> str:
    """Return the text with its control characters and bidirectional marks made visible, as ``^[`` and ``<202E>``.

    Line breaks, tabs and sequences that ``styled`` makes stay; without ``keep_styles``, sequences that only set a style
    are removed.
    """
    if text.isprintable():
        return text
    if "\x1b" not in text:
        return text.translate(_SHOWN)
    import re  # imported late: most texts have no escape sequence

    if not keep_styles:
        return re.sub(r"\x1b\[[0-9;:]*m", "", text).translate(_SHOWN)
    parts = re.split(r"(\x1b\[(?:[0-2]|3[1-6])(?:;(?:[12]|3[1-6]))*m)", text)
    return "".join(part if number % 2 else part.translate(_SHOWN) for number, part in enumerate(parts))


def clean(text: str) -> str:
    """Return untrusted text as one line without control characters, for a table."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c in "\n\t\r" else "?" for c in text)


def display_width(text: str) -> int:
    """Return the columns that the text takes on a terminal."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def clip(text: str, width: int, ellipsis: str) -> str:
    """Return the text, shortened to ``width`` columns."""
    if display_width(text) <= width:
        return text
    kept: list[str] = []
    room = width - display_width(ellipsis)
    for c in text:
        room -= display_width(c)
        if room < 0:
            break
        kept.append(c)
    return "".join(kept).rstrip() + ellipsis if width > 0 else ""
