"""Where the ranks of a group sit on the cluster, and at what rate they exchange.

Ranks are placed in order: rank r in scale-up domain r // domain size. A group inside one domain exchanges at the scale-up rate; one that
leaves it is held back by the network cards of its members in the domain where it has the fewest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.links import group_bytes_per_s
from trainwright.ir.layout import Group
from trainwright.spec.cluster import Cluster
from trainwright.units import BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How one kind of group lies over the scale-up domains: its size, and the fewest members that it has in a domain it touches."""

    num_ranks: int
    members_per_domain: int

    @property
    def leaves_domain(self) -> bool:
        """Some of its traffic passes network cards."""
        return self.members_per_domain < self.num_ranks


class Fabric:
    """The links of one mesh on one cluster."""

    def __init__(self, sizes: Mapping[str, int], cluster: Cluster) -> None:
        self.sizes, self.cluster = dict(sizes), cluster
        self.axes = tuple(sizes)
        self.domain = max(1, cluster.scale_up_domain)
        self.spreads: dict[Group, Spread] = {}

    @property
    def ranks(self) -> NDArray[np.int64]:
        """Global ranks, as an array with one dimension an axis, in mesh order."""
        shape = tuple(self.sizes.values())
        return np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64).reshape(shape)

    def spread(self, group: Group) -> Spread:
        """How the groups named `group` lie; the worst of them where they differ."""
        if group not in self.spreads:
            ranks = self.ranks
            for axis, listed in group.only:
                ranks = np.take(ranks, listed, axis=self.axes.index(axis))
            dims = [self.axes.index(axis) for axis in group.axes]
            moved = np.moveaxis(ranks, dims, range(-len(dims), 0))
            num_ranks = int(np.prod(moved.shape[-len(dims) :], dtype=np.int64))
            domains = moved.reshape(-1, num_ranks) // self.domain
            inside = bool((domains == domains[:, :1]).all())
            members = num_ranks if inside else self._fewest(domains)
            self.spreads[group] = Spread(num_ranks=num_ranks, members_per_domain=members)
        return self.spreads[group]

    @staticmethod
    def _fewest(domains: NDArray[np.int64]) -> int:
        """Fewest members in any (group, domain) that has one. Members of one domain need not be neighbours in the group."""
        numbered = np.sort(domains, axis=1) + np.arange(domains.shape[0])[:, None] * (int(domains.max()) + 1)
        flat = numbered.ravel()
        bounds = np.flatnonzero(np.diff(flat)) + 1
        return int(np.diff(np.concatenate(([0], bounds, [flat.size]))).min())

    def group_bytes_per_s(self, group: Group) -> BytesPerSecond:
        """Rate at which each member sends while all do."""
        spread = self.spread(group)
        cluster = self.cluster
        if not cluster.nic_bytes_per_s:
            return cluster.device.scale_up_bytes_per_s
        return group_bytes_per_s(
            num_ranks=spread.num_ranks,
            members_per_node=spread.members_per_domain,
            domain_size=self.domain,
            scale_up_bytes_per_s=cluster.device.scale_up_bytes_per_s,
            nic_bytes_per_s=cluster.nic_bytes_per_s,
            nic_efficiency=cluster.stack.nic_efficiency,
        )

    def link_bytes_per_s(self, source: int, target: int) -> BytesPerSecond:
        """Rate between ranks of two pipeline positions that have all other coordinates in common; the slowest pair counts."""
        by_position = np.moveaxis(self.ranks, self.axes.index("pipeline"), 0).reshape(self.sizes["pipeline"], -1) // self.domain
        cluster = self.cluster
        if not cluster.nic_bytes_per_s or bool((by_position[source] == by_position[target]).all()):
            return cluster.device.scale_up_bytes_per_s
        return min(cluster.device.scale_up_bytes_per_s, cluster.nic_bytes_per_s * cluster.stack.nic_efficiency)
