"""A proof in the report: predicted and measured beside each other, and a difference that nobody can overlook."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from small_plans import small_plan
from trainwright.export.html import report
from trainwright.export.report import proof as section
from trainwright.prove.prove import prove_small

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def proof():
    return prove_small(small_plan(mesh={"pipeline": 2, "zero": 2}, compute="fp64"))


def lines_of(page):
    """Rows of the page's tables, as lists of cells."""
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def test_bytes_of_an_axis_sum_to_the_whole(proof):
    """The table by axis holds every byte of the proof once, predicted and measured."""
    rows = [row for row in lines_of(report(proof=proof)) if len(row) == 6 and row[0] in {"zero", "pipeline", "pipeline+zero"}]

    assert proof.wire.predicted_bytes == sum(int(row[3].replace(",", "")) for row in rows)
    assert proof.wire.measured_bytes == sum(int(row[4].replace(",", "")) for row in rows)
    assert {"equal"} == {row[5] for row in rows}


def test_the_curves_are_the_live_bytes(proof):
    """Predicted and measured curves begin with what persists, end there, and have their peaks where the proof has them."""
    for one in proof.reports:
        predicted, measured = section.curves(proof, one)

        assert predicted == measured
        assert [one.persistent_bytes] * 2 == [measured[0], measured[-1]]
        assert one.peak_bytes == max(measured)
        assert len(one.events) + 1 == len(measured)


def test_a_missing_byte_is_shown(proof):
    """One event that sent a byte less: the site is named with both numbers, and the curves are said to differ where memory is wrong."""
    first = proof.reports[0]
    place = next(number for number, event in enumerate(first.events) if event.sent_bytes)
    event = first.events[place]
    wrong = replace(event, sent_bytes=event.sent_bytes - 1, live_delta_bytes=event.live_delta_bytes + 8)
    events = (*first.events[:place], wrong, *first.events[place + 1 :])
    site = str(event.site.at(step=None))
    shown = replace(
        proof,
        reports=(replace(first, events=events), *proof.reports[1:]),
        wire=replace(proof.wire, wrong=((0, site, event.kind, event.sent_bytes, event.sent_bytes - 1),)),
    )
    page = report(proof=shown)

    assert "NOT equal" in page
    assert "-1" in {row[5] for row in lines_of(page) if len(row) == 6}
    assert [f"rank 0 {site}", event.kind, "1", f"{event.sent_bytes:,}", f"{event.sent_bytes - 1:,}", "wrong"] in lines_of(page)
    assert "The curves differ." in page


def test_what_was_shrunk_is_told(proof):
    """Each change has its value in the plan and its value in the proof."""
    changes = (type("Change", (), {"__str__": lambda _: "model.num_layers 32 -> 2"})(),)

    assert ["model.num_layers", "32", "2"] in lines_of(report(proof=replace(proof, changes=changes)))
