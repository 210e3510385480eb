"""Cluster: devices in nodes, the software stack on them, and what they cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainwright.spec.device import Device
    from trainwright.spec.stack import Stack
    from trainwright.units import BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """num_nodes nodes of devices_per_node devices of one kind.

    nic_bytes_per_s        one direction, per device, between nodes.
    stack                  already specialised to the device (`Stack.on`).
    usd_per_device_hour    None: the price is unknown, and no money is shown.
    watts_per_device       drawn by a device with its share of host, cooling and fabric, where known; else the board limit.
    """

    name: str
    device: Device
    num_nodes: int
    devices_per_node: int
    nic_bytes_per_s: BytesPerSecond
    stack: Stack
    usd_per_device_hour: float | None = None
    watts_per_device: float | None = None
    source: str = ""

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.num_nodes * self.devices_per_node

    @property
    def scale_up_domain(self) -> int:
        """Devices that reach each other at the scale-up rate: at most those of one node, unless the domain spans nodes."""
        return min(self.device.scale_up_domain, self.num_devices if self.device.spans_nodes else self.devices_per_node)

    @property
    def watts(self) -> float | None:
        """Power of one device, where it is known."""
        return self.device.watts if self.watts_per_device is None else self.watts_per_device

    @property
    def is_local(self) -> bool:
        """The devices are processes of this machine."""
        return self.device.name == "local"

    def with_devices(self, num_devices: int) -> Cluster:
        """Return the same cluster as one node of so many devices: a local one has as many processes as the plan asks for."""
        return dataclasses.replace(self, num_nodes=1, devices_per_node=num_devices)
