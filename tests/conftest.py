"""Fixtures and the profiles of the property tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from support import DEVICES

SLOW = [HealthCheck.too_slow]
settings.register_profile("dev", max_examples=100, deadline=None, suppress_health_check=SLOW)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=500, derandomize=True)
settings.register_profile("soak", settings.get_profile("dev"), max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The CPU always, and CUDA where there is one."""
    return str(request.param)
