"""The wire over both local transports: values, bytes, order, abort and time-outs."""

import random
import threading
import time

import pytest
import torch

from trainwright.cost.wire import group_sent_bytes, member_sent_bytes
from trainwright.engine.transport_gloo import GlooTransport
from trainwright.engine.transport_threads import Switchboard
from trainwright.engine.wire import Wire, WireError, WireTimeout, WorldAborted
from trainwright.engine.world import RankFailed, read_wchar, run_processes, run_threads

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
WORLDS = [(run_threads, 2), (run_threads, 3), (run_threads, 4), (run_processes, 2), (run_processes, 3)]
SIZES = [0, 1, 2, 7, 1_003]


def part(rank, size, dtype):
    """Numbers whose sum depends on the order of addition."""
    generator = torch.Generator().manual_seed(100 * rank + size)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 10.0 ** (rank % 3)).to(dtype)


def in_rank_order(parts, combine=torch.add):
    total = parts[0]
    for one in parts[1:]:
        total = combine(total, one)
    return total


def bounds(size, num_ranks, index):
    return slice(index * size // num_ranks, (index + 1) * size // num_ranks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("run", "num_ranks"), WORLDS)
def test_a_reduction_is_the_ordered_sum_to_the_bit(run, num_ranks, dtype):
    """Every rank holds the bits of ((r0 + r1) + r2) + ..., whatever the size and the type."""

    def body(world):
        found = []
        for size in SIZES:
            summed, largest, scattered = part(world.rank, size, dtype), part(world.rank, size, dtype), part(world.rank, size, dtype)
            world.wire.start_all_reduce(summed, world.ranks).wait()
            world.wire.start_all_reduce(largest, world.ranks, "max").wait()
            out = torch.empty_like(scattered[bounds(size, world.size, world.rank)])
            world.wire.start_reduce_scatter(out, scattered, world.ranks).wait()
            own = scattered.clone()[bounds(size, world.size, world.rank)]
            found.append((summed, largest, out, own))
        return found

    results = run(body, num_ranks)

    for number, size in enumerate(SIZES):
        parts = [part(rank, size, dtype) for rank in range(num_ranks)]
        for rank in range(num_ranks):
            summed, largest, scattered, own = results[rank][number]
            piece = bounds(size, num_ranks, rank)
            assert torch.equal(in_rank_order(parts), summed)
            assert torch.equal(in_rank_order(parts, torch.maximum), largest)
            assert torch.equal(in_rank_order(parts)[piece], scattered)
            assert torch.equal(parts[rank][piece], own), "the source is only read"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("run", "num_ranks"), WORLDS)
def test_gathers_exchanges_and_broadcasts_move_every_element(run, num_ranks, dtype):
    """Each piece lands where its owner's number says."""

    def body(world):
        size = 6 * world.size
        mine = part(world.rank, size, dtype)
        gathered, in_place, exchanged = torch.empty_like(mine), torch.empty_like(mine), torch.empty_like(mine)
        piece = bounds(size, world.size, world.rank)
        in_place[piece] = mine[piece]
        root = world.size - 1
        broadcast = mine.clone()
        started = [
            world.wire.start_all_gather(gathered, mine[piece].clone(), world.ranks),
            world.wire.start_all_gather(in_place, in_place[piece], world.ranks),
            world.wire.start_all_to_all(exchanged, mine, world.ranks),
            world.wire.start_broadcast(broadcast, world.ranks, root),
        ]
        for pending in reversed(started):
            pending.wait()
        return gathered, in_place, exchanged, broadcast

    results = run(body, num_ranks)

    size = 6 * num_ranks
    parts = [part(rank, size, dtype) for rank in range(num_ranks)]
    expected = torch.cat([parts[rank][bounds(size, num_ranks, rank)] for rank in range(num_ranks)])
    for rank, (gathered, in_place, exchanged, broadcast) in enumerate(results):
        assert torch.equal(expected, gathered)
        assert torch.equal(expected, in_place)
        assert torch.equal(torch.cat([one[bounds(size, num_ranks, rank)] for one in parts]), exchanged)
        assert torch.equal(parts[-1], broadcast)


def test_a_reduce_scatter_may_end_in_its_own_piece():
    """The result may take the place of the summand that this rank brought."""

    def body(world):
        full = part(world.rank, 9, torch.float64)
        own = full[bounds(9, world.size, world.rank)]
        world.wire.start_reduce_scatter(own, full, world.ranks).wait()
        return own.clone()

    expected = in_rank_order([part(rank, 9, torch.float64) for rank in range(3)])

    assert torch.equal(expected, torch.cat(run_threads(body, 3)))


@pytest.mark.parametrize(("run", "num_ranks"), WORLDS)
def test_counted_bytes_are_those_of_the_formulas(run, num_ranks):
    """Per member and summed over the group, for sizes that do not divide."""
    num_elements = 1_003

    def body(world):
        tensor = torch.zeros(num_elements)
        piece = tensor[bounds(num_elements, world.size, world.rank)].clone()
        even = torch.zeros(60)
        wire, ranks = world.wire, world.ranks
        pendings = {
            "all_gather": wire.start_all_gather(torch.empty(num_elements), piece, ranks),
            "reduce_scatter": wire.start_reduce_scatter(piece.clone(), tensor, ranks),
            "all_to_all": wire.start_all_to_all(torch.empty(60), even, ranks),
            "all_reduce": wire.start_all_reduce(torch.zeros(num_elements), ranks),
            "broadcast": wire.start_broadcast(torch.zeros(num_elements), ranks, 0),
        }
        for pending in pendings.values():
            pending.wait()
        return {op: pending.sent_bytes for op, pending in pendings.items()}

    results = run(body, num_ranks)

    for op in results[0]:
        payload = 60 * 4 if op == "all_to_all" else num_elements * 4
        members = [member_sent_bytes(op, payload, num_ranks, index=index, element_bytes=4) for index in range(num_ranks)]
        assert members == [sent[op] for sent in results]
        assert group_sent_bytes(op, payload, num_ranks) == sum(sent[op] for sent in results)


@pytest.mark.parametrize(("run", "num_ranks"), WORLDS)
def test_messages_of_a_channel_keep_their_order_and_channels_are_apart(run, num_ranks):
    """The n-th send meets the n-th receive, though waits come in any order; another channel's messages do not mix in."""

    def body(world):
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        sent = [torch.full((3,), float(10 * world.rank + number)) for number in range(4)]
        got = [torch.empty(3) for _ in range(4)]
        pendings = [world.wire.start_recv(got[number], left, "b" if number == 3 else "a") for number in (3, 0, 1, 2)]
        pendings += [world.wire.start_send(sent[number], right, "b" if number == 3 else "a") for number in (0, 1, 2, 3)]
        random.Random(world.rank).shuffle(pendings)
        for pending in pendings:
            pending.wait()
        assert 4 * 12 == sum(pending.sent_bytes for pending in pendings)
        return [int(tensor[0]) for tensor in got]

    results = run(body, num_ranks)

    assert [[10 * ((rank - 1) % num_ranks) + number for number in range(4)] for rank in range(num_ranks)] == results


@pytest.mark.parametrize(("run", "num_ranks"), [(run_threads, 3), (run_processes, 3)])
def test_ranks_may_wait_in_different_orders(run, num_ranks):
    """An all_reduce of three ranks has two rounds; a rank that waits for one of them does not hold up the second round of another."""

    def body(world):
        tensors = [part(world.rank + number, 50, torch.float64) for number in range(6)]
        pendings = [world.wire.start_all_reduce(tensor, world.ranks) for tensor in tensors]
        random.Random(world.rank).shuffle(pendings)
        for pending in pendings:
            pending.wait()
        return tensors

    results = run(body, num_ranks)

    for number in range(6):
        expected = in_rank_order([part(rank + number, 50, torch.float64) for rank in range(num_ranks)])
        assert all(torch.equal(expected, found[number]) for found in results)


def test_a_rank_that_waits_for_a_message_still_serves_its_sums():
    """Rank 0 waits for a message that rank 1 sends only after a sum that needs rank 0's second round."""

    def body(world):
        tensor, message = torch.ones(5), torch.zeros(1)
        total = world.wire.start_all_reduce(tensor, world.ranks)
        if world.rank == 0:
            world.wire.start_recv(message, 1).wait()
            total.wait()
        else:
            total.wait()
            if world.rank == 1:
                world.wire.start_send(tensor[:1], 0).wait()
        return float(message if world.rank == 0 else tensor[0])

    assert [3.0, 3.0, 3.0] == run_threads(body, 3, timeout_s=20)
    assert [3.0, 3.0, 3.0] == run_processes(body, 3, timeout_s=20)


def test_a_send_is_not_buffered():
    """Until the receive is posted the buffer is lent: what is in it then is what arrives, and the send's wait takes until then."""
    board = Switchboard(2)
    sender, receiver = Wire(board.transport(0), timeout_s=0.05), Wire(board.transport(1), timeout_s=5)
    lent, got = torch.zeros(2), torch.empty(2)
    pending = sender.start_send(lent, 1)

    with pytest.raises(WireTimeout, match="no receive on rank 1"):
        pending.wait()
    lent.fill_(7.0)
    receiver.start_recv(got, 0).wait()

    assert [7.0, 7.0] == got.tolist()


def test_both_sides_must_agree_on_size_and_type():
    """A message that does not fit its place is an error on both sides, not a silent conversion."""
    board = Switchboard(2)
    left, right = Wire(board.transport(0), 5), Wire(board.transport(1), 5)
    sent, received = left.start_send(torch.zeros(3), 1), right.start_recv(torch.zeros(3, dtype=torch.float64), 0)

    for pending in (sent, received):
        with pytest.raises(WireError, match=r"rank 0 sends 3 x torch.float32, rank 1 expects 3 x torch.float64"):
            pending.wait()


def test_abort_frees_whoever_waits_and_whoever_comes_later():
    """One rank fails; a waiting rank and one that posts afterwards are told which one it was."""
    board = Switchboard(3)
    seen = []

    def wait():
        with pytest.raises(WorldAborted) as caught:
            Wire(board.transport(1)).start_recv(torch.empty(1), 0).wait()
        seen.append(caught.value.rank)

    thread = threading.Thread(target=wait)
    thread.start()
    board.abort(2, "boom")
    thread.join(10)

    assert [2] == seen
    with pytest.raises(WorldAborted, match="rank 2 failed: boom"):
        Wire(board.transport(0)).start_send(torch.empty(1), 1)


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_a_peer_that_does_not_come_is_a_time_out(run):
    """No wait is for ever, and the message says who waited for whom."""

    def body(world):
        if world.rank == 0:
            world.wire.start_recv(torch.empty(4), 1, "late").wait()
        else:
            time.sleep(1.0)

    with pytest.raises(RankFailed, match="rank 0") as caught:
        run(body, 2, timeout_s=0.3)

    assert isinstance(caught.value.__cause__, WireTimeout)
    assert "late" in str(caught.value)


def test_two_channel_names_with_one_tag_are_refused():
    """For gloo a channel is a number: two names with one number would mix their messages."""
    transport = GlooTransport(rank=0, size=1)
    transport._names[transport._tag("one")] = "another"
    transport._tags.clear()

    with pytest.raises(WireError, match="have one tag"):
        transport._tag("one")


@pytest.mark.skipif(read_wchar() is None, reason="/proc/self/io is not readable here")
def test_the_operating_system_counts_the_same_bytes():
    """What gloo writes to sockets is what this rank sends, within a thousandth for messages of a MiB and more."""
    num_elements = 1 << 19  # 2 MiB each

    def body(world):
        tensor, gathered = torch.ones(num_elements), torch.empty(num_elements)
        piece = torch.empty(num_elements // world.size)
        counted = []
        for start in (
            lambda: world.wire.start_all_reduce(tensor, world.ranks),
            lambda: world.wire.start_reduce_scatter(piece, tensor, world.ranks),
            lambda: world.wire.start_all_gather(gathered, piece, world.ranks),
        ):
            world.barrier()
            before = read_wchar()
            pending = start()
            pending.wait()
            counted.append((read_wchar() - before, pending.sent_bytes))
        return counted

    for counted in run_processes(body, 2):
        for written, sent in counted:
            assert sent >= 1 << 20
            assert sent <= written <= sent * 1.001
