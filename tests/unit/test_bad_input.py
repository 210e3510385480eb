"""Bad input: each mistake is refused with what was given, what is allowed and what to try, at its line, and all of them at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainwright.plan.check import check_run
from trainwright.plan.load import load
from trainwright.problems import PlanError, Problem

GOOD = """\
# a plan that is right
[model]
name = "llama-3-8b"

[cluster]
device = "h100-sxm"
nodes = 1
devices_per_node = 8

[batch]
sequence_tokens = 8192
global_sequences = 64

[parallel]
zero = { size = 4, stage = 3 }
tensor = { size = 2, sequence = true }

[optimizer]
lr = 3e-4

[run]
data = "text:stdlib"
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A place for a plan."""
    return tmp_path / "plan.toml"


def refused(file: Path | str, text: str | bytes | None = None, overrides: dict[str, object] | None = None) -> tuple[Problem, ...]:
    """The problems of a plan that must not load; every one says where it is."""
    if isinstance(file, Path) and text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PlanError) as caught:
        load(file, overrides)
    return caught.value.problems


def only(problems: tuple[Problem, ...]) -> Problem:
    """The one problem, and no second."""
    assert len(problems) == 1, "\n".join(map(str, problems))
    return problems[0]


def changed(old: str, new: str) -> str:
    """The good plan with one thing changed."""
    assert old in GOOD
    return GOOD.replace(old, new)


def line_of(text: str, piece: str) -> int:
    """Line on which a piece of the text stands."""
    return text[: text.index(piece)].count("\n") + 1


def test_the_good_plan_loads(plan_file):
    """What the other tests change one thing of is right as it stands."""
    plan_file.write_text(GOOD)

    assert load(plan_file).num_microbatches == 16


# --- the file -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_an_empty_file_is_called_empty(plan_file, text):
    """Nothing in it: say which tables there must be."""
    problem = only(refused(plan_file, text))

    assert "empty" in problem.message
    assert "[model]" in problem.allowed


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[model]\nname = llama\n", "line 2, column 8"),
        ("[model\nname = 'x'\n", "line 1, column 7"),
        ('{"model": "gpt2"}', "line 1, column 1"),
        ("[model]\nname = 'never closed", "line 2"),
        ("x = [[[[", "line 1"),
    ],
)
def test_what_is_no_toml_is_refused_with_line_and_column(plan_file, text, place):
    """The parser's own place is passed on, and the line is shown."""
    problem = only(refused(plan_file, text))

    assert "not TOML" in problem.message
    assert place in problem.message
    assert problem.file == str(plan_file)
    assert problem.line == int(re.search(r"line (\d+)", place)[1])
    assert problem.given


def test_brackets_without_end_are_refused(plan_file):
    """A text that exhausts the parser's stack is bad input, not our fault."""
    assert "deep" in only(refused(plan_file, "x = " + "[" * 50_000)).message


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"])
def test_a_byte_order_mark_is_named(plan_file, mark):
    """Editors write it unasked; the message says what to do."""
    problem = only(refused(plan_file, mark + GOOD.encode()))

    assert "byte order mark" in problem.message
    assert "without BOM" in problem.attempt
    assert problem.line == 1


def test_a_byte_that_is_not_utf8_is_placed(plan_file):
    """Latin-1 text has a line."""
    problem = only(refused(plan_file, b"[model]\n# caf\xe9\n"))

    assert (problem.line, problem.given) == (2, "byte 0xe9 at position 13")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    """A folder cannot be read, but a plan in it can."""
    (tmp_path / "inside.toml").write_text(GOOD)
    problem = only(refused(tmp_path))

    assert "is a folder" in problem.message
    assert "inside.toml" in problem.attempt


def test_a_file_that_does_not_exist_names_the_nearest(tmp_path):
    """A typo in the file's name."""
    (tmp_path / "llama.toml").write_text(GOOD)
    problem = only(refused(tmp_path / "lama.toml"))

    assert problem.attempt == str(tmp_path / "llama.toml")


def test_an_unknown_model_name_names_the_nearest():
    """A bare word is a model of the catalog or a mistake."""
    problem = only(refused("lama-3-8b"))

    assert "neither a file nor a model" in problem.message
    assert problem.attempt == "llama-3-8b"


def test_a_file_that_may_not_be_read_is_refused(plan_file, monkeypatch):
    """The operating system's reason is passed on."""
    plan_file.write_text(GOOD)

    def refuse(_self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)

    assert "Permission denied" in only(refused(plan_file)).message


def test_a_file_far_too_large_is_not_read(plan_file):
    """A data file given by mistake."""
    assert "ordinary file" in only(refused(plan_file, b"#" * 1_000_001)).message


# --- keys ---------------------------------------------------------------------------------------------------------------------------


def test_a_key_written_twice_names_both_lines(plan_file):
    """TOML forbids it; the second line is where it is noticed."""
    text = changed("lr = 3e-4", "lr = 3e-4\nlr = 1e-4")
    problem = only(refused(plan_file, text))

    assert problem.line == line_of(text, "lr = 1e-4")
    assert f"first time on line {line_of(text, 'lr = 3e-4')}" in problem.message


def test_an_axis_written_twice_names_both_lines(plan_file):
    """Two sizes for one axis: neither is taken."""
    text = changed("tensor =", "zero = { size = 2 }\ntensor =")
    problem = only(refused(plan_file, text))

    assert (problem.path, problem.line) == ("parallel.zero", line_of(text, "zero = { size = 2"))


def test_a_table_written_twice_names_both_lines(plan_file):
    """Two [optimizer] tables."""
    problem = only(refused(plan_file, GOOD + "[optimizer]\neps = 1e-8\n"))

    assert (problem.path, problem.line) == ("optimizer", GOOD.count("\n") + 1)


@pytest.mark.parametrize(
    ("old", "new", "path", "attempt"),
    [
        ("lr = 3e-4", "lrr = 3e-4", "optimizer.lrr", "optimizer.lr in place of"),
        ("[optimizer]", "[optimiser]", "optimiser", "optimizer in place of"),
        ("sequence = true", "sequense = true", "parallel.tensor.sequense", "parallel.tensor.sequence in place of"),
        ("tensor = {", "tensr = {", "parallel.tensr", "parallel.tensor in place of"),
        ("lr = 3e-4", "global_sequences = 8", "optimizer.global_sequences", "batch.global_sequences in place of"),
        ("lr = 3e-4", "qqqq = 8", "optimizer.qqqq", "leave it out"),
    ],
)
def test_an_unknown_key_names_the_nearest(plan_file, old, new, path, attempt):
    """A typo must not train for a week; and nothing is said that only follows from it."""
    text = changed(old, new)
    problem = only(refused(plan_file, text))

    assert problem.path == path
    assert problem.line == line_of(text, new)
    assert problem.attempt.startswith(attempt)


@pytest.mark.parametrize("name", ["model", "cluster", "batch"])
def test_a_missing_table_is_named(plan_file, name):
    """The three tables that every plan has."""
    problem = only(refused(plan_file, re.sub(rf"\[{name}\]\n(.+\n)+", "", GOOD)))

    assert problem.path == name
    assert f"[{name}] is missing" in problem.message


def test_a_missing_key_is_named_at_its_table(plan_file):
    """The line of the table stands for the line that is not there."""
    text = changed("sequence_tokens = 8192\n", "")
    problem = only(refused(plan_file, text))

    assert (problem.path, problem.line) == ("batch.sequence_tokens", line_of(text, "[batch]"))


# --- numbers ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says", "attempt"),
    [
        ("0", "from 1 to", "= 1"),
        ("-2", "from 1 to", "= 1"),
        ("2.5", "a fraction", "= 2"),
        ("2.0", "a whole number", "= 2"),
        ("true", "not true or false", "= 1"),
        ('"2"', "not text", "= 2"),
        ("1000000000000000000", "from 1 to", "= 1"),
        ("1" + "0" * 400, "from 1 to", "= 1"),
        ("nan", "nan", "= 1"),
        ("inf", "inf", "= 1"),
        ("[2]", "not an array", "= 1"),
        ("{ a = 1 }", "not a table", "= 1"),
    ],
)
@pytest.mark.parametrize("axis", ["tensor", "zero"])
def test_a_size_that_is_no_count_is_refused(plan_file, axis, given, says, attempt):
    """Strictly: nothing is converted, rounded or guessed."""
    text = re.sub(rf"({axis} = {{ size =) \d", rf"\1 {given}", GOOD)
    problem = only(refused(plan_file, text))

    assert problem.path == f"parallel.{axis}.size"
    assert problem.line == line_of(text, f"{axis} =")
    assert says in problem.message
    assert problem.attempt == f"parallel.{axis}.size {attempt}"
    assert "whole number from 1" in problem.allowed


@pytest.mark.parametrize(
    "path", ["batch.sequence_tokens", "batch.global_sequences", "cluster.nodes", "cluster.devices_per_node", "run.steps"]
)
@pytest.mark.parametrize("given", ["0", "-1", "0.5", "true", '"8"', "1000000000000000000"])
def test_every_count_is_strict(plan_file, path, given):
    """Batch, cluster and run as much as the axes."""
    plan_file.write_text(GOOD)

    assert path in {problem.path for problem in refused(plan_file, overrides={path: given})}


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "momentum", "min_lr_fraction", "clip_norm"])
@pytest.mark.parametrize("given", ["nan", "inf", "-inf", "1e400", "true", '"1"', "-1.0"])
def test_a_number_that_makes_no_sense_is_refused(plan_file, name, given):
    """NaN, infinity, truth, text and negative numbers, in every constant of the optimizer."""
    text = changed("lr = 3e-4", f"{name} = {given}")
    problem = only(refused(plan_file, text))

    assert (problem.path, problem.line) == (f"optimizer.{name}", line_of(text, f"{name} = {given}"))
    assert problem.allowed
    assert problem.attempt


def test_an_amount_without_its_unit_says_why_it_is_ambiguous(plan_file):
    """80G may be 80 GB or 80 GiB."""
    text = GOOD + '[recompute]\nbudget = "80G"\n'
    problem = only(refused(plan_file, text))

    assert "ambiguous" in problem.message
    assert "80 GiB" in problem.attempt
    assert "80 GB" in problem.attempt
    assert problem.line == line_of(text, "budget")


def test_a_rate_without_its_unit_is_refused(plan_file):
    """The same for a bandwidth, which the catalog's reader looks at."""
    text = changed("nodes = 1", 'nodes = 1\nnic_bytes_per_s = "400G"')
    problem = only(refused(plan_file, text))

    assert (problem.path, problem.line) == ("cluster.nic_bytes_per_s", line_of(text, "nic"))
    assert "ambiguous" in problem.message


# --- what does not fit together -----------------------------------------------------------------------------------------------------


def test_a_product_that_is_not_the_number_of_devices_says_both(plan_file):
    """16 ranks on 8 devices: change zero, the axis that costs least to change."""
    problem = only(refused(plan_file, changed("zero = { size = 4", "zero = { size = 8")))

    assert "16 ranks (zero 8 x tensor 2)" in problem.message
    assert "8 devices" in problem.message
    assert problem.attempt == "parallel.zero.size = 4"


@pytest.mark.parametrize(
    ("model", "size", "says", "allowed"),
    [
        ("llama-3-8b", 16, "8 key-value heads", (1, 2, 4, 8)),
        ("gpt2", 5, "12 heads and the 12 key-value heads", (1, 2, 3, 4, 6, 12)),
        ("tiny-llama-2m", 4, "6 heads and the 2 key-value heads", (1, 2)),
    ],
)
def test_heads_that_do_not_divide_list_the_sizes_that_work(plan_file, model, size, says, allowed):
    """Heads, key-value heads and the feed-forward width, in one message."""
    text = changed("llama-3-8b", model)
    problems = refused(plan_file, text, {"parallel.tensor.size": size, "parallel.tensor.sequence": False, "batch.sequence_tokens": 64})
    problem = next(one for one in problems if one.path == "parallel.tensor.size")

    assert says in problem.message
    assert problem.allowed == allowed


def test_layers_that_cannot_be_cut_list_the_sizes_that_can(plan_file):
    """Five positions for 32 layers."""
    problems = refused(plan_file, changed("zero = {", "pipeline = { size = 5 }\nzero = {"))
    problem = next(one for one in problems if one.path == "parallel.pipeline.size")

    assert "5 does not divide the 32 layers" in problem.message
    assert problem.allowed == (1, 2, 4, 8, 16, 17, 32)
    assert "layers = [...]" in problem.attempt


@pytest.mark.parametrize("layers", ["[16, 15]", "[32]", "[16, 8, 8]", "[33, 1]"])
def test_layers_given_by_hand_add_up(plan_file, layers):
    """One number a stage, and all blocks."""
    text = changed("zero = { size = 4", f"pipeline = {{ size = 2, layers = {layers} }}\nzero = {{ size = 2")
    problem = only(refused(plan_file, text))

    assert problem.path == "parallel.pipeline.layers"
    assert problem.attempt == "parallel.pipeline.layers = [16, 16]"


@pytest.mark.parametrize("layers", ["[0, 32]", "[true, 31]", "[1.5, 30]", '"16,16"'])
def test_layers_given_by_hand_are_counts(plan_file, layers):
    """Every stage holds at least one block."""
    text = changed("zero = { size = 4", f"pipeline = {{ size = 2, layers = {layers} }}\nzero = {{ size = 2")

    assert all(problem.path.startswith("parallel.pipeline.layers") for problem in refused(plan_file, text))


@pytest.mark.parametrize(
    ("sequences", "says", "attempt"), [(63, "no whole number", 64), (2, "fewer than one microbatch", 4), (66, "no whole", 64)]
)
def test_a_batch_that_does_not_divide_names_the_next_that_does(plan_file, sequences, says, attempt):
    """M must be a whole number, and at least 1."""
    problem = only(refused(plan_file, changed("global_sequences = 64", f"global_sequences = {sequences}")))

    assert says in problem.message
    assert problem.attempt == f"batch.global_sequences = {attempt}"
    assert "multiples of 4" in problem.allowed


def test_a_sequence_that_does_not_divide_under_sequence_parallelism_is_refused(plan_file):
    """Each rank of the tensor axis takes an equal piece."""
    problem = only(refused(plan_file, changed("sequence_tokens = 8192", "sequence_tokens = 8191")))

    assert problem.path == "batch.sequence_tokens"
    assert problem.attempt == "batch.sequence_tokens = 8190, or parallel.tensor.sequence = false"


def test_a_sequence_longer_than_learned_positions_is_refused(plan_file):
    """GPT-2 has 1,024."""
    problem = only(refused(plan_file, changed("llama-3-8b", "gpt2")))

    assert problem.attempt == "batch.sequence_tokens = 1024"


def test_an_unknown_schedule_names_the_nearest(plan_file):
    """From the registry of schedules."""
    text = changed("zero = { size = 4", 'pipeline = { size = 2, schedule = "1f1c" }\nzero = { size = 2')
    problem = only(refused(plan_file, text))

    assert problem.attempt == 'parallel.pipeline.schedule = "1f1b"'


def test_chunks_need_a_schedule_that_uses_them(plan_file):
    """1f1b has one chunk a position; the schedule itself says so."""
    text = changed("zero = { size = 4", "pipeline = { size = 2, chunks = 2 }\nzero = { size = 2")
    problem = only(refused(plan_file, text))

    assert problem.path == "parallel.pipeline"
    assert "chunks = 1" in problem.attempt


def test_the_blocks_policy_needs_a_number(plan_file):
    """`policy = "blocks"` alone says nothing."""
    text = GOOD + '[recompute]\npolicy = "blocks"\n'
    problem = only(refused(plan_file, text))

    assert (problem.path, problem.line) == ("recompute.blocks", line_of(text, "[recompute]"))


def test_interleaved_needs_whole_groups_of_microbatches(plan_file):
    """Microbatches in groups of the pipeline size."""
    text = changed("zero = { size = 4", 'pipeline = { size = 2, schedule = "interleaved" }\nzero = { size = 2').replace("= 64", "= 62")
    problem = only(refused(plan_file, text))

    assert "31 is not a multiple" in problem.message


@pytest.mark.parametrize(
    ("setting", "given", "says"),
    [
        ("parallel.zero.stage", "4", "from 1 to 3"),
        ("parallel.zero.stage", "0", "from 1 to 3"),
        ("parallel.context.size", "2", "not landed"),
        ("parallel.expert.size", "2", "not landed"),
        ("precision.compute", "fp16", "not landed"),
        ("precision.weights", "bf17", "not a number format"),
        ("offload.optimizer", "true", "not landed"),
        ("recompute.budget", '"60 GiB"', "not landed"),
        ("model.module", "mine:make", "not be planned yet"),
        ("recompute.policy", "selectiv", "not one of"),
        ("parallel.zero.free", "never", "not one of"),
        ("parallel.zero.gradients", "half", "not one of"),
        ("recompute.blocks", "33", "has 32"),
        ("optimizer.name", "adam", "adam"),
        ("cluster.stack", "megatron", "no stack"),
        ("cluster.device", "h100", "no device"),
        ("model.name", "llama-3", "no model"),
        ("model.config", "nowhere/config.json", "does not exist"),
        ("run.validation_fraction", "1.0", "validation"),
        ("run.data", "corpus", "data"),
    ],
)
def test_a_setting_that_cannot_be_had_says_so(plan_file, setting, given, says):
    """Options that do not exist, and those that have not landed yet; from the command line, so without a line."""
    plan_file.write_text(GOOD)
    problems = refused(plan_file, overrides={f"--{setting}": given})
    problem = next(one for one in problems if (one.path or "").startswith(setting))

    assert says in problem.message.replace("cannot", "not")
    assert (problem.file, problem.line) == ("command line", None)


def test_two_ways_to_name_a_model_are_one_too_many(plan_file):
    """name, config, module: one of them."""
    text = changed('name = "llama-3-8b"', 'name = "llama-3-8b"\nconfig = "config.json"')
    problem = only(refused(plan_file, text))

    assert "name and config" in problem.message
    assert problem.line == line_of(text, "config =")


def test_a_mistake_inside_the_config_names_that_file(plan_file, tmp_path):
    """The problem stands where the mistake is."""
    (tmp_path / "config.json").write_text('{\n"architectures": ["LlamaForCausalLM"],\n"hidden_size": 0\n}\n')
    problems = refused(plan_file, changed('name = "llama-3-8b"', 'config = "config.json"'))

    assert {problem.file for problem in problems} == {str(tmp_path / "config.json")}
    assert 3 in {problem.line for problem in problems}


def test_a_mistake_inside_the_cluster_file_names_that_file(plan_file, tmp_path):
    """The same for [cluster] file."""
    (tmp_path / "cluster.toml").write_text('device = "h100-sxm"\nnodes = 0\ndevices_per_node = 8\n')
    text = re.sub(r"(\[cluster\]\n)(.+\n)+", r'\1file = "cluster.toml"\n', GOOD)
    problem = only(refused(plan_file, text))

    assert (problem.file, problem.line) == (str(tmp_path / "cluster.toml"), 2)


# --- all at once --------------------------------------------------------------------------------------------------------------------


def test_every_problem_comes_at_once_in_the_order_of_the_file(plan_file):
    """Names, types, ranges and laws between tables, each at its own line."""
    text = """\
[model]
name = "gpt2"
[cluster]
device = "h100-sxm"
nodes = 1
devices_per_node = 8
[batch]
sequence_tokens = 2048
global_sequences = 63
[parallel]
zero = { size = 4, stge = 2 }
tensor.size = 5
[optimizer]
lr = nan
betas = [0.9, 1.5]
[run]
seed = "1"
"""
    found = {problem.path: problem.line for problem in refused(plan_file, text)}

    assert found == {
        "batch.sequence_tokens": 8,
        "batch.global_sequences": 9,
        "parallel": 10,
        "parallel.zero.stge": 11,
        "parallel.tensor.size": 12,
        "optimizer.lr": 14,
        "optimizer.betas[1]": 15,
        "run.seed": 17,
    }
    assert list(found.values()) == sorted(found.values())


def test_a_wrong_setting_hides_no_other_and_brings_no_second(plan_file):
    """A size that is no number does not also make the product wrong; a batch that does not divide is still found."""
    text = changed("size = 2, sequence", 'size = "2", sequence').replace("global_sequences = 64", "global_sequences = 63")

    assert [problem.path for problem in refused(plan_file, text)] == ["batch.global_sequences", "parallel.tensor.size"]


def test_a_refused_plan_writes_nothing(plan_file, tmp_path):
    """Reading a plan leaves the folder as it was."""
    refused(plan_file, GOOD + '[recompute]\nbudget = "80G"\n')

    assert list(tmp_path.iterdir()) == [plan_file]


# --- the files of a run -------------------------------------------------------------------------------------------------------------


def run_problem(plan_file: Path, text: str) -> Problem:
    """The one problem that a run would meet."""
    plan_file.write_text(text)
    return only(tuple(check_run(load(plan_file))))


def test_the_standard_library_is_always_there(plan_file):
    """text:stdlib needs no file of the user's."""
    plan_file.write_text(GOOD)

    assert list(check_run(load(plan_file))) == []


def test_a_corpus_that_does_not_exist_is_refused(plan_file, tmp_path):
    """The path is relative to the plan file, and shown in full."""
    problem = run_problem(plan_file, changed("text:stdlib", "text:corpus/"))

    assert str(tmp_path / "corpus") in problem.message
    assert "does not exist" in problem.message


def test_a_corpus_that_may_not_be_read_is_refused(plan_file, tmp_path, monkeypatch):
    """Permissions are asked, not tried."""
    (tmp_path / "corpus.txt").write_text("a" * 10_000)
    monkeypatch.setattr("os.access", lambda *_: False)

    assert "may not be read" in run_problem(plan_file, changed("text:stdlib", "text:corpus.txt")).message


@pytest.mark.parametrize(("num_bytes", "problems"), [(8192, 1), (8193, 0), (0, 1)])
def test_a_corpus_needs_one_sequence_and_the_token_after_it(plan_file, tmp_path, num_bytes, problems):
    """8,192 tokens and the one to predict."""
    (tmp_path / "corpus.txt").write_text("a" * num_bytes)
    plan_file.write_text(changed("text:stdlib", "text:corpus.txt"))
    found = list(check_run(load(plan_file)))

    assert len(found) == problems
    assert all(f"has {num_bytes} bytes" in problem.message for problem in found)


def test_the_files_of_a_folder_are_one_corpus(plan_file, tmp_path):
    """Folders within folders count."""
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    for name in ("a.txt", "deep/b.txt"):
        (tmp_path / "corpus" / name).write_text("a" * 4097)
    plan_file.write_text(changed("text:stdlib", "text:corpus"))

    assert list(check_run(load(plan_file))) == []


def test_a_checkpoint_folder_below_a_file_is_refused(plan_file, tmp_path):
    """A folder cannot be made inside a file; nothing is made to find that out."""
    problem = run_problem(plan_file, GOOD + 'checkpoint = { every = 5, folder = "plan.toml/inside" }\n')

    assert "is not a folder" in problem.message
    assert list(tmp_path.iterdir()) == [plan_file]


def test_a_checkpoint_folder_that_may_not_be_written_is_refused(plan_file, monkeypatch):
    """Nor is a permission tried out."""
    monkeypatch.setattr("os.access", lambda *_: False)
    problem = run_problem(plan_file, GOOD + "checkpoint = { every = 5 }\n")

    assert "may not be written" in problem.message


def test_a_checkpoint_folder_that_can_be_made_is_not_made(plan_file, tmp_path):
    """Looking is enough."""
    plan_file.write_text(GOOD + 'checkpoint = { every = 5, folder = "a/b" }\n')

    assert list(check_run(load(plan_file))) == []
    assert list(tmp_path.iterdir()) == [plan_file]
