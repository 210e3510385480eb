"""The published schema says what `load` takes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
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


def keys(document):
    """(table, key, what the schema says of it) of every key."""
    for name, one in [*document["$defs"].items(), (document["title"], document)]:
        yield from ((name, key, value) for key, value in one["properties"].items())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("Recompute.policy", ["none", "selective", "full", "blocks"]),
        ("Pipeline.schedule", ["1f1b", "gpipe", "interleaved"]),
        ("Zero.free", ["before-reduce", "after-reduce"]),
        ("Zero.gradients", ["sharded", "whole"]),
        ("Optimizer.name", ["adamw", "sgd"]),
        ("Optimizer.decay", ["cosine", "none"]),
        ("Precision.compute", ["fp64", "fp32", "bf16"]),
        ("Precision.master", ["fp64", "fp32", "bf16", "none"]),
        ("Context.method", ["ring"]),
    ],
)
def test_fixed_words_are_enums_and_no_others_are_allowed(path, words):
    """An editor completes them; the plan's own check refuses any other word and allows each of these."""
    table, _, key = path.partition(".")
    found = schema.schemas()["plan"]["$defs"][table]["properties"][key]

    assert words == found["enum"]
    assert "default" not in found or found["default"] in words


@pytest.mark.parametrize("name", ["plan", "cluster", "model"])
def test_a_default_is_one_that_a_file_can_hold(name):
    """TOML has no null, and a default lies within the bounds of its key."""
    for table, key, value in keys(schema.schemas()[name]):
        where = f"{table}.{key}"
        assert "null" not in json.dumps(value), where
        if "default" in value and "minimum" in value:
            assert value["minimum"] <= value["default"], where
        assert not {"$ref", "default"} <= value.keys(), where


def test_every_table_and_key_of_a_plan_says_what_it_is():
    """In a sentence that needs no look at the source."""
    plan = schema.schemas()["plan"]
    tables = {name: one["description"] for name, one in plan["$defs"].items()}

    assert not [name for name, text in tables.items() if not text or "head of the file" in text or "\n" in text]
    assert not [
        f"{name}.{key}"
        for name, key, value in keys(plan)
        if "description" not in value and "$ref" not in value and "enum" not in value and name not in {"Context", "Expert"}
    ]


@pytest.mark.parametrize("name", ["plan", "cluster", "model"])
def test_the_schemas_are_schemas(name):
    """By the meta-schema, where a validator is installed; a plan of the folder plans/ is valid."""
    jsonschema = pytest.importorskip("jsonschema")
    found = schema.schemas()[name]

    jsonschema.Draft202012Validator.check_schema(found)
    if name == "plan":
        for file in (Path(__file__).parents[3] / "plans").glob("*.toml"):
            jsonschema.Draft202012Validator(found).validate(tomllib.loads(file.read_text(encoding="utf-8")))


def test_reading_a_plan_loads_neither_torch_nor_tomlkit():
    """What a prediction does not need stays on the disk."""
    program = "import sys, trainwright.plan.load as l; l.load('gpt2'); print(sorted({'torch', 'tomlkit', 'rich'} & sys.modules.keys()))"
    environment = os.environ | {"PYTHONPATH": str(Path(schema.__file__).parents[2])}
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)

    assert answer.stdout == "[]\n"
