"""Checkpoints: a folder a step, written beside and moved into place, so that a killed save never looks like a saved one.

    FOLDER/step-000000050/manifest.json             step, number of ranks, the caller's own facts; size and checksum of each shard
    FOLDER/step-000000050/rank-00000.safetensors    one rank's tensors
    FOLDER/.saving-step-000000100/                  a save in progress, or one that was killed; removed by the next save

Each file is written and flushed to the disk, then the folder is renamed, then the parent flushed: a step folder with a manifest is
complete, and never changes again. Loading compares every byte with the checksum. Nothing is pickled: a checkpoint cannot run code.

The shards follow the safetensors format (https://github.com/huggingface/safetensors, "Format": eight bytes of header length, a JSON
header with dtype, shape and data_offsets by name, then the data). They are written here piece by piece, so that saving needs no second
copy of the state.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.engine.gathering import told_by_all
from trainwright.problems import Json, PlanError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from trainwright.engine.world import World

SCHEMA = "trainwright/checkpoint/1"

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}
_STEP_FOLDER = re.compile(r"step-(\d{9,})")
_ALIGNMENT = 8
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a rank gets back: its own tensors, and the facts that were saved with them."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Json]
    folder: Path


def prepare(folder: Path) -> None:
    """Make the folder and write a byte into it: a run says before its first step that it could not save. PlanError if so."""
    probe = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"1")
        probe.unlink()
    except OSError as error:
        raise PlanError(_not_writable(folder, error)) from None


def steps(folder: Path) -> list[int]:
    """The steps of all complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = ((_STEP_FOLDER.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(int(match[1]) for match, path in found if match and (path / "manifest.json").is_file())


def latest(folder: Path) -> int | None:
    """The newest complete checkpoint's step, None if there is none."""
    return max(steps(folder), default=None)


def save(world: World, folder: Path, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Json], *, keep: int = 3) -> Path:
    """Write this rank's tensors as part of the checkpoint of `step`; every rank calls it. `meta`, from rank 0, is what JSON can hold.

    Older checkpoints beyond the newest `keep` are removed after the new one is in place. PlanError on all ranks if one cannot write.
    """
    final, draft = folder / _name(step), folder / f".saving-{_name(step)}"
    problem = _attempt(lambda: _begin(folder, final, draft), folder) if world.rank == 0 else None
    _agree(world, problem)
    problem = _attempt(lambda: _write_rank(draft, world.rank, tensors), folder)
    _agree(world, problem)
    if world.rank == 0:
        problem = _attempt(lambda: _publish(draft, final, _manifest(draft, world.size, step, meta), keep), folder)
    _agree(world, problem)
    return final


def load(world: World, folder: Path, step: int | None = None) -> Loaded:
    """Read this rank's part of a checkpoint, the newest if `step` is None.

    PlanError if there is none, it is damaged, or it is of another number of ranks.
    """
    found = latest(folder) if step is None else step
    place = folder / _name(found or 0)
    if found is None or not (place / "manifest.json").is_file():
        saved = ", ".join(map(str, steps(folder))) or "none"
        allowed = f"saved steps: {saved}"
        raise PlanError(Problem("there is no such checkpoint", path="run.checkpoint.folder", given=str(folder), allowed=allowed))
    manifest = _read_manifest(place / "manifest.json")
    if manifest["num_ranks"] != world.size:
        raise PlanError(
            Problem(
                f"the checkpoint was saved by {manifest['num_ranks']} ranks and cannot be resumed by {world.size}",
                file=str(place),
                allowed=f"a plan for {manifest['num_ranks']} devices",
                attempt="the plan that saved it, or a new checkpoint folder",
            )
        )
    name = _shard_name(world.rank)
    problem, tensors = None, {}
    try:
        tensors = _read_shard(place / name, manifest["files"][name])
    except PlanError as error:
        problem = error.problems[0]
    _agree(world, problem)
    return Loaded(step=manifest["step"], tensors=tensors, meta=manifest["meta"], folder=place)


def facts(folder: Path, step: int) -> dict[str, Json]:
    """The caller's own facts that were saved with the checkpoint of a step. PlanError if it is damaged."""
    return dict(_read_manifest(folder / _name(step) / "manifest.json")["meta"])


def _name(step: int) -> str:
    return f"step-{step:09d}"


def _shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _agree(world: World, problem: Problem | None) -> None:
    """Go on together or fail together: all ranks raise the problem of the first rank that has one, whoever is heard first."""
    if world.largest(0 if problem is None else 1):
        said = told_by_all(world, None if problem is None else problem.to_json())
        first: dict[str, Any] = next(one for one in said if one is not None)
        raise PlanError(Problem(attempt=first.pop("try"), **first))


def _attempt(action: Callable[[], object], folder: Path) -> Problem | None:
    try:
        action()
    except PlanError as error:
        return error.problems[0]
    except OSError as error:
        return _not_writable(folder, error)
    return None


def _not_writable(folder: Path, error: OSError) -> Problem:
    return Problem(
        f"the checkpoint folder cannot be written: {error.strerror or error}",
        path="run.checkpoint.folder",
        given=str(folder),
        allowed="a folder that this user may write, on a disk with room",
        attempt="another folder, or no run.checkpoint",
    )


def _begin(folder: Path, final: Path, draft: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if final.exists():
        message = f"{final.name} is there already, and a checkpoint never changes"
        raise PlanError(Problem(message, path="run.checkpoint.folder", given=str(folder), attempt="resume from it, or another folder"))
    for left_over in folder.glob(".saving-*"):
        shutil.rmtree(left_over)
    draft.mkdir()


def _write_rank(draft: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    path = draft / _shard_name(rank)
    num_bytes, checksum = _write_shard(path, tensors)
    _write_synced(draft / f"{path.name}.json", json.dumps({"bytes": num_bytes, "crc32": f"{checksum:08x}"}).encode())


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write one shard; return its size and checksum."""
    entries: dict[str, Json] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    checksum = 0
    with path.open("wb") as out:
        for piece in chain((len(header).to_bytes(8, "little"), header), _data(tensors)):
            out.write(piece)
            checksum = zlib.crc32(piece, checksum)
        out.flush()
        os.fsync(out.fileno())
        return out.tell(), checksum


def _data(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of all tensors in order, in pieces, without a copy of what is contiguous and on the host."""
    for tensor in tensors.values():
        flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), _CHUNK_BYTES):
            yield flat[begin : begin + _CHUNK_BYTES].numpy().data


def _manifest(draft: Path, num_ranks: int, step: int, meta: Mapping[str, Json]) -> bytes:
    files = {}
    for rank in range(num_ranks):
        note = draft / f"{_shard_name(rank)}.json"
        files[_shard_name(rank)] = json.loads(note.read_bytes())
        note.unlink()
    content = {"schema": SCHEMA, "step": step, "num_ranks": num_ranks, "files": files, "meta": dict(meta)}
    body = json.dumps(content, indent=1, sort_keys=True)
    return json.dumps({"crc32": f"{zlib.crc32(body.encode()):08x}", "content": content}, indent=1, sort_keys=True).encode()


def _publish(draft: Path, final: Path, manifest: bytes, keep: int) -> None:
    _write_synced(draft / "manifest.json", manifest)
    _sync_folder(draft)
    draft.rename(final)
    _sync_folder(final.parent)
    for step in steps(final.parent)[:-keep]:
        doomed = final.parent / f".saving-old-{_name(step)}"
        (final.parent / _name(step)).rename(doomed)
        shutil.rmtree(doomed)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        content = document["content"]
        body = json.dumps(content, indent=1, sort_keys=True)
        is_intact = document["crc32"] == f"{zlib.crc32(body.encode()):08x}" and content["schema"] == SCHEMA
    except (OSError, ValueError, KeyError, TypeError):
        is_intact = False
    if not is_intact:
        raise PlanError(_damaged(path, "its checksum does not fit its content"))
    return dict(content)


def _read_shard(path: Path, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        content = bytearray(path.stat().st_size)
        with path.open("rb") as source:
            source.readinto(content)
    except OSError as error:
        raise PlanError(_damaged(path, error.strerror or str(error))) from None
    if len(content) != expected["bytes"]:
        raise PlanError(_damaged(path, f"it has {len(content)} bytes, {expected['bytes']} were saved"))
    if f"{zlib.crc32(content):08x}" != expected["crc32"]:
        raise PlanError(_damaged(path, "its checksum does not fit its content"))
    return dict(_tensors(content))


def _tensors(content: bytearray) -> list[tuple[str, Tensor]]:
    header_length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_length])
    found = []
    for name, entry in header.items():
        begin, end = (8 + header_length + offset for offset in entry["data_offsets"])
        dtype = _DTYPE_OF[entry["dtype"]]
        value = torch.empty(entry["shape"], dtype=dtype)
        if end > begin:
            value.view(-1).view(torch.uint8).copy_(torch.frombuffer(content, dtype=torch.uint8, offset=begin, count=end - begin))
        found.append((name, value))
    return found


def _damaged(path: Path, why: str) -> Problem:
    return Problem(f"the checkpoint is damaged: {why}", file=str(path), attempt="an older step, or a copy of this one")
