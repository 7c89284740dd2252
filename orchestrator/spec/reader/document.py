"""Converts YAML text to a tree of nodes with their line and column; interprets nothing yet.

Built from the parser's events, not by a loader: no tag ever creates an object, and depth and size are bounded while the
text is read, before anything is built from it. Scalars stay as written, so that the key that holds `no`, `1_000` or
`12:30` can interpret it. Must not name any key of job.yaml.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import yaml
from yaml.resolver import Resolver

from orchestrator.spec.fields.nodes import ListNode, MapNode, Mark, Node, ScalarKind, ScalarNode, kind_of
from orchestrator.spec.problems import Problem, SpecError, quoted
from orchestrator.spec.source import MAX_JOB_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 32
"""Deepest nesting. job.yaml itself needs six levels; the rest is for `trainer`."""
MAX_NODES = 20_000
"""Most values in one file, each alias counted with all that it stands for."""

# libyaml's parser is about ten times as fast; the slow one serves where PyYAML was built without it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVER: Any = Resolver()
_KINDS: dict[str, ScalarKind] = {
    "tag:yaml.org,2002:int": "integer",
    "tag:yaml.org,2002:float": "number",
    "tag:yaml.org,2002:bool": "boolean",
    "tag:yaml.org,2002:null": "null",
    "tag:yaml.org,2002:timestamp": "date",
}
# YAML 1.1 reads 1e-3 as text, YAML 1.2 and people as a number.
_EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_SURROGATE = re.compile("[\ud800-\udfff\x00]")


def compose(text: str, *, source: str, problems: list[Problem], loader: Any = _LOADER) -> Node | None:
    """Read one YAML document; None when it is empty. Recoverable errors are added to `problems`.

    Raises:
        SpecError: the text cannot be read any further (syntax, size, depth, several documents).

    """
    text = text.removeprefix("\ufeff")
    _check_text(text, source)
    builder = _Builder(source, problems)
    try:
        for event in _events(text, loader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Mark(source=source) if mark is None else Mark(source=source, line=mark.line + 1, column=mark.column + 1)
        message = error.problem or error.context or "unreadable"
        _fail(where, f"not valid YAML: {message}", _syntax_hint(message), cause=error)
    except yaml.YAMLError as error:
        _fail(Mark(source=source, line=1, column=1), f"not valid YAML: {error}", cause=error)
    return builder.root


def _events(text: str, loader: Any) -> Iterator[Any]:
    yield from yaml.parse(text, Loader=loader)


def _fail(mark: Mark, message: str, hint: str = "", *, cause: Exception | None = None) -> NoReturn:
    problem = Problem(line=mark.line, column=mark.column, path="", message=message, hint=hint, source=mark.source)
    raise SpecError((problem,)) from cause


def _check_text(text: str, source: str) -> None:
    # Characters never outnumber bytes, so the cheap comparison comes first and guards the encoding.
    if len(text) > MAX_JOB_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_JOB_BYTES:
        _fail(Mark(source=source), f"is larger than {MAX_JOB_BYTES} bytes", "a job file holds settings, not data")
    bad = _UNPRINTABLE.search(text)
    if bad is not None:
        line = text.count("\n", 0, bad.start()) + 1
        column = bad.start() - (text.rfind("\n", 0, bad.start()) + 1) + 1
        mark = Mark(source=source, line=line, column=column)
        _fail(mark, f"the character U+{ord(bad.group()):04X} is not allowed in a job file", "remove it; save as UTF-8")


def _syntax_hint(message: str) -> str:
    if "tab" in message or "\\t" in message:
        return "indent with spaces, not with tabs"
    if "mapping values are not allowed" in message:
        return 'put a text that holds ": " in quotation marks'
    if "cannot start any token" in message:
        return "put a text that begins with a special character in quotation marks"
    if "expected ',' or" in message:
        return "a bracket is not closed"
    return "check the indentation and the quotation marks above"


@dataclass(slots=True)
class _Frame:
    """A collection that is still open. `size` and `height` count everything below it, aliases expanded."""

    mark: Mark
    anchor: str | None
    is_map: bool
    children: list[Node] = field(default_factory=list)
    size: int = 1
    height: int = 1


class _Builder:
    """Processes the parser's events one by one and keeps the open collections on its own stack.

    No recursion, so that a file of a million brackets ends at MAX_DEPTH and not at the interpreter's limit.
    """

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.root: Node | None = None
        self._source = source
        self._problems = problems
        self._stack: list[_Frame] = []
        self._anchors: dict[str, tuple[Node, int, int] | None] = {}
        self._count = 0
        self._documents = 0

    def take(self, event: Any) -> None:
        match event:
            case yaml.ScalarEvent():
                self._add(self._scalar(event), size=1, height=0, anchor=event.anchor)
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                self._open(event)
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                self._close()
            case yaml.AliasEvent():
                self._alias(event)
            case yaml.DocumentStartEvent():
                self._documents += 1
                if self._documents > 1:
                    _fail(self._mark(event), "a second document begins here", "one job a file: split it at the `---`")

    def _mark(self, event: Any) -> Mark:
        return Mark(source=self._source, line=event.start_mark.line + 1, column=event.start_mark.column + 1)

    def _note(self, mark: Mark, message: str, hint: str) -> None:
        self._problems.append(
            Problem(line=mark.line, column=mark.column, path="", message=message, hint=hint, source=mark.source)
        )

    def _refuse_tag(self, event: Any) -> None:
        if event.tag is not None:
            self._note(self._mark(event), f"YAML tags are not supported: {quoted(event.tag)}", "remove the tag")

    def _scalar(self, event: Any) -> ScalarNode:
        self._refuse_tag(event)
        mark = self._mark(event)
        text: str = event.value
        if _SURROGATE.search(text):
            self._note(mark, "an escape stands for NUL or half a character", "remove it")
            text = _SURROGATE.sub("?", text)
        kind: ScalarKind = "text"
        if not event.style and event.tag is None:
            tag = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False))
            kind = "number" if _EXPONENT.fullmatch(text) else _KINDS.get(tag, "text")
        return ScalarNode(text=text, kind=kind, mark=mark)

    def _open(self, event: Any) -> None:
        self._refuse_tag(event)
        mark = self._mark(event)
        if len(self._stack) >= MAX_DEPTH:
            _fail(mark, f"nested deeper than {MAX_DEPTH} levels", "flatten the value that begins here")
        self._counted(1, mark)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        is_map = isinstance(event, yaml.MappingStartEvent)
        self._stack.append(_Frame(mark=mark, anchor=event.anchor, is_map=is_map))

    def _close(self) -> None:
        frame = self._stack.pop()
        node: Node = self._mapping(frame) if frame.is_map else ListNode(items=tuple(frame.children), mark=frame.mark)
        self._count -= frame.size  # _add counts it again, as a whole
        self._add(node, size=frame.size, height=frame.height, anchor=frame.anchor)

    def _alias(self, event: Any) -> None:
        mark = self._mark(event)
        if event.anchor not in self._anchors:
            _fail(mark, f"no anchor &{event.anchor} comes before this alias", "name it where the value is written")
        known = self._anchors[event.anchor]
        if known is None:
            _fail(mark, f"the value &{event.anchor} contains itself", "write it out")
        node, size, height = known
        if len(self._stack) + height > MAX_DEPTH:
            _fail(mark, f"nested deeper than {MAX_DEPTH} levels through the alias *{event.anchor}", "write less")
        self._add(node, size=size, height=height, anchor=None)

    def _counted(self, size: int, mark: Mark) -> None:
        self._count += size
        if self._count > MAX_NODES:
            _fail(mark, f"holds more than {MAX_NODES} values, aliases expanded", "a job file holds settings, not data")

    def _add(self, node: Node, *, size: int, height: int, anchor: str | None) -> None:
        self._counted(size, node.mark)
        if anchor is not None:
            self._anchors[anchor] = (node, size, height)
        if not self._stack:
            self.root = node
            return
        frame = self._stack[-1]
        frame.children.append(node)
        frame.size += size
        frame.height = max(frame.height, height + 1)

    def _mapping(self, frame: _Frame) -> MapNode:
        entries: dict[str, tuple[ScalarNode, Node]] = {}
        for key, value in zip(frame.children[::2], frame.children[1::2], strict=True):
            if not isinstance(key, ScalarNode):
                self._note(key.mark, f"a key must be a word, not {kind_of(key)}", "write `key: value`")
            elif key.text == "<<" and key.kind == "text":
                self._note(
                    key.mark, "merge keys are not supported", "write the lines out, or use an alias for each value"
                )
            elif key.text in entries:
                first = entries[key.text][0].mark.line
                self._note(key.mark, f"the key {quoted(key.text)} occurs twice", f"the first is in line {first}")
            else:
                entries[key.text] = (key, value)
        return MapNode(entries=tuple(entries.values()), mark=frame.mark)
