"""What a run learned of lengths, in a file beside verl's checkpoint. It is of use, not of need: no run fails for it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NAME = "resource_shift_lengths.json"


def write(folder: Path, state: dict[str, Any]) -> None:
    """Write ``state`` into a checkpoint's ``folder``, whole or not at all."""
    path = folder / NAME
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(state), encoding="utf-8")
        os.replace(part, path)
    except (OSError, ValueError, TypeError) as error:
        logger.warning("resource_shift: %s was not written, a resumed run learns lengths anew: %s", path, error)


def read(folder: Path) -> Any:
    """What a checkpoint says; None, with a warning, where there is nothing or nothing that can be read."""
    try:
        return json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        warn(folder, str(error))
        return None


def warn(folder: Path, problem: str) -> None:
    logger.warning("resource_shift: %s cannot be used, lengths are learned anew: %s", folder / NAME, problem)
