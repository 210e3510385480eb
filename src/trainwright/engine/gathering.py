"""What ranks tell each other about a run: plain facts, never tensors of the model."""

from __future__ import annotations

import json
from typing import Any

import torch

from trainwright.engine.wire import WORLD
from trainwright.engine.world import World

_LARGEST_PIECE = 1 << 16


def told_by_all(world: World, said: Any) -> list[Any]:  # noqa: ANN401 - what JSON can hold
    """What every rank says, in rank order, on every rank; all ranks call it. `said` is what JSON can hold."""
    content = json.dumps(said).encode()
    size = -(-world.largest(len(content)) // _LARGEST_PIECE) * _LARGEST_PIECE
    own = torch.frombuffer(bytearray(content.ljust(size)), dtype=torch.uint8).to(world.device)
    everything = torch.empty(world.size * size, dtype=torch.uint8, device=world.device)
    world.wire.start_all_gather(everything, own, world.ranks, WORLD).wait()
    return [json.loads(piece.cpu().numpy().tobytes()) for piece in everything.chunk(world.size)]
