"""The house has floors: a file imports only from its own folder and from below."""

from __future__ import annotations

from architecture.source import Module, modules

LAYERS = (
    ("units",),
    ("problems",),
    ("registry",),
    ("ir",),
    ("spec",),
    ("cost",),
    ("schedules", "collectives"),
    ("strategies",),
    ("plan",),
    ("loops",),
    ("graph",),
    ("predict", "engine", "fleet"),
    ("search", "prove"),
    ("lessons",),
    ("export",),
    ("studio",),
    ("api",),
    ("cli",),
    ("__main__",),
)
FLOOR = {folder: floor for floor, folders in enumerate(LAYERS) for folder in folders}
TORCH_FILES = {f"trainwright.graph.{name}" for name in ("capture", "run", "backend")} | {
    f"trainwright.prove.{name}" for name in ("reference", "launch")
}
NOT_NOUNS = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers"}


def folder(module: str) -> str:
    return module.split(".")[1]


def may_import(importer: str, imported: str) -> bool:
    """Below, or in the same folder."""
    return folder(importer) == folder(imported) or FLOOR[folder(imported)] < FLOOR[folder(importer)]


def may_load_torch(module: Module) -> bool:
    return module.name.startswith("trainwright.engine") or module.name in TORCH_FILES


def test_every_folder_has_its_floor():
    """A new folder is put on a line of LAYERS before it is used."""
    unknown = {folder(module.name) for module in modules() if module.name != "trainwright"} - FLOOR.keys()

    assert set() == unknown


def test_a_file_imports_only_from_below():
    """Folders on one line do not know each other; the package itself resolves its names from api, lazily."""
    upward = [
        f"{module.at(node)}: {module.name} imports {imported}"
        for module in modules()
        if module.name != "trainwright"
        for node, imported in module.imports()
        if imported.startswith("trainwright.") and not may_import(module.name, imported)
    ]

    assert upward == []


def test_torch_lives_in_the_engine_and_a_few_named_files():
    """Prediction starts in a blink because nothing it needs imports torch, not even inside a function."""
    strangers = [
        f"{module.at(node)}: {module.name} imports {imported}"
        for module in modules()
        if not may_load_torch(module)
        for node, imported in module.imports()
        if imported.split(".")[0] == "torch"
    ]

    assert strangers == []


def test_no_file_is_called_after_nothing():
    """A file is called by the noun that its code is about."""
    vague = [module.name for module in modules() if NOT_NOUNS & set(module.name.replace("_", ".").split("."))]

    assert vague == []
