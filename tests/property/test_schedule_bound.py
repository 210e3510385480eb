"""No order of the slots, however strange, is faster than the lower bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwright.ir.slot import Backward, Forward
from trainwright.schedules.timeline import Prices, walk


@st.composite
def orders(draw):
    """(orders, places, num_microbatches): any placement of the stages, any order in which slots can be carried out."""
    num_positions = draw(st.integers(1, 3))
    num_stages = num_positions + draw(st.integers(0, 2))
    places = (*range(num_positions), *(draw(st.integers(0, num_positions - 1)) for _ in range(num_stages - num_positions)))
    places = tuple(draw(st.permutations(places)))
    num_microbatches = draw(st.integers(1, 4))
    chains = [
        [
            *(Forward(stage, microbatch) for stage in range(num_stages)),
            *(Backward(stage, microbatch) for stage in reversed(range(num_stages))),
        ]
        for microbatch in range(num_microbatches)
    ]
    rows = [[] for _ in range(num_positions)]
    left = [list(reversed(chain)) for chain in chains]
    while any(left):
        chain = draw(st.sampled_from([chain for chain in left if chain]))
        slot = chain.pop()
        rows[places[slot.stage]].append(slot)
    return rows, places, num_microbatches


@given(
    drawn=orders(),
    prices=st.builds(Prices, forward=st.integers(1, 5), backward=st.integers(1, 5), weight=st.integers(0, 5), send=st.integers(0, 5)),
)
def test_no_order_beats_the_lower_bound(drawn, prices):
    """Whatever the placement, the prices and the order."""
    timeline = walk(*drawn, prices)

    assert timeline.lower_bound <= timeline.makespan
    assert timeline.gap >= 0
