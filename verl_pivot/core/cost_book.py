"""What work and changes cost on one cluster, measured once and kept: what a simulation starts from.

Written by ``verl-pivot fit`` from a run's event log, read by ``verl-pivot simulate --costs`` and by benchmarks. All
figures are of one slot, and in seconds, tokens or sequences as their names say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_pivot.core.costs import DecodeCost, is_figure
from verl_pivot.core.snapshot import INFERENCE_ROLES, Role

KIND = "verl_pivot slot costs"
"""What the file says it is, under ``kind``."""


class CostBookError(ValueError):
    """A cost book cannot be used; the message names the figure."""


@dataclass(frozen=True)
class RoleCosts:
    """One inference role on one slot, all its engines together."""

    decode: DecodeCost
    prefill_s_per_token: float
    kv_tokens: int
    """Tokens that the KV cache holds."""
    max_sequences: int
    """Sequences that run at a time."""


@dataclass(frozen=True)
class TrainCost:
    """One optimizer step, with all that belongs to it but publishing."""

    slot_s_per_token: float
    """Seconds of one slot for each prompt and response token; several slots share them evenly."""
    fixed_s: float = 1.0
    """Whatever the size of the batch."""
    exchange_slot_s_per_token: float = 0.0
    """What comes on top where slots train together: they exchange shards and gradients, and wait for the slowest. A
    single slot has none of it, each of ``n`` slots ``1 - 1 / n`` of it, as in a ring."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < 0:
                raise CostBookError(f"train.{name} is {value}: it must be a number, 0 or more")

    def update_s(self, tokens: float, slots: int) -> float:
        slot_s = self.slot_s_per_token + self.exchange_slot_s_per_token * (1 - 1 / slots)
        return self.fixed_s + slot_s * tokens / slots


@dataclass(frozen=True)
class CostBook:
    """All of it."""

    roles: Mapping[Role, RoleCosts]
    train: TrainCost
    shift_s: Mapping[tuple[Role, Role], float]
    """By (source, target): from the last token in the old role to the first request in the new one."""
    publish_s: float
    reload_s: float
    """An awake rollout engine takes a new version."""
    feed_s: float = 0.0
    """From a publish until the prompts that it lets go ask for engines."""
    collect_s: float = 0.0
    """From the last answer of a batch until the next phase has it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "roles": {
                str(role): {
                    "decode": costs.decode.to_dict(),
                    "prefill_s_per_token": costs.prefill_s_per_token,
                    "kv_tokens": costs.kv_tokens,
                    "max_sequences": costs.max_sequences,
                }
                for role, costs in self.roles.items()
            },
            "train": vars(self.train),
            "shift_s": {f"{source}->{target}": seconds for (source, target), seconds in self.shift_s.items()},
            "publish_s": self.publish_s,
            "reload_s": self.reload_s,
            "feed_s": self.feed_s,
            "collect_s": self.collect_s,
        }

    @classmethod
    def from_json(cls, content: Any) -> CostBook:
        """Raises CostBookError that names the figure which is missing, negative or no number."""
        if not isinstance(content, Mapping) or content.get("kind") != KIND:
            raise CostBookError(f"it does not say kind: {KIND!r}")
        train = _mapping(content, "train", "")
        shifts = _mapping(content, "shift_s", "")
        return cls(
            roles={role: _role(_mapping(content, "roles", ""), role) for role in INFERENCE_ROLES},
            train=TrainCost(
                _number(train, "slot_s_per_token", "train"),
                _number(train, "fixed_s", "train"),
                _number(train, "exchange_slot_s_per_token", "train"),
            ),
            shift_s={_pair(name): _number(shifts, name, "shift_s") for name in shifts},
            publish_s=_number(content, "publish_s", ""),
            reload_s=_number(content, "reload_s", ""),
            feed_s=_number(content, "feed_s", ""),
            collect_s=_number(content, "collect_s", ""),
        )


def _role(roles: Mapping[str, Any], role: Role) -> RoleCosts:
    where = f"roles.{role}"
    entry = _mapping(roles, str(role), "roles")
    decode = _mapping(entry, "decode", where)
    try:
        cost = DecodeCost.from_dict({name: _number(decode, name, f"{where}.decode") for name in decode})
    except (TypeError, ValueError) as error:
        raise CostBookError(f"{where}.decode: {error}") from None
    counts = {name: int(_number(entry, name, where)) for name in ("kv_tokens", "max_sequences")}
    for name, count in counts.items():
        if count < 1:
            raise CostBookError(f"{where}.{name} is {count}: it must be 1 or more")
    return RoleCosts(cost, _number(entry, "prefill_s_per_token", where), **counts)


def _pair(name: str) -> tuple[Role, Role]:
    source, _, target = name.partition("->")
    known = {str(role): role for role in Role}
    if source not in known or target not in known or source == target:
        raise CostBookError(f"shift_s.{name}: it must be two roles with an arrow, such as rollout->genrm")
    return known[source], known[target]


def _mapping(content: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = content.get(name)
    if not isinstance(value, Mapping):
        raise CostBookError(f"{_path(where, name)} is missing, or no mapping")
    return value


def _number(content: Mapping[str, Any], name: str, where: str) -> float:
    value = content.get(name)
    if not is_figure(value):
        raise CostBookError(f"{_path(where, name)} is {value!r}: it must be a number, 0 or more")
    return float(value)


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
