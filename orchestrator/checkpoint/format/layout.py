"""Names of files and directories of a checkpoint directory (docs/checkpoints.md); no other module defines them."""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST = "manifest.json"
FENCE = "fence.json"
LOCK = ".lock"
QUARANTINE_NOTE = "quarantine.json"
SMALL_BYTES = 16 * 1024 * 1024  # limit for a file that describes others: a rank could write any size
STATE = "state"
_STAGING = ".staging-"
_REMOVING = ".removing-"
_NAME = re.compile(r"step-(\d{12,})-a(\d+)")
_BROKEN = re.compile(r"(step-\d{12,}-a\d+)\.broken(?:-\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """The attempt and step of a checkpoint. Ordered by attempt first: a newer attempt takes precedence."""

    attempt: int
    step: int

    @property
    def name(self) -> str:
        """The directory's name."""
        return f"step-{self.step:012d}-a{self.attempt}"


def parse_name(name: str) -> Version | None:
    """Return the version in a committed checkpoint's directory name, None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else Version(step=int(match[1]), attempt=int(match[2]))


def parse_broken(name: str) -> Version | None:
    """Return the version in a quarantined checkpoint's directory name."""
    match = _BROKEN.fullmatch(name)
    return None if match is None else parse_name(match[1])


def broken_name(name: str, number: int) -> str:
    """Return the name for a quarantined checkpoint; ``number``, from 1, makes names unique."""
    return f"{name}.broken" if number == 1 else f"{name}.broken-{number}"


def staging_name(version: Version, token: str) -> str:
    """Return the name of the directory in which the ranks of one run (``token``) write a checkpoint."""
    return f"{_STAGING}{version.name}-{token}"


def parse_staging(name: str) -> tuple[Version, str] | None:
    """Return version and run token of a staging directory's name."""
    if not name.startswith(_STAGING):
        return None
    base, _, token = name.removeprefix(_STAGING).rpartition("-")
    version = parse_name(base)
    return None if version is None else (version, token)


def removing_name(name: str) -> str:
    """Return a directory's name while its files are deleted, so that it does not count as damaged."""
    return f"{_REMOVING}{name}"


def is_removing(name: str) -> bool:
    """Whether deletion of this directory has begun."""
    return name.startswith(_REMOVING)


def removed_name(name: str) -> str:
    """Return the name from which ``removing_name`` made this one."""
    return name.removeprefix(_REMOVING)


def ticket_name(attempt: int, token: str, number: int) -> str:
    """Return the name of the note in which the ranks of a run agree on the result of their ``number``-th load()."""
    return f"{ticket_prefix(attempt, token)}{number}.json"


def ticket_prefix(attempt: int, token: str) -> str:
    """Return the prefix of all such notes of one run."""
    return f".resume-a{attempt}-{token}-"


def is_ticket(name: str) -> bool:
    """Whether this file is such a note."""
    return name.startswith(".resume-a")


def rank_part(rank: int) -> str:
    """Return the base name of a rank's own files."""
    return f"rank-{rank:05d}"


def shard_part(rank: int) -> str:
    """Return the base name of the files with a rank's pieces of the sharded tensors."""
    return f"shard-{rank:05d}"


def done_marker(rank: int) -> str:
    """Return the name of the file that each rank writes last: its files and their digests."""
    return f"{rank_part(rank)}.done.json"


def is_done_marker(name: str) -> bool:
    """Whether a file in a staging directory marks a rank as finished."""
    return name.endswith(".done.json")


def tree_file(part: str) -> str:
    """Return the JSON file of a part (``state`` or a rank's)."""
    return f"{part}.json"


def tensor_file(part: str) -> str:
    """Return the safetensors file of a part; absent when it holds no tensor."""
    return f"{part}.safetensors"
