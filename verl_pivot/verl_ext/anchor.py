"""An actor that tells where a slot's GPU is. A module of its own: its process must not import verl."""

from __future__ import annotations


class SlotAnchor:
    """Held on one GPU while engines are launched; Ray answers ``__ray_call__`` for it."""
