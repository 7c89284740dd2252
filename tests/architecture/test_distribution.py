"""Distribution of the suite's files: a process continues with the daemon that it has, and long files come first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from tests.support.distribution import DAEMONS, ROOT, SECONDS, next_file, shared_daemon

TESTS = Path(__file__).parents[1]
DAEMON = "tests/integration/test_no_gpus.py"
OTHER = "tests/integration/test_outputs.py"
NONE = "tests/integration/test_systemd.py"


@pytest.mark.parametrize(
    ("waiting", "own", "taken", "found"),
    [
        ([NONE, DAEMON, OTHER], {"breakable"}, {"breakable"}, DAEMON),
        ([NONE, OTHER], {"breakable"}, {"breakable"}, OTHER),
        ([NONE, OTHER], {"breakable"}, set(DAEMONS), NONE),
        ([OTHER], {"breakable"}, set(DAEMONS), OTHER),
    ],
    ids=["its own daemon first", "then one that nothing has started", "then none", "then another's"],
)
def test_a_process_takes_what_costs_the_fewest_daemons(
    waiting: Iterable[str], own: Collection[str], taken: Collection[str], found: str
) -> None:
    assert (shared_daemon(DAEMON), shared_daemon(OTHER), shared_daemon(NONE)) == ("breakable", "stack", "")
    assert next_file(list(waiting), own, taken) == found


def test_the_longest_comes_first() -> None:
    files = [str(path.relative_to(ROOT)) for path in TESTS.rglob("test_*.py") if path.name in SECONDS]
    alone = [file for file in files if not shared_daemon(file)]
    assert Path(next_file(files, (), DAEMONS)).name == max((Path(file).name for file in alone), key=SECONDS.__getitem__)


def test_every_file_that_is_called_long_is_there() -> None:
    assert SECONDS.keys() <= {path.name for path in TESTS.rglob("test_*.py")}
