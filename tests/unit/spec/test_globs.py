"""Patterns of .gitignore: as git and pathspec read them, with a bounded cost."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pathspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from orchestrator.spec.globs import MAX_PATTERN_CHARACTERS, MAX_PATTERNS, MAX_WIDE_SETS, GlobError, Globs

if TYPE_CHECKING:
    from pathlib import Path

SEGMENTS = st.one_of(
    st.just("**"),
    st.text(st.sampled_from("ab*?"), min_size=1, max_size=4).filter(lambda text: "**" not in text),
    st.sampled_from(["[ab]", "[!a]", "a[^b]*", "\\*", "\\a", "*.b"]),
)
PATTERNS = st.builds(
    lambda sign, root, parts, tail: sign + root + "/".join(parts) + tail,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "/"]),
    st.lists(SEGMENTS, min_size=1, max_size=4),
    st.sampled_from(["", "/"]),
)
PATHS = st.lists(st.text(st.sampled_from("ab."), min_size=1, max_size=4), min_size=1, max_size=5).filter(
    lambda parts: not {".", ".."}.intersection(parts)
)


@given(st.lists(PATTERNS, max_size=4), PATHS, st.booleans())
def test_a_walk_leaves_out_what_git_does(lines: list[str], parts: list[str], is_dir: bool) -> None:
    """The walk goes directory by directory, as git does: nothing below an excluded one is checked."""
    globs = Globs(lines)
    found = [globs.last("/".join(parts[: end + 1]), is_dir=is_dir or end < len(parts) - 1) for end in range(len(parts))]
    if all(glob is None or not glob.negated for glob in found):  # without a negation, both methods agree
        assert any(found) == Globs(line for line in lines if not line.startswith("!")).matches(
            "/".join(parts), is_dir=is_dir
        )


@given(st.lists(PATTERNS, max_size=4), PATHS, st.booleans())
@example(["?/**/"], ["a", "b"], True)
def test_what_is_matched_is_what_pathspec_matches(lines: list[str], parts: list[str], is_dir: bool) -> None:
    """The semantics are those of the library that was used before."""
    path = "/".join(parts)
    spec = pathspec.PathSpec.from_lines("gitignore", lines, backend="simple")
    # pathspec lets a negated set match a slash, and "a/**" and "a/**/" name the directory a itself; git does not.
    # It takes "a/*" for the entries of a alone, not for those below them, and lets "a/**/" name files; git does neither.
    assume(not any(line.endswith(("/*", "/**/")) for line in lines))
    assume(not any("[^" in line or "[!" in line or (is_dir and line.endswith("/**")) for line in lines))
    assert Globs(lines).matches(path, is_dir=is_dir) == spec.match_file(path + "/" * is_dir)


@pytest.mark.parametrize(
    ("line", "path", "expected"),
    [
        ("*.bin", "data/train.bin", True),
        ("/*", "data/train.bin", True),
        ("data/*", "data/old/train.bin", True),
        ("data/**/", "data/train.bin", False),
        ("data/**/", "data/old/train.bin", True),
        ("/*.bin", "data/train.bin", False),
        ("out/**", "out/a/b", True),
        ("out/**", "out", False),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**/b", "a/x/y/c", False),
        ("**/b", "b", True),
        ("build/", "build/x", True),
        ("build/", "build", False),
        ("build", "x/build/y", True),
        ("\\#x", "#x", True),
        ("#x", "#x", False),
        ("\\!x", "!x", True),
        ("x\\ ", "x ", True),
        ("x  ", "x", True),
        ("[", "[", True),
        ("a[^b]", "ac", True),
        ("a[^b]", "ab", False),
        ("/", "x", False),
        ("a//b", "a/b", False),
        ("\udcff*", "\udcffx", True),
    ],
)
def test_patterns(line: str, path: str, expected: bool) -> None:
    """The forms that the manual of gitignore describes."""
    assert Globs([line]).matches(path) is expected


@pytest.mark.parametrize(
    ("lines", "path", "is_dir", "line"),
    [
        (["*", "!keep/"], "keep", True, 1),
        (["*", "!keep/"], "keep/x", False, 0),
        (["a/**"], "a", True, None),
        (["a/**"], "a/b", False, 0),
        (["a/**/"], "a/b", False, None),
        (["**"], "a", False, 0),
        (["/x/*.b"], "y/x/z.b", False, None),
        (["# no", "", "x"], "q/x", False, 2),
        (["a/**/b", "**/c/**/b"], "a/b/b", False, 0),
    ],
)
def test_which_line_names_the_path_itself(lines: list[str], path: str, is_dir: bool, line: int | None) -> None:
    """The last matching line does; the number counts comments."""
    found = Globs(lines).last(path, is_dir=is_dir)
    assert (None if found is None else found.line) == line


def test_the_last_pattern_decides() -> None:
    """A later line overrides an earlier one."""
    globs = Globs(["*.txt", "!keep.txt"])
    assert globs.matches("a.txt")
    assert not globs.matches("keep.txt")


def test_git_agrees(tmp_path: Path) -> None:
    """git reads the same file with the same result."""
    lines = ["*.bin", "!keep.bin", "/out/**/x", "cache/", "a/*/c", "d?[0-9]", "\\*star"]
    paths = ["w.bin", "keep.bin", "out/x", "out/q/x", "out/q/y", "a/b/c", "a/c", "dz7", "dzz", "*star", "s/keep.bin"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("\n".join(lines))
    told = subprocess.run(
        ["git", "-C", str(tmp_path), "check-ignore", "--no-index", "--stdin"],
        input="\n".join(paths),
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    ignored = {line.strip('"').replace("\\\\", "\\") for line in told}
    assert {path for path in paths if Globs(lines).matches(path)} == ignored


def test_the_cost_is_bounded_by_the_lengths() -> None:
    """Many ``**`` on a deep path: the number of compared segments is bounded by the product of both lengths."""
    parts = ["a"] * 400
    pattern = "/".join(["**/a"] * 30) + "/b"
    count = 0

    def meter() -> None:
        nonlocal count
        count += 1

    assert not Globs([pattern]).matches("/".join(parts), meter=meter)
    assert count <= 31 * len(parts) * 2


def test_wildcards_in_a_segment_do_not_backtrack() -> None:
    """A backtracking matcher would never finish with this name."""
    assert not Globs(["*a" * 60 + "*b"]).matches("a" * 255)


def test_limits() -> None:
    """A list or a pattern that is too long is refused without being processed."""
    with pytest.raises(GlobError, match="characters"):
        Globs(["a" * (MAX_PATTERN_CHARACTERS + 1)])
    with pytest.raises(GlobError, match="patterns"):
        Globs(f"a{number}" for number in range(MAX_PATTERNS + 1))


def test_what_compiling_takes_is_bounded() -> None:
    """A set with characters beyond U+00FF becomes a table of 65,536 entries, in the daemon."""
    lines = [f"{number}[ā-\uffff]" for number in range(MAX_WIDE_SETS)]
    assert len(Globs([*lines, *(f"{number}[a-z]" for number in range(1000))])) == 1000 + MAX_WIDE_SETS
    with pytest.raises(GlobError, match="200 sets of characters"):
        Globs([*lines, "[ā-\uffff]"])


@given(st.lists(st.text(max_size=30), max_size=5), st.text(min_size=1, max_size=30))
def test_any_text_is_a_list_of_patterns(lines: list[str], path: str) -> None:
    """No content of a file raises."""
    Globs(lines).matches(path)
