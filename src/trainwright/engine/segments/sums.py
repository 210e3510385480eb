"""sums: the two numbers a token's loss is made of, summed over this rank's part of the vocabulary.

Rows are worked through in chunks, so that the widened exponentials never hold the whole of z a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainwright.engine.segments.linear import flat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainwright.engine.segments.call import Call, Tensors

NAME = "sums"
CHUNK_ROWS = 256


def forward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From z [b, s, V / t], m [b, s] -> r [2, b, s]: the sum of exp(z - m); z[target] - m where the target is ours, else 0.

    r is float32 or wider, as m, and to be summed over the tensor axis. Backward needs z and m.
    """
    m = inputs["m"]
    z = flat(inputs["z"])
    column, ours = _target(call, z.shape[1])
    r = torch.empty((2, *m.shape), dtype=m.dtype, device=m.device)
    peaks, sums = m.flatten(), r[0].view(-1)
    for rows in _chunks(len(z)):
        torch.sum(torch.sub(z[rows], peaks[rows, None]).exp_(), dim=-1, out=sums[rows])
    picked = z.gather(1, column.unsqueeze(1)).squeeze(1).to(m.dtype).sub_(peaks)
    r[1].view(-1).copy_(picked.masked_fill_(~ours, 0))
    return {"r": r}


def backward(call: Call, inputs: Tensors) -> dict[str, Tensor]:
    """From z, m, dr [2, b, s] -> dz [b, s, V / t]."""
    z, dr = flat(inputs["z"]), inputs["dr"].flatten(1)
    peaks = inputs["m"].flatten()
    column, ours = _target(call, z.shape[1])
    dz = torch.empty_like(z)
    for rows in _chunks(len(z)):
        if z.dtype == peaks.dtype:
            torch.sub(z[rows], peaks[rows, None], out=dz[rows]).exp_().mul_(dr[0, rows, None])
        else:
            dz[rows] = torch.sub(z[rows], peaks[rows, None]).exp_().mul_(dr[0, rows, None])
    hit = dr[1].masked_fill(~ours, 0).to(dz.dtype)
    dz.scatter_add_(1, column.unsqueeze(1), hit.unsqueeze(1))
    return {"dz": dz.view_as(inputs["z"])}


def _target(call: Call, num_columns: int) -> tuple[Tensor, Tensor]:
    """Column of each target in the local scores (0 if it is not ours), and which are ours; ignored targets are nobody's."""
    assert call.targets is not None
    column = call.targets.flatten() - call.tensor_index * num_columns
    ours = (column >= 0) & (column < num_columns) & (call.targets.flatten() >= 0)
    return column.masked_fill_(~ours, 0), ours


def _chunks(num_rows: int) -> Iterator[slice]:
    for start in range(0, num_rows, CHUNK_ROWS):
        yield slice(start, start + CHUNK_ROWS)
