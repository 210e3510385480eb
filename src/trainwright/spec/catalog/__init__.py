"""Catalog: the models, devices, clusters and stacks that Trainwright knows by name.

An entry is a TOML file beside this one, and its name is the file's. Each carries its source.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from trainwright.spec import reading, shelf

if TYPE_CHECKING:
    from pathlib import Path

    from trainwright.spec.cluster import Cluster
    from trainwright.spec.device import Device
    from trainwright.spec.model import Model
    from trainwright.spec.stack import Stack


@cache
def model(name: str, path: str = "model.name") -> Model:
    """Return the model of that name. Raises PlanError, its Problem at `path`, for a name the catalog lacks; so do the others."""
    return reading.model_from_dict({"name": name, **shelf.table("model", name, path)})


@cache
def device(name: str, path: str = "cluster.device") -> Device:
    """Return the device of that name."""
    return reading.device_from_dict({"name": name, **shelf.table("device", name, path)})


@cache
def cluster(name: str, path: str = "cluster.name") -> Cluster:
    """Return the cluster of that name."""
    return reading.cluster_from_dict({"name": name, **shelf.table("cluster", name, path)})


@cache
def stack(name: str, path: str = "cluster.stack") -> Stack:
    """Return the stack of that name, its constants common to all devices; `Stack.on` gives those of one."""
    return reading.stack_from_dict({"name": name, **shelf.table("stack", name, path)})


def model_names() -> tuple[str, ...]:
    """Return the names of all models."""
    return shelf.names("model")


def device_names() -> tuple[str, ...]:
    """Return the names of all devices."""
    return shelf.names("device")


def cluster_names() -> tuple[str, ...]:
    """Return the names of all clusters."""
    return shelf.names("cluster")


def stack_names() -> tuple[str, ...]:
    """Return the names of all stacks."""
    return shelf.names("stack")


def hugging_face_config(name: str) -> Path:
    """Return the path of a shipped Hugging Face style config.json, such as that of llama-3-8b."""
    return shelf.FOLDER / "hf" / name / "config.json"
