"""The JSON document of a prediction: every number with the reason for it.

Field names are a contract (schema trainwright/predict/1). Bytes are exact integers. `time` and `wire` are those of the critical role, the
position that idles least; `memory.roles` has all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

from trainwright.ir.action import Compute, Update
from trainwright.ir.buffer import PARTS
from trainwright.plan.plan import Plan
from trainwright.predict.arithmetic import executed_flops, matrix_parameters, recomputed_flops
from trainwright.predict.critical import seconds_by_class
from trainwright.predict.memory import FAILS_ABOVE, FITS_BELOW, Memory, RoleMemory
from trainwright.predict.page import Number, Page, Spelled, total, weighted
from trainwright.predict.simulate import Simulation
from trainwright.predict.slopes import label
from trainwright.predict.traffic import Traffic, traffic
from trainwright.spec.model import num_parameters
from trainwright.spec.stack import UNKNOWN_INTERVAL, Stack
from trainwright.units import Seconds

SCHEMA: Final = "trainwright/predict/1"

SIMULATION: Final = "simulation"

LEDGER: Final = "lowering: the buffers of the Program"

LEFT_OUT: Final = (
    "data loading, checkpoints, validation, failures",
    "contention between groups that share a network card, and jitter",
    "memory fragmentation beyond the allocator's factor",
)

WAITS: Final = "time that the critical role waits for wires of its own, and what overlapped traffic costs its compute"


def describe(plan: Plan, simulation: Simulation, memory: Memory) -> Page:
    """Write the document of a prediction."""
    return _Writer(plan, simulation, memory).page


def interval_source(stack: Stack) -> str:
    """What the half width of the interval rests on."""
    if stack.num_points and stack.interval < UNKNOWN_INTERVAL:
        return f"half width that held 80% of held-out measurements of stack {stack.name}: {stack.source}"
    return (
        f"assumed for stack {stack.name}, which has no constants fitted on this device: half width that held 80% of published steps when "
        "the constants of other studies on the same device were used"
    )


class _Writer:
    def __init__(self, plan: Plan, simulation: Simulation, memory: Memory) -> None:
        self.plan, self.simulation, self.memory = plan, simulation, memory
        self.program = simulation.program
        self.device, self.stack = plan.cluster.device, plan.cluster.stack
        self.critical = simulation.critical
        self.live: dict[int, Counter[str]] = {}
        self.page = Page()
        self.page.text("/schema", SCHEMA)
        self.head()
        self.speed()
        self.arithmetic()
        self.page.text("/bottleneck", "")  # its place; the words follow from what comes after
        self.cost()
        self.memories()
        self.wires()
        self.time()
        self.assumptions()
        self.page.document["bottleneck"] = bottleneck(self.page.document, self.simulation)

    # --- what is predicted -----------------------------------------------------------------------------------------------------------

    def head(self) -> None:
        """The plan in short."""
        plan, page = self.plan, self.page
        page.text("/plan/model", plan.model.name)
        page.text("/plan/device", plan.cluster.device.title or plan.cluster.device.name)
        page.text("/plan/cluster", plan.cluster.name)
        page.leaf("/plan/num_parameters", num_parameters(plan.model), source="shape of the model")
        page.leaf("/plan/num_devices", plan.num_devices, source="plan")
        for axis, size in self.program.sizes.items():
            page.leaf(f"/plan/mesh/{axis}", size, source=f"plan: parallel.{axis}.size")
        page.leaf("/plan/num_microbatches", plan.num_microbatches, source="plan: global_sequences / (data * zero * microbatch_sequences)")
        page.leaf("/plan/microbatch_sequences", plan.batch.microbatch_sequences, source="plan: batch")
        page.leaf("/plan/global_sequences", plan.batch.global_sequences, source="plan: batch")
        page.leaf("/plan/sequence_tokens", plan.batch.sequence_tokens, source="plan: batch")
        page.figure(
            "/plan/tokens_per_step",
            "sequences * tokens",
            {"sequences": "/plan/global_sequences", "tokens": "/plan/sequence_tokens"},
            unit="tokens",
        )

    def speed(self) -> None:
        """The step, its interval, and tokens per second."""
        page, stack = self.page, self.stack
        page.leaf(
            "/step_s",
            self.simulation.step_s,
            unit="s",
            source=SIMULATION,
            not_counted="; ".join(LEFT_OUT),
            spelled=lambda: total(seconds_by_class(self.simulation)),
        )
        for name, sign in (("p10", "-"), ("p90", "+")):
            page.figure(
                f"/interval_s/{name}",
                f"step * (1 {sign} half_width)",
                {"step": "/step_s", "half_width": stack.interval},
                unit="s",
                source=interval_source(stack),
            )
        page.figure("/tokens_per_s", "tokens / step", {"tokens": "/plan/tokens_per_step", "step": "/step_s"}, unit="tokens/s")
        page.figure(
            "/tokens_per_s_per_device", "rate / devices", {"rate": "/tokens_per_s", "devices": "/plan/num_devices"}, unit="tokens/s"
        )

    def arithmetic(self) -> None:
        """FLOPs, and their shares of the peak under each convention."""
        page, model, fmt = self.page, self.plan.model, self.plan.precision.compute
        shape: dict[str, Number | str] = {
            "tokens": "/plan/tokens_per_step",
            "matrix_parameters": matrix_parameters(model),
            "layers": model.num_layers,
            "sequence": "/plan/sequence_tokens",
            "heads": model.num_heads,
            "head_width": model.head_width,
        }
        left_out = "norms, activations, softmax, optimizer"
        source = "forward once and backward twice: Kaplan et al. 2020, section 2.1; attention: Chowdhery et al. 2022 (PaLM), appendix B"
        formula = "3 * tokens * (2 * matrix_parameters + {} * layers * sequence * heads * head_width)"
        page.figure(
            "/model_flops_per_step", formula.format(2), shape, unit="FLOP", source=f"{source}; mask counted as half", not_counted=left_out
        )
        full, executed, again = (f"/flops/{name}" for name in ("full_attention", "executed", "recomputed_full_attention"))
        page.figure(full, formula.format(4), shape, unit="FLOP", source=f"{source}; mask ignored", not_counted=left_out)
        for pointer, by_class in ((executed, executed_flops(self.program)), (again, recomputed_flops(self.program))):
            page.leaf(
                pointer,
                sum(by_class.values()),
                unit="FLOP",
                source="matrix products and attention of every action of every rank",
                not_counted=left_out,
                spelled=_sum_of(by_class),
            )
        page.leaf(
            "/peak_flops_per_s_per_device", self.device.peak(fmt), unit="FLOP/s", source=f"{fmt}, dense: {self.said('peak_flops_per_s')}"
        )
        most: dict[str, Number | str] = {
            "step": "/step_s",
            "devices": "/plan/num_devices",
            "peak": "/peak_flops_per_s_per_device",
        }
        share = "{} / (step * devices * peak)"
        page.figure("/mfu", share.format("flops"), {"flops": "/model_flops_per_step", **most}, source="causal mask as half, no recompute")
        page.figure("/hfu", share.format("flops"), {"flops": executed, **most}, source="everything that is executed, causal mask as half")
        page.figure("/conventions/causal", "mfu", {"mfu": "/mfu"}, source="causal mask counted as half, no recompute")
        page.figure("/conventions/full", share.format("flops"), {"flops": full, **most}, source="causal mask ignored, no recompute")
        page.figure(
            "/conventions/full_with_recompute",
            share.format("(flops + again)"),
            {"flops": full, "again": again, **most},
            source="causal mask ignored, recomputed passes included",
        )

    def cost(self) -> None:
        """Of the whole run where the plan says how many tokens it sees, else of one step."""
        page, plan = self.page, self.plan
        run = plan.run.tokens is not None
        page.text("/cost/covers", "run" if run else "step")
        if run:
            page.figure(
                "/cost/num_steps",
                "-(-tokens // per_step)",
                {"tokens": plan.run.tokens or 0, "per_step": "/plan/tokens_per_step"},
                source="plan: run.tokens",
            )
        else:
            page.leaf("/cost/num_steps", 1, source="the plan names no run.tokens")
        work: dict[str, Number | str] = {"steps": "/cost/num_steps", "step": "/step_s"}
        page.figure("/cost/device_hours", "steps * step * devices / 3600", {**work, "devices": "/plan/num_devices"}, unit="h")
        if run:
            page.figure("/cost/days", "steps * step / 86400", work, unit="d", not_counted="failures and restarts")
        else:
            page.text("/cost/days", None)
        hours: dict[str, Number | str] = {"hours": "/cost/device_hours"}
        price, watts = plan.cluster.usd_per_device_hour, plan.cluster.watts
        self.maybe("/cost/usd", "hours * usd_per_hour", hours, "usd_per_hour", price, "price of the cluster")
        self.maybe("/cost/kwh", "hours * watts / 1000", hours, "watts", watts, f"power of a device: {self.said('watts')}")

    def maybe(self, pointer: str, formula: str, inputs: Mapping[str, Number | str], name: str, value: Number | None, source: str) -> None:
        """A figure, or null where a value is unknown."""
        if value is None:
            self.page.text(pointer, None)
        else:
            self.page.figure(pointer, formula, {**inputs, name: value}, source=source)

    # --- memory ------------------------------------------------------------------------------------------------------------------------

    def memories(self) -> None:
        """Peaks, the verdict, and every role's parts."""
        page, memory = self.page, self.memory
        peaks = [f"/memory/roles/{number}/peak_bytes" for number in range(len(memory.roles))]
        page.leaf(
            "/memory/peak_bytes",
            memory.peak_bytes,
            unit="B",
            source="the fullest role",
            spelled=lambda: (
                (f"max({', '.join(names := [f'role_{n}' for n in range(len(peaks))])})", dict(zip(names, peaks, strict=True)))
                if len(peaks) > 1
                else ("peak", {"peak": peaks[0]})
            ),
        )
        page.figure(
            "/memory/reserved_bytes",
            "ceil(peak * factor) + context",
            {"peak": "/memory/peak_bytes", "factor": memory.allocator_factor, "context": memory.context_bytes},
            unit="B",
            source="blocks of PyTorch's allocator over what it hands out, and the driver's context: see assumptions",
        )
        page.leaf("/memory/capacity_bytes", memory.capacity_bytes, unit="B", source=self.said("memory_bytes"))
        page.text("/memory/verdict", memory.verdict)
        page.text("/memory/roles", [])
        for number, role in enumerate(memory.roles):
            self.role(f"/memory/roles/{number}", role)

    def role(self, here: str, role: RoleMemory) -> None:
        """One role's memory."""
        page = self.page
        page.text(here, {})
        page.text(f"{here}/role", f"pipeline[{role.position}]")
        page.leaf(f"{here}/num_ranks", role.num_ranks, source="devices over positions")
        page.leaf(
            f"{here}/peak_bytes",
            role.peak_bytes,
            unit="B",
            source="parts at the instant of the peak",
            spelled=lambda: (" + ".join(PARTS), {part: f"{here}/parts/{part}" for part in PARTS}),
        )
        page.leaf(
            f"{here}/boundary_peak_bytes",
            role.boundary_peak_bytes,
            unit="B",
            source=f"{LEDGER}, at the ends of actions",
            not_counted="what is held inside actions",
            spelled=_sum_of(role.boundary_parts),
        )
        for part in PARTS:
            page.leaf(f"{here}/parts/{part}", role.parts[part], unit="B", source=LEDGER, spelled=self.at_peak(role, part))
        for part, num_bytes in role.persistent.items():
            if num_bytes:
                page.leaf(f"{here}/persistent/{part}", num_bytes, unit="B", source=LEDGER, spelled=self.always(role, part))

    def at_peak(self, role: RoleMemory, part: str) -> Spelled:
        """The buffers of a part that are live at the peak."""

        def spelled() -> tuple[str, Mapping[str, Number | str]]:
            live = self.buffers(self.counted(role), part)
            formula, inputs = weighted(live)
            if rest := role.parts[part] - sum(count * size for count, size in live.values()):
                name = "inside_the_action" if part == "temporary" else "on_the_wire"
                formula, inputs = f"{formula} + {name}", {**inputs, name: rest}
            return formula, inputs

        return spelled

    def counted(self, role: RoleMemory) -> Counter[str]:
        """Live buffers at a role's peak, by kind."""
        if role.position not in self.live:
            self.live[role.position] = self.memory.at_peak(role.position)
        return self.live[role.position]

    def always(self, role: RoleMemory, part: str) -> Spelled:
        """The persistent buffers of a part."""
        counts = Counter(ref.tensor for _, ref in self.program.roles[role.position].persistent)
        return lambda: weighted(self.buffers(counts, part))

    def buffers(self, counts: Mapping[str, int], part: str) -> dict[str, tuple[int, int]]:
        """How many of each kind, and the size of one."""
        sizes = self.program.buffers
        return {name: (count, sizes[name].num_bytes) for name, count in counts.items() if count and sizes[name].part == part}

    # --- wire and time -----------------------------------------------------------------------------------------------------------------

    def wires(self) -> None:
        """Traffic of one rank of the critical role, by axis and operation."""
        exposed: dict[tuple[str, str], float] = defaultdict(float)
        for waited in self.simulation.waits[self.critical]:
            exposed[waited.axis, waited.op] += waited.exposed_s
        self.page.text("/wire", [])
        rows = traffic(self.program, self.critical)
        for number, row in enumerate(rows):
            self.wire(f"/wire/{number}", row, exposed.pop((row.axis, row.op), 0.0))
        for number, (key, seconds) in enumerate(exposed.items(), len(rows)):  # received only
            self.wire(f"/wire/{number}", Traffic(*key, 2, Counter()), seconds)

    def wire(self, here: str, row: Traffic, exposed_s: Seconds) -> None:
        """One kind of exchange."""
        page = self.page
        page.text(here, {})
        page.text(f"{here}/axis", row.axis)
        page.text(f"{here}/op", row.op)
        by_size = {f"of_{size}_bytes": count for size, count in row.sizes.items()}
        page.leaf(f"{here}/count", row.count, source="actions of the critical role in a step", spelled=_sum_of(by_size))
        page.leaf(
            f"{here}/payload_bytes",
            row.payload_bytes,
            unit="B",
            source="whole tensors as one rank sees them",
            spelled=lambda: weighted({f"payload_{number}": (count, size) for number, (size, count) in enumerate(row.sizes.items())}),
        )
        page.leaf(
            f"{here}/sent_bytes_per_rank",
            row.sent_bytes_per_rank,
            unit="B",
            source="ring algorithms: (P-1)/P of the payload, twice for an all_reduce, all of a send",
            spelled=lambda: row.sent_formula() if row.sizes else ("0", {}),
        )
        page.leaf(f"{here}/exposed_s", exposed_s, unit="s", source=SIMULATION, not_counted="waiting for ranks that are late")

    def time(self) -> None:
        """The critical role's step in five parts."""
        page, simulation = self.page, self.simulation
        busy = simulation.busy_s[self.critical]
        page.leaf("/time/compute_s", busy["compute"], unit="s", source=SIMULATION, spelled=lambda: total(self.by_class(updates=False)))
        wires = [f"/wire/{number}/exposed_s" for number in range(len(page.document["wire"]))]
        names = [f"wire_{number}" for number in range(len(wires))]
        page.figure("/time/exposed_wire_s", " + ".join(names) or "0.0", dict(zip(names, wires, strict=True)), unit="s", source=WAITS)
        page.text("/time/bubble_s", 0.0)  # its place
        page.leaf("/time/update_s", busy["update"], unit="s", source=SIMULATION, spelled=lambda: total(self.by_class(updates=True)))
        page.leaf("/time/offload_s", busy["offload"], unit="s", source=SIMULATION)
        page.figure(
            "/time/bubble_s",
            "step - compute - exposed - update - offload",
            {
                "step": "/step_s",
                "compute": "/time/compute_s",
                "exposed": "/time/exposed_wire_s",
                "update": "/time/update_s",
                "offload": "/time/offload_s",
            },
            unit="s",
            source="the rest: waiting for other positions",
        )

    def by_class(self, *, updates: bool) -> dict[str, float]:
        """Seconds of the critical role's Computes (or Updates) by class."""
        sums: dict[str, float] = defaultdict(float)
        runs = Counter(run.template for run in self.program.roles[self.critical].runs)
        for name, times in runs.items():
            for action, seconds in zip(self.program.templates[name], self.simulation.prices.durations[name], strict=True):
                if isinstance(action, Update if updates else Compute) and seconds:
                    sums[label(action)] += seconds * times
        return dict(sums)

    # --- assumptions -------------------------------------------------------------------------------------------------------------------

    def said(self, field: str) -> str:
        """Where the catalog has a figure of the device from."""
        source = self.device.sources.get(field)
        return f"{source.text} ({source.standing})" if source else f"catalog: {self.device.name}"

    def assumptions(self) -> None:
        """Constants, with their sources, and what is left out."""
        self.page.text("/assumptions", [])
        for number, (name, value, source) in enumerate(self.listed()):
            here = f"/assumptions/{number}"
            self.page.text(here, {})
            self.page.text(f"{here}/name", name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.page.leaf(f"{here}/value", value, source=source)
            else:
                self.page.text(f"{here}/value", value)
            self.page.text(f"{here}/source", source)

    def listed(self) -> Iterator[tuple[str, object, str]]:
        """Name, value and source of each."""
        plan, stack, device = self.plan, self.stack, self.device
        yield "stack", stack.name, f"{stack.title}: {stack.source}"
        if stack.fitted_devices and device.name not in stack.fitted_devices:
            yield "stack fitted on", ", ".join(stack.fitted_devices), f"not on {device.name}: the interval is that of an unknown stack"
        for name in _CONSTANTS:
            yield name, getattr(stack, name), f"stack {stack.name}"
        if stack.attention == "fused":
            for name in ("attention_forward_efficiency", "attention_backward_efficiency"):
                yield name, getattr(stack, name), f"stack {stack.name}"
        for name in ("memory_bytes_per_s", "scale_up_bytes_per_s", "launch_s"):
            yield name, getattr(device, name), self.said(name)
        yield "nic_bytes_per_s", plan.cluster.nic_bytes_per_s, f"cluster {plan.cluster.name}"
        precision = plan.precision.resolved(stack)
        for name in ("compute", "weights", "gradients", "master", "optimizer", "reduce"):
            yield f"precision.{name}", getattr(precision, name), "plan, or the default for its compute format"
        yield "recompute", plan.recompute.policy, "plan"
        if plan.recompute.policy == "blocks":
            yield "recompute.blocks", plan.recompute.blocks, "plan: the first blocks of each stage"
        yield "allocator_factor", self.memory.allocator_factor, "median of published readings of reserved over allocated memory"
        yield "context_bytes", self.memory.context_bytes, "driver context and libraries of one process: assumed"
        yield "fits_below", FITS_BELOW, "share of the capacity; a choice after the runs of the BLOOM engineering logs that died of memory"
        yield "fails_above", FAILS_ABOVE, "the same: five of six of those were foretold above it, two that ran just below"
        yield "critical role", f"pipeline[{self.critical}]", "the position that idles least; time and wire are its"
        for text in LEFT_OUT:
            yield "left out", text, ""


_CONSTANTS: Final = (
    "gemm_efficiency",
    "gemm_ramp_depth",
    "weight_gradient_efficiency",
    "traffic_multiplier",
    "memory_efficiency",
    "attention",
    "data_overlap_residue",
    "zero_contention",
    "tensor_exposed",
    "pipeline_exposed",
    "half_rate_bytes",
    "collective_latency_s",
    "ring_hop_s",
    "nic_efficiency",
    "accumulation_bytes",
    "host_fixed_s",
    "host_floor_s",
    "straggler_per_doubling",
    "interval",
)


def _sum_of(parts: Mapping[str, Number]) -> Spelled:
    return lambda: total(parts)


def bottleneck(document: Mapping[str, object], simulation: Simulation) -> str:
    """What takes the most time, and what is lost most, in words."""
    time: Mapping[str, float] = document["time"]  # type: ignore[assignment]
    wire: list[Mapping[str, object]] = document["wire"]  # type: ignore[assignment]
    step_s = simulation.step_s or 1.0
    shares = {name.removesuffix("_s"): seconds / step_s for name, seconds in time.items()}
    words = {
        "compute": "compute",
        "exposed_wire": "exposed wire",
        "bubble": "the pipeline's bubble",
        "update": "the optimizer",
        "offload": "offload",
    }
    first = max(shares, key=lambda name: shares[name])
    lost = max((name for name in shares if name != "compute"), key=lambda name: shares[name])
    text = f"{words[first]}, {shares[first]:.0%} of the step"
    if first != lost:
        text += f"; the largest loss is {words[lost]}, {shares[lost]:.0%}"
    if lost == "exposed_wire" and wire:
        worst = max(wire, key=lambda row: float(row["exposed_s"]))  # type: ignore[arg-type]
        text += f", most of it {worst['op']} over {worst['axis']} ({float(worst['exposed_s']) / step_s:.0%})"  # type: ignore[arg-type]
    if lost == "bubble":
        roles = simulation.program.roles
        text += f": {len(roles)} positions" if len(roles) > 1 else ""
        num_microbatches = document["plan"]["num_microbatches"]  # type: ignore[index]
        text += f", {num_microbatches} microbatches" if len(roles) > 1 else ""
    return text
