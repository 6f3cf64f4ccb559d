"""What can go wrong in the parameter store. Every message names the object, the value and the way out."""

from __future__ import annotations


class StoreError(RuntimeError):
    """Base of all errors of the parameter store."""


class StoreFull(StoreError):
    """The tmpfs has no room for what is being published. The version before is still served."""

    def __init__(self, message: str, *, directory: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.directory = directory
        self.needed_bytes = needed_bytes
        """Bytes that the write which failed still wanted (a whole version when its size was known ahead)."""
        self.free_bytes = free_bytes
        """Bytes that were free beyond the reserve; can be negative."""


class StoreBusy(StoreError):
    """Another process is publishing the same model."""


class StoreClosed(StoreError):
    """The run folder is gone, or its owner is."""


class StoreCorrupt(StoreError):
    """Files of the store are not what its manifest says."""


class StoreDeadline(StoreError, TimeoutError):
    """A wait passed its deadline."""


class VersionNotFound(StoreError, LookupError):
    """The version was never published, or has been collected."""


class VersionOrder(StoreError, ValueError):
    """A published version must be greater than every version before it."""
