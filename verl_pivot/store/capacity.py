"""Room in the tmpfs: asked for before every write, and told in one message when there is none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verl_pivot.config.schema import StoreConfig
from verl_pivot.store.errors import StoreFull


def free_bytes(directory: Path) -> int:
    """Bytes free in the file system of ``directory``."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


@dataclass(frozen=True)
class Room:
    """The space that one publish may take."""

    directory: Path
    config: StoreConfig
    subject: str
    """What is being written, for the message: ``version 7 of model 'policy'``."""
    served: int | None
    """Version that goes on being served."""

    @contextmanager
    def taking(self, nbytes: int) -> Iterator[None]:
        """Around a write of ``nbytes``: raises StoreFull before it when there is no room beyond the reserve, and
        instead of the system's own error when another process has taken the room meanwhile."""
        self.check(nbytes)
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._full(nbytes) from error

    def check(self, nbytes: int) -> None:
        if nbytes > free_bytes(self.directory) - self.config.reserve_bytes:
            raise self._full(nbytes)

    def _full(self, nbytes: int) -> StoreFull:
        free = free_bytes(self.directory) - self.config.reserve_bytes
        served = "no version has been published" if self.served is None else f"version {self.served} is still served"
        return StoreFull(
            f"the parameter store is full: writing {self.subject} into {self.directory} needs {_size(nbytes)} more, "
            f"but {_size(max(free, 0))} are free beyond the reserve of {_size(self.config.reserve_bytes)}; {served}. "
            "Point trainer.resource_shift.store.directory at a larger tmpfs (or remount it larger), or lower "
            f"trainer.resource_shift.store.keep_versions (now {self.config.keep_versions}; one version more than "
            "that is held while publishing) or trainer.resource_shift.store.reserve_bytes",
            directory=str(self.directory),
            needed_bytes=nbytes,
            free_bytes=free,
        )


def _size(nbytes: int) -> str:
    """In the unit that leaves digits of small sizes."""
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes} bytes"
