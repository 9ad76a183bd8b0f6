"""Fixtures of the tests of SPIR-V."""

import pytest
from spirv_kernels import RUN

from mlc_amd.schedules.gpu.base import profiles


@pytest.fixture(params=RUN)
def profile(request):
    return profiles.resolve(request.param)
