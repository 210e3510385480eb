"""The commands that start a plan's ranks on its cluster. Nothing here loads torch: they can be printed on any machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from trainwright.plan.plan import Plan

PORT = 29500
"""The port of torchrun's own examples."""


def launch_commands(plan: Plan, arguments: Sequence[str]) -> list[str]:
    """The command of each node, to be run with `trainwright` installed; `arguments` are those of `trainwright run`."""
    nodes, each = plan.cluster.num_nodes, plan.cluster.devices_per_node
    tail = f"-m trainwright run {shlex.join(arguments)}"
    if nodes == 1:
        return [f"torchrun --standalone --nproc-per-node {each} {tail}"]
    return [
        f'torchrun --nnodes {nodes} --node-rank {node} --nproc-per-node {each} --master-addr "$MASTER_ADDR" --master-port {PORT} {tail}'
        for node in range(nodes)
    ]
