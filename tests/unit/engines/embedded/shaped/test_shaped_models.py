"""The small models: the same answers however they are chunked, batched or cut, and answers that depend on all of the cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from shaped_rig import BLOCK_TOKENS, BLOCKS, PROMPT, TABLE, Ranks, decode, fresh_cache, model_of, prefill, span

from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.cache import POISON_BYTE
from kvbaton.engines.embedded.shaped.blueprint import BLUEPRINTS, Kind, check_cut, find_blueprint
from kvbaton.engines.embedded.shaped.memory import CACHE_DTYPES, ShapedCache
from kvbaton.engines.embedded.shaped.model import load_shaped
from kvbaton.errors import ConfigError, ModelError

NAMES = sorted(BLUEPRINTS)
TOLERANCE = 1e-4
SHAPES = [
    ("tiny-gqa8", 1, 2),
    ("tiny-gqa8", 2, 4),
    ("tiny-gqa2", 1, 4),
    ("tiny-gqa4", 1, 8),
    ("tiny-gqa6", 1, 3),
    ("tiny-mqa", 2, 2),
    ("tiny-mla", 1, 4),
    ("tiny-swa", 2, 2),
    ("tiny-mamba", 1, 4),
    ("tiny-mamba", 2, 2),
    ("tiny-nsa", 2, 2),
    ("tiny-nsa", 4, 1),
]


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_do_not_depend_on_chunks(name: str, dtype: str) -> None:
    loaded = model_of(name)
    whole = fresh_cache(loaded, dtype)
    expected = decode(loaded, whole, prefill(loaded, whole), 6)
    for chunk in (5, 32):
        memory = fresh_cache(loaded, dtype)
        rows = decode(loaded, memory, prefill(loaded, memory, chunk), 6)
        np.testing.assert_allclose(rows, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_sequences_in_one_step_do_not_disturb_each_other(name: str) -> None:
    loaded = model_of(name)
    alone = [fresh_cache(loaded), fresh_cache(loaded)]
    first, second = PROMPT[:20], PROMPT[25:48]
    expected = [prefill(loaded, memory, 9, prompt) for memory, prompt in zip(alone, (first, second), strict=True)]
    tables = TABLE[:8], TABLE[8:16]
    together = fresh_cache(loaded)
    loaded.model.forward([span(first[:9], 0, tables[0])], together)
    loaded.model.forward([span(first[9:18], 9, tables[0]), span(second[:9], 0, tables[1])], together)
    rows = loaded.model.forward([span(first[18:], 18, tables[0]), span(second[9:], 9, tables[1])], together)
    np.testing.assert_allclose(rows, expected, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "pp_size", "tp_size"), SHAPES)
def test_a_cut_model_answers_as_the_whole_one(name: str, pp_size: int, tp_size: int) -> None:
    loaded, ranks = model_of(name), Ranks(name, pp_size, tp_size)
    memory = fresh_cache(loaded)
    for cut in ranks.caches:
        cut.poison(range(BLOCKS))
    for start in range(0, len(PROMPT), 24):
        part = span(PROMPT[start : start + 24], start)
        np.testing.assert_allclose(ranks.forward([part]), loaded.model.forward([part], memory), atol=TOLERANCE)


def _poisoned_heads(memory: ShapedCache) -> Iterator[str]:
    """Poison one head of one plane of one layer after another, and say which; what was before is put back."""
    for group in memory.groups:
        for plane in group.planes:
            values = memory.plane(group.kind, plane.name)
            kept = values.copy()
            bad = np.frombuffer(bytes([POISON_BYTE] * memory.element_bytes), values.dtype)[0]
            for place, layer in enumerate(group.layers):
                for head in range(plane.head_count):
                    values[(place, slice(None), head) if group.is_state else (place, slice(None), slice(None), head)] = bad
                    yield f"{group.kind} {plane.name} layer {layer} head {head}"
                    values[...] = kept


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_depend_on_every_head_of_every_plane_and_layer(name: str, dtype: str) -> None:
    loaded = model_of(name)
    memory = fresh_cache(loaded, dtype)
    chosen = span((int(prefill(loaded, memory).argmax()),), len(PROMPT))
    before = memory.memory.tobytes()
    expected = loaded.model.forward([chosen], memory)[0]
    memory.memory[:] = before
    for what in _poisoned_heads(memory):
        row = loaded.model.forward([chosen], memory)[0]
        assert np.abs(row - expected).max() > 0.01, what


def test_a_window_needs_its_last_tokens_and_no_others() -> None:
    loaded = model_of("tiny-swa")
    memory = fresh_cache(loaded)
    logits = prefill(loaded, memory)
    expected = loaded.model.forward([span((int(logits.argmax()),), len(PROMPT))], memory)[0]
    group = next(group for group in memory.groups if group.kind == "sliding")
    first = len(PROMPT) - group.window
    for token, is_needed in ((first - 1, False), (0, False), (first, True), (len(PROMPT) - 1, True)):
        memory = fresh_cache(loaded)
        prefill(loaded, memory)
        memory.plane("sliding", "v")[:, TABLE[token // BLOCK_TOKENS], token % BLOCK_TOKENS] = 1e6
        row = loaded.model.forward([span((int(logits.argmax()),), len(PROMPT))], memory)[0]
        assert bool(np.abs(row - expected).max() > 0.01) is is_needed, token


def test_states_start_from_nothing_whatever_lies_there() -> None:
    loaded = model_of("tiny-mamba")
    used, fresh = fresh_cache(loaded), fresh_cache(loaded)
    prefill(loaded, used, prompt=PROMPT[:10])
    np.testing.assert_array_equal(prefill(loaded, used), prefill(loaded, fresh))


def test_a_model_is_the_same_everywhere_and_differs_with_its_seed() -> None:
    one, again, other = load_shaped("tiny-gqa2"), load_shaped("tiny-gqa2:0"), load_shaped("tiny-gqa2:1")
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert len({model_of(name).fingerprint for name in NAMES}) == len(NAMES)


def test_names_and_seeds_that_are_none_are_refused() -> None:
    with pytest.raises(ModelError, match="tiny-gqa3"):
        load_shaped("tiny-gqa3")
    with pytest.raises(ModelError, match="is no seed"):
        load_shaped("tiny-gqa2:x")


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("tiny-gqa6", "tp4", "6 KV heads and tp is 4"),
        ("tiny-gqa8", "pp5", "4 layers and pp is 5"),
        ("tiny-gqa8", "tp5", "16 heads and tp is 5"),
        ("tiny-mamba", "tp3", "8 heads and tp is 3"),
        ("tiny-mamba", "cp2", "cp1 only"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused_with_the_numbers(name: str, shape: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_cut(BLUEPRINTS[name], Shape.parse(shape))


def test_only_models_that_keep_everything_share_prefixes() -> None:
    shared = {name for name in NAMES if BLUEPRINTS[name].shares_prefixes}
    assert shared == set(NAMES) - {"tiny-swa", "tiny-mamba"}
    assert Kind.SLIDING in BLUEPRINTS["tiny-swa"].kinds


def test_a_model_with_other_sizes_is_another_model() -> None:
    wide = find_blueprint("tiny-mamba:2@conv_taps=6,head_size=16")
    assert (wide.name, wide.seed, wide.conv_taps, wide.head_size, wide.state_size) == ("tiny-mamba", 2, 6, 16, 16)
    assert load_shaped("tiny-mamba@conv_taps=6").fingerprint != model_of("tiny-mamba").fingerprint
    loaded = load_shaped("tiny-mamba@conv_taps=6,head_size=16")
    assert np.isfinite(prefill(loaded, fresh_cache(loaded))).all()


@pytest.mark.parametrize(
    "sizes", ["heads=2", "conv_taps", "conv_taps=", "conv_taps=5", "conv_taps=0", "window=10000", "x=2", "window=²"]
)
def test_sizes_that_cannot_be_are_refused(sizes: str) -> None:
    with pytest.raises(ModelError, match=r"is no size that can be chosen|give an even number from 2 to"):
        find_blueprint(f"tiny-mamba@{sizes}")


def test_a_type_that_a_cache_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="'bfloat16' is not known; give float32 or float16"):
        fresh_cache(model_of("tiny-gqa2"), "bfloat16")
