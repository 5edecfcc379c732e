"""Must-work behaviours and bad inputs, on embedded instances: each row of the two lists has a test that names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvbaton.engines.embedded.weights import LoadedModel, load_model

for neighbour in ("e2e", "unit/agent"):
    sys.path.append(str(Path(__file__).parents[1] / neighbour))


@pytest.fixture(scope="session")
def loaded() -> LoadedModel:
    """The tiny model, whose weights all nodes of the test's process share."""
    return load_model("tiny")
