"""The catalog: every entry loads, every figure has a source, no sparse rate slips in."""

from __future__ import annotations

import dataclasses

import pytest

from trainwright.problems import PlanError
from trainwright.spec import catalog, shelf
from trainwright.spec.stack import UNKNOWN_INTERVAL

# Tensor-core rates without sparsity, TFLOP/s, from the dense columns of the vendors' data sheets.
DENSE_TFLOPS = {
    "v100": ("fp16", 125),
    "a100-40g": ("bf16", 312),
    "a100-80g": ("bf16", 312),
    "h100-sxm": ("bf16", 989),
    "h100-pcie": ("bf16", 756),
    "h800": ("bf16", 989),
    "h200": ("bf16", 989),
    "b200": ("bf16", 2250),
    "gb200": ("bf16", 2500),
    "mi300x": ("bf16", 1307.4),
    "l4": ("bf16", 121),
    "l40s": ("bf16", 362.05),
    "rtx-4090": ("bf16", 165.2),
    "tpu-v5p": ("bf16", 459),
}
UNSOURCED = {"name", "title", "vendor", "sources"}


@pytest.mark.parametrize("name", catalog.model_names())
def test_a_model_of_the_catalog_can_be_built_and_has_a_source(name):
    """No problems, and its name is the file's."""
    model = catalog.model(name)

    assert model.name == name
    assert model.source
    assert not list(model.check())


@pytest.mark.parametrize("name", catalog.device_names())
def test_every_figure_of_a_device_has_a_source(name):
    """Verified or not, it says where to look; what a device does not do (`spans_nodes = false`) needs none."""
    device = catalog.device(name)
    stated = (field.name for field in dataclasses.fields(device) if getattr(device, field.name) not in (None, ""))
    figures = {name for name in stated if getattr(device, name) is not False} - UNSOURCED

    assert figures <= set(device.sources)
    assert set(device.sources) <= figures


@pytest.mark.parametrize("name", [name for name in catalog.device_names() if name != "local"])
def test_tensor_rates_are_the_dense_ones(name):
    """A new device needs a row here, read from the dense column."""
    fmt, tflops = DENSE_TFLOPS[name]
    peaks = catalog.device(name).peak_flops_per_s

    assert tflops == pytest.approx(peaks[fmt] / 1e12)
    assert peaks.get("fp8", 0) <= 2.05 * peaks[fmt]


@pytest.mark.parametrize("name", catalog.device_names())
def test_devices_are_in_the_units_their_fields_name(name):
    """A factor of 8 or 1000 would leave these ranges."""
    device = catalog.device(name)

    assert 2**30 <= device.memory_bytes <= 2**39
    assert 1e9 <= device.memory_bytes_per_s <= 1e13
    assert 1e9 <= device.scale_up_bytes_per_s <= 1e12
    assert 0 <= device.nic_bytes_per_s <= device.scale_up_bytes_per_s
    assert 1e-7 <= device.launch_s <= 1e-3


@pytest.mark.parametrize("name", catalog.stack_names())
def test_a_stack_says_where_its_constants_come_from(name):
    """On every device that it has constants for."""
    stack = catalog.stack(name)

    assert stack.source
    assert set(stack.on_devices) | set(stack.fitted_devices) <= set(catalog.device_names())
    for device in catalog.device_names():
        on = stack.on(device)
        assert 0 < on.gemm_efficiency <= 1
        assert on.gradients in {None, "bf16", "fp32"}


def test_a_stack_on_a_device_it_was_not_fitted_on_is_as_uncertain_as_an_unknown_stack():
    """Constants do not travel."""
    stack = catalog.stack("megatron-2024")

    assert stack.on("h100-sxm").interval < UNKNOWN_INTERVAL == stack.on("b200").interval


def test_a_stack_has_constants_of_its_own_for_a_device():
    """A file's table for a device replaces the common values."""
    stack = catalog.stack("fsdp-2023")

    assert (stack.on("h100-sxm").gemm_efficiency, stack.on("a100-40g").gemm_efficiency) == (0.63, 0.73)


@pytest.mark.parametrize("name", catalog.cluster_names())
def test_a_cluster_of_the_catalog_loads(name):
    """Its name is the file's, and a domain is no larger than the cluster."""
    cluster = catalog.cluster(name)

    assert cluster.name == name
    assert 1 <= cluster.scale_up_domain <= cluster.num_devices


def test_a_rack_is_one_domain_and_a_node_is_one_domain():
    """GB200 links go beyond a tray, H100 links end at the node."""
    assert catalog.cluster("gb200-72").scale_up_domain == 72
    assert catalog.cluster("h100-64").scale_up_domain == 8


@pytest.mark.parametrize("kind", shelf.KINDS)
def test_an_unknown_name_lists_the_known_ones(kind):
    """And stands at the place that was asked about."""
    with pytest.raises(PlanError) as caught:
        getattr(catalog, kind)("no-such-thing", path="here")

    (problem,) = caught.value.problems
    assert problem.path == "here"
    assert problem.allowed == shelf.names(kind)


@pytest.mark.parametrize(("given", "meant"), [("lama-3-8b", "llama-3-8b"), ("llama_3_8b", "llama-3-8b")])
def test_a_slip_is_answered_with_the_nearest_name(given, meant):
    """What the user probably wanted."""
    with pytest.raises(PlanError) as caught:
        catalog.model(given)

    assert caught.value.problems[0].attempt == f'model.name = "{meant}"'


def test_the_beginning_of_a_name_is_enough_for_suggestions():
    """h100 is not v100; which h100 is meant is for the user to say."""
    with pytest.raises(PlanError) as caught:
        catalog.device("h100")

    assert caught.value.problems[0].attempt == 'cluster.device = "h100-pcie" or "h100-sxm"'
