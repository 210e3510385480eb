"""What goes over the wire in a step, by axis and operation, as one rank of a role sees it.

Sent bytes are those of ring algorithms: all_gather, reduce_scatter and all_to_all (P-1)/P of the payload, all_reduce twice that, a send
all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trainwright.cost.wire import TRANSFERS, sent_bytes_per_rank
from trainwright.ir.action import Action, Collective, Send
from trainwright.ir.program import Program
from trainwright.units import Bytes


@dataclass(frozen=True)
class Traffic:
    """One kind of exchange of a role in a step: `sizes` counts its payloads by their bytes."""

    axis: str
    op: str
    num_ranks: int
    sizes: Counter[Bytes]

    @property
    def count(self) -> int:
        """Exchanges in a step."""
        return sum(self.sizes.values())

    @property
    def payload_bytes(self) -> Bytes:
        """Bytes of their tensors, as one rank sees them whole."""
        return sum(count * size for size, count in self.sizes.items())

    @cached_property
    def sent_bytes_per_rank(self) -> Bytes:
        """Bytes that one rank hands to others."""
        return sum(count * sent_bytes_per_rank(self.op, size, self.num_ranks) for size, count in self.sizes.items())

    def sent_formula(self) -> tuple[str, dict[str, int | float | str]]:
        """How `sent_bytes_per_rank` comes about: each exchange's bytes over the group's ranks, rounded up."""
        inputs: dict[str, int | float | str] = {"ranks": self.num_ranks, "times": TRANSFERS.get(self.op, 1)}
        terms = []
        for number, (size, count) in enumerate(self.sizes.items()):
            inputs |= {f"count_{number}": count, f"payload_{number}": size}
            one = f"payload_{number}" if self.op == "send" else f"-(-times * (ranks - 1) * payload_{number} // ranks)"
            terms.append(f"count_{number} * {one}")
        return " + ".join(terms), inputs


def traffic(program: Program, position: int) -> tuple[Traffic, ...]:
    """Every kind of exchange that a role starts, in the order of its first. A Recv is the other side's Send."""
    by_template = {name: _exchanges(program, actions) for name, actions in program.templates.items()}
    sums: dict[tuple[str, str, int], Counter[Bytes]] = {}
    for name, times in Counter(run.template for run in program.roles[position].runs).items():
        for key, sizes in by_template[name].items():
            counts = sums.setdefault(key, Counter())
            for size, count in sizes.items():
                counts[size] += count * times
    return tuple(Traffic(axis, op, num_ranks, sizes) for (axis, op, num_ranks), sizes in sums.items())


def _exchanges(program: Program, actions: Sequence[Action]) -> dict[tuple[str, str, int], Counter[Bytes]]:
    found: dict[tuple[str, str, int], Counter[Bytes]] = {}
    for action in actions:
        if isinstance(action, Collective):
            key = (str(action.group), action.op, action.group.size(dict(program.sizes)))
        elif isinstance(action, Send):
            key = ("pipeline", "send", 2)
        else:
            continue
        found.setdefault(key, Counter())[action.payload_bytes] += 1
    return found
