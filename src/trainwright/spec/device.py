"""Device: what one accelerator can do, each figure with its source."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainwright.units import Bytes, BytesPerSecond, Seconds

Standing = Literal["verified", "unverified"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a figure comes from.

    "verified": compared with the text named. "unverified": the text is where the figure should be found, but it was not read.
    """

    text: str
    standing: Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    memory_bytes            what a program can have in all, as PyTorch reports it; somewhat less than the vendor's round figure.
    memory_bytes_per_s      peak of its own memory.
    peak_flops_per_s        by format of the operands ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8"), dense;
                            sums in fp32 (fp64 for fp64).
    scale_up_bytes_per_s    one direction, per device, to its scale-up domain: NVLink, xGMI, ICI, or PCIe where there is nothing else.
    scale_up_domain         most devices that reach each other at that rate.
    spans_nodes             the domain goes beyond a node (a rack of GB200, a pod of TPUs).
    nic_bytes_per_s         one direction, per device, the usual fabric between domains; 0 where there is none.
    host_bytes_per_s        one direction, to the memory of its host.
    launch_s                least time of one operator, however small.
    num_processors          streaming multiprocessors, compute units or cores; None where unknown.
    watts                   board power limit; None where unknown.
    sources                 by field.
    """

    name: str
    title: str = ""
    vendor: str = ""
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerSecond
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    scale_up_bytes_per_s: BytesPerSecond
    scale_up_domain: int = 8
    nic_bytes_per_s: BytesPerSecond = 0.0
    host_bytes_per_s: BytesPerSecond = 16e9
    launch_s: Seconds = 5e-6
    watts: float | None = None
    spans_nodes: bool = False
    num_processors: int | None = None
    sources: Mapping[str, Source] = field(default_factory=dict, hash=False)

    def supports(self, fmt: str) -> bool:
        """Say whether there is a peak rate for operands of this format."""
        return fmt in self.peak_flops_per_s

    def peak(self, fmt: str) -> float:
        """Return the FLOP/s in the named format. Raises KeyError where the device has no such rate."""
        return self.peak_flops_per_s[fmt]
