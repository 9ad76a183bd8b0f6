"""What several files of this folder share."""

import pytest

from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import RunOptions


@pytest.fixture(scope="module")
def one(lavapipe_model):
    """The usual model on one device, to compare several with."""
    with Engine.load(lavapipe_model, RunOptions(kv_tokens=1024)) as engine:
        yield engine
