"""The wire with torch.distributed's own collectives: here over gloo groups, which tests all of it but NCCL itself."""

import pytest
import torch

from trainwright.cost.wire import member_sent_bytes
from trainwright.engine.transport_nccl import NcclWire
from trainwright.engine.world import RankFailed, run_processes


def test_the_native_wire_moves_the_same_numbers_as_the_direct_exchange():
    """Whole numbers, so that the order of addition does not matter; bytes are those of the formulas."""

    def body(world):
        native = NcclWire(world.rank, world.size, timeout_s=30)
        native.prepare([(world.ranks, ""), ((0, 1), "")], [(0, 1, "ring"), (1, 2, "ring"), (2, 0, "ring")])
        found = []
        for wire in (native, world.wire):
            full = torch.arange(12.0) * (world.rank + 1)
            summed, largest, broadcast = full.clone(), full.clone(), full.clone()
            piece, gathered, exchanged, message = torch.empty(4), torch.empty(12), torch.empty(12), torch.empty(12)
            left, right = (world.rank - 1) % 3, (world.rank + 1) % 3
            pendings = [
                wire.start_all_reduce(summed, world.ranks),
                wire.start_all_reduce(largest, world.ranks, "max"),
                wire.start_reduce_scatter(piece, full, world.ranks),
                wire.start_all_gather(gathered, full[:4].clone(), world.ranks),
                wire.start_all_to_all(exchanged, full, world.ranks),
                wire.start_broadcast(broadcast, world.ranks, 1),
                wire.start_send(full, right, "ring"),
                wire.start_recv(message, left, "ring"),
            ]
            for pending in pendings:
                pending.wait()
            found.append(([summed, largest, piece, gathered, exchanged, broadcast, message], [pending.sent_bytes for pending in pendings]))
        return found

    for rank, ((native, native_sent), (direct, direct_sent)) in enumerate(run_processes(body, 3, timeout_s=60)):
        assert all(torch.equal(expected, tensor) for expected, tensor in zip(direct, native, strict=True))
        assert direct_sent == native_sent
        assert native_sent[0] == member_sent_bytes("all_reduce", 48, 3, index=rank, element_bytes=4)


def test_a_group_that_nobody_prepared_is_an_error():
    """Made at first use, communicators could wait for each other in a circle."""
    with pytest.raises(RankFailed, match=r"call Wire.prepare"):
        run_processes(lambda world: NcclWire(world.rank, world.size).start_all_reduce(torch.ones(1), (0,)), 1)
