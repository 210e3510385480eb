"""Exchanges between ranks: what is handed over, what is held meanwhile, and who is still missing.

Every exchange goes straight from rank to rank: a member hands each other member exactly what that one needs. An array counts as sent by
the rank that hands it over, and only there. A tensor of n elements is owned in pieces i * n // P up to (i + 1) * n // P by its P members;
sums are added in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trainwright.ir.action import Collective, Send, Started, kind
from trainwright.ir.layout import Partial, Shard
from trainwright.ir.site import Site
from trainwright.prove.numeric.call import Array
from trainwright.units import Bytes

PAIR = 2
"""Two members that reduce hand each other the whole tensor; more of them reduce a piece each, and then gather the pieces."""


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One rank's side of a started exchange: what it holds until the Wait, what it has sent, whether all is in place."""

    rank: int
    action: Started
    source: Array
    target: Array
    waits_for: str = ""
    done: bool = False
    sent_bytes: Bytes = 0
    held: list[Array] = field(default_factory=list)

    def hand_over(self, array: Array) -> Array:
        """What another rank gets: a copy. The one place where bytes are counted."""
        self.sent_bytes += array.nbytes
        return array.copy()


class MismatchError(RuntimeError):
    """Members of a group start different exchanges."""


@dataclass(slots=True, kw_only=True)
class Meeting:
    """One collective of a group, from the first member's start to the last's; `ranks` are the members in order."""

    group: str
    ranks: tuple[int, ...]
    joined: dict[int, Transfer] = field(default_factory=dict)

    def join(self, transfer: Transfer) -> None:
        """A member starts; the last one brings it about. Raises MismatchError if members do not start the same thing."""
        for other in self.joined.values():
            mine, theirs = (f"{one.action.site} {kind(one.action)}" for one in (transfer, other))
            if _what(transfer) != _what(other):
                raise MismatchError(f"group {self.group}: rank {transfer.rank} starts {mine} where rank {other.rank} starts {theirs}")
        self.joined[transfer.rank] = transfer
        _hold(transfer, len(self.ranks))
        missing = [rank for rank in self.ranks if rank not in self.joined]
        for one in self.joined.values():
            one.waits_for = f"rank {', '.join(map(str, missing))} has not joined {self.group}"
        if not missing:
            _perform([self.joined[rank] for rank in self.ranks])
            for one in self.joined.values():
                one.done = True


def _what(transfer: Transfer) -> tuple[str, Site]:
    """What a member starts; where members are positions, their stages differ."""
    return kind(transfer.action), replace(transfer.action.site, stage=None)


@dataclass(slots=True)
class Channel:
    """Sends and receives of one (from, to, tag): the n-th send meets the n-th receive, nothing is buffered."""

    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)

    def post(self, transfer: Transfer) -> None:
        """Add one side; if the other is there, both are complete."""
        mine, theirs = (self.sends, self.receives) if isinstance(transfer.action, Send) else (self.receives, self.sends)
        mine.append(transfer)
        number = len(mine) - 1
        if number < len(theirs):
            send, receive = self.sends[number], self.receives[number]
            receive.target[...] = send.hand_over(send.source)
            send.done = receive.done = True


def _dim(transfer: Transfer) -> int:
    """The dimension along which pieces are gathered or scattered."""
    action = transfer.action
    assert isinstance(action, Collective)
    placement = (action.before if action.op == "all_gather" else action.after)[action.group.axes[0]]
    assert isinstance(placement, Shard), f"{action.site}: {placement} is no cut"
    return placement.dim


def _hold(transfer: Transfer, num_ranks: int) -> None:
    """Take what the exchange needs beside source and target: places for what arrives, and a copy where pieces do not lie in one stretch."""
    action = transfer.action
    assert isinstance(action, Collective)
    size = reduced(transfer).size
    if action.op == "all_reduce" and num_ranks == PAIR:
        transfer.held.append(np.empty((1, size)))
    elif action.op in {"all_reduce", "reduce_scatter"}:
        transfer.held.append(np.empty((num_ranks - 1, -(-size // num_ranks))))
    if action.op != "all_reduce":
        full = transfer.target if action.op == "all_gather" else transfer.source
        if math.prod(full.shape[: _dim(transfer)]) > 1:
            transfer.held.append(np.empty(full.size))


def reduced(transfer: Transfer) -> Array:
    """The flat tensor that a reduction is about: the source, or the range of it that the action names."""
    assert transfer.source.flags.c_contiguous, f"{transfer.action.site}: exchanges take contiguous arrays"
    flat = transfer.source.reshape(-1)
    assert isinstance(transfer.action, Collective)
    return flat[slice(*transfer.action.span)] if transfer.action.span else flat


def _perform(members: Sequence[Transfer]) -> None:
    """All members have started: hand over, add up, put in place."""
    action = members[0].action
    assert isinstance(action, Collective)
    match action.op:
        case "all_gather":
            _all_gather(members)
        case "reduce_scatter":
            _reduce_scatter(members)
        case "all_reduce":
            partial = action.before[action.group.axes[0]]
            _all_reduce(members, partial.op if isinstance(partial, Partial) else "sum")
        case _:
            raise ValueError(f"{action.site}: no exchange is called {action.op!r}")


def _all_gather(members: Sequence[Transfer]) -> None:
    dim = _dim(members[0])
    own: list[Array] = [
        np.array_split(one.target, len(members), axis=dim)[place] if one.source is one.target else one.source
        for place, one in enumerate(members)
    ]
    for receiver in members:
        pieces = np.array_split(receiver.target, len(members), axis=dim)
        for piece, sender, value in zip(pieces, members, own, strict=True):
            if sender is not receiver:
                piece[...] = sender.hand_over(value)
            elif receiver.source is not receiver.target:
                piece[...] = value


def _reduce_scatter(members: Sequence[Transfer]) -> None:
    dim = _dim(members[0])
    pieces = [np.array_split(one.source, len(members), axis=dim) for one in members]
    for place, receiver in enumerate(members):
        receiver.target[...] = _sum(
            _arrivals(members, receiver, {one.rank: cut[place] for one, cut in zip(members, pieces, strict=True)}), "sum"
        )


def _all_reduce(members: Sequence[Transfer], op: str) -> None:
    flats = [reduced(one) for one in members]
    if len(members) == PAIR:
        totals = [
            _sum(_arrivals(members, receiver, {one.rank: flat for one, flat in zip(members, flats, strict=True)}), op)
            for receiver in members
        ]
        for flat, total in zip(flats, totals, strict=True):
            flat[...] = total
        return
    bounds = [place * flats[0].size // len(members) for place in range(len(members) + 1)]
    pieces = [[flat[bounds[place] : bounds[place + 1]] for place in range(len(members))] for flat in flats]
    for place, owner in enumerate(members):
        pieces[place][place][...] = _sum(
            _arrivals(members, owner, {one.rank: cut[place] for one, cut in zip(members, pieces, strict=True)}), op
        )
    for place, owner in enumerate(members):
        for other, cut in zip(members, pieces, strict=True):
            if other is not owner:
                cut[place][...] = owner.hand_over(pieces[place][place])


def _arrivals(members: Sequence[Transfer], receiver: Transfer, parts: Mapping[int, Array]) -> list[Array]:
    """Each member's part as the receiver sees it, in rank order: its own as it lies, the others' handed over."""
    return [parts[one.rank] if one is receiver else one.hand_over(parts[one.rank]) for one in members]


def _sum(parts: Sequence[Array], op: str) -> Array:
    """The parts combined in order."""
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part if op == "sum" else np.maximum(total, part)
    return total
