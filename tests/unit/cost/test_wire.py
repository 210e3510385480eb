import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cost.wire import TRANSFERS, group_sent_bytes, member_sent_bytes, sent_bytes_per_rank, wire_buffer_bytes


@pytest.mark.parametrize(
    ("op", "expected"), [("all_gather", 3_072), ("reduce_scatter", 3_072), ("all_reduce", 6_144), ("all_to_all", 3_072), ("send", 4_096)]
)
def test_a_rank_sends_what_the_textbook_says(op, expected):
    """4 ranks, 4 KiB: (P-1)/P of the payload, twice that for an all_reduce."""
    assert expected == sent_bytes_per_rank(op, payload_bytes=4_096, num_ranks=4)


@given(
    op=st.sampled_from(sorted(TRANSFERS)),
    num_elements=st.integers(0, 100),
    num_ranks=st.integers(1, 9),
    element_bytes=st.sampled_from([2, 4, 8]),
)
def test_the_members_together_send_what_the_group_sends(op, num_elements, num_ranks, element_bytes):
    """However unevenly the elements divide, nothing is lost between the formulas."""
    payload = num_elements * element_bytes
    members = [member_sent_bytes(op, payload, num_ranks, index=index, element_bytes=element_bytes) for index in range(num_ranks)]

    assert group_sent_bytes(op, payload, num_ranks) == sum(members)


@given(num_elements=st.integers(0, 100), num_ranks=st.integers(2, 9))
def test_a_reduction_keeps_no_more_than_the_parts_of_the_others(num_elements, num_ranks):
    """The largest piece, once for each of the others."""
    largest = -(-num_elements // num_ranks)

    assert (num_ranks - 1) * largest * 4 == wire_buffer_bytes("reduce_scatter", num_elements * 4, num_ranks, element_bytes=4)
    assert wire_buffer_bytes("all_gather", num_elements * 4, num_ranks, element_bytes=4) == 0


def test_one_rank_sends_nothing_and_needs_no_buffer():
    """A group of one is no group."""
    assert {0} == {group_sent_bytes(op, 8, 1) for op in TRANSFERS} | {wire_buffer_bytes(op, 8, 1) for op in TRANSFERS}
