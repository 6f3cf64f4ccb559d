"""Removing what nobody needs: old versions that no reader holds, and what killed processes left half done."""

from __future__ import annotations

import os
from contextlib import suppress

from verl_pivot.store.layout import REMOVED, WRITING, RunLayout, parse_version, remove_tree
from verl_pivot.store.locks import try_lock
from verl_pivot.store.reader import current_version, list_versions


def collect_model(layout: RunLayout, model: str, keep_versions: int) -> list[int]:
    """Removes versions older than the newest ``keep_versions`` unless a reader holds them; returns those removed.

    May run in any process at any time, several at once too. Killed half way, it leaves a version either whole or
    under a name that nobody reads and the next collection removes.
    """
    _remove_prefixed(layout, model, REMOVED)
    removed = []
    for version in list_versions(layout, model)[:-keep_versions]:
        path = layout.version_dir(model, version)
        with suppress(FileNotFoundError):  # another collector was faster
            lock = try_lock(path)
            if lock is None:
                continue
            # Readers lock first and check the name then, so from this rename on none can come in.
            with lock:
                grave = layout.new_removed_dir(model, version)
                os.rename(path, grave)
                remove_tree(grave)
                removed.append(version)
    return removed


def remove_leftovers(layout: RunLayout, model: str) -> None:
    """Removes what a publisher left that did not reach its commit. The caller holds the model's lock."""
    _remove_prefixed(layout, model, WRITING)
    served = current_version(layout, model)
    for entry in os.listdir(layout.model_dir(model)):
        version = parse_version(entry)
        if version is not None and (served is None or version > served):
            remove_tree(layout.version_dir(model, version))


def sweep_model(layout: RunLayout, model: str) -> bool:
    """``remove_leftovers`` unless the model is being published; whether it ran."""
    lock = try_lock(layout.model_dir(model))
    if lock is None:
        return False
    with lock:
        remove_leftovers(layout, model)
        _remove_prefixed(layout, model, REMOVED)
    return True


def _remove_prefixed(layout: RunLayout, model: str, prefix: str) -> None:
    folder = layout.model_dir(model)
    for entry in os.listdir(folder):
        if entry.startswith(prefix):
            if (folder / entry).is_dir():
                remove_tree(folder / entry)
            else:
                (folder / entry).unlink(missing_ok=True)
