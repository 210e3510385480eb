"""The published schema says what `load` takes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainwright.plan import schema
from trainwright.plan.plan import Parallel, Plan


def test_the_schemas_are_json():
    """plan, cluster and model, each closed to unknown keys."""
    schemas = json.loads(json.dumps(schema.schemas()))

    assert set(schemas) == {"plan", "cluster", "model"}
    assert all(one["additionalProperties"] is False for one in schemas.values())
    assert schemas["plan"]["required"] == ["model", "cluster", "batch"]


def test_every_table_of_a_plan_is_in_the_schema():
    """A new table of Plan is a new table of the file."""
    tables = {one.name for one in dataclasses.fields(Plan)} - {"source"}

    assert tables <= set(schema.names())
    assert {one.name for one in dataclasses.fields(Parallel)} - {"order"} == set(schema.names(("parallel",)))


@pytest.mark.parametrize("name", ["batch", "precision", "optimizer", "run"])
def test_every_field_is_a_key(name):
    """By the name it has in Python."""
    hints = {"batch": "Batch", "precision": "Precision", "optimizer": "Optimizer", "run": "RunSettings"}
    cls = getattr(schema, hints[name])

    assert {one.name for one in dataclasses.fields(cls)} == set(schema.names((name,)))


def test_reading_a_plan_loads_neither_torch_nor_tomlkit():
    """What a prediction does not need stays on the disk."""
    program = "import sys, trainwright.plan.load as l; l.load('gpt2'); print(sorted({'torch', 'tomlkit', 'rich'} & sys.modules.keys()))"
    environment = os.environ | {"PYTHONPATH": str(Path(schema.__file__).parents[2])}
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)

    assert answer.stdout == "[]\n"
