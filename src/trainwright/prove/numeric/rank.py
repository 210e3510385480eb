"""One rank of the numpy interpreter: its buffers, and what each action does to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import assert_never

import numpy as np

from trainwright.ir.action import (
    WAITED_KIND,
    Action,
    Alloc,
    Collective,
    Compute,
    Free,
    Move,
    Operand,
    Recv,
    Save,
    Send,
    Started,
    Update,
    Wait,
)
from trainwright.ir.program import Program
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.plan.lower import SCALARS, VALID
from trainwright.plan.plan import Plan
from trainwright.prove.numeric.call import Array, Call, Feed, Samples, Saved, Values
from trainwright.prove.numeric.exchange import Transfer
from trainwright.prove.numeric.pieces import cut, unit_of, views
from trainwright.prove.numeric.update import decays, update
from trainwright.spec.families.segment import Unit
from trainwright.units import Bytes

SQUARES, LOSS = 0, 1
"""The two scalars of a step."""


class Rank:
    """One rank. `held` are its live buffers, `on_the_way` its started exchanges, by (site, kind)."""

    def __init__(
        self, *, plan: Plan, program: Program, number: int, units: Mapping[str, Unit], mathematics: ModuleType, feed: Feed
    ) -> None:
        self.plan, self.program, self.number, self.units = plan, program, number, units
        self.mathematics, self.feed = mathematics, feed
        self.at = plan.coordinates(number)
        self.replica = self.at["data"] * plan.size("zero") + self.at["zero"]
        self.actions = tuple(program.actions(self.at["pipeline"]))
        self.held: dict[Ref, Array | Saved] = {}
        self.on_the_way: dict[tuple[Site, str], Transfer] = {}
        self.samples: dict[int, Samples] = {}
        self.place = 0
        self.step, self.num_steps = 0, 1
        self.scalars: Array = np.zeros(2)
        self.num_valid = 0.0
        self.gradients: dict[Ref, Array] = {}

    def load(self, parameters: Mapping[str, Array]) -> None:
        """Fill the persistent buffers: weights from the logical `parameters`, optimizer state with zeros."""
        for ref in self.program.persistent(self.at["pipeline"]):
            (size,) = self.program.buffers[ref.tensor].shape
            flat = np.zeros(size)
            if ref.tensor.rpartition(".")[2] == "weights":
                unit = self.units[unit_of(ref)]
                whole = cut(unit, ref.block, parameters, tensor_index=self.at["tensor"], num_shards=self.plan.size("zero"))
                flat[...] = whole if size == whole.size else whole[self.at["zero"] * size :][:size]
            self.held[ref] = flat

    # --- what is held ----------------------------------------------------------------------------------------------------------

    def array(self, ref: Ref) -> Array:
        """A buffer that is one array."""
        held = self.held[ref]
        assert isinstance(held, np.ndarray), f"{ref} holds several arrays"
        return held

    def flats(self, what: str) -> dict[Ref, Array]:
        """The flat buffers of one kind: "weights", "gradients" ..."""
        return {ref: self.array(ref) for ref in self.held if ref.tensor.rpartition(".")[2] == what}

    @property
    def live_bytes(self) -> Bytes:
        """Bytes of all arrays held at this moment, by buffers and by exchanges, each memory counted once."""
        exchanged = (array for transfer in self.on_the_way.values() for array in transfer.held)
        return _memory_bytes((*_arrays(self.held.values()), *exchanged))

    def part_bytes(self, part: str) -> Bytes:
        """Bytes of the buffers that count in one part of memory ("weights", "gathered" ...)."""
        return _memory_bytes(_arrays(held for ref, held in self.held.items() if self.program.buffers[ref.tensor].part == part))

    def empty(self, ref: Ref) -> Array:
        """A new buffer, its contents not a number until something is put there."""
        self.held[ref] = new = np.full(self.program.buffers[ref.tensor].shape, np.nan)
        return new

    # --- a step ----------------------------------------------------------------------------------------------------------------

    def begin(self, step: int, num_steps: int) -> None:
        """Before the first action of a step."""
        self.step, self.num_steps, self.place = step, num_steps, 0
        self.samples, self.gradients = {}, {}

    @property
    def next_action(self) -> Action | None:
        """The action that comes next, None at the end of the step."""
        return self.actions[self.place] if self.place < len(self.actions) else None

    @property
    def blocked_by(self) -> str:
        """What the next action waits for; empty if it can be done."""
        action = self.next_action
        if not isinstance(action, Wait):
            return ""
        transfer = self.on_the_way.get((action.site, action.kind))
        if transfer is None:
            return f"no {action.kind} was started here"
        return "" if transfer.done else transfer.waits_for

    def perform(self, action: Action) -> Transfer | None:
        """Do one action on this rank alone; an exchange comes back as a Transfer, for the others to meet."""
        match action:
            case Compute():
                self.compute(action)
            case Collective():
                source = self.array(action.source)
                return self.started(action, source, source if action.target == action.source else self.empty(action.target))
            case Send():
                return self.started(action, self.array(action.buffer), self.array(action.buffer))
            case Recv():
                buffer = self.empty(action.buffer)
                return self.started(action, buffer, buffer)
            case Wait():
                del self.on_the_way[action.site, action.kind]
            case Alloc():
                self.empty(action.buffer)
            case Free():
                self.free(action)
            case Update():
                self.update(action)
            case Move() | Save():
                raise NotImplementedError(f"{action.site}: the numpy interpreter has no {type(action).__name__}")
            case _:
                assert_never(action)
        return None

    def started(self, action: Started, source: Array, target: Array) -> Transfer:
        """Note an exchange."""
        transfer = Transfer(rank=self.number, action=action, source=source, target=target)
        self.on_the_way[action.site, WAITED_KIND[type(action)]] = transfer
        return transfer

    def free(self, action: Free) -> None:
        """End the life of buffers; the step's scalars are read before they go."""
        if SCALARS in action.buffers:
            self.scalars = self.array(SCALARS)
            self.num_valid = float(self.array(VALID)[0]) if VALID in self.held else 0.0
        for ref in action.buffers:
            del self.held[ref]

    # --- compute ---------------------------------------------------------------------------------------------------------------

    def compute(self, action: Compute) -> None:
        """A function of a segment, or one of the engine's own."""
        match action.function:
            case "forward" | "backward":
                self.segment(action)
            case "start":
                self.held[SCALARS] = np.zeros(2)
            case "count":
                counts = (self.mathematics.num_valid(self.microbatch(one)) for one in range(self.plan.num_microbatches))
                self.held[VALID] = np.array([sum(counts)], dtype=np.float64)
            case "collect":
                if self.at["tensor"] == 0:
                    self.array(SCALARS)[LOSS] += self.array(action.reads[0].ref)
            case "accumulate":
                assert action.accumulates is not None
                self.array(action.accumulates.ref)[...] += self.array(action.reads[0].ref)
            case "square":
                self.array(SCALARS)[SQUARES] += (self.owned(action.reads[0].ref) ** 2).sum()
            case _:
                raise ValueError(f"{action.site}: no function is called {action.function!r}")

    def segment(self, action: Compute) -> None:
        """Forward or backward of the segment that the site names."""
        assert action.site.segment is not None
        assert action.site.microbatch is not None
        gradients = self.sink(action.accumulates, fresh=action.fresh) if action.accumulates else {}
        call = Call(
            model=self.plan.model,
            samples=self.microbatch(action.site.microbatch),
            weights=self.parameters(action.weights) if action.weights else {},
            gradients=gradients,
            block=action.site.block,
            num_valid=float(self.array(VALID)[0]) if VALID in self.held else 0.0,
            tensor_index=self.at["tensor"],
            num_tensor=self.plan.size("tensor"),
            sequence=self.plan.parallel.tensor.sequence and self.plan.size("tensor") > 1,
        )
        run = self.mathematics.forward if action.function == "forward" else self.mathematics.backward
        outputs: Values = run(action.site.segment, call, {operand.name: self.held[operand.ref] for operand in action.reads})
        for operand in action.writes:
            self.held[operand.ref] = _in_rows(outputs[operand.name])

    def microbatch(self, number: int) -> Samples:
        """This rank's part of the batch."""
        if number not in self.samples:
            self.samples[number] = self.feed(self.step, self.replica, number)
        return self.samples[number]

    def parameters(self, operand: Operand) -> dict[str, Array]:
        """The parameters in a flat buffer."""
        return views(self.units[unit_of(operand.ref)], self.array(operand.ref))

    def sink(self, operand: Operand, *, fresh: bool) -> dict[str, Array]:
        """Where a backward adds; a fresh buffer begins with zeros."""
        if fresh:
            self.held[operand.ref] = np.zeros(self.program.buffers[operand.ref.tensor].shape)
        return self.parameters(operand)

    # --- gradients and update --------------------------------------------------------------------------------------------------

    def owned(self, ref: Ref) -> Array:
        """The elements of a gradient buffer that this rank counts, so that each logical element is counted once over all ranks."""
        gradients = self.array(ref)
        first = self.at["zero"] * gradients.size
        places = np.arange(first, first + gradients.size)
        mine = places >= (self.units[unit_of(ref)].num_replicated if self.at["tensor"] else 0)
        return gradients[mine & (self.at["data"] == 0)]

    def update(self, action: Update) -> None:
        """One optimizer step on this rank's piece. The gradients of the step are noted before the first."""
        if not self.gradients:
            self.gradients = {ref: flat.copy() for ref, flat in self.flats("gradients").items()}
        gradients, weights = self.array(action.gradients), self.array(action.weights)
        start = self.at["zero"] * gradients.size
        mine = slice(start, start + gradients.size)
        optimizer = self.plan.optimizer
        update(
            optimizer,
            weights[mine] if weights.size > gradients.size else weights,
            gradients,
            tuple(self.array(ref) for ref in action.states),
            decayed=decays(self.units[unit_of(action.weights)], self.plan.size("zero"))[mine],
            norm=math.sqrt(self.array(SCALARS)[SQUARES]),
            step=self.step,
            lr=optimizer.lr_at(self.step, self.num_steps),
        )


def _in_rows(made: Array | Saved) -> Array | Saved:
    """The same values row by row in memory: exchanges look at buffers as flat."""
    if isinstance(made, dict):
        return {name: np.asarray(array, order="C") for name, array in made.items()}
    return np.asarray(made, order="C")


def _arrays(held: Iterable[Array | Saved]) -> Iterator[Array]:
    for one in held:
        if isinstance(one, np.ndarray):
            yield one
        else:
            yield from one.values()


def _memory_bytes(arrays: Iterable[Array]) -> Bytes:
    """Bytes of the memory behind arrays; a view counts as what it looks into."""
    owners = {}
    for array in arrays:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        owners[id(owner)] = owner.nbytes
    return sum(owners.values())
