"""Trainwright: decide how to train a model on a cluster, prove the plan right, and run it.

The names of `trainwright.api` are found here, loaded at first use: importing this package loads neither torch nor pydantic.

Two of them are also names of folders. `trainwright.predict` and `trainwright.prove` are always the functions, whatever was
imported before; the folders are reached as `from trainwright.predict import ...`.

>>> import trainwright
>>> trainwright.__version__
'0.1.0'
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.api import Plan, load, predict, prove, run

__version__ = "0.1.0"
__all__ = ["Plan", "load", "predict", "prove", "run"]


class _Package(ModuleType):
    """This package; importing the folder predict/ does not put it in the place of the function predict."""

    def __setattr__(self, name: str, value: object) -> None:
        """Keep what the import system sets, but for a folder with the name of a public function."""
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:  # noqa: ANN401 (an attribute of a module may be anything)
    """Load a public name from `trainwright.api` when it is first asked for."""
    if name not in __all__:
        message = f"module 'trainwright' has no attribute '{name}'"
        raise AttributeError(message)
    value = getattr(import_module("trainwright.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*globals(), *__all__])
