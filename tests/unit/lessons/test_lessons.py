"""Every lesson's figures follow from their formulas, and the reference values come out."""

from __future__ import annotations

import json

import pytest

from trainwright.ir.figure import evaluate
from trainwright.lessons import LESSONS
from trainwright.lessons.page import LANGUAGES
from trainwright.units import GIB, MIB

PARTS = list(LESSONS.parts())


def default_page(part, **changes):
    return part.page(**{each.name: each.default for each in part.INPUTS} | changes)


def figures(name, **changes):
    return {key: shown.figure.value for key, shown in default_page(LESSONS.get(name), **changes).figures.items()}


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_figure_follows_from_its_formula(name, part):
    """The value comes from the code that plans, the formula stands beside it; both agree."""
    page = default_page(part)

    assert page.name == name
    assert {key: shown.figure.value for key, shown in page.figures.items()} == {
        key: pytest.approx(evaluate(shown.figure.formula, shown.figure.inputs), rel=1e-12) for key, shown in page.figures.items()
    }


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_page_speaks_both_languages_and_says_what_it_leaves_out(name, part):
    """Title, text and omissions differ between the languages; sources are named; the document is plain JSON."""
    page = default_page(part)
    english, chinese = (json.loads(json.dumps(page.to_json(language))) for language in LANGUAGES)

    assert english["name"] == chinese["name"] == name
    for key in ("title", "text", "not_counted"):
        assert english[key]
        assert english[key] != chinese[key]
    assert english["sources"]


def test_activations_of_the_reference_shape():
    """One sequence of 8,192 tokens, 32 heads of 128, feed-forward 14,336, 16-bit."""
    values = figures("activations")

    assert 4 * GIB == values["score_matrix_bytes"]
    assert 192 * MIB == values["qkv_bytes"]
    assert 448 * MIB == values["gate_up_bytes"]
    assert 64 * MIB == values["residual_bytes"]


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 8}, {"batch": 3, "tokens": 1000}, {"element_bytes": 4}, {"element_bytes": 8, "heads": 4, "kv_heads": 2}]
)
def test_the_closed_formula_of_what_a_block_keeps_is_the_sum_of_its_ledger(changes):
    """For other shapes and formats too."""
    page = default_page(LESSONS.get("activations"), **changes)
    figure = page.figures["kept_bytes"].figure

    assert evaluate(figure.formula, figure.inputs) == figure.value == page.tables[0].rows[-1][2] == page.steps[-1].buffers["kept_bytes"]


@pytest.mark.parametrize(
    ("stages", "microbatches", "makespan", "idle"),
    [(2, 4, 10, 4), (3, 5, 14, 12), (4, 2, 10, 24), (4, 8, 22, 24), (8, 4, 22, 112), (8, 32, 78, 112), (16, 64, 158, 480)],
)
def test_pipelines_of_the_reference_shapes(stages, microbatches, makespan, idle):
    """2 (M + P - 1) ticks, 2 P (P - 1) idle slots, peaks M and min(P, M)."""
    values = figures("pipeline", stages=stages, microbatches=microbatches)

    assert [makespan, idle] == [values["makespan"], values["idle_slots"]]
    assert [microbatches, min(stages, microbatches)] == [values["peak_kept_gpipe"], values["peak_kept_1f1b"]]


def test_the_steps_of_a_pipeline_end_with_nothing_kept():
    """And never keep more than the table's peak."""
    page = default_page(LESSONS.get("pipeline"))
    most = [max(step.buffers["kept"] for step in page.steps if step.rank == rank) for rank in range(4)]
    last = [[step.buffers["kept"] for step in page.steps if step.rank == rank][-1] for rank in range(4)]

    assert [4, 3, 2, 1] == most
    assert [0, 0, 0, 0] == last


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75)])
def test_a_ring_all_reduce_moves_less_than_twice_the_payload(ranks, factor):
    """2 (P - 1)/P, and rank i owns the next chunk half-way."""
    values = figures("collectives", ranks=ranks)

    assert factor == values["ring_all_reduce_factor"]
    assert factor * 1e9 == values["ring_all_reduce_sent_bytes"]
    assert (ranks - 1) * 1e9 == values["naive_all_reduce_sent_bytes"]
    assert 1 == values["ring_owner_shift"]


def test_the_steps_of_a_collective_end_with_the_right_numbers():
    """Four ranks that begin with 10 (r + 1) + j end with the sums 100 + 4 j."""
    page = default_page(LESSONS.get("collectives"))
    ends = [step.buffers for step in page.steps if step.event.en.startswith("ring all_reduce, round 6")]

    assert [{f"c{chunk}": 100.0 + 4 * chunk for chunk in range(4)}] * 4 == ends


@pytest.mark.parametrize("ranks", [3, 4, 7])
def test_bytes_are_whole(ranks):
    """Also where the ranks do not divide the tensor; the formula gives them."""
    page = default_page(LESSONS.get("collectives"), ranks=ranks)
    sent = {name: shown.figure for name, shown in page.figures.items() if name.endswith("_bytes")}

    assert {int} == {type(figure.value) for figure in sent.values()}
    assert [figure.value for figure in sent.values()] == [evaluate(figure.formula, figure.inputs) for figure in sent.values()]


def test_figures_that_a_table_shows_are_in_the_document():
    """The text prints them once, in the table."""
    page = default_page(LESSONS.get("zero-ledger"))

    assert {"peak_keep_before_reduce", "all_gathers_release"} <= page.to_json("en")["figures"].keys()
    assert {"peak_bytes", "largest_difference"} == {name for name, shown in page.figures.items() if not shown.tabled}


def test_the_peak_of_the_ledger_is_where_the_text_says():
    """Freed after forward: backward of layer 1, with a reduced piece. Kept or gathered ahead: backward of layer 2, with both matrices."""
    ledger = LESSONS.get("zero-ledger").ledger_of
    found = {}
    for release, prefetch in ((True, 0), (True, 1), (False, 0), (False, 1)):
        entries = ledger(reshard_after_forward=release, prefetch=prefetch, free="before-reduce").entries[0]
        found[release, prefetch] = [
            (one.event.en, one.elements["gathered"], one.elements["gradients"])
            for one in entries
            if one.live == max(e.live for e in entries)
        ]

    late = [("backward of layer 2", 8, 4)]
    assert {(True, 0): [("backward of layer 1", 4, 6)], (True, 1): late, (False, 0): late, (False, 1): late} == found
