"""What a rank does, one step at a time, and what each of these words means.

The meaning stands in the docstrings, once; simulator and executor keep to it. A rank performs the actions of its Program in
order. `Compute`, `Update`, `Alloc`, `Free`, `Move` and `Save` are done when the next action begins. `Collective`, `Send` and `Recv` are
split in two: the action starts them, the `Wait` that names them ends them. An action that writes a buffer that is not live
brings it to life; `Free` ends its life.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from trainwright.ir.layout import REPLICATED, Group, Layout
from trainwright.ir.ref import Ref
from trainwright.ir.site import Site
from trainwright.ir.work import NO_WORK, Work
from trainwright.units import Bytes


@dataclass(frozen=True, slots=True)
class Operand:
    """A buffer in the role that a function has for it: `name` is the function's own name for the argument.

    `layout` is what the function needs (argument) or leaves behind (result).
    """

    name: str
    ref: Ref
    layout: Layout = REPLICATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run one function of one segment on this rank.

    `function` is "forward" or "backward" of the segment that `site` names, or a function of the engine ("count", "accumulate",
    "norm"). `reads` must be live and ready. `writes` are new buffers. `weights` is the flat buffer of parameters that the
    segment uses, `accumulates` the one it adds gradients to; with `fresh` the latter begins as garbage and is overwritten.
    `keeps` tells a forward to write what backward needs. `temporary_bytes` is the most that the function holds inside beyond what it
    reads and
    writes.
    """

    site: Site
    function: str
    reads: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()
    weights: Operand | None = None
    accumulates: Operand | None = None
    fresh: bool = False
    keeps: bool = True
    work: Work = NO_WORK
    temporary_bytes: Bytes = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Start an exchange among the ranks of `group`; it changes the layout of `source` from `before` to `after` on the group's axes.

    The result is in `target` (the same Ref as `source`: in place) after its Wait; until then neither may be read, written or
    freed. All ranks of a group start their collectives in one order. `payload_bytes` is the full tensor as one rank sees it: the gathered
    side of an
    all_gather, the unreduced side of a reduce_scatter. `span` restricts the exchange to a range of elements of a flat buffer.
    """

    site: Site
    op: str
    group: Group
    source: Ref
    target: Ref
    before: Layout
    after: Layout
    payload_bytes: Bytes
    wire_buffer_bytes: Bytes = 0
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Lend `buffer` to the channel towards position `to` and go on.

    The buffer may not be written or freed before the Wait that names this Send. The n-th Send of a channel meets the n-th Recv;
    a channel is (from, to, tag). A Send completes when its Recv is posted: nothing is buffered.
    """

    site: Site
    to: int
    channel: str
    buffer: Ref
    payload_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv:
    """Post `buffer`, which comes to life here, to the channel from position `source` and go on.

    Its contents exist after its Wait. In a template `source` is an offset on the pipeline axis.
    """

    site: Site
    source: int
    channel: str
    buffer: Ref
    payload_bytes: Bytes
    layout: Layout = REPLICATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Go on when the Collective, Send or Recv at `site` of that `kind` ("collective", "send", "recv") is complete."""

    site: Site
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alloc:
    """Bring a buffer to life, its contents undefined."""

    site: Site
    buffer: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """End the life of buffers; nobody may name them until something writes them anew."""

    site: Site
    buffers: tuple[Ref, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Copy a buffer between device and host memory; both copies exist until one is freed."""

    site: Site
    source: Ref
    target: Ref
    num_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimizer step on a piece of a flat buffer, in place.

    Reads `gradients` and the step's scalars, writes `weights`, `states`, and `master` if there is one.

    `after` is set where a rank holds whole weights but updates its own slice: the layout that leaves.
    """

    site: Site
    weights: Ref
    gradients: Ref
    states: tuple[Ref, ...]
    master: Ref | None = None
    scalars: Ref | None = None
    num_elements: int = 0
    after: Layout | None = None
    work: Work = NO_WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Write the persistent buffers to a checkpoint."""

    site: Site
    num_bytes: Bytes


Action: TypeAlias = Compute | Collective | Send | Recv | Wait | Alloc | Free | Move | Update | Save

Started: TypeAlias = Collective | Send | Recv

WAITED_KIND = {Collective: "collective", Send: "send", Recv: "recv"}


def kind(action: Action) -> str:
    """The kind of an action as events print it: `forward`, `backward`, `all_gather`, `send`, `free` ..."""
    match action:
        case Compute(function=function):
            return function
        case Collective(op=op):
            return op
        case Wait(kind=what):
            return f"wait_{what}"
        case _:
            return type(action).__name__.lower()


def wait_for(action: Started) -> Wait:
    """The Wait that ends `action`."""
    return Wait(site=action.site, kind=WAITED_KIND[type(action)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one run of a template takes place: what `bind` fills in."""

    position: int
    num_positions: int
    stage: int | None
    microbatch: int | None
    first_block: int = 0


def bind(action: Action, place: Place) -> Action:
    """The absolute action of a template's relative one: names, site and peer filled in for one run of the template."""
    microbatch, first_block = place.microbatch, place.first_block

    def ref(name: Ref) -> Ref:
        return name.at(microbatch, first_block)

    def operand(one: Operand) -> Operand:
        return Operand(one.name, ref(one.ref), one.layout)

    site = action.site.at(stage=place.stage, microbatch=microbatch, first_block=first_block)
    match action:
        case Compute():
            return replace(
                action,
                site=site,
                reads=tuple(map(operand, action.reads)),
                writes=tuple(map(operand, action.writes)),
                weights=action.weights and operand(action.weights),
                accumulates=action.accumulates and operand(action.accumulates),
            )
        case Collective() | Move():
            return replace(action, site=site, source=ref(action.source), target=ref(action.target))
        case Send():
            return replace(action, site=site, buffer=ref(action.buffer), to=(place.position + action.to) % place.num_positions)
        case Recv():
            return replace(action, site=site, buffer=ref(action.buffer), source=(place.position + action.source) % place.num_positions)
        case Alloc():
            return replace(action, site=site, buffer=ref(action.buffer))
        case Free():
            return replace(action, site=site, buffers=tuple(map(ref, action.buffers)))
        case Update():
            return replace(
                action,
                site=site,
                weights=ref(action.weights),
                gradients=ref(action.gradients),
                states=tuple(map(ref, action.states)),
                master=action.master and ref(action.master),
            )
        case Wait() | Save():
            return replace(action, site=site)
