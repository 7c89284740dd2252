"""Conversion of YAML text to nodes: positions, bounds, and refusals; with libyaml and without it."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import yaml

from orchestrator.spec.fields import ListNode, MapNode, ScalarNode
from orchestrator.spec.problems import Problem, SpecError
from orchestrator.spec.reader import document
from orchestrator.spec.reader.document import MAX_DEPTH, MAX_NODES, Node, compose
from orchestrator.spec.source import MAX_JOB_BYTES
from tests.support.work import calls

Read: TypeAlias = Callable[[str], tuple[Node | None, list[Problem]]]
Refused: TypeAlias = Callable[[str], Problem]


@pytest.fixture(params=[yaml.CSafeLoader, yaml.SafeLoader], ids=["libyaml", "python"])
def read(request: pytest.FixtureRequest) -> Read:
    """Return a function that reads a text with one of the two parsers."""

    def read(text: str) -> tuple[Node | None, list[Problem]]:
        problems: list[Problem] = []
        return compose(text, source="t.yaml", problems=problems, loader=request.param), problems

    return read


@pytest.fixture
def refused(read: Read) -> Refused:
    """Return a function that returns the only problem of a text."""

    def refused(text: str) -> Problem:
        with pytest.raises(SpecError) as caught:
            read(text)
        (problem,) = caught.value.problems
        return problem

    return refused


def plain(node: Node | None) -> Any:
    match node:
        case ScalarNode():
            return node.text
        case ListNode():
            return [plain(item) for item in node.items]
        case MapNode():
            return {key.text: plain(value) for key, value in node.entries}
    return None


def test_a_document_becomes_a_tree_with_positions(read: Read) -> None:
    root, problems = read("a: 1\nbé: [x,\n  {c: d}]\n")
    assert plain(root) == {"a": "1", "bé": ["x", {"c": "d"}]}
    assert problems == []
    assert isinstance(root, MapNode)
    value = root.get("bé")
    assert isinstance(value, ListNode)
    assert (value.mark.line, value.mark.column) == (2, 5)
    assert (value.items[1].mark.line, value.items[1].mark.column) == (3, 3)
    assert root.get("none") is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("x", "text"),
        ("'1'", "text"),
        ("1", "integer"),
        ("0x10", "integer"),
        ("1:30", "integer"),
        ("1.5", "number"),
        ("1e-3", "number"),
        ("'1e-3'", "text"),
        ("on", "boolean"),
        ("No", "boolean"),
        ("~", "null"),
        ("2026-11-21", "date"),
        ("=", "text"),
    ],
)
def test_scalars_stay_as_written_and_know_what_yaml_takes_them_for(text: str, kind: str, read: Read) -> None:
    root, problems = read(text)
    assert isinstance(root, ScalarNode)
    assert (root.text, root.kind) == (text.strip("'"), kind)
    assert problems == []


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "\ufeff"])
def test_an_empty_text_has_no_node(text: str, read: Read) -> None:
    assert read(text) == (None, [])


def test_aliases_stand_for_their_values(read: Read) -> None:
    root, problems = read("a: &x [1, 2]\nb: *x\nc: {d: *x}\n")
    assert plain(root) == {"a": ["1", "2"], "b": ["1", "2"], "c": {"d": ["1", "2"]}}
    assert problems == []


@pytest.mark.parametrize(
    ("text", "line", "column", "message", "hint"),
    [
        ("a: 1\nb: c: d\n", 2, 5, "not valid YAML", "quotation marks"),
        ("a: [1, 2\n", 2, 1, "not valid YAML", "a bracket is not closed"),
        ("a:\n  b: 1\n\tc: 2\n", 3, 1, "not valid YAML", "spaces, not with tabs"),
        ("a: @x\n", 1, 4, "not valid YAML", "quotation marks"),
        ("a: 'x\n", 2, 1, "not valid YAML", "quotation marks above"),
        ("%YAML 2.0\n---\na: 1\n", 1, 1, "not valid YAML", ""),
        ("a: 1\n---\nb: 2\n", 2, 1, "second document", "one job a file"),
        ("a: 1\n--- \n", 2, 1, "second document", "one job a file"),
        ("a: *x\n", 1, 4, "no anchor &x", "name it where"),
        ("a: &x [1, *x]\n", 1, 11, "contains itself", "write it out"),
        ("a: b\n\x00", 2, 1, "U+0000", "remove it"),
        ("a: b\x07\n", 1, 5, "U+0007", "remove it"),
        ("a: \ud800\n", 1, 4, "U+D800", "remove it"),
        ("[" * 40 + "]" * 40, 1, MAX_DEPTH + 1, "nested deeper than 32", "flatten"),
    ],
)
def test_what_cannot_be_read_is_one_problem_with_its_place(
    text: str, line: int, column: int, message: str, hint: str, refused: Refused
) -> None:
    problem = refused(text)
    assert message in problem.message
    assert hint in problem.hint
    assert (problem.line, problem.column, problem.source) == (line, column, "t.yaml")


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, '"a" occurs twice', "the first is in line 1"),
        ("a: !!python/object:os.system x\n", 1, "tags are not supported", "remove the tag"),
        ("a: !!set {b}\n", 1, "tags are not supported", "remove the tag"),
        ("a: ! x\n", 1, "tags are not supported", "remove the tag"),
        ("? [a]\n: 1\n", 1, "a key must be a word", "key: value"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "merge keys are not supported", "write the lines out"),
        ('a: "x\\0y"\n', 1, "NUL or half a character", "remove it"),
    ],
)
def test_what_can_be_passed_over_is_noted_and_the_rest_is_read(
    text: str, line: int, message: str, hint: str, read: Read
) -> None:
    root, (problem,) = read(text + "rest: here\n")
    assert message in problem.message
    assert hint in problem.hint
    assert problem.line == line
    assert plain(root)["rest"] == "here"


def test_no_tag_makes_an_object(read: Read) -> None:
    root, problems = read("a: !!python/object/apply:os.system ['exit 1']\n")
    assert plain(root) == {"a": ["exit 1"]}
    assert len(problems) == 1


def test_a_billion_laughs_ends_at_the_bound_on_values(refused: Refused) -> None:
    lines = ["a0: &a0 [" + ",".join(["lol"] * 10) + "]"]
    lines += [f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 10)]
    problem = refused("\n".join(lines))
    assert f"more than {MAX_NODES} values" in problem.message
    assert problem.line == 1 or problem.line > 3


def test_depth_through_aliases_is_bounded(refused: Refused) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [[[[*a{i - 1}]]]]" for i in range(1, 12)]
    assert "nested deeper than 32 levels through the alias" in refused("\n".join(lines)).message


@pytest.mark.parametrize("text", ["[" * 500_000, "a: [" + "x, " * 300_000 + "]"], ids=["[", "x"])
def test_a_large_hostile_text_is_refused_before_it_is_read_through(
    text: str, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    events: list[object] = []

    def noted(text: str, loader: object) -> Iterator[object]:
        for event in parsed(text, loader):
            events.append(event)
            yield event

    parsed = document._events
    monkeypatch.setattr(document, "_events", noted)
    problem = refused(text)
    assert len(events) < MAX_NODES + 10
    assert calls(lambda: refused(text)) < 200 * len(events) + 50_000
    assert "nested deeper" in problem.message or "more than" in problem.message


@pytest.mark.parametrize("text", ["#" + "x" * MAX_JOB_BYTES, "#" + "é" * (MAX_JOB_BYTES // 2)], ids=["ascii", "utf-8"])
def test_a_text_over_the_size_limit_is_refused_unread(text: str, refused: Refused) -> None:
    assert "larger than 1048576 bytes" in refused(text).message
