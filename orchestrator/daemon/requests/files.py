"""Answers queries about what jobs run (specs, archives), and reads their outputs and checkpoints: links are not followed, names cannot lead out."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from orchestrator.abandoned import PIECE_BYTES, sha256_of
from orchestrator.api.errors import BadRequestError, NotFoundError, RefusedError
from orchestrator.api.files import CHECKPOINTS, OUTPUTS, FileDigest, FileList, FileView
from orchestrator.api.spec_views import FileChange, GitView, SpecDiff, SpecView, ValueChange
from orchestrator.core.events import JobSubmitted
from orchestrator.private_files import enter_below
from orchestrator.runtime.nodes.files import is_utf8, open_output, regular_files
from orchestrator.spec.entrypoint import parse_entrypoint
from orchestrator.spec.globs import GlobError, Globs
from orchestrator.spec.job import spec_yaml
from orchestrator.spec.reader.reading import to_dict
from orchestrator.trees import Problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from orchestrator.core.ids import JobId
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.paths import Paths
    from orchestrator.store.store import Store

MASK: Final = "***"
MAX_CHANGES: Final = 200
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
        files=changes[:MAX_CHANGES],
        more_files=max(0, len(changes) - MAX_CHANGES),
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


MAX_FILES: Final = 10_000

Result = TypeVar("Result")


class LeftFiles:
    """Implements ``api.files.FileReader`` on ``roots``: directories by the first part of a path. Files are read in ``pool``."""

    def __init__(self, job_id: str, roots: Mapping[str, Path], pool: Pool, *, elsewhere: str = "") -> None:
        self._job_id, self._roots, self._pool, self._elsewhere = job_id, roots, pool, elsewhere

    async def find(self, patterns: Sequence[str]) -> FileList:
        """Return the files that a pattern matches; all without one."""
        try:
            globs = Globs(patterns)
        except GlobError as error:
            raise BadRequestError(
                f"the pattern cannot be used: {error}", hint="write one like 'outputs/**/*.pt'"
            ) from error
        files, unnamed = await self._pool.run(self._found, globs)
        found = sorted(files, key=lambda file: file.path)
        return FileList(
            job_id=self._job_id,
            files=tuple(found[:MAX_FILES]),
            more=len(found) > MAX_FILES,
            unnamed=unnamed,
            elsewhere=self._elsewhere,
        )

    async def digest(self, path: str) -> FileDigest:
        """Return a file's digest."""
        return await self._pool.run(self._digest, path)

    async def open(self, path: str) -> OpenFile:
        """Open a file's content."""
        return await self._pool.run(self._open, path)

    def _found(self, globs: Globs) -> tuple[list[FileView], int]:
        """Return the files that match, and how many have names that cannot be requested."""
        found: list[FileView] = []
        unnamed = 0
        for name, root in self._roots.items():
            self._refuse_link(root)
            try:
                for file in regular_files(root, Problems()):
                    path = f"{name}/{file.path}"
                    if not is_utf8(path):  # it cannot be requested
                        unnamed += 1
                    elif not len(globs) or globs.matches(path):
                        found.append(FileView(path=path, size_bytes=file.size_bytes))
            except FileNotFoundError:
                continue  # there is no file yet
            except (OSError, ValueError) as error:
                raise RefusedError(
                    f"the {name} of {self._job_id} cannot be read: {error}", hint=f"look at {root}"
                ) from error
        return found, unnamed

    def _refuse_link(self, root: Path) -> None:
        """Raise RefusedError where the job has replaced its own directory by a link: files elsewhere are not the job's."""
        if root.parent.is_symlink():
            raise RefusedError(
                f"the directory of {self._job_id} is a symbolic link, which is not followed",
                hint=f"remove {root.parent}, and put the directory that it names in its place",
            )

    def _digest(self, path: str) -> FileDigest:
        with os.fdopen(self._handle(path), "rb", buffering=0) as file:
            sha256, size = sha256_of(file)
        return FileDigest(path=path, size_bytes=size, sha256=sha256)

    def _open(self, path: str) -> OpenFile:
        return OpenFile(self._handle(path), self._pool)

    def _handle(self, path: str) -> int:
        kind, _, below = path.partition("/")
        root = self._roots.get(kind)
        missing = NotFoundError(
            f"{self._job_id} has no file {path!r}", hint=f"`orch get {self._job_id} --list` lists its files"
        )
        if root is None or not below or "\0" in path:
            raise missing
        self._refuse_link(root)
        folder, _, name = below.rpartition("/")
        if name in {"", ".", ".."}:
            raise missing
        try:
            parent = enter_below(root, folder)
            try:
                return open_output(parent, name)
            finally:
                os.close(parent)
        except (OSError, ValueError) as error:
            raise missing from error


class OpenFile:
    """Implements ``api.files.FileContent``."""

    def __init__(self, handle: int, pool: Pool) -> None:
        self._handle, self._pool = handle, pool

    def __del__(self) -> None:
        """Close the file of a request that was cancelled before it received this."""
        self.close()

    async def read(self, offset: int) -> bytes:
        """Return the next piece from ``offset`` on; empty at the end."""
        return await self._pool.run(os.pread, self._handle, PIECE_BYTES, offset)

    def close(self) -> None:
        """Close the file, once."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def left_files(job_id: str, outputs: Path, checkpoints: str, path_of: Callable[[str], Path], pool: Pool) -> LeftFiles:
    """Return the files of a job with its checkpoints at ``checkpoints``, a directory or a URL."""
    if "://" in checkpoints:
        return LeftFiles(job_id, {OUTPUTS: outputs}, pool, elsewhere=checkpoints)
    return LeftFiles(job_id, {OUTPUTS: outputs, CHECKPOINTS: path_of(checkpoints)}, pool)


class JobSpecs:
    """Specs and files of jobs. Archives are read in threads of ``pool``."""

    def __init__(self, store: Store, paths: Paths, pool: Pool) -> None:
        self._store = store
        self._paths = paths
        self._pool = pool

    async def spec(self, job_id: JobId) -> SpecView:
        """Return what the job runs."""
        return spec_view(await self._submission(job_id))

    async def diff(self, before: JobId, after: JobId) -> SpecDiff:
        """Return the differences of two jobs."""
        first, second = await self._submission(before), await self._submission(after)
        if first.snapshot == second.snapshot:
            return spec_diff(first, second, None)
        try:
            files = (
                await self._pool.run(self._files, first.snapshot),
                await self._pool.run(self._files, second.snapshot),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            return spec_diff(first, second, None, f"an archive cannot be read: {error}")
        return spec_diff(first, second, files)

    async def _submission(self, job_id: JobId) -> JobSubmitted:
        """Return the job's first event. Raises RefusedError where the record has none."""
        for stored in await self._store.events(job_id, after=0, limit=1):
            if isinstance(stored.event, JobSubmitted):
                return stored.event
        raise RefusedError(
            f"the record of {job_id} does not hold its submission", hint="`orch doctor` checks the record"
        )

    async def files(self, job_id: JobId) -> LeftFiles:
        """Return the job's outputs and checkpoints."""
        configured = (await self._submission(job_id)).spec.checkpoint.storage_path
        own = str(self._paths.checkpoints(job_id))
        checkpoints = own if configured is None else f"{configured.rstrip('/')}/{job_id}"
        return left_files(job_id, self._paths.outputs(job_id), checkpoints, Path, self._pool)

    def _files(self, digest: str) -> Mapping[str, str]:
        return archived_files(self._paths.blob(digest)) if digest else {}


def archived_files(manifest: Path) -> dict[str, str]:
    """Return each file and link of an archive, with its digest. Raises ValueError, KeyError for an invalid one."""
    entries: list[dict[str, Any]] = json.loads(manifest.read_bytes())["entries"]
    return {
        str(entry["path"]): f"{entry.get('mode', '')} {entry.get('digest') or entry.get('target')}"
        for entry in entries
        if entry["type"] in ("file", "link")
    }
