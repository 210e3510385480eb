"""What all tests share: one thread a process, and examples that are the same on every machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded anywhere: ranks are processes or threads of their own, and the workers of pytest-xdist run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: a test asserts counts, bytes and order, never seconds.
settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repository."""
    return Path(__file__).parents[1]
