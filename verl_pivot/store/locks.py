"""Locks on files and directories that vanish with the process that holds them.

``flock`` belongs to the open file, so a kill -9 releases it, process ids do not matter, and it works between
containers that share the tmpfs. Two openings in one process exclude each other like two processes do.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path

POLL_S = 0.02
"""How often waits look again. Nothing in the store is worth a notification mechanism."""


class PathLock:
    """A held lock on an existing file or directory. Made by ``try_lock`` and ``lock_within``."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._open = [fd]  # a list, because taking the last item is atomic even to a signal handler
        _held.add(self)

    def release(self) -> None:
        """Idempotent."""
        with suppress(IndexError):
            fd = self._open.pop()
            # Closing is not enough: a child forked outside Python's knowledge may still have the file open.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def forget(self) -> None:
        """Lets go of the file without unlocking it: in a forked child the lock is the parent's."""
        with suppress(IndexError):
            os.close(self._open.pop())

    def __enter__(self) -> PathLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


_held: weakref.WeakSet[PathLock] = weakref.WeakSet()


def _forget_parents_locks() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_parents_locks)


def try_lock(path: Path, *, shared: bool = False) -> PathLock | None:
    """Locks ``path``, or returns None when another holds it.

    Raises FileNotFoundError when the path does not exist, or was removed or replaced while it was being locked.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        opened, named = os.fstat(fd), os.stat(path)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    lock = PathLock(path, fd)
    if (opened.st_dev, opened.st_ino) != (named.st_dev, named.st_ino):
        lock.release()
        raise FileNotFoundError(f"{path} was replaced while it was being locked")
    return lock


def lock_within(path: Path, deadline_s: float) -> PathLock | None:
    """Exclusive lock, waited for at most ``deadline_s`` seconds; None when it was not to be had."""
    end_s = time.monotonic() + deadline_s
    while (lock := try_lock(path)) is None and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return lock
