"""No document and no error installs `orch` by its bare name: on PyPI that is another project."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BARE = re.compile(r"(?:pipx?|uv tool|uv pip) install\b[^\n`]*[\s'\"]orch(?:\[[a-z,-]*\])?(?=[\s'\"`.]|$)", re.MULTILINE)
FILES = sorted(
    path
    for pattern in ("*.md", "Dockerfile", "docs/**/*.md", "examples/**/*.md", "deploy/**/*.md", "orchestrator/**/*.py")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)


def test_the_pattern_finds_such_lines() -> None:
    for line in (
        "pip install orch",
        "pip install 'orch[top]'",
        "pipx install --force orch",
        "pip install --upgrade orch.",
    ):
        assert BARE.search(line), line
    for line in (
        "pip install dist/orchd-*.whl",
        "pip install torch",
        "install -m644 systemd/orch.sysusers /usr",
        "pip install ./orch",
    ):
        assert not BARE.search(line), line


def test_nothing_installs_the_bare_name() -> None:
    assert len(FILES) > 100
    lines = {path: BARE.findall(path.read_text(encoding="utf-8")) for path in FILES}
    assert {str(path.relative_to(ROOT)): bare for path, bare in lines.items() if bare} == {}
