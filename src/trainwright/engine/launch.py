"""Where the ranks of a plan come from: forked by this process for a plan of this machine, else by torchrun."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from trainwright.engine.world import World, from_environment, is_launched, run_processes
from trainwright.plan.plan import Plan
from trainwright.problems import PlanError, Problem

Result = TypeVar("Result")


def demand_ranks(plan: Plan) -> None:
    """Raise PlanError if the ranks that the plan needs are neither there nor can be started here."""
    if is_launched():
        size = int(os.environ["WORLD_SIZE"])
        if size != plan.num_devices:
            raise PlanError(
                Problem(
                    f"torchrun started {size} processes, and the plan needs {plan.num_devices}",
                    path="WORLD_SIZE",
                    given=size,
                    allowed=f"{plan.num_devices}, the product of the sizes in [parallel]",
                    attempt="trainwright run PLAN --print-launch prints the right command",
                )
            )
    elif not plan.cluster.is_local:
        nodes = plan.cluster.num_nodes
        raise PlanError(
            Problem(
                f"the plan needs {plan.num_devices} processes on {plan.cluster.device.name}, and this is 1, not started by torchrun",
                path="cluster",
                given=f"{nodes} node{'' if nodes == 1 else 's'} of {plan.cluster.devices_per_node} {plan.cluster.device.name}",
                allowed=f"{plan.num_devices} processes started by torchrun, or a plan for the cluster local",
                attempt="trainwright run PLAN --print-launch, or --cluster.name local with sizes that this machine can hold",
            ).at(*plan.source.place("cluster"))
        )


def launch(plan: Plan, body: Callable[[World], Result]) -> Result:
    """Run `body` as every rank, and return what rank 0 (under torchrun: this rank) returned. `demand_ranks` has been asked before."""
    return body(_joined()) if is_launched() else run_processes(body, plan.num_devices)[0]


@cache
def _joined() -> World:
    """The world that torchrun describes; joined once, left at the end of the process."""
    world = from_environment()
    atexit.register(world.close)
    return world


def speaks() -> bool:
    """Whether this process tells the user: it started the ranks itself, or is the first of them."""
    return not is_launched() or os.environ["RANK"] == "0"
