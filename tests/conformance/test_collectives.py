"""Every collective algorithm computes its operation, and its closed formulas say what its rounds do."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from trainwright.collectives import ALGORITHMS
from trainwright.collectives.execute import OPS, execute
from trainwright.collectives.rounds import chunks_on_links, chunks_sent, rounds_s
from trainwright.cost.wire import TRANSFERS

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
CASES = [(name, op, num_ranks) for name, part in ALGORITHMS.parts() for op in part.OPS for num_ranks in SIZES]


def expected(op: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The definition of each operation, in one line of numpy."""
    num_ranks = len(inputs)
    cuts = [rank * len(inputs[0]) // num_ranks for rank in range(1, num_ranks)]
    match op:
        case "all_gather":
            return [np.concatenate(inputs)] * num_ranks
        case "reduce_scatter":
            return np.split(np.sum(inputs, axis=0), cuts)
        case "all_reduce":
            return [np.sum(inputs, axis=0)] * num_ranks
        case "all_to_all":
            return [np.concatenate([np.split(own, cuts)[rank] for own in inputs]) for rank in range(num_ranks)]
        case "broadcast":
            return [inputs[0]] * num_ranks
    raise AssertionError(op)


@pytest.mark.parametrize(("name", "op", "num_ranks"), CASES)
def test_the_result_is_exact_on_every_rank(name, op, num_ranks):
    """Whole numbers in float64 add exactly in any order; 3 P + 1 elements do not divide by P."""
    random = np.random.default_rng(num_ranks)
    inputs = [random.integers(-1000, 1000, 3 * num_ranks + 1).astype(np.float64) for _ in range(num_ranks)]

    results = execute(op, ALGORITHMS.get(name).rounds(op, num_ranks), inputs)

    for wanted, result in zip(expected(op, inputs), results, strict=True):
        np.testing.assert_array_equal(wanted, result)


@pytest.mark.parametrize(("name", "op", "num_ranks"), CASES)
def test_every_rank_sends_what_the_formula_says(name, op, num_ranks):
    """The closed formula of sent chunks is the fold over the rounds."""
    part = ALGORITHMS.get(name)
    counted = chunks_sent(part.rounds(op, num_ranks))

    assert [part.num_chunks_sent(op, rank, num_ranks) for rank in range(num_ranks)] == [counted[rank] for rank in range(num_ranks)]


@pytest.mark.parametrize(("name", "op", "num_ranks"), CASES)
def test_the_closed_time_is_the_sum_over_rounds(name, op, num_ranks):
    """Powers of two as rates: no rounding hides a difference."""
    part = ALGORITHMS.get(name)
    figures = {"payload_bytes": 1024 * num_ranks, "num_ranks": num_ranks, "link_bytes_per_s": 0.5, "hop_s": 0.25}

    assert part.duration_s(op, **figures) == rounds_s(part.rounds(op, num_ranks), **figures)


@pytest.mark.parametrize(("name", "op", "num_ranks"), CASES)
def test_no_rank_sends_to_itself_or_twice_in_a_round(name, op, num_ranks):
    """One send and one receive a rank and round: a full-duplex port suffices."""
    for one_round in ALGORITHMS.get(name).rounds(op, num_ranks):
        senders = Counter(transfer.from_rank for transfer in one_round)
        receivers = Counter(transfer.to_rank for transfer in one_round)

        assert max(senders.values()) == 1
        assert max(receivers.values()) == 1
        assert all(transfer.from_rank != transfer.to_rank for transfer in one_round)
        assert set(senders) | set(receivers) <= set(range(num_ranks))


@pytest.mark.parametrize(("name", "op"), [(name, op) for name, part in ALGORITHMS.parts() for op in OPS if op not in part.OPS])
def test_an_operation_that_an_algorithm_lacks_is_refused(name, op):
    """All three functions refuse; none returns a number that means nothing."""
    part = ALGORITHMS.get(name)
    with pytest.raises((ValueError, KeyError)):
        list(part.rounds(op, 4))
    with pytest.raises((ValueError, KeyError)):
        part.num_chunks_sent(op, 0, 4)
    with pytest.raises((ValueError, KeyError)):
        part.duration_s(op, payload_bytes=4, num_ranks=4, link_bytes_per_s=1.0, hop_s=0.0)


@pytest.mark.parametrize("num_ranks", SIZES[1:])
def test_a_ring_loads_every_link_alike(num_ranks):
    """An all-reduce puts 2 (P - 1) chunks on each of the P links, and uses no other."""
    links = chunks_on_links(ALGORITHMS.get("ring").rounds("all_reduce", num_ranks))

    assert links == {(rank, (rank + 1) % num_ranks): 2 * (num_ranks - 1) for rank in range(num_ranks)}


@pytest.mark.parametrize("num_ranks", SIZES[1:])
@pytest.mark.parametrize("op", OPS)
def test_direct_exchange_sends_what_the_wire_is_said_to_send(op, num_ranks):
    """`cost/wire.py` foretells the engine's bytes by formula; here they are counted, transfer by transfer."""
    counted = chunks_sent(ALGORITHMS.get("direct").rounds(op, num_ranks)).total()

    assert TRANSFERS[op] * (num_ranks - 1) * num_ranks == counted


@pytest.mark.parametrize("num_ranks", SIZES[1:])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_nobody_gathers_or_scatters_in_fewer_bytes_than_the_ring(op, num_ranks):
    """(P - 1) / P of the payload must leave some rank, whatever the algorithm."""
    for _, part in ALGORITHMS.parts():
        if op in part.OPS:
            assert max(part.num_chunks_sent(op, rank, num_ranks) for rank in range(num_ranks)) >= num_ranks - 1
