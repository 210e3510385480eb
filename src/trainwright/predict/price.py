"""Seconds of every action of a Program, on the plan's devices under its software stack.

Glossary
    e, k         of the stack: share of the peak that large matrix products sustain; memory and wire traffic as a
                 multiple of what is written
    felt         what a Wait costs beyond waiting: the part of hidden traffic that slows the compute beside it
    pass         all that a template does for one block in one phase
    quantum      durations are whole multiples of a power of two (about a picosecond), so that sums of them are exact in any order

Left out: contention between groups that share a network card, and everything that measured tables of kernels would tell. The terms and
their order of importance follow published studies of step times (Narayanan et al. 2021; Korthikanti et al. 2022; Isaev et al. 2023,
"Calculon").
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainwright.cost.links import collective_s, send_s
from trainwright.cost.roofline import head_alignment
from trainwright.ir.action import Action, Collective, Compute, Move, Send, Update, Wait
from trainwright.ir.layout import Group
from trainwright.ir.program import Program
from trainwright.ir.work import Op, OpKind, Work
from trainwright.plan.plan import Plan
from trainwright.predict.fabric import Fabric
from trainwright.spec.device import Device
from trainwright.spec.stack import Stack
from trainwright.units import Bytes, Seconds

SOFT: Final = 4
"""Power of the soft maximum between a pass's work and the host's time to issue it: (x^4 + floor^4)^(1/4)."""

FINEST: Final = -40
"""Exponent of the finest quantum: 2^-40 s, about a picosecond. A step of more than 2^12 s gets a coarser one."""

MANTISSA: Final = 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds of a Program's actions.

    `durations` has one number an action of each template: for a Wait what is felt beyond waiting, for Send and Recv 0, since a transfer's
    duration depends on the two positions: `transfers` has it by (from, to, payload bytes). All are multiples of `quantum_s`.
    """

    durations: Mapping[str, tuple[Seconds, ...]]
    transfers: Mapping[tuple[int, int, int], Seconds]
    quantum_s: Seconds = 2.0**FINEST


def price(program: Program, plan: Plan) -> Prices:
    """Seconds of every action of `program`."""
    pricer = Pricer(program, plan)
    raw = {name: pricer.template(name, actions) for name, actions in program.templates.items()}
    transfers = pricer.transfers()
    quantum = quantum_s(_longest_s(program, raw, transfers.values()))

    def whole_s(duration_s: Seconds) -> Seconds:
        return round(duration_s / quantum) * quantum

    return Prices(
        durations={name: tuple(map(whole_s, seconds)) for name, seconds in raw.items()},
        transfers={key: whole_s(seconds) for key, seconds in transfers.items()},
        quantum_s=quantum,
    )


def quantum_s(longest_s: Seconds) -> Seconds:
    """The finest power of two of which `longest_s`, and any sum below it, is an exact multiple in a float.

    >>> quantum_s(10.0) == 2.0**-40, quantum_s(10_000.0) == 2.0**-38
    (True, True)
    """
    return 2.0 ** max(FINEST, math.frexp(longest_s)[1] - MANTISSA)


def _longest_s(program: Program, raw: Mapping[str, Sequence[Seconds]], transfers: Iterable[Seconds]) -> Seconds:
    """No step takes longer: all actions of all roles one after another, and every transfer as long as the longest."""
    totals = {name: sum(seconds) for name, seconds in raw.items()}
    num_sends = {name: sum(isinstance(one, Send) for one in actions) for name, actions in program.templates.items()}
    longest = max(transfers, default=0.0)
    return sum(totals[run.template] + num_sends[run.template] * longest for role in program.roles for run in role.runs)


class Pricer:
    """Prices one Program; equal work is priced once."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.fabric = Fabric(program.sizes, plan.cluster)
        self.rates = Rates(plan.cluster.device, plan.cluster.stack)
        self.stack = plan.cluster.stack
        self.straggler = straggler(self.stack, plan.num_devices)
        self.of_work: dict[int, Seconds] = {}
        self.of_collective: dict[tuple[str, Group, int], Seconds] = {}

    # --- single actions ----------------------------------------------------------------------------------------------------------

    def alone_s(self, action: Action) -> Seconds:
        """Seconds of an action by itself, as if the host were infinitely fast."""
        match action:
            case Compute(function="accumulate", accumulates=grad) if grad is not None:
                return self.rates.traffic_s(3 * self.program.num_bytes(grad.ref)) * self.straggler
            case Compute(work=work) | Update(work=work):
                return self.work_s(work)
            case Collective(op=op, group=group, payload_bytes=payload_bytes):
                return self.collective_s(op, group, payload_bytes)
            case Move(num_bytes=num_bytes):
                return num_bytes / self.plan.cluster.device.host_bytes_per_s * self.straggler
            case _:
                return 0.0

    def work_s(self, work: Work) -> Seconds:
        """Seconds of an action's operators, one after another. The Program holds each Work once, so its identity tells it."""
        if id(work) not in self.of_work:
            self.of_work[id(work)] = sum(map(self.rates.op_s, work.ops)) * self.straggler
        return self.of_work[id(work)]

    def collective_s(self, op: str, group: Group, payload_bytes: Bytes) -> Seconds:
        """Seconds of an exchange."""
        key = (op, group, payload_bytes)
        if key not in self.of_collective:
            spread = self.fabric.spread(group)
            duration_s = collective_s(
                op,
                payload_bytes=payload_bytes,
                num_ranks=spread.num_ranks,
                group_bytes_per_s=self.fabric.group_bytes_per_s(group) / self.stack.traffic_multiplier,
                half_message_bytes=int(self.stack.half_rate_bytes),
                latency_s=self.stack.collective_latency_s + self.hops_s(op, spread.num_ranks, leaves=spread.leaves_domain),
            )
            felt = self.stack.tensor_exposed if group.axes == ("tensor",) else 1.0
            self.of_collective[key] = duration_s * felt * self.straggler
        return self.of_collective[key]

    def hops_s(self, op: str, num_ranks: int, *, leaves: bool) -> Seconds:
        """Latency that grows with the group, outside a domain: a ring for gathers and scatters, a tree for sums."""
        if not leaves:
            return 0.0
        return self.stack.ring_hop_s * (math.log2(num_ranks) if op == "all_reduce" else num_ranks - 1)

    def transfers(self) -> dict[tuple[int, int, int], Seconds]:
        """Seconds of a transfer by (from, to, payload bytes), for every pair of positions that has one."""
        found: dict[tuple[int, int, int], Seconds] = {}
        sends = {name: [one for one in actions if isinstance(one, Send)] for name, actions in self.program.templates.items()}
        num_positions = len(self.program.roles)
        for role in self.program.roles:
            for name in {run.template for run in role.runs}:
                for send in sends[name]:
                    target = (role.position + send.to) % num_positions
                    key = (role.position, target, send.payload_bytes)
                    if key not in found:
                        rate = self.fabric.link_bytes_per_s(role.position, target) / self.stack.traffic_multiplier
                        duration_s = send_s(
                            payload_bytes=send.payload_bytes, link_bytes_per_s=rate, latency_s=self.stack.collective_latency_s
                        )
                        found[key] = duration_s * self.stack.pipeline_exposed * self.straggler
        return found

    # --- templates ---------------------------------------------------------------------------------------------------------------

    def template(self, name: str, actions: tuple[Action, ...]) -> list[Seconds]:
        """Seconds of a template's actions, the host's time and what overlapping costs included."""
        seconds = [self.alone_s(action) for action in actions]
        felt = self.felt(actions, seconds)
        self.add_host(name, actions, seconds)
        for index, more in felt.items():
            seconds[index] += more
        return seconds

    def felt(self, actions: tuple[Action, ...], seconds: list[Seconds]) -> dict[int, Seconds]:
        """By index of a Wait: contention times the shorter of the exchange and the compute between its start and its Wait."""
        started: dict[object, tuple[int, float]] = {}
        felt: dict[int, Seconds] = {}
        done_s = 0.0
        for index, action in enumerate(actions):
            if isinstance(action, Collective):
                started[action.site] = (index, done_s)
            elif isinstance(action, Wait):
                if action.kind == "collective" and action.site in started:
                    start, before_s = started.pop(action.site)
                    collective = actions[start]
                    assert isinstance(collective, Collective)
                    overlapped_s = min(seconds[start], done_s - before_s)
                    share = self.contention(collective.group)
                    if overlapped_s and share:
                        felt[index] = share * overlapped_s
            elif isinstance(action, Compute | Update):
                done_s += seconds[index]
        return felt

    def contention(self, group: Group) -> float:
        """Part of overlapped traffic that is felt; all of it where the stack does not overlap."""
        zero = self.plan.parallel.zero
        if group.axes == ("zero",) and zero.reduces_each_microbatch:
            return self.stack.zero_contention
        return self.stack.data_overlap_residue if self.stack.data_overlap_window else 1.0

    def add_host(self, name: str, actions: tuple[Action, ...], seconds: list[Seconds]) -> None:
        """The host issues no faster than a floor for each pass, and once more for each slot of a pipeline.

        Some stacks stop for it besides.
        """
        floor_s, fixed_s = self.stack.host_floor_s * self.straggler, self.stack.host_fixed_s * self.straggler
        if not floor_s and not fixed_s:
            return
        passes: dict[tuple[int, str | None], list[int]] = defaultdict(list)
        for index, action in enumerate(actions):
            block = action.site.block
            if block is not None and isinstance(action, Compute | Collective) and action.site.phase != "upd":
                at_once = index + 1 < len(actions) and isinstance(actions[index + 1], Wait) and actions[index + 1].site == action.site
                if isinstance(action, Compute) or at_once:
                    passes[block, action.site.phase].append(index)
        for indices in passes.values():
            computes = [index for index in indices if isinstance(actions[index], Compute)]
            if computes:
                work_s = sum(seconds[index] for index in indices)
                seconds[computes[-1]] += (work_s**SOFT + floor_s**SOFT) ** (1 / SOFT) - work_s + fixed_s
        if passes and len(self.program.roles) > 1 and name.startswith(("forward", "backward")):
            first = next(index for index, action in enumerate(actions) if isinstance(action, Compute))
            seconds[first] += floor_s


def straggler(stack: Stack, num_devices: int) -> float:
    """Slowdown of a step that waits for the slowest of many devices; 1 up to eight.

    >>> from trainwright.spec.catalog import stack
    >>> straggler(stack("default"), 32)
    1.01
    """
    return 1.0 + stack.straggler_per_doubling * max(0.0, math.log2(num_devices / 8))


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of single operators on a device under a stack."""

    device: Device
    stack: Stack

    def traffic_s(self, num_bytes: float) -> Seconds:
        """Streaming bytes through memory: bytes x k / (0.85 of the peak rate)."""
        return num_bytes * self.stack.traffic_multiplier / (self.device.memory_bytes_per_s * self.stack.memory_efficiency)

    def op_s(self, op: Op) -> Seconds:
        """One operator."""
        match op.kind:
            case OpKind.GEMM | OpKind.GEMM_WEIGHT:
                return self.gemm_s(op)
            case OpKind.ATTENTION_FORWARD | OpKind.ATTENTION_BACKWARD:
                return self.attention_s(op)
            case OpKind.ELEMENTWISE:
                return self.traffic_s(op.num_bytes)

    def gemm_s(self, op: Op) -> Seconds:
        """2 m n (k + k0) / (peak x e) and a launch, never below the traffic; the weight gradient at its own rate, with its accumulation."""
        stack = self.stack
        weight = op.kind is OpKind.GEMM_WEIGHT
        rate = self.device.peak(op.format) * stack.gemm_efficiency * (stack.weight_gradient_efficiency if weight else 1.0)
        compute_s = op.flops * (1 + stack.gemm_ramp_depth / op.k) / rate
        accumulated = op.flops // (2 * op.k) * stack.accumulation_bytes if weight else 0
        return max(compute_s + self.device.launch_s, self.traffic_s(op.num_bytes)) + self.traffic_s(accumulated)

    def attention_s(self, op: Op) -> Seconds:
        """Fused: at the kernel's efficiency, causal half counted. Unfused: all of it, at a part of e, and the scores' traffic."""
        stack, peak = self.stack, self.device.peak(op.format)
        backward = op.kind is OpKind.ATTENTION_BACKWARD
        if stack.attention == "fused":
            efficiency = stack.attention_backward_efficiency if backward else stack.attention_forward_efficiency
            return max(op.flops / (peak * efficiency) + self.device.launch_s, self.traffic_s(op.num_bytes))
        flops = 4 * op.score_elements * op.k * (2 if backward else 1)
        rate = peak * stack.gemm_efficiency * stack.unfused_attention_efficiency * head_alignment(op.k)
        score_bytes = stack.score_bytes_backward if backward else stack.score_bytes_forward
        return flops / rate + self.traffic_s(op.score_elements * score_bytes) + self.device.launch_s
