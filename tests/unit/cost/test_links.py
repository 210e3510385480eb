"""Rates of groups and times of collectives, against published figures and against the algorithms' rounds."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import ALGORITHMS
from trainwright.cost.links import all_reduce_s, broadcast_s, bus_bytes_per_s, collective_s, group_bytes_per_s, send_s
from trainwright.cost.littles_law import in_flight_bytes, num_requests, reachable_bytes_per_s

GOLDEN = tomllib.loads((Path(__file__).parents[2] / "golden" / "collectives.toml").read_text(encoding="utf-8"))
IDEAL = {"half_message_bytes": 0, "latency_s": 0.0}


@pytest.mark.parametrize("row", GOLDEN["factor"], ids=lambda row: f"{row['op']}-{row['num_ranks']}")
def test_a_ring_sends_the_published_share(row):
    """The bus bandwidth factors of nccl-tests are what a ring's rank sends."""
    assert row["factor"] == ALGORITHMS.get("ring").num_chunks_sent(row["op"], 0, row["num_ranks"]) / row["num_ranks"]
    assert row["factor"] == collective_s(row["op"], payload_bytes=1, num_ranks=row["num_ranks"], group_bytes_per_s=1.0, **IDEAL)


@pytest.mark.parametrize("row", GOLDEN["measured"], ids=lambda row: str(row["payload_bytes"]))
def test_rates_of_measured_collectives_come_out_as_published(row):
    """The tool printed the rate beside the time; ours agrees to its last digit but one."""
    rate_bytes_per_s = bus_bytes_per_s("all_reduce", payload_bytes=row["payload_bytes"], num_ranks=8, duration_s=row["duration_s"])

    assert row["bus_gb_per_s"] == pytest.approx(rate_bytes_per_s / 1e9, rel=2e-4)


@pytest.mark.parametrize(
    "row", [row for row in GOLDEN["measured"] if row["payload_bytes"] >= 2**30], ids=lambda row: str(row["payload_bytes"])
)
def test_large_measured_collectives_are_met_within_three_percent(row):
    """At the plateau's rate, with the half message and the latency as they stand."""
    predicted_s = all_reduce_s(payload_bytes=row["payload_bytes"], num_ranks=8, group_bytes_per_s=235e9)

    assert row["duration_s"] == pytest.approx(predicted_s, rel=0.03)


@pytest.mark.parametrize("row", GOLDEN["group"], ids=lambda row: f"{row['num_ranks']}-{row['members_per_node']}-{row['scale_up_gb_per_s']}")
def test_the_rate_of_a_group(row):
    """Scale-up inside the domain, the cards of its members outside."""
    rate_bytes_per_s = group_bytes_per_s(
        num_ranks=row["num_ranks"],
        members_per_node=row["members_per_node"],
        domain_size=row["domain_size"],
        scale_up_bytes_per_s=row["scale_up_gb_per_s"] * 1e9,
        nic_bytes_per_s=row["nic_gb_per_s"] * 1e9,
    )

    assert row["group_gb_per_s"] == pytest.approx(rate_bytes_per_s / 1e9, rel=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "op"), [("ring", "all_gather"), ("ring", "reduce_scatter"), ("ring", "all_reduce"), ("direct", "all_to_all")]
)
@given(num_ranks=st.integers(1, 64), payload_bytes=st.integers(1, 10**12))
def test_without_latencies_a_collective_takes_as_long_as_its_algorithm(algorithm, op, num_ranks, payload_bytes):
    """The closed formula of the links is the algorithm's, plus latency and half message."""
    wanted_s = ALGORITHMS.get(algorithm).duration_s(op, payload_bytes=payload_bytes, num_ranks=num_ranks, link_bytes_per_s=1e9, hop_s=0.0)
    got_s = collective_s(op, payload_bytes=payload_bytes, num_ranks=num_ranks, group_bytes_per_s=1e9, **IDEAL)

    assert wanted_s == pytest.approx(got_s, rel=1e-12)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_a_group_of_one_exchanges_nothing(op):
    """No latency either."""
    assert 0.0 == collective_s(op, payload_bytes=10**9, num_ranks=1, group_bytes_per_s=1e9)


def test_the_half_message_halves_the_rate():
    """A payload of its size takes twice its own time."""
    alone_s = all_reduce_s(payload_bytes=3_000_000, num_ranks=8, group_bytes_per_s=1e9, half_message_bytes=0, latency_s=0.0)

    assert 2 * alone_s == pytest.approx(all_reduce_s(payload_bytes=3_000_000, num_ranks=8, group_bytes_per_s=1e9, latency_s=0.0))


def test_a_broadcast_down_a_chain_takes_one_payload_and_a_send_too():
    """Streamed, the length of the chain does not show."""
    assert 1.0 == broadcast_s(payload_bytes=10**9, num_ranks=9, group_bytes_per_s=1e9, **IDEAL)
    assert 1.0 == send_s(payload_bytes=10**9, link_bytes_per_s=1e9, latency_s=0.0)


def test_an_unknown_collective_is_refused():
    """No time is made up for it."""
    with pytest.raises(KeyError):
        collective_s("gossip", payload_bytes=1, num_ranks=2, group_bytes_per_s=1.0)


@given(in_flight=st.integers(1, 10**9), latency_us=st.integers(1, 1000))
def test_littles_law_goes_both_ways(in_flight, latency_us):
    """Rate x latency = what is under way."""
    rate_bytes_per_s = reachable_bytes_per_s(in_flight_bytes=in_flight, latency_s=latency_us * 1e-6)

    assert in_flight == pytest.approx(in_flight_bytes(rate_bytes_per_s=rate_bytes_per_s, latency_s=latency_us * 1e-6), rel=1e-12)
    needed = num_requests(rate_bytes_per_s=rate_bytes_per_s, latency_s=latency_us * 1e-6, request_bytes=64)
    assert 64 * (needed - 1) <= in_flight * (1 + 1e-9) <= 64 * needed * (1 + 1e-9) + 1e-9
