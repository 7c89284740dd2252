"""Reads shell text without running it: divides it into commands and words as bash does.

In a word, each part that bash would replace (a variable, a command's output, a pattern of file names) is one character, a
surrogate, that stands for an `Expansion`. All other characters of a word are literal: quotation marks are gone. So a word can
be compared and cut like any text, and no quoted `$` is taken for an active one.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_left
from typing import NamedTuple

from orchestrator.spec.problems import BadValueError, quoted

_FIRST, _COUNT = 0xD800, 1024
_MARK = re.compile("([\ud800-\udbff])")
_ENDS = " \t\n;|&<>()"
_BLANK = re.compile(r"(?:[ \t]|\\\n)+|#[^\n]*")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|<>|<&|>>|>&|>\||<(?!\()|>(?!\())|&>>?")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;&?|;&|[;|&\n()]")
_VARIABLE = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-])")
_ANSI = re.compile(r"\$'(?:\\.|[^'\\])*'", re.DOTALL)
_PATTERN = re.compile(r"[*?]|\[[^\]\s'\"\\;|&]+\]|\{[^{}\s'\"\\]*(?:,|\.\.)[^{}\s'\"\\]*\}")
_HOME = re.compile(r"~(?=[/\s;|&<>()]|\Z)|~[A-Za-z0-9_.-]+")
_NAMES = re.compile(r"\$\{?[#!]?([A-Za-z_][A-Za-z0-9_]*|[0-9@*#])")
_ARITHMETIC_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LITERAL = re.compile(r"[^\s;|&<>()'\"\\$`*?\[{~]+")
_DEEPEST = 40
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=(.*)", re.DOTALL)


def items_of(array: str) -> list[str]:
    """Return the words of an array."""
    return array[1:].split("\0")[:-1]


class Expansion(NamedTuple):
    """One part that bash would replace, as written, and whether it is within double quotation marks."""

    text: str
    quoted: bool

    def names(self) -> set[str]:
        """Return the names of the variables in it."""
        inside = self.text.startswith("$((") and set(_ARITHMETIC_NAMES.findall(self.text))
        return set(_NAMES.findall(self.text)) | (inside or set())


class Command(NamedTuple):
    """A simple command: its words, redirections as written, and the operator after it. An array is one word.

    ``document``: its input is a here-document, which is data and is not read.
    """

    line: int
    words: tuple[str, ...]
    redirections: tuple[str, ...]
    operator: str
    document: bool
    source: str


class Shell:
    """Expansions of all texts read so far, and the words' way back to text."""

    def __init__(self) -> None:
        self._marked: list[Expansion] = []
        self._marks: dict[Expansion, str] = {}

    def mark(self, text: str, *, quoted: bool) -> str:
        """Return the character that stands for an expansion."""
        expansion = Expansion(text, quoted)
        if expansion not in self._marks:
            if len(self._marked) == _COUNT:
                raise BadValueError(
                    f"more than {_COUNT} different expansions", "give the line that starts the training alone"
                )
            self._marks[expansion] = chr(_FIRST + len(self._marked))
            self._marked.append(expansion)
        return self._marks[expansion]

    def parts(self, word: str) -> list[str | Expansion]:
        """Return the literal texts and the expansions of a word in turn."""
        return [
            self._marked[ord(part) - _FIRST] if _MARK.fullmatch(part) else part for part in _MARK.split(word) if part
        ]

    def open(self, word: str) -> list[Expansion]:
        """Return the expansions of a word."""
        return [part for part in self.parts(word) if isinstance(part, Expansion)]

    def restored(self, word: str) -> str:
        """Return the word with its expansions as they were written."""
        return "".join(part.text if isinstance(part, Expansion) else part for part in self.parts(word))

    def written(self, word: str) -> str:
        """Return the word as bash reads it: literal text quoted, expansions active."""
        if word.startswith("\0"):
            return "(" + " ".join(map(self.written, items_of(word))) + ")"
        texts: list[str] = []
        for part in self.parts(word):
            if isinstance(part, str):
                # `$A"b"` must not become `$Ab`
                cut = texts and _VARIABLE.fullmatch(texts[-1]) and re.match(r"[A-Za-z0-9_\[]", part)
                if cut:
                    texts[-1] = f"${{{texts[-1][1:]}}}"
                texts.append(shlex.quote(part))
            else:
                texts.append(f'"{part.text}"' if part.quoted else part.text)
        return "".join(texts) or "''"

    def commands(self, text: str) -> list[Command]:
        """Return the commands of a text. Raises BadValueError where a quotation mark or a bracket is not closed."""
        if "\0" in text or _MARK.search(text):
            raise BadValueError(
                "the text holds a character that no shell script can hold", "remove NUL and lone surrogates"
            )
        return _Scanner(self, text.replace("\r\n", "\n")).commands()

    def word(self, text: str) -> str:
        """Return a text as one word, read as if within double quotation marks."""
        return _Scanner(self, f'{text}"').double()


class _Scanner:
    def __init__(self, shell: Shell, text: str) -> None:
        self._shell = shell
        self._text = text
        self._at = 0
        self._newlines = [match.start() for match in re.finditer("\n", text)]

    def commands(self) -> list[Command]:
        found: list[Command] = []
        words: list[str] = []
        redirections: list[str] = []
        documents: list[tuple[str, bool]] = []
        start, document = -1, False
        while True:
            self._skip()
            at = self._at
            operator = _OPERATOR.match(self._text, at)
            if self._text.startswith("&>", at):
                operator = None
            if operator is not None or at >= len(self._text):
                end = operator[0] if operator is not None else ""
                source = self._text[start if start >= 0 else at : at].replace("\\\n", " ").strip()
                line = bisect_left(self._newlines, start if start >= 0 else at) + 1
                found.append(Command(line, tuple(words), tuple(redirections), end, document, source))
                words, redirections, start, document = [], [], -1, False
                self._at += len(end)
                if end == "\n" and documents:
                    self._skip_documents(documents)
                    documents = []
                if not end:
                    return found
                continue
            start = at if start < 0 else start
            redirection = _REDIRECTION.match(self._text, at)
            if redirection is None:
                words.append(self._array_or_word())
                continue
            self._at = redirection.end()
            self._skip()
            target = self._shell.restored(self._word())
            redirections.append(redirection[0] + target)
            if redirection[0].lstrip("0123456789") in {"<<", "<<-"}:
                documents.append((target, redirection[0].endswith("-")))
                document = True

    def _skip(self) -> None:
        while (match := _BLANK.match(self._text, self._at)) is not None:
            self._at = match.end()

    def _skip_documents(self, documents: list[tuple[str, bool]]) -> None:
        for delimiter, tabs in documents:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                line = self._text[self._at : end if end >= 0 else len(self._text)]
                self._at += len(line) + 1
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
        self._at = min(self._at, len(self._text))

    def _array_or_word(self) -> str:
        word = self._word()
        if not (word.endswith("=") and ASSIGNMENT.fullmatch(word) and self._text.startswith("(", self._at)):
            return word
        self._at += 1
        items: list[str] = []
        while True:
            while self._text.startswith("\n", self._at) or _BLANK.match(self._text, self._at):
                self._skip()
                self._at += self._text.startswith("\n", self._at)
            if self._text.startswith(")", self._at):
                self._at += 1
                return f"{word}\0" + "".join(f"{item}\0" for item in items)
            if self._text[self._at : self._at + 1] in set(_ENDS) | {""}:
                raise self._unclosed("(")
            items.append(self._word())

    def _word(self) -> str:
        text, start = self._text, self._at
        parts: list[str] = []
        while self._at < len(text):
            at, character = self._at, text[self._at]
            if at == start and text.startswith(("<(", ">("), at):
                self._at = self._closing(at + 2, ")")
                parts.append(self._shell.mark(text[at : self._at], quoted=False))
            elif character in _ENDS:
                break
            elif character == "\\":
                parts.append(text[at + 1 : at + 2].strip("\n"))
                self._at += 2
            elif character == "'":
                self._at = self._closing(at + 1, "'")
                parts.append(text[at + 1 : self._at - 1])
            elif character == '"':
                self._at += 1
                parts.append(self.double())
            elif (ansi := _ANSI.match(text, at)) is not None:
                self._at = ansi.end()
                parts.append(self._shell.mark(ansi[0], quoted=False))
            elif (home := _HOME.match(text, at)) and (at == start or ASSIGNMENT.fullmatch(text[start:at])):
                self._at = home.end()
                own = home[0] == "~"
                parts.append(self._shell.mark("$HOME" if own else home[0], quoted=own))
            elif (pattern := _PATTERN.match(text, at)) is not None:
                self._at = pattern.end()
                parts.append(self._shell.mark(pattern[0], quoted=False))
            else:
                parts.append(self._expansion(quoted=False) or self._literal())
        return "".join(parts)

    def double(self) -> str:
        """Read on to the closing double quotation mark."""
        parts: list[str] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == '"':
                self._at += 1
                return "".join(parts)
            if character == "\\":
                following = self._text[self._at + 1 : self._at + 2]
                parts.append(following.strip("\n") if following in set('$`"\\\n') else f"\\{following}")
                self._at += 2
                continue
            parts.append(self._expansion(quoted=True) or self._literal())
        raise self._unclosed('"')

    def _literal(self) -> str:
        start, run = self._at, _LITERAL.match(self._text, self._at)
        self._at = run.end() if run is not None else start + 1
        return self._text[start : self._at]

    def _expansion(self, *, quoted: bool) -> str:
        """Read an expansion, and return its mark; the empty string where none begins."""
        text, at = self._text, self._at
        if text.startswith("$(", at):
            self._at = self._closing(at + 2, ")")
        elif text.startswith("${", at):
            self._at = self._closing(at + 2, "}")
        elif text.startswith("`", at):
            self._at = self._closing(at + 1, "`")
        elif (variable := _VARIABLE.match(text, at)) is not None:
            self._at = variable.end()
        else:
            return ""
        return self._shell.mark(text[at : self._at], quoted=quoted)

    def _closing(self, at: int, close: str, depth: int = 0) -> int:
        """Return the position after the closing character."""
        text = self._text
        while at < len(text) and depth < _DEEPEST:
            character = text[at]
            if character == close:
                return at + 1
            if close == "'":
                at += 1
            elif character == "\\":
                at += 2
            elif text.startswith(("$(", "${"), at):
                at = self._closing(at + 2, ")" if text[at + 1] == "(" else "}", depth + 1)
            elif character == "`" or (close != '"' and character in "'\""):
                at = self._closing(at + 1, character, depth + 1)
            elif character == "(" and close == ")":
                at = self._closing(at + 1, ")", depth + 1)
            else:
                at += 1
        raise self._unclosed(close)

    def _unclosed(self, character: str) -> BadValueError:
        kind = "a quotation mark" if character in "'\"" else f"{quoted(character)}: a bracket"
        first = self._text.strip().partition("\n")[0]
        return BadValueError(f"{quoted(first)}: {kind} is not closed", "close it")
