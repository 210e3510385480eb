"""A part is found by its name: the file is called after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture.source import PACKAGE
from trainwright.registry import Registry, file_stem

FOLDERS = ("strategies", "schedules", "collectives", "lessons", "engine/segments", "spec/families", "prove/numeric")
FIRST = {
    "strategies": "zero",
    "schedules": "1f1b",
    "collectives": "ring",
    "lessons": "pipeline",
    "engine/segments": "qkv",
    "spec/families": "decoder",
    "prove/numeric": "toy",
}


def registry(folder: str) -> Registry:
    return Registry(f"trainwright.{folder.replace('/', '.')}")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_is_called_after_its_part(folder):
    """With - as _, and a leading digit spelled out."""
    parts = registry(folder).files

    assert FIRST[folder] in parts
    assert [] == [(name, path.name) for name, path in parts.items() if path.stem != file_stem(name)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_loaded_part_has_the_name_that_its_text_declares(folder):
    """Listing reads text, loading runs it; both tell the same name."""
    assert [] == [(name, module.NAME) for name, module in registry(folder).parts() if name != module.NAME]


def test_no_two_folders_are_forgotten():
    """Every folder with a declared NAME in it is checked here."""
    found = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if declares_a_name(path)}

    assert set() == found - set(FOLDERS) - {"."}


def declares_a_name(path: Path) -> bool:
    return any(line.startswith(("NAME =", "NAME:")) for line in path.read_text(encoding="utf-8").splitlines())
