"""The trainer's lease: in order, one holder, and no claim left behind."""

from __future__ import annotations

import asyncio

import pytest
from fakes import Events, VirtualLoop, run_virtual

from verl_pivot.core.snapshot import LeaseState
from verl_pivot.runtime.lease import Lease, LeaseTimeout


class Slots:
    """What training waits for."""

    def __init__(self, *blocked: str) -> None:
        self.blocked = list(blocked)

    def __call__(self) -> list[str]:
        return self.blocked


def test_granted_at_once_when_nothing_is_in_the_way() -> None:
    async def main(loop: VirtualLoop) -> None:
        events = Events()
        lease = Lease(Slots(), events)
        await lease.acquire(1.0)
        assert lease.state is LeaseState.HELD
        lease.release()
        assert lease.state is LeaseState.FREE
        assert [event["state"] for event in events.of("lease")] == ["held", "free"]

    run_virtual(main)


def test_waits_until_the_slots_are_free_and_goes_in_order() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        slots, events, order = Slots("slot 0"), Events(), []
        lease = Lease(slots, events)

        async def trainer(name: str) -> None:
            await lease.acquire(100.0)
            order.append(name)
            await asyncio.sleep(5.0)
            lease.release()

        trainers = [asyncio.ensure_future(trainer(name)) for name in "abc"]
        await asyncio.sleep(10.0)
        assert (lease.state, order) == (LeaseState.WANTED, [])
        slots.blocked.clear()
        lease.poke()
        await asyncio.gather(*trainers)
        assert [e["state"] for e in events.of("lease")] == ["wanted", "held", "free"]
        assert loop.time() == pytest.approx(25.0)
        return order

    assert run_virtual(main) == ["a", "b", "c"]


def test_a_late_claim_is_withdrawn_and_names_what_was_in_the_way() -> None:
    async def main(loop: VirtualLoop) -> None:
        slots, events = Slots("slot 7 (shifting)"), Events()
        lease = Lease(slots, events)
        with pytest.raises(LeaseTimeout, match=r"within 3 s \(.*lease_deadline_s\): slot 7 \(shifting\)"):
            await lease.acquire(3.0)
        assert lease.state is LeaseState.FREE
        slots.blocked.clear()
        lease.poke()
        assert lease.state is LeaseState.FREE
        await lease.acquire(1.0)
        with pytest.raises(LeaseTimeout, match="another holder has not returned it"):
            await lease.acquire(3.0)
        assert lease.state is LeaseState.HELD

    run_virtual(main)


@pytest.mark.parametrize("granted_first", [False, True])
def test_a_cancelled_claim_does_not_keep_the_lease(granted_first: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        slots, events = Slots("slot 0"), Events()
        lease = Lease(slots, events)
        claim = asyncio.ensure_future(lease.acquire(100.0))
        behind = asyncio.ensure_future(lease.acquire(100.0))
        await asyncio.sleep(1.0)
        if granted_first:
            slots.blocked.clear()
            lease.poke()
        claim.cancel()
        await asyncio.wait({claim})
        assert claim.cancelled()
        slots.blocked.clear()
        lease.poke()
        await behind
        assert lease.state is LeaseState.HELD
        lease.release()
        assert lease.state is LeaseState.FREE

    run_virtual(main)


def test_closing_ends_every_wait() -> None:
    async def main(loop: VirtualLoop) -> None:
        lease = Lease(Slots("slot 0"), Events())
        claim = asyncio.ensure_future(lease.acquire(100.0))
        await asyncio.sleep(1.0)
        lease.close(RuntimeError("the end"))
        with pytest.raises(RuntimeError, match="the end"):
            await claim
        with pytest.raises(RuntimeError, match="the end"):
            await lease.acquire(1.0)

    run_virtual(main)


def test_returning_what_is_not_held_is_an_error() -> None:
    async def main(loop: VirtualLoop) -> None:
        with pytest.raises(RuntimeError, match="not held"):
            Lease(Slots(), Events()).release()

    run_virtual(main)
