import json
import zlib

import pytest
import torch
from safetensors.torch import load_file

from trainwright.engine import checkpoint
from trainwright.engine.world import RankFailed, run_processes, run_threads
from trainwright.problems import PlanError


def state(rank, salt=0):
    """Tensors of every kind that a run may keep, odd ones among them."""
    generator = torch.Generator().manual_seed(1_000 * salt + rank)
    drawn = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    return {
        "weights": drawn,
        "half": drawn.to(torch.bfloat16),
        "single": drawn.to(torch.float32)[:, 1],
        "turned": drawn.t(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(3 + rank),
        "flags": drawn > 0,
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def same_bits(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and one[name].contiguous().view(-1).view(torch.uint8).equal(other[name].contiguous().view(-1).view(torch.uint8))
        for name in one
    )


def save(folder, step=1, num_ranks=2, keep=3):
    return run_threads(
        lambda world: checkpoint.save(world, folder, step, state(world.rank, step), {"seed": 7, "step": step}, keep=keep), num_ranks
    )[0]


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_what_is_saved_comes_back_to_the_bit(tmp_path, run):
    """Every rank its own tensors, of every type, with the facts of the run."""

    def body(world):
        place = checkpoint.save(world, tmp_path / "deep" / "down", 5, state(world.rank), {"cursor": [5, 40]})
        loaded = checkpoint.load(world, tmp_path / "deep" / "down")
        return same_bits(state(world.rank), loaded.tensors), loaded.step, loaded.meta, place == loaded.folder

    assert [(True, 5, {"cursor": [5, 40]}, True)] * 2 == run(body, 2)


def test_shards_are_safetensors_files(tmp_path):
    """The library reads what is written here."""
    place = save(tmp_path)

    for rank in range(2):
        assert same_bits(state(rank, 1), load_file(place / f"rank-{rank:05d}.safetensors"))


def test_the_newest_are_kept(tmp_path):
    """Three of five, and nothing else is left in the folder."""
    for step in (1, 2, 3, 10, 11):
        save(tmp_path, step)

    assert [3, 10, 11] == checkpoint.steps(tmp_path)
    assert 11 == checkpoint.latest(tmp_path)
    assert {f"step-{step:09d}" for step in (3, 10, 11)} == {path.name for path in tmp_path.iterdir()}


def test_an_empty_place_has_no_checkpoint(tmp_path):
    """Neither has a folder that does not exist."""
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None
    with pytest.raises(RankFailed, match="no such checkpoint") as caught:
        run_threads(lambda world: checkpoint.load(world, tmp_path), 1)
    assert isinstance(caught.value.__cause__, PlanError)


def test_a_save_that_was_killed_is_not_a_checkpoint(tmp_path):
    """What is there without a manifest, or under a draft's name, is passed over; the next save clears drafts away."""
    save(tmp_path, 1)
    draft = tmp_path / ".saving-step-000000002"
    draft.mkdir()
    (draft / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / "step-000000009").mkdir()

    assert 1 == checkpoint.latest(tmp_path)
    save(tmp_path, 2)
    assert not draft.exists()
    assert 2 == checkpoint.latest(tmp_path)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.999])
def test_a_flipped_bit_is_found_and_the_file_named(tmp_path, where):
    """Wherever it is: header, data or end."""
    shard = save(tmp_path) / "rank-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[int(where * len(content))] ^= 0x10
    shard.write_bytes(content)

    with pytest.raises(RankFailed) as caught:
        run_threads(lambda world: checkpoint.load(world, tmp_path), 2)
    said = _problems(tmp_path, 2)
    assert isinstance(caught.value.__cause__, PlanError)
    assert any(problem.file == str(shard) and "damaged" in problem.message for problem in said)


def _problems(folder, num_ranks):
    """What each rank says of a checkpoint that cannot be loaded."""

    def body(world):
        try:
            checkpoint.load(world, folder)
        except PlanError as error:
            return error.problems[0]
        raise AssertionError

    return run_threads(body, num_ranks)


def test_a_shard_that_is_short_or_missing_is_found(tmp_path):
    """Every rank tells the damage, with its file: the user sees the cause, whichever rank is heard first."""
    shard = save(tmp_path) / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    messages = [problem.message for problem in _problems(tmp_path, 2)]
    assert "bytes" in messages[0]
    assert messages[0] == messages[1]

    shard.unlink()
    assert "No such file" in _problems(tmp_path, 2)[0].message


@pytest.mark.parametrize("change", [lambda text: text.replace('"seed": 7', '"seed": 8'), lambda text: text[:-9], lambda _text: "[]"])
def test_a_changed_manifest_is_found(tmp_path, change):
    """The manifest vouches for the shards, so it has a checksum of its own."""
    manifest = save(tmp_path) / "manifest.json"
    before = manifest.read_text()
    manifest.write_text(change(before))

    assert before != manifest.read_text()
    assert {str(manifest)} == {problem.file for problem in _problems(tmp_path, 2)}


def test_another_number_of_ranks_is_refused(tmp_path):
    """Both numbers are named."""
    save(tmp_path, num_ranks=2)

    assert {"the checkpoint was saved by 2 ranks and cannot be resumed by 3"} == {problem.message for problem in _problems(tmp_path, 3)}


def test_a_checkpoint_never_changes(tmp_path):
    """Saving a step again is a problem on every rank, and what is there stays."""
    place = save(tmp_path)
    before = (place / "manifest.json").read_bytes()

    def body(world):
        try:
            checkpoint.save(world, tmp_path, 1, {}, {})
        except PlanError as error:
            return error.problems[0].message
        raise AssertionError

    assert ["step-000000001 is there already, and a checkpoint never changes"] * 2 == run_threads(body, 2)
    assert before == (place / "manifest.json").read_bytes()


def test_a_folder_that_cannot_be_written_is_a_problem_before_anything_is_trained(tmp_path):
    """A file stands where the folder should be; a run as root may write anywhere else."""
    (tmp_path / "file").write_text("")

    with pytest.raises(PlanError, match="the checkpoint folder cannot be written") as caught:
        checkpoint.prepare(tmp_path / "file" / "deeper")
    assert "run.checkpoint.folder" == caught.value.problems[0].path
    with pytest.raises(RankFailed, match="cannot be written"):
        save(tmp_path / "file" / "deeper")
    checkpoint.prepare(tmp_path / "fine")
    assert [] == list((tmp_path / "fine").iterdir())


def test_one_rank_that_cannot_write_stops_all(tmp_path, monkeypatch):
    """A full disk on one rank: nothing is published, everybody is told."""
    write = checkpoint._write_shard

    def full(path, tensors):
        if path.name == "rank-00001.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(checkpoint, "_write_shard", full)
    with pytest.raises(RankFailed, match="No space left"):
        save(tmp_path)

    assert checkpoint.latest(tmp_path) is None


def test_the_manifest_lists_size_and_checksum_of_each_shard(tmp_path):
    """Anyone can check a checkpoint with a standard tool."""
    place = save(tmp_path)
    content = json.loads((place / "manifest.json").read_text())["content"]

    assert (1, 2, {"seed": 7, "step": 1}) == (content["step"], content["num_ranks"], content["meta"])
    for name, entry in content["files"].items():
        data = (place / name).read_bytes()
        assert {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"} == entry
