"""Answers of every small model depend on each of its heads, layers and states: else the tests of shapes would prove nothing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_servers import ready

from kvbaton.engines.vllm.setup.small_models import SMALL_MODELS, ensure_small_model
from kvbaton.verify.compare import TOLERANCE

pytestmark = [pytest.mark.vllm_shapes, pytest.mark.timeout(1800)]

_SCRIPT = Path(__file__).parent / "inside" / "small_model_checks.py"
_LIMIT_S = 1500.0
_CERTAIN = -1e-3
"""A logprob above this is of a token without a rival: no change of the cache would show in it."""
_LEAST = 10 * TOLERANCE


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = ready().environment
    made = {name: ensure_small_model(name, environment, print) for name in SMALL_MODELS}
    results = tmp_path_factory.mktemp("small") / "results.json"
    variables = {**os.environ, **environment.variables(), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    subprocess.run(
        [str(environment.python), str(_SCRIPT), str(results)],
        input=json.dumps([[name, str(each.directory), list(each.arguments)] for name, each in made.items()]).encode(),
        env=variables,
        capture_output=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return dict(json.loads(results.read_text()))


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_part_that_is_taken_out_of_the_weights_moves_logprobs(found: dict[str, Any], name: str) -> None:
    result = found[name]
    assert "error" not in result, result["error"]
    assert sum(value < _CERTAIN for value in result["logprobs"]) > len(result["logprobs"]) / 2
    assert result["moved"]
    assert {part: moved for part, moved in result["moved"].items() if moved < _LEAST} == {}


@pytest.mark.parametrize("name", [name for name, model in SMALL_MODELS.items() if "draft" in model.kinds])
def test_drafted_tokens_are_accepted(found: dict[str, Any], name: str) -> None:
    assert found[name]["accepted"] > 0.05 * found[name]["drafted"] > 0
