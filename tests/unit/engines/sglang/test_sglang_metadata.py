"""The metadata row: as it is between two SGLang instances, made from numbers when another engine has computed the prefill."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvbaton.core.handoff import Aux
from kvbaton.engines.sglang.metadata import MetadataRows
from kvbaton.errors import ConfigError, ProtocolError

ROOM = (1 << 63) - 1
SIZES = {
    "output_ids": 64,
    "cached_tokens": 64,
    "output_token_logprobs_val": 64,
    "output_token_logprobs_idx": 64,
    "output_top_logprobs_val": 512,
    "output_top_logprobs_idx": 512,
    "output_hidden_states": 64,
    "bootstrap_room": 64,
}


def buffers(rows: int = 4) -> dict[str, npt.NDArray[np.uint8]]:
    return {name: np.zeros((rows, size), np.uint8) for name, size in SIZES.items()}


def test_a_row_arrives_as_it_is_and_its_neighbours_stay() -> None:
    here, there = buffers(), buffers()
    random = np.random.default_rng(1)
    for buffer in here.values():
        buffer[:] = random.integers(0, 256, buffer.shape, np.uint8)
    here["bootstrap_room"][1].view(np.uint64)[0] = ROOM
    aux = MetadataRows(list(here.items())).read(1)
    MetadataRows(list(there.items())).write(2, aux, ROOM)
    for name, buffer in there.items():
        assert (buffer[2] == here[name][1]).all(), name
        assert not buffer[[0, 1, 3]].any(), name


def test_the_numbers_of_a_row_can_be_read_by_other_engines() -> None:
    here = buffers()
    here["output_ids"][0].view(np.int32)[0] = 42
    here["output_token_logprobs_val"][0].view(np.float32)[0] = -0.25
    here["output_top_logprobs_idx"][0].view(np.int32)[:2] = (42, 7)
    here["output_top_logprobs_val"][0].view(np.float32)[:2] = (-0.25, -1.5)
    aux = MetadataRows(list(here.items())).read(0)
    assert (aux.token_id, aux.logprob, aux.top_logprobs) == (42, -0.25, ((42, -0.25), (7, -1.5)))


def test_a_row_is_made_from_the_numbers_of_another_engine() -> None:
    there = buffers()
    for buffer in there.values():
        buffer[:] = 0xFF
    MetadataRows(list(there.items())).write(3, Aux(42, -0.25, ((42, -0.25),)), ROOM)
    assert there["output_ids"][3].view(np.int32)[0] == 42
    assert there["output_token_logprobs_val"][3].view(np.float32)[0] == -0.25
    assert there["output_token_logprobs_idx"][3].view(np.int32)[0] == 42
    assert there["bootstrap_room"][3].view(np.uint64)[0] == ROOM
    assert not there["output_hidden_states"][3].any()


def test_a_row_of_another_size_is_refused_and_nothing_is_written() -> None:
    there = buffers()
    with pytest.raises(ProtocolError, match="has 5 bytes, ours has 1408"):
        MetadataRows(list(there.items())).write(0, Aux(1, 0.0, opaque=b"12345"), ROOM)
    assert not any(buffer.any() for buffer in there.values())


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_outside_the_buffers_is_refused(row: int) -> None:
    with pytest.raises(ProtocolError, match="outside"):
        MetadataRows(list(buffers().items())).read(row)


def test_buffers_of_another_release_are_refused_by_name() -> None:
    lacking = [(name, buffer) for name, buffer in buffers().items() if name != "output_ids"]
    with pytest.raises(ConfigError, match="output_ids"):
        MetadataRows(lacking)
