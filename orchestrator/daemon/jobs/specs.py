"""Converts a submission's event to the API's view, and compares two. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from orchestrator.api.spec_views import FileChange, GitView, SpecDiff, SpecView, ValueChange
from orchestrator.spec.entrypoint import parse_entrypoint
from orchestrator.spec.job import spec_yaml, to_dict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.core.events import JobSubmitted

MASK: Final = "***"
MOST_FILES: Final = 200
_SECRET: Final = re.compile(
    r"(?i)token|secret|pass|pwd|keys?(?:$|_)|credential|auth|webhook|cookie|signature|(?:^|_)(?:pat|pin|dsn)(?:$|_)"
)
"""A guess at names, for showing alone: which variables a job gets does not depend on it."""
_USER_IN_URL: Final = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30}://)[^\s/?#]+@")


def spec_view(event: JobSubmitted) -> SpecView:
    """Return what a submission runs; values that look like secrets are masked."""
    spec: dict[str, Any] = to_dict(event.spec)
    masked = [f"env.{name}" for name in spec["env"] if _SECRET.search(name)]
    spec["env"] = {name: MASK if f"env.{name}" in masked else value for name, value in spec["env"].items()}
    plain, spec = dict(_leaves("", spec)), _without_users(spec)
    masked += [key for key, value in _leaves("", spec) if value != plain[key]]
    for number, hook in enumerate(spec["notify"]):
        if (url := _without_path(hook["url"])) != hook["url"]:
            hook["url"] = url
            masked.append(f"notify.{number}.url")
    entry = parse_entrypoint(event.spec.entrypoint)
    command = entry.argv if entry.python is None else (event.python, *entry.argv[1:])
    return SpecView(
        job_id=event.job_id,
        name=event.name,
        user=event.user,
        submitted_at=event.at,
        spec=spec,
        yaml=spec_yaml(spec),
        python=event.python,
        command=tuple(map(_without_users, command)),
        env={**spec["env"], **dict.fromkeys(event.spec.secrets, MASK), "PATH": event.path},
        masked=tuple(masked),
        archive=event.snapshot,
        git=None if event.git is None else GitView(**{n: getattr(event.git, n) for n in ("commit", "branch", "dirty")}),
        resume_from=None if event.resume_from is None else _without_users(event.resume_from),
        rerun_of=event.rerun_of,
    )


def _without_users(value: Any) -> Any:
    """Return the value with each address in it without its user and password."""
    if isinstance(value, dict):
        return {key: _without_users(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_without_users, value))
    return _USER_IN_URL.sub(rf"\g<scheme>{MASK}@", value) if isinstance(value, str) else value


def _without_path(url: str) -> str:
    """Return the address of a web hook without the parts that identify a caller: user, path and query."""
    parts = urlsplit(url)
    return (
        url
        if parts.path in ("", "/") and not (parts.query or parts.username)
        else f"{parts.scheme}://{parts.hostname}/{MASK}"
    )


def spec_diff(
    before: JobSubmitted,
    after: JobSubmitted,
    files: tuple[Mapping[str, str], Mapping[str, str]] | None,
    files_unknown: str = "",
) -> SpecDiff:
    """Return the differences of two submissions. ``files``: the digest of each file of the two archives; None: unknown."""
    first, second = dict(_resolved_values(before)), dict(_resolved_values(after))
    values = [
        ValueChange(key=key, before=first.get(key), after=second.get(key))
        for key in dict.fromkeys([*first, *second])
        if first.get(key) != second.get(key)
    ]
    changes = () if files is None else tuple(_changes(*files))
    return SpecDiff(
        before=before.job_id,
        after=after.job_id,
        values=tuple(_masked(value, before, after) for value in values),
        files=changes[:MOST_FILES],
        more_files=max(0, len(changes) - MOST_FILES),
        files_unknown=files_unknown,
    )


def _resolved_values(event: JobSubmitted) -> Iterator[tuple[str, Any]]:
    """Return each value of the spec by its dotted key, unmasked, and values resolved beside it."""
    yield from _leaves("", to_dict(event.spec))
    yield "(interpreter)", event.python
    yield "(git commit)", None if event.git is None else event.git.commit + (" with changes" if event.git.dirty else "")
    yield "(resume from)", event.resume_from


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else name, below)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, below in enumerate(value):
            yield from _leaves(f"{prefix}.{number}", below)
    elif value not in ({}, []):
        yield prefix, value


def _masked(change: ValueChange, *events: JobSubmitted) -> ValueChange:
    """Return the change with the masks of ``spec_view``: it shows that values differ, not the values."""
    secret = {f"env.{name}" for event in events for name in event.spec.env if _SECRET.search(name)}
    bare = ValueChange(key=change.key, before=_without_users(change.before), after=_without_users(change.after))
    if change.key not in secret and not re.fullmatch(r"notify\.\d+\.url", change.key):
        return bare if bare.before != bare.after else replace(bare, after=f"{bare.after} (another)")
    before, after = (
        value and f"{MASK} ({word})" for value, word in ((change.before, "one"), (change.after, "another"))
    )
    return ValueChange(key=change.key, before=before, after=after)


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[FileChange]:
    for path in sorted(before.keys() | after.keys()):
        if path not in before:
            yield FileChange(path=path, change="added")
        elif path not in after:
            yield FileChange(path=path, change="removed")
        elif before[path] != after[path]:
            yield FileChange(path=path, change="changed")
