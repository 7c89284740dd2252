"""The collectives that a rank enters, from torch's own calls to the page that its actor reads."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.runtime.forkserver.torch_changes import collective_calls as calls
from orchestrator.runtime.ranks.process_inspector import entered_call
from orchestrator.train.script import progress_layout as layout
from orchestrator.train.script.progress_reading import PageReader


class Group:
    def __init__(self, name: str, desc: str = "undefined", ranks: tuple[int, ...] = ()) -> None:
        self.group_name, self.group_desc, self.ranks = name, desc, ranks

    def size(self) -> int:
        return len(self.ranks)


WORLD = Group("0", "default_pg", (0, 1, 2))


class Torch:
    """A torch.distributed with the functions that the test needs."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.distributed_c10d = SimpleNamespace(
            GroupMember=SimpleNamespace(WORLD=WORLD), _rank_not_in_group=self.told.append
        )

    def get_process_group_ranks(self, group: Group) -> list[int]:
        return list(group.ranks)

    def all_reduce(self, group: Any = None) -> None:
        self.distributed_c10d._rank_not_in_group(group)

    def get_rank(self, group: Any = None) -> None:
        self.distributed_c10d._rank_not_in_group(group)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PageReader:
    made = PageReader.create(tmp_path / "page")
    monkeypatch.setenv("ORCH_PROGRESS_PATH", str(tmp_path / "page"))
    return made


@pytest.fixture
def torch() -> Torch:
    made = Torch()
    calls.count_collectives(made)
    return made


def test_the_layouts_agree() -> None:
    for name in ("ENTERED", "ENTERED_AT", "GROUP", "GROUPS_AT", "MAX_GROUPS"):
        ours, theirs = getattr(calls, name), getattr(layout, name)
        assert getattr(ours, "format", ours) == getattr(theirs, "format", theirs)


def test_calls_are_counted_by_group_and_read_from_the_page(page: PageReader, torch: Torch) -> None:
    assert entered_call(page.head(), os.getpid()) is None
    for group in (None, WORLD, None):
        torch.all_reduce(group)
    torch.get_rank()
    newest = entered_call(page.head(), os.getpid())
    assert newest is not None
    assert (newest.name, newest.number, newest.label) == ("all_reduce", 3, "")
    torch.all_reduce(Group("7", ranks=(1, 2)))
    other = entered_call(page.head(), os.getpid())
    assert other is not None
    assert (other.number, other.label, other.counts) == (1, "ranks 1,2", {newest.group: 3, other.group: 1})
    torch.all_reduce(Group("8", "dp"))
    torch.all_reduce(Group("9", ranks=tuple(range(64))))
    big = entered_call(page.head(), os.getpid())
    assert big is not None
    assert big.label == "64 ranks"
    assert entered_call(page.head(), os.getpid() + 1) is None, "another process wrote it"
    assert len(torch.told) == 7
    page.close()
    assert page.head() == b""


def test_a_call_never_fails_of_its_count(page: PageReader, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.all_reduce(-100)  # torch passes this where the rank is not in the group
    assert entered_call(page.head(), os.getpid()) is None
    monkeypatch.setenv("ORCH_PROGRESS_PATH", str(page.path.parent))
    for path in (str(page.path.parent), "", "/nowhere"):
        monkeypatch.setenv("ORCH_PROGRESS_PATH", path)
        blind = Torch()
        calls.count_collectives(blind)
        blind.all_reduce()
        assert blind.told == [None]
    page.path.write_bytes(bytes(layout.PAGE_BYTES))
    blind = Torch()
    calls.count_collectives(blind)
    blind.all_reduce()
    assert page.path.read_bytes() == bytes(layout.PAGE_BYTES)
    older = SimpleNamespace(distributed_c10d=SimpleNamespace())
    calls.count_collectives(older)
    assert vars(older.distributed_c10d) == {}


@pytest.mark.parametrize(
    "values",
    [
        (5, 1, 1, b"all_reduce; rm", b""),
        (5, 0, 1, b"all_reduce", b""),
        (5, 2**60, 1, b"all_reduce", b""),
        (5, 1, 1, b"all_reduce", b"\x1b[2J"),
        (6, 1, 1, b"all_reduce", b""),
    ],
)
def test_bytes_that_no_counter_writes_are_no_call(values: tuple[Any, ...]) -> None:
    head = bytearray(layout.HOT.offset)
    layout.ENTERED.pack_into(head, layout.ENTERED_AT, *values)
    assert entered_call(bytes(head), 5) is None
    assert entered_call(bytes(head)[:100], 5) is None
    struct.pack_into("<IQ", head, layout.GROUPS_AT, 1, 2**63)
    layout.ENTERED.pack_into(head, layout.ENTERED_AT, 5, 1, 9, b"barrier", b"")
    good = entered_call(bytes(head), 5)
    assert good is not None
    assert good.counts == {9: 1}


def test_torch_calls_the_function_first_in_every_collective() -> None:
    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    known = [getattr(c10d, name) for name in calls.COLLECTIVES if hasattr(c10d, name)]
    assert len(known) > 15
    missing = [one.__name__ for one in known if "_rank_not_in_group" not in _code(one).co_names]
    assert missing in ([], ["all_gather_into_tensor", "reduce_scatter_tensor"]), "aliases of the _single ones"


def _code(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function.__code__
