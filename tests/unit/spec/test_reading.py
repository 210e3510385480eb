"""Tables of clusters and devices: read with their units, or refused with every problem at once."""

from __future__ import annotations

import pytest

from trainwright.problems import PlanError
from trainwright.spec import catalog
from trainwright.spec.reading import cluster_from_dict, device_from_dict

H100S = {"device": "h100-sxm", "nodes": 8, "devices_per_node": 8}
OWN = {
    "name": "own",
    "memory_bytes": "80 GiB",
    "memory_bytes_per_s": "3 TB/s",
    "peak_flops_per_s": {"bf16": "1 PFLOP/s"},
    "scale_up_bytes_per_s": "450 GB/s",
}


def paths(table):
    with pytest.raises(PlanError) as caught:
        cluster_from_dict(table)
    return [problem.path for problem in caught.value.problems]


def test_a_cluster_is_devices_in_nodes():
    """With the device's usual fabric and the default stack."""
    cluster = cluster_from_dict({**H100S, "usd_per_device_hour": 2.5})

    assert cluster.num_devices == 64
    assert cluster.nic_bytes_per_s == 50e9
    assert cluster.stack.name == "default"
    assert cluster.usd_per_device_hour == 2.5
    assert cluster.watts == 700


def test_a_network_given_in_bits_is_kept_in_bytes():
    """The commonest error in this field is a factor of 8."""
    assert cluster_from_dict({**H100S, "nic_bytes_per_s": "100 Gb/s"}).nic_bytes_per_s == 12.5e9


def test_a_name_alone_is_an_entry_of_the_catalog_and_the_other_keys_replace_its_values():
    """The entry's device stays."""
    cluster = cluster_from_dict({"name": "h100-64", "nodes": 2, "stack": "megatron-2024"})

    assert (16, "megatron-2024", "h100-64") == (cluster.num_devices, cluster.stack.name, cluster.name)
    assert catalog.cluster("h100-64") == cluster_from_dict({"name": "h100-64"})


def test_a_local_cluster_has_as_many_processes_as_are_asked_for():
    """One node of them."""
    cluster = catalog.cluster("local")

    assert cluster.is_local
    assert cluster.with_devices(8).num_devices == 8


def test_an_own_device_is_read_in_place():
    """A table in place of a name, with units in text."""
    device = cluster_from_dict({**H100S, "device": OWN}).device

    assert (80 * 2**30, 3e12, 1e15) == (device.memory_bytes, device.memory_bytes_per_s, device.peak("bf16"))


def test_a_device_based_on_another_differs_in_what_is_said():
    """The rest is the other's, and the name says so."""
    device = device_from_dict({"base": "h100-sxm", "memory_bytes": "96 GiB"})

    assert 96 * 2**30 == device.memory_bytes
    assert catalog.device("h100-sxm").peak_flops_per_s == device.peak_flops_per_s
    assert "changed" in device.name


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nodes": 0}, ["cluster.nodes"]),
        ({"nodes": -1, "devices_per_node": 1.5}, ["cluster.nodes", "cluster.devices_per_node"]),
        ({"nodes": True}, ["cluster.nodes"]),
        ({"nodes": "8"}, ["cluster.nodes"]),
        ({"nodes": 10**18}, ["cluster.nodes"]),
        ({"device": "h100"}, ["cluster.device"]),
        ({"device": 3}, ["cluster.device"]),
        ({"device": {**OWN, "memory_bytes": "80G"}}, ["cluster.device.memory_bytes"]),
        ({"device": {**OWN, "peak_flops_per_s": {"bf17": 1e15}}}, ["cluster.device.peak_flops_per_s.bf17"]),
        ({"device": {**OWN, "peak_flops_per_s": {}}}, ["cluster.device.peak_flops_per_s"]),
        ({"device": {"name": "own"}}, [f"cluster.device.{key}" for key in list(OWN)[1:]]),
        ({"device": {"base": "h1000"}}, ["cluster.device.base"]),
        ({"device": {**OWN, "sources": {"memory_bytes": 3}}}, ["cluster.device.sources.memory_bytes"]),
        ({"stack": "megatron-2023"}, ["cluster.stack"]),
        ({"nic_bytes_per_s": "400G"}, ["cluster.nic_bytes_per_s"]),
        ({"usd_per_device_hour": float("nan")}, ["cluster.usd_per_device_hour"]),
        ({"usd_per_device_hour": float("inf")}, ["cluster.usd_per_device_hour"]),
        ({"usd_per_gpu_hour": 2.5}, ["cluster.usd_per_gpu_hour"]),
    ],
)
def test_each_fault_of_a_cluster_is_named(change, expected):
    """At its own key, all at once."""
    assert expected == paths({**H100S, **change})


def test_missing_keys_are_named():
    """All three."""
    assert ["cluster.device", "cluster.nodes", "cluster.devices_per_node"] == paths({})


def test_an_unknown_cluster_is_named():
    """Whatever stands in the place of its name."""
    assert ["cluster.name"] == paths({"name": "h100-46"}) == paths({"name": 3})
