"""Converts YAML text to a tree of nodes with their line and column; interprets nothing yet.

Built from the parser's events, not by a loader: no tag ever creates an object, and depth and size are bounded while the
text is read, before anything is built from it. Scalars stay as written, so that the key that holds `no`, `1_000` or
`12:30` can interpret it. Must not name any key of job.yaml.

Also changes of the tree before it is read: `--set a.b=c` of a command line, and `env: {pass: [...]}`, variables of the submitter's
environment by name and by pattern. That list is taken out, so that a spec and its stored form hold plain variables only; `pass` with a
text is a variable of that name.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final, NoReturn

import yaml
from yaml.resolver import Resolver

from orchestrator.spec.fields import (
    ENV_PATTERN,
    ListNode,
    MapNode,
    Mark,
    Node,
    ScalarKind,
    ScalarNode,
    kind_of,
    looks_secret,
    set_by_orch,
)
from orchestrator.spec.model import LIST_KEY, MAX_PATTERNS, PASS_PATTERN
from orchestrator.spec.problems import BadValueError, Problem, SpecError, dotted, quoted, shown
from orchestrator.spec.source import MAX_JOB_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

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


_KEY_END = re.compile(r"(?<!\\)=")
_STEP_END = re.compile(r"(?<!\\)\.")
_MAX_STEPS = 16


def apply_overrides(root: MapNode, overrides: Sequence[str], problems: list[Problem]) -> MapNode:
    r"""Set each `path=value` in turn; what cannot be set is added to `problems`.

    The value is read as YAML: a scalar, or a list or mapping in brackets. Where the key takes text, or it is neither,
    it counts as typed, since users rarely quote twice on a command line. Lists take positions (`notify.0.url=...`); `\.` is a dot inside a key.
    """
    tree: Node = root
    for override in overrides:
        source = f"--set {shown(override)}"
        try:
            steps, text = _split(override)
            tree = _set(tree, steps, _value(text, source, problems))
        except SpecError as error:
            problems.extend(error.problems)
        except BadValueError as error:
            problems.append(Problem(line=0, column=0, path="", message=error.message, hint=error.hint, source=source))
    return tree if isinstance(tree, MapNode) else root


def _split(override: str) -> tuple[list[str], str]:
    equals = _KEY_END.search(override)
    if equals is None:
        raise BadValueError("there is no `=`", "write --set resources.num_workers=4")
    steps = [step.replace("\\.", ".").replace("\\=", "=") for step in _STEP_END.split(override[: equals.start()])]
    if not all(step and step.isprintable() for step in steps) or len(steps) > _MAX_STEPS:
        raise BadValueError("the part before `=` is not a key", "write keys joined by dots: resources.num_workers")
    return steps, override[equals.end() :]


def _value(text: str, source: str, problems: list[Problem]) -> Node:
    as_text = ScalarNode(text=text, kind="text", mark=Mark(source=source), as_typed=True)
    collection = text.lstrip()[:1] in ("[", "{")
    found: list[Problem] = []
    try:
        node = compose(text, source=source, problems=found)
    except SpecError as error:
        if collection or not text.isprintable():
            raise SpecError(dataclasses.replace(problem, line=0, column=0) for problem in error.problems) from error
        return as_text
    if node is None:
        return dataclasses.replace(as_text, kind="null")
    if isinstance(node, ScalarNode) and not found:
        return dataclasses.replace(node, mark=as_text.mark, as_typed=True)
    if not collection:  # such as `a: b`, which YAML takes for a mapping
        return as_text
    problems.extend(dataclasses.replace(problem, line=0, column=0) for problem in found)
    return _at(node, as_text.mark)


def _at(node: Node, mark: Mark) -> Node:
    """Give every node below the same mark, because a position within an argument is of little use."""
    match node:
        case ScalarNode():
            return dataclasses.replace(node, mark=mark)
        case ListNode():
            return ListNode(items=tuple(_at(item, mark) for item in node.items), mark=mark)
        case MapNode():
            entries = tuple((dataclasses.replace(key, mark=mark), _at(value, mark)) for key, value in node.entries)
            return MapNode(entries=entries, mark=mark)


def _set(node: Node | None, steps: Sequence[str], value: Node) -> Node:
    """Return the tree with one value replaced or added; the given tree stays as it is."""
    if not steps:
        return value
    step, rest = steps[0], steps[1:]
    if isinstance(node, ListNode):
        if not step.isdecimal() or int(step[:9]) > len(node.items):
            raise BadValueError(
                f"{shown(step)} is not a position in a list of {len(node.items)}", "positions count from 0"
            )
        items = list(node.items)
        index = int(step[:9])
        below = _set(items[index] if index < len(items) else None, rest, value)
        return ListNode(items=(*items[:index], below, *items[index + 1 :]), mark=node.mark)
    if isinstance(node, MapNode):
        entries = {key.text: (key, old) for key, old in node.entries}
        key, old = entries.get(step, (ScalarNode(text=step, kind="text", mark=value.mark), None))
        entries[step] = (key, _set(old, rest, value))
        return MapNode(entries=tuple(entries.values()), mark=node.mark)
    if isinstance(node, ScalarNode) and node.kind != "null":
        raise BadValueError(
            f"nothing can be set below {kind_of(node)}", "set the key itself, or remove it from the file"
        )
    if step == "0":
        return ListNode(items=(_set(None, rest, value),), mark=value.mark)
    key = ScalarNode(text=step, kind="text", mark=value.mark)
    return MapNode(entries=((key, _set(None, rest, value)),), mark=value.mark)


MAX_VARIABLES: Final = 200
LONGEST_VALUE: Final = 65_536
"""Characters of one value, and of all together: they travel in the request, beside the job file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """Variables that a file requests by ``patterns``, and the ``taken`` names, which it sets itself or as secrets."""

    patterns: tuple[str, ...] = ()
    taken: frozenset[str] = frozenset()
    mark: Mark = field(default_factory=lambda: Mark(source=""))

    def idle(self, values: Collection[str]) -> tuple[str, ...]:
        """Return the patterns that match none of these names and none of the taken names."""
        names = (*values, *self.taken)
        return tuple(pattern for pattern in self.patterns if not any(_matches(name, pattern) for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The variables that are passed, and those that match but are not: ``secret`` by their name, ``unusable`` by their value."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()


def split_request(root: MapNode, problems: list[Problem]) -> tuple[MapNode, PassRequest]:
    """Return the tree without the list, and the list's request. Errors in its items are added to ``problems``."""
    env = root.get("env")
    listed = env.get(LIST_KEY) if isinstance(env, MapNode) else None
    if not isinstance(env, MapNode) or not isinstance(listed, ListNode):
        return root, PassRequest()
    rest = MapNode(entries=tuple((key, value) for key, value in env.entries if key.text != LIST_KEY), mark=env.mark)
    request = PassRequest(
        patterns=_patterns(listed, problems),
        taken=frozenset({key.text for key, _ in rest.entries} | _texts(root.get("secrets"))),
        mark=listed.mark,
    )
    return _with_env(root, rest), request


def _texts(node: Node | None) -> set[str]:
    items = node.items if isinstance(node, ListNode) else ()
    return {item.text for item in items if isinstance(item, ScalarNode)}


def _patterns(listed: ListNode, problems: list[Problem]) -> tuple[str, ...]:
    found: list[str] = []
    if len(listed.items) > MAX_PATTERNS:
        error = BadValueError(f"a list of {len(listed.items)} items", f"at most {MAX_PATTERNS}")
        problems.append(_problem(error, listed.mark))
    for index, item in enumerate(listed.items[:MAX_PATTERNS]):
        try:
            found.append(_another(PASS_PATTERN.read(item), found))
        except BadValueError as error:
            problems.append(_problem(error, item.mark, index))
    return tuple(found)


def _another(text: str, found: Sequence[str]) -> str:
    if text in found:
        raise BadValueError(f"{quoted(text)} occurs twice in the list", "remove one")
    return text


def _problem(error: BadValueError, mark: Mark, *index: int) -> Problem:
    where = dotted(("env", LIST_KEY, *index))
    return Problem(
        line=mark.line, column=mark.column, path=where, message=error.message, hint=error.hint, source=mark.source
    )


def select(request: PassRequest, environ: Mapping[str, str]) -> Passed:
    """Return the variables of an environment that a file requests, except those that it sets itself. Raises BadValueError."""
    names = [name for name in environ if name not in request.taken and _asked(name, request.patterns)]
    secret = tuple(sorted(name for name in names if looks_secret(name)))
    values = {name: environ[name] for name in sorted(names) if name not in secret}
    unusable = tuple(name for name, value in values.items() if not _usable(value))
    values = {name: value for name, value in values.items() if name not in unusable}
    if len(values) > MAX_VARIABLES:
        message = f"env.{LIST_KEY} matches {len(values)} variables; at most {MAX_VARIABLES}"
        raise BadValueError(message, "write names, or patterns that match less")
    if (total := sum(map(len, values.values()))) > LONGEST_VALUE:
        message = f"the variables of env.{LIST_KEY} have {total} characters; at most {LONGEST_VALUE}"
        raise BadValueError(message, "write names, or patterns that match less; data belongs in files of working_dir")
    return Passed(values=values, secret=secret, unusable=unusable)


def _asked(name: str, patterns: Sequence[str]) -> bool:
    if re.fullmatch(ENV_PATTERN, name) is None or set_by_orch(name):
        return False
    return any(_matches(name, p) for p in patterns)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern)


def _usable(value: str) -> bool:
    """Whether the value is text of a bounded length."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return len(value) <= LONGEST_VALUE and "\0" not in value


def with_variables(root: MapNode, request: PassRequest, values: Mapping[str, str]) -> MapNode:
    """Return the tree with these variables in ``env``, as text at the place of the list."""
    if not values:
        return root
    env = root.get("env")
    own = env.entries if isinstance(env, MapNode) else ()
    added = tuple((_text(name, request.mark), _text(value, request.mark)) for name, value in values.items())
    return _with_env(root, MapNode(entries=(*own, *added), mark=request.mark))


def _text(text: str, mark: Mark) -> ScalarNode:
    return ScalarNode(text=text, kind="text", mark=mark)


def _with_env(root: MapNode, env: MapNode) -> MapNode:
    return replace(root, entries=tuple((key, env if key.text == "env" else value) for key, value in root.entries))
