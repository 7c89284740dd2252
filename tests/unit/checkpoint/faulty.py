"""Storage between a checkpoint repository and the disk that fails, or dies, at a chosen operation."""

from __future__ import annotations

import contextlib
import os

from orchestrator.checkpoint.storage.storage import LocalStorage


class PowerCutError(BaseException):
    """The process is dead: its later operations have no effect."""


class FaultyStorage(LocalStorage):
    """Counts operations that change the disk. At number ``fail_at`` raises ``error`` (and goes on), or, with
    ``error=None``, dies there: half of a write is done, and every later operation raises PowerCutError too.
    """

    def __init__(self, root, *, fail_at=None, error=None, fail_reads=None):
        super().__init__(root)
        self.operations = 0
        self.fail_at, self.error, self.fail_reads = fail_at, error, fail_reads
        self.dead = False

    def _step(self):
        if self.dead:
            raise PowerCutError
        self.operations += 1
        if self.operations != self.fail_at:
            return False
        if self.error is None:
            self.dead = True
        return True

    def _stop(self):
        raise PowerCutError if self.error is None else OSError(self.error, os.strerror(self.error))

    def write(self, path, chunks, *, durable=True):
        if self._step():
            whole = b"".join(bytes(chunk) for chunk in chunks)
            super().write(path, [whole[: len(whole) // 2]], durable=False)
            self._stop()
        return super().write(path, chunks, durable=durable)

    def rename(self, source, target):
        if self._step():
            self._stop()
        super().rename(source, target)

    def discard(self, path):
        if self._step():
            self._stop()
        super().discard(path)

    def sync(self, path):
        if self.dead:
            raise PowerCutError
        super().sync(path)

    def remove(self, path):
        if self._step():
            with contextlib.suppress(OSError, IndexError):  # a tree is deleted file by file
                os.unlink(self.root / path / self.names(path)[0])
            self._stop()
        super().remove(path)

    def read(self, path, *most_bytes):
        if self.dead:
            raise PowerCutError
        if self.fail_reads is not None and path.endswith(self.fail_reads[0]):
            raise OSError(self.fail_reads[1], os.strerror(self.fail_reads[1]))
        return super().read(path, *most_bytes)

    def digest(self, path):
        if self.fail_reads is not None and path.endswith(self.fail_reads[0]):
            raise OSError(self.fail_reads[1], os.strerror(self.fail_reads[1]))
        return super().digest(path)
