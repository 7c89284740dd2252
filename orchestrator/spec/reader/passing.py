"""`env: {pass: [...]}`: variables of the submitter's environment, by name and by pattern.

The list is taken out of the tree before a spec is read, so that a spec and its stored form hold plain variables only.
`pass` with a text is a variable of that name. Pure: takes the environment as a mapping. Must not name any other key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from orchestrator.spec.fields.nodes import ListNode, MapNode, Mark, Node, ScalarNode
from orchestrator.spec.fields.rules import ENV_PATTERN, looks_secret, set_by_orch
from orchestrator.spec.model import LIST_KEY, MOST_PATTERNS, PASS_PATTERN
from orchestrator.spec.problems import BadValueError, Problem, dotted, quoted

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

MOST_VARIABLES: Final = 200
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
    if len(listed.items) > MOST_PATTERNS:
        error = BadValueError(f"a list of {len(listed.items)} items", f"at most {MOST_PATTERNS}")
        problems.append(_problem(error, listed.mark))
    for index, item in enumerate(listed.items[:MOST_PATTERNS]):
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
    if len(values) > MOST_VARIABLES:
        message = f"env.{LIST_KEY} matches {len(values)} variables; at most {MOST_VARIABLES}"
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
