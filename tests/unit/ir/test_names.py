"""Names of places, buffers, layouts and groups print and read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.ir.layout import Group, Layout, Partial, Replicate, Residency, Shard
from trainwright.ir.ref import Ref
from trainwright.ir.site import PHASES, Site

NUMBERS = st.none() | st.integers(0, 10**6)
SEGMENTS = st.from_regex(r"[a-z_]{2,8}[0-9]?", fullmatch=True).filter(lambda word: word not in PHASES)
TAGS = st.from_regex(r"[a-z0-9.+]{1,12}", fullmatch=True)
SITES = st.builds(
    Site,
    step=NUMBERS,
    stage=NUMBERS,
    microbatch=NUMBERS,
    block=NUMBERS,
    segment=st.none() | SEGMENTS,
    phase=st.none() | st.sampled_from(PHASES),
    tag=st.none() | TAGS,
)


@given(SITES)
def test_a_site_reads_back_as_it_prints(site):
    """Parse is the inverse of str."""
    assert site == Site.parse(str(site))


@given(SITES, SITES)
def test_two_sites_that_print_alike_are_one(one, other):
    """A join on the printed site joins nothing that is different."""
    assert (one == other) == (str(one) == str(other))


@pytest.mark.parametrize("text", ["s1/what is this/fwd", "s1/core/core", "s1/b2/x-y"])
def test_what_is_no_site_is_refused(text):
    """The part that is not understood is named."""
    with pytest.raises(ValueError, match="is no part of a site"):
        Site.parse(text)


def test_a_site_of_a_template_is_filled_in_where_it_runs():
    """Blocks count from the stage's first; what the template says itself stays."""
    site = Site(block=1, segment="core", phase="bwd", tag="tensor")

    assert "s2/m3/b9.core/bwd#tensor" == str(site.at(stage=2, microbatch=3, first_block=8))
    assert "s0/m3/b1" == str(Site(stage=0, block=1).at(stage=2, microbatch=3))
    assert "b1.core/bwd#zero" == str(site.tagged("zero"))


@given(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99))
def test_a_buffer_of_a_template_is_filled_in_where_it_runs(block, microbatch, first_block):
    """What belongs to no block or to no microbatch stays so."""
    assert Ref("h1", block + first_block, microbatch) == Ref("h1", block, 0).at(microbatch, first_block)
    assert Ref("weights", block + first_block) == Ref("weights", block).at(microbatch, first_block)
    assert Ref("scalars") == Ref("scalars").at(microbatch, first_block)


PLACEMENTS = st.sampled_from([Shard(0), Shard(1), Replicate(), Partial(), Partial("max")])
AXES = st.sampled_from(["pipeline", "data", "zero", "tensor"])


@given(st.lists(st.tuples(AXES, PLACEMENTS)), st.randoms())
def test_a_layout_does_not_depend_on_the_order_in_which_it_is_said(pairs, shuffled):
    """The last word on each axis counts; Replicate is what is not said."""
    final = list(dict(pairs).items())
    layout = Layout()
    for axis, placement in pairs:
        layout = layout.on(axis, placement)
    shuffled.shuffle(final)
    again = Layout()
    for axis, placement in final:
        again = again.on(axis, placement)

    assert layout == again
    assert all(placement == layout[axis] for axis, placement in final)
    assert "replicate" not in dict(layout.axes).values()
    assert set(layout.partial_axes()) == {axis for axis, placement in final if isinstance(placement, Partial)}


def test_a_layout_prints_its_axes_and_its_residency():
    """What is gathered says nothing more."""
    assert "replicate" == str(Layout())
    assert "tensor=partial(max) zero=shard(0) sharded" == str(Layout().on("zero", Shard(0), Residency.SHARDED).on("tensor", Partial("max")))


def test_the_size_of_a_group_is_the_product_of_what_takes_part():
    """Listed coordinates count in place of the axis."""
    sizes = {"pipeline": 4, "data": 3, "tensor": 2}

    assert 6 == Group(("data", "tensor")).size(sizes)
    assert 2 == Group(("pipeline",), (("pipeline", (0, 3)),)).size(sizes)
    assert "pipeline[0,3]+tensor" == str(Group(("pipeline", "tensor"), (("pipeline", (0, 3)),)))
    assert Group(("pipeline",)).coordinates("pipeline") is None
