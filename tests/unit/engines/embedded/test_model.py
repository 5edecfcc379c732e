"""The model against a plain reference, on every path through the cache."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_llama import ReferenceLlama

from kvbaton.engines.embedded.attention import Extent, block_extents
from kvbaton.engines.embedded.cache import POISON_BYTE, PagedCache
from kvbaton.engines.embedded.model import TokenSpan
from kvbaton.engines.embedded.tiny import write_tiny_model
from kvbaton.engines.embedded.weights import LoadedModel, load_model
from kvbaton.errors import Bug

TOLERANCE = 2e-4


class Subject:
    """A tiny model, loaded and as a reference."""

    def __init__(self, directory: Path, cache_dir: Path) -> None:
        self.loaded: LoadedModel = load_model(str(directory), cache_dir=cache_dir)
        self.reference = ReferenceLlama(directory)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("model")
    return Subject(write_tiny_model(directory / "tiny", 5), directory / "cache")


def prompt(length: int, seed: int = 0) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def table(*blocks: int) -> npt.NDArray[np.int32]:
    return np.array(blocks, np.int32)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def test_prompt_in_one_step_equals_reference(subject: Subject) -> None:
    ids = prompt(150)
    cache = PagedCache(subject.loaded.config, 10, 16)
    logits = subject.loaded.model.forward([TokenSpan(ids, 0, table(*range(10)))], cache)
    assert logits.shape == (1, subject.loaded.config.vocab_size)
    np.testing.assert_allclose(logits[0], subject.reference.logits(ids.tolist())[-1], atol=TOLERANCE)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_chunks_in_any_blocks_equal_reference(subject: Subject, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 70), "tokens")
    block_tokens = data.draw(st.sampled_from([1, 3, 8, 16]), "block tokens")
    needed = -(-length // block_tokens)
    blocks = table(*data.draw(st.permutations(range(needed + 3)), "blocks")[:needed])
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=5), "cuts") | {0, length})
    ids, cache = prompt(length, length), PagedCache(subject.loaded.config, needed + 3, block_tokens)
    expected = subject.reference.logits(ids.tolist())
    for start, stop in pairwise(cuts):
        logits = subject.loaded.model.forward([TokenSpan(ids[start:stop], start, blocks)], cache)
        np.testing.assert_allclose(logits[0], expected[stop - 1], atol=TOLERANCE)


def test_mixed_step_equals_each_sequence_alone(subject: Subject) -> None:
    lengths, block_tokens = (1, 40, 37, 90, 5), 8
    cache = PagedCache(subject.loaded.config, 60, block_tokens)
    free = np.random.default_rng(1).permutation(60).astype(np.int32)
    spans, expected, first = [], [], 0
    for index, length in enumerate(lengths):
        ids, needed = prompt(length, index), -(-length // block_tokens)
        blocks = np.sort(free[first : first + needed]) if index % 2 else free[first : first + needed]
        first += needed
        start = (0, length - 1, length - 1, 50, 3)[index]
        if start:
            subject.loaded.model.forward([TokenSpan(ids[:start], 0, blocks)], cache)
        spans.append(TokenSpan(ids[start:], start, blocks))
        expected.append(subject.reference.logits(ids.tolist())[-1])
    np.testing.assert_allclose(subject.loaded.model.forward(spans, cache), np.array(expected), atol=TOLERANCE)


@pytest.mark.parametrize(
    "order",
    [
        list(range(40)),
        [*range(20, 40), *range(20)],
        [*range(1, 35), 0, *range(35, 40)],
        [*range(39, -1, -1)],
        np.random.default_rng(3).permutation(40).tolist(),
    ],
    ids=["consecutive", "two pieces", "three pieces", "reversed", "scattered"],
)
def test_long_context_is_the_same_however_its_blocks_lie(subject: Subject, order: list[int]) -> None:
    ids, cache = prompt(600, 9), PagedCache(subject.loaded.config, 40, 16)
    expected = subject.reference.logits(ids.tolist())
    model = subject.loaded.model
    prefill = model.forward([TokenSpan(ids[:550], 0, table(*order))], cache)
    np.testing.assert_allclose(prefill[0], expected[549], atol=TOLERANCE)
    chunk = model.forward([TokenSpan(ids[550:599], 550, table(*order))], cache)
    np.testing.assert_allclose(chunk[0], expected[598], atol=TOLERANCE)
    decode = model.forward([TokenSpan(ids[599:], 599, table(*order))], cache)
    np.testing.assert_allclose(decode[0], expected[599], atol=TOLERANCE)


def test_tied_head_and_other_dimensions_equal_reference(tmp_path: Path) -> None:
    directory = write_tiny_model(
        tmp_path / "tied", 2, layers=2, hidden=48, heads=4, kv_heads=4, head_size=8, ffn=40, tied_head=True
    )
    tied, ids = Subject(directory, tmp_path / "cache"), prompt(33)
    logits = tied.loaded.model.forward([TokenSpan(ids, 0, table(0, 1, 2))], PagedCache(tied.loaded.config, 3, 16))
    np.testing.assert_allclose(logits[0], tied.reference.logits(ids.tolist())[-1], atol=TOLERANCE)


def test_only_the_span_is_written(subject: Subject) -> None:
    cache, ids = PagedCache(subject.loaded.config, 6, 8), prompt(20)
    cache.poison(range(6))
    poisoned = cache.data.copy()
    subject.loaded.model.forward([TokenSpan(ids, 0, table(4, 1, 5))], cache)
    assert np.array_equal(cache.data[:, :, [0, 2, 3]], poisoned[:, :, [0, 2, 3]])
    assert np.array_equal(cache.data[:, :, 5, 4:], poisoned[:, :, 5, 4:])
    assert not np.any(cache.data[:, :, [4, 1]] == poisoned[0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("damage", ["poison", "zero"])
def test_a_prompt_cache_that_is_not_there_shows(subject: Subject, damage: str) -> None:
    cache, ids = PagedCache(subject.loaded.config, 8, 16), prompt(101)
    subject.loaded.model.forward([TokenSpan(ids[:100], 0, table(*range(8)))], cache)
    right = log_softmax(subject.loaded.model.forward([TokenSpan(ids[100:], 100, table(*range(8)))], cache)[0])
    if damage == "poison":
        cache.poison(range(7))
    else:
        cache.data[:, :, :7] = 0.0
    wrong = log_softmax(subject.loaded.model.forward([TokenSpan(ids[100:], 100, table(*range(8)))], cache)[0])
    assert np.isfinite(wrong).all()
    assert np.abs(wrong - right).max() > 0.1
    assert abs(wrong[right.argmax()] - right.max()) > 1e-2


def test_one_lost_block_shows(subject: Subject) -> None:
    cache, ids = PagedCache(subject.loaded.config, 8, 16), prompt(101)
    subject.loaded.model.forward([TokenSpan(ids[:100], 0, table(*range(8)))], cache)
    right = log_softmax(subject.loaded.model.forward([TokenSpan(ids[100:], 100, table(*range(8)))], cache)[0])
    cache.poison([2])
    wrong = log_softmax(subject.loaded.model.forward([TokenSpan(ids[100:], 100, table(*range(8)))], cache)[0])
    assert abs(wrong[right.argmax()] - right.max()) > 1e-2


@pytest.mark.parametrize("token_id", [-1, 259])
def test_token_outside_the_vocabulary_is_a_bug(subject: Subject, token_id: int) -> None:
    with pytest.raises(Bug, match="vocabulary of 259"):
        subject.loaded.model.forward([TokenSpan(table(5, token_id), 0, table(0))], PagedCache(subject.loaded.config, 1, 16))


def test_empty_span_is_a_bug(subject: Subject) -> None:
    with pytest.raises(Bug, match="no tokens"):
        subject.loaded.model.forward([TokenSpan(table(), 0, table(0))], PagedCache(subject.loaded.config, 1, 16))


def test_table_that_is_too_short_is_a_bug(subject: Subject) -> None:
    with pytest.raises(Bug, match="covers 16"):
        subject.loaded.model.forward([TokenSpan(prompt(17), 0, table(0))], PagedCache(subject.loaded.config, 2, 16))


def test_extents_join_consecutive_blocks() -> None:
    assert block_extents(table(3, 4, 5, 1, 7, 8), 90, 16) == [Extent(0, 48, 48), Extent(48, 64, 16), Extent(64, 90, 112)]
    assert block_extents(table(2, 9), 7, 8) == [Extent(0, 7, 16)]


def test_a_layer_is_reported_when_its_keys_and_values_are_there_and_do_not_change_any_more(subject: Subject) -> None:
    cache, reported = PagedCache(subject.loaded.config, 8, 16), []
    cache.poison(range(8))

    def written(layer: int) -> None:
        reported.append((layer, cache.data[layer].copy(), cache.data[layer + 1 :].copy()))

    spans = [TokenSpan(prompt(40), 0, table(0, 1, 2)), TokenSpan(prompt(20, 1), 0, table(5, 4))]
    subject.loaded.model.forward(spans, cache, written)
    assert [layer for layer, _, _ in reported] == list(range(subject.loaded.config.layers))
    for layer, contents, rest in reported:
        assert np.array_equal(contents, cache.data[layer])
        assert (rest.view(np.uint8) == POISON_BYTE).all()
