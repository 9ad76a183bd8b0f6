"""Fixtures of the tests that run kernels on Mesa's CPU driver."""

import pytest
from vulkan_harness import PROFILES, gpu


@pytest.fixture(scope="module")
def vulkan():
    """Skips the tests of a module where there is no device."""
    gpu()


@pytest.fixture(params=PROFILES)
def profile(request):
    return PROFILES[request.param]
