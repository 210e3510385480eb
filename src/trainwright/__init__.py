"""Trainwright: decide how to train a model on a cluster, prove the plan right, and run it.

The names of `trainwright.api` are found here, loaded at first use: importing this package loads neither torch nor pydantic.

>>> import trainwright
>>> trainwright.__version__
'0.1.0'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.api import Plan, load, predict, prove, run

__version__ = "0.1.0"
__all__ = ["Plan", "load", "predict", "prove", "run"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attribute may be anything
    """Load a public name from `trainwright.api` when it is first asked for."""
    if name not in __all__:
        message = f"module 'trainwright' has no attribute '{name}'"
        raise AttributeError(message)
    folder_or_function = getattr(import_module("trainwright.api"), name)
    globals()[name] = folder_or_function
    return folder_or_function


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*globals(), *__all__])
