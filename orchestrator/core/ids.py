"""Identifiers, and the function that builds a job's id. Pure: the caller passes the random part."""

from __future__ import annotations

from typing import NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)

ID_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"  # none of 0 1 i l o: an id is read aloud and typed
ID_SUFFIX_LENGTH = 6


def job_id(name: str, entropy: int) -> JobId:
    """Return the id ``name-xxxxxx`` of a job named ``name``; ``entropy`` is any non-negative integer."""
    letters = []
    for _ in range(ID_SUFFIX_LENGTH):
        entropy, index = divmod(entropy, len(ID_ALPHABET))
        letters.append(ID_ALPHABET[index])
    return JobId(f"{name}-{''.join(letters)}")
