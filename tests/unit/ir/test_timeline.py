"""Totals are folds over events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.ir.event import Event
from trainwright.ir.site import Site
from trainwright.ir.timeline import ON_THE_WIRE, Timeline, Traffic, wire_ledger

KINDS = ("forward", "free", "wait_send", "recv", *ON_THE_WIRE)
EVENTS = st.lists(
    st.builds(
        lambda position, rank, kind, start, lasts, sent, delta, microbatch: Event(
            position=position,
            rank=rank,
            lane="compute" if kind in KINDS[:3] else "wire:data",
            site=Site(stage=position, microbatch=microbatch, phase="fwd"),
            kind=kind,
            start_s=start,
            end_s=start + lasts,
            payload_bytes=2 * sent,
            sent_bytes=sent,
            group="data",
            live_delta_bytes=delta,
        ),
        st.integers(0, 1),
        st.integers(0, 3),
        st.sampled_from(KINDS),
        st.integers(0, 20),
        st.integers(0, 5),
        st.integers(0, 100),
        st.integers(-50, 50),
        st.integers(0, 2),
    )
)


@given(EVENTS)
def test_every_byte_on_the_wire_is_in_the_ledger_once(events):
    """However it is grouped, the ledger sums to what the events sent; what is no exchange, and a receive, sent nothing."""
    sent = [event for event in events if event.kind in ON_THE_WIRE]
    for by in (("position", "site", "kind"), ("kind",), ("group", "position")):
        ledger = wire_ledger(events, by=by)

        assert sum(event.sent_bytes for event in sent) == sum(traffic.sent_bytes for traffic in ledger.values())
        assert len(sent) == sum(traffic.count for traffic in ledger.values())
        assert set(ledger) == {tuple(str(event.site) if name == "site" else getattr(event, name) for name in by) for event in sent}


@given(EVENTS, EVENTS)
def test_ledgers_add(one, other):
    """The ledger of both is the sum of the ledgers."""
    both = Counter({key: traffic.payload_bytes for key, traffic in wire_ledger([*one, *other]).items()})
    each = Counter({key: traffic.payload_bytes for key, traffic in wire_ledger(one).items()})
    each.update({key: traffic.payload_bytes for key, traffic in wire_ledger(other).items()})

    assert each == both
    assert Traffic(count=2, payload_bytes=3, sent_bytes=1) + Traffic() == Traffic(count=2, payload_bytes=3, sent_bytes=1)


@given(EVENTS.filter(bool))
def test_times_fold(events):
    """The makespan runs from the first start to the last end; busy times of positions sum to those of the lane."""
    timeline = Timeline("measured", tuple(events))

    assert max(event.end_s for event in events) == timeline.start_s + timeline.makespan_s
    for lane in ("compute", "wire:data"):
        assert timeline.busy_s(lane) == sum(timeline.busy_s(lane, position) for position in (0, 1))


@given(EVENTS)
def test_live_bytes_are_the_sum_of_what_changed(events):
    """One point an event, of one rank alone."""
    timeline = Timeline("measured", tuple(events))
    for rank in range(4):
        own = [event for event in events if event.position == 0 and event.rank == rank]
        curve = timeline.live_bytes(0, rank)

        assert len(own) == len(curve)
        assert sum(event.live_delta_bytes for event in own) == (curve[-1][1] if curve else 0)


def test_an_empty_timeline_takes_no_time():
    """Nothing took place."""
    timeline = Timeline("predicted", ())

    assert pytest.approx(0.0) == timeline.makespan_s
    assert [] == timeline.live_bytes(0)
    assert {} == wire_ledger(())
