"""Stack: constants of one era of training software.

The same plan on the same devices takes different times under different software. A stack holds what differs: which attention
kernel, what overlaps, which gradient copies exist, how much of the peak the matrix products reach. Most values were fitted to a published
study; `source` names it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainwright.units import Seconds

UNKNOWN_INTERVAL: Final = 0.20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Constants of a software stack on one device.

    Where a stack's file names no value, the default below holds. The defaults were fitted once, to all published steps together
    (Narayanan et al. 2021, Korthikanti et al. 2022, the vTrain and BLOOM measurements, Mosaic llm-foundry, NVIDIA's DGX Cloud recipes): no
    single study confirms one of them. Attention: FlashAttention-2 on H100, from IBM's fms-fsdp tables. Score traffic: unfused Megatron
    attention, 2021.

    gemm_efficiency                  e: fraction of peak that a deep matrix product sustains.
    gemm_ramp_depth                  k0: a product of inner size k takes the time of k + k0: the pipes fill and drain.
    weight_gradient_efficiency       rate of the weight gradient relative to the other two products.
    traffic_multiplier               k: memory and wire traffic as a multiple of what is written in the formulas.
    memory_efficiency                fraction of peak memory rate that streaming operators reach.
    attention                        "fused" keeps no scores; "unfused" writes and reads them.
    attention_forward_efficiency     fraction of peak of a fused kernel, counting a causal mask as half.
    attention_backward_efficiency    the same for its backward, counting 2.5 times the forward work.
    unfused_attention_efficiency     rate of the two products of unfused attention relative to gemm_efficiency, mask counted in full.
    score_bytes_forward, _backward   memory traffic of unfused attention per score.
    data_overlap_window              part of the last backward under which gradient traffic hides; 0 = no overlap.
    data_overlap_residue             part of the hidden traffic that is felt all the same.
    zero_contention                  of two lanes that overlap under ZeRO, part of the shorter that is felt.
    tensor_exposed                   part of tensor-parallel traffic that is felt; 1 = nothing overlaps.
    pipeline_exposed                 the same for sends between stages.
    half_rate_bytes                  message at which a collective reaches half its rate.
    collective_latency_s             fixed cost of a collective.
    ring_hop_s                       cost per member of a ring, per collective.
    nic_efficiency                   fraction of the NIC rate that a collective reaches.
    gradients                        format of accumulated gradients under mixed precision; None = the plan's default.
    accumulation_bytes               extra memory traffic per parameter and microbatch where accumulation is not fused.
    host_fixed_s                     host time per block and pass that nothing hides.
    host_floor_s                     least time of a block and pass: the host issues no faster.
    straggler_per_doubling           slowdown for each doubling of the devices beyond 8.
    interval                         half width, as a fraction, of the interval that held 80% of held-out measurements.
    num_points                       measurements behind the fit; 0 = none.
    fitted_devices                   devices that these were taken on; on others the interval is at least that of an unknown stack.
    """

    name: str
    title: str
    source: str
    num_points: int = 0
    fitted_devices: tuple[str, ...] = ()
    gemm_efficiency: float = 0.68
    gemm_ramp_depth: int = 200
    weight_gradient_efficiency: float = 0.95
    traffic_multiplier: float = 1.0
    memory_efficiency: float = 0.85
    attention: Literal["fused", "unfused"] = "fused"
    attention_forward_efficiency: float = 0.33
    attention_backward_efficiency: float = 0.30
    unfused_attention_efficiency: float = 0.55
    score_bytes_forward: float = 13.0
    score_bytes_backward: float = 17.0
    data_overlap_window: float = 0.8
    data_overlap_residue: float = 0.1
    zero_contention: float = 0.1
    tensor_exposed: float = 1.0
    pipeline_exposed: float = 1.0
    half_rate_bytes: float = 3e6
    collective_latency_s: Seconds = 20e-6
    ring_hop_s: Seconds = 2e-6
    nic_efficiency: float = 0.85
    gradients: str | None = None
    accumulation_bytes: float = 0.0
    host_fixed_s: Seconds = 0.0
    host_floor_s: Seconds = 250e-6
    straggler_per_doubling: float = 0.005
    interval: float = UNKNOWN_INTERVAL
    on_devices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False, repr=False)

    def on(self, device: str) -> Stack:
        """Return the constants for one device: the common ones, replaced where that device has its own."""
        constants = dataclasses.replace(self, **self.on_devices.get(device, {}))
        if not self.fitted_devices or device in self.fitted_devices:
            return constants
        return dataclasses.replace(constants, interval=max(constants.interval, UNKNOWN_INTERVAL))
