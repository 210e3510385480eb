"""The report: one file that asks for nothing, pictures that are exact, and each number with what it rests on."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

from trainwright.engine.outcome import Look, Measured, Outcome, Traffic
from trainwright.engine.run import Run
from trainwright.export.html import demand_writable, report, write
from trainwright.export.report import memory, pipeline, plan
from trainwright.export.report.page import BASES
from trainwright.export.report.spans import COMPUTE, busy_shares, columns, pieces, spans
from trainwright.plan.load import load, read
from trainwright.predict.predict import predict
from trainwright.problems import PlanError
from trainwright.units import show_bytes, show_seconds

PLAN = """
[model]
name = "tiny-llama-2m"
[cluster]
device = "h100-sxm"
nodes = 1
devices_per_node = 8
[batch]
sequence_tokens = 128
global_sequences = 16
[precision]
compute = "bf16"
[parallel]
pipeline = { size = 2 }
zero = { size = 2, stage = 3 }
tensor = { size = 2, sequence = true }
[recompute]
policy = "selective"
"""

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """Reads a page: tags that were opened, attributes that lead elsewhere, and whether every tag was closed in its turn."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags, self.leads, self.anchors, self.words = [], [], [], set(), []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        """An opening tag."""
        self.note(tag, attrs)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        """A tag that closes itself."""
        self.note(tag, attrs)

    def handle_endtag(self, tag):
        """A closing tag: it must be that of the innermost element."""
        assert self.stack.pop() == tag

    def handle_data(self, data):
        """Text."""
        self.words.append(data)

    def note(self, tag, attrs):
        """Keep what the tests ask about."""
        self.tags.append(tag)
        named = dict(attrs)
        assert len(named) == len(attrs), "no attribute is given twice"
        self.leads += [value for name, value in attrs if name in {"href", "src", "xlink:href", "action", "data"}]
        self.anchors |= {named["id"]} if "id" in named else set()


@pytest.fixture(scope="module")
def small():
    return predict(read(PLAN))


@pytest.fixture(scope="module")
def large():
    return predict(
        load("gpt3-175b", {"cluster.nodes": 16, "parallel.pipeline.size": 16, "parallel.tensor.size": 8, "batch.global_sequences": 64})
    )


@pytest.fixture
def ran():
    """The document of a run on two ranks, built from what the engine's own records hold."""
    local = read(PLAN.replace('device = "h100-sxm"\nnodes = 1\ndevices_per_node = 8', 'name = "local"\ndevices_per_node = 8'))
    wire = (Traffic(axis="zero", op="all_gather", count=3, payload_bytes=300, sent_bytes=150),)
    ranks = tuple(
        Measured(
            rank=rank,
            position=rank // 4,
            step_s=1.0,
            compute_s=0.7,
            exposed_wire_s=0.2,
            update_s=0.05,
            other_s=0.05,
            peak_bytes=1000 + rank,
            wire=wire,
        )
        for rank in range(8)
    )
    outcome = Outcome(
        first_step=0,
        num_steps=4,
        losses=(5.5, 4.5, math.nan, 2.5),
        step_s=(1.0, 1.0, 1.0, 1.0),
        tokens_per_step=2048,
        bytes_per_token=1.0,
        looks=(Look(step=2, loss=4.0), Look(step=4, loss=2.4)),
        unigram_entropy=3.25,
        ranks=ranks,
        folder="runs/x",
    )
    return Run(plan=local, outcome=outcome, prediction=predict(local).to_json()).to_json()


def text_of(page):
    return " ".join("".join(Reader(page).words).split())


def test_the_page_asks_for_nothing_else(small, ran):
    """No script, no address, no file: links lead to sections of the page itself, and all of them are there."""
    page = report(small, run=ran)
    reader = Reader(page)

    assert {"script", "link", "img", "iframe", "object"} & set(reader.tags) == set()
    assert {"#plan", "#pipeline", "#memory", "#run"} == set(reader.leads)
    assert {lead[1:] for lead in reader.leads} <= reader.anchors
    assert re.findall(r"https?://|url\(|@import", page) == []
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_what_a_user_wrote_stays_text():
    """Names from a plan are escaped wherever they appear."""
    prediction = predict(read(PLAN))
    named = replace(prediction.plan, model=replace(prediction.plan.model, name="<script>alert(1)</script>"))
    page = report(predict(named))

    assert "script" not in Reader(page).tags
    assert "<script>alert(1)</script>" in text_of(page)


def test_the_numbers_are_those_of_the_document(small):
    """The page shows the step, its interval, the peak of every role and every wire, as the JSON has them."""
    document, shown = small.to_json(), text_of(report(small))

    expected = [
        show_seconds(document["step_s"]),
        show_seconds(document["interval_s"]["p10"]),
        f"{document['mfu']:.1%}",
        document["memory"]["verdict"],
        document["bottleneck"],
        *(show_bytes(role["peak_bytes"]) for role in document["memory"]["roles"]),
        *(f"{row['count']:,}" for row in document["wire"]),
        *(one["source"] for one in document["assumptions"] if one["source"]),
    ]
    assert [] == [words for words in expected if words not in shown]


def test_every_card_says_what_its_number_rests_on(small, ran):
    """One of four words stands under each figure, and the page explains all four."""
    page = report(small, run=ran)

    cards = re.findall(r'<div class="card [^"]*">.*?<div class="value">.*?</div>.*?<span class="badge (\w+)"', page)
    assert len(cards) == page.count('<div class="card ')
    assert set(cards) <= set(BASES)
    assert page.index('class="bases"') > 0


def test_simulated_and_predicted_are_told_apart(small):
    """What depends on a simulated time is simulated; bytes are counted without one."""
    reasons = plan.Reasons(small)

    assert ["simulated"] * 4 == [reasons.basis(pointer) for pointer in ("/step_s", "/tokens_per_s", "/mfu", "/time/bubble_s")]
    assert ["predicted"] * 3 == [
        reasons.basis(pointer) for pointer in ("/memory/peak_bytes", "/model_flops_per_step", "/plan/num_parameters")
    ]


# --- pictures ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1])
def test_spans_are_the_events_of_the_simulation(small, position):
    """The arrays hold exactly what the simulation tells one event at a time."""
    events = [event for event in small.simulation.events() if event.position == position]
    of = spans(small.simulation, position)

    assert [event.start_s for event in events] == of.starts.tolist()
    assert [event.end_s for event in events] == of.ends.tolist()
    assert [str(event.site) for event in events] == [str(of.site(place)) for place in range(len(events))]


def test_bars_hold_all_of_the_work(small):
    """No compute is lost when actions are joined into bars, and bars of one position never overlap."""
    for role in small.program.roles:
        of = spans(small.simulation, role.position)
        bars = pieces(of, gap_s=0.0)

        busy = sum(small.simulation.busy_s[role.position].values())
        assert busy == pytest.approx(sum(one.end_s - one.start_s for one in bars))
        assert all(one.end_s <= two.start_s + 1e-12 for one, two in pairwise(bars))


def test_shares_of_columns_sum_to_the_busy_time(small):
    """However the step is cut, each class is busy for the same time; no slice is more than full."""
    of = spans(small.simulation, 0)
    shares = busy_shares(of, COMPUTE, small.step_s, 97)

    assert (shares.sum(axis=0) <= 1 + 1e-9).all()
    assert busy_shares(of, COMPUTE, small.step_s, 1)[:, 0] == pytest.approx(shares.mean(axis=1))
    assert sum(small.simulation.busy_s[0].values()) == pytest.approx(float(shares.mean(axis=1).sum()) * small.step_s)


def test_a_column_shows_what_fills_most_of_it(small):
    """With columns as narrow as actions the picture in slices is the picture in bars."""
    of = spans(small.simulation, 0)
    exact, sliced = pieces(of, gap_s=0.0), columns(of, small.step_s, 20_000)

    for kind in COMPUTE:
        true_s = sum(one.end_s - one.start_s for one in exact if one.kind == kind)
        shown_s = sum(one.end_s - one.start_s for one in sliced if one.kind == kind)
        assert true_s == pytest.approx(shown_s, abs=0.02 * small.step_s)


def test_a_large_plan_is_drawn_in_bounded_space(large):
    """16 positions with 64 microbatches each still make a page of less than a MiB."""
    page = report(large)

    assert len(page) < 2**20
    assert len(Reader(page).tags) < 12_000


def test_the_memory_picture_reaches_the_peak(small):
    """The highest column of the picture is the peak of the fullest role, to the byte, and it begins with what persists."""
    fullest = small.memory.fullest
    held = memory.inside(small, fullest.position)
    _, drawn = memory.by_column(spans(small.simulation, fullest.position), held, small.step_s)

    assert fullest.peak_bytes == int(held.sum(axis=1).max()) == int(drawn.sum(axis=1).max())
    assert fullest.persistent_bytes <= int(drawn[0].sum())


def test_memory_bars_are_as_long_as_their_bytes():
    """Against a capacity of 1,000 bytes, 250 bytes of weights are a quarter of the width."""
    picture = memory.bars([("one", {"weights": 250, "activations": 500}, 50)], 1_000)

    assert [("0%", "25%", "weights"), ("25%", "50%", "activations"), ("75%", "5%", "other")] == re.findall(
        r'<rect x="([\d.]+%)" y="[\d.]+" width="([\d.]+%)" height="[\d.]+" class="(weights|activations|other)"', picture
    )


def test_a_plan_that_does_not_fit_is_drawn_beyond_the_capacity():
    """The bar is the longest thing, and the capacity a mark inside the picture."""
    picture = memory.bars([("one", {"weights": 1_500}, 500)], 1_000)

    assert 'x1="50%" x2="50%"' in picture


def test_time_bars_share_one_scale():
    """A step of half the length is half as wide."""
    picture = plan.time_bars([("one", {"compute_s": 1.0}), ("two", {"compute_s": 0.25, "exposed_wire_s": 0.25})])

    assert ["100%", "25%", "25%"] == re.findall(r'<rect [^>]*width="([\d.]+%)"', picture)


def test_wires_are_named_by_their_axis():
    """What runs over several axes has a colour of its own."""
    assert ["wire-zero", "wire-tensor", "wire-other"] == [
        pipeline.wire_class(f"wire:{group}") for group in ("zero", "tensor", "pipeline+zero")
    ]


# --- run ---------------------------------------------------------------------------------------------------------------------------------


def test_a_run_shows_predicted_beside_measured(ran):
    """Loss against the entropy, the difference in per cent, equal where equal; a loss that is no number is left out of the curve."""
    shown = text_of(report(run=ran))

    assert "2.400 nat per byte" in shown
    assert "0.850 below the 3.250 of letter frequencies alone" in shown
    assert "NOT equal" in shown  # the bytes of the made-up ranks are not those of the plan
    assert "nan" not in report(run=ran).lower().replace("nano", "")


def test_bytes_that_the_plan_does_not_know_are_shown(ran):
    """A wire that was measured and not predicted has a row."""
    ran["measured"]["wire"].append({"axis": "context", "op": "send", "count": 1, "payload_bytes": 7, "sent_bytes_per_rank": 7})

    assert "sent: send over context" in text_of(report(run=ran))


# --- files -------------------------------------------------------------------------------------------------------------------------------


def test_a_report_that_cannot_be_written_is_a_problem(tmp_path):
    """Said before the work is done, and when it is done; nothing is left behind."""
    missing = tmp_path / "no" / "report.html"

    with pytest.raises(PlanError, match="cannot be written"):
        demand_writable(missing)
    with pytest.raises(PlanError, match="cannot be written"):
        write(missing, "text")
    with pytest.raises(PlanError, match="cannot be written"):
        demand_writable(tmp_path)
    demand_writable(tmp_path / "report.html")
    assert [] == list(tmp_path.iterdir())


def test_columns_keep_the_fullest_moment():
    """Of two actions in one slice the one that holds more is shown; the order of actions does not matter."""
    prediction = predict(read(PLAN))
    of = spans(prediction.simulation, 0)
    held = memory.inside(prediction, 0)
    moments, drawn = memory.by_column(of, held, prediction.step_s)

    assert (np.diff(moments) > 0).all()
    assert set(map(tuple, drawn.tolist())) <= set(map(tuple, held.tolist()))
