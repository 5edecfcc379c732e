"""Which models in which shapes fit together, as verify asks before it starts anything."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.core.topology import Shape
from kvbaton.engines.embedded.plugin import check_fit
from kvbaton.engines.embedded.shaped.blueprint import BLUEPRINTS
from kvbaton.engines.embedded.shaped.model import LoadedShaped, load_shaped
from kvbaton.errors import ConfigError, Incompatible


@pytest.mark.parametrize("model", sorted(BLUEPRINTS))
@pytest.mark.parametrize("prefill", ["tp1", "tp2", "pp2", "pp2,tp2"])
@pytest.mark.parametrize("decode", ["tp1", "tp2", "pp4", "pp2,tp2"])
def test_every_model_fits_itself_in_any_two_shapes(model: str, prefill: str, decode: str) -> None:
    loaded = _loaded(model)
    check_fit(loaded, Shape.parse(prefill), loaded, Shape.parse(decode))


def test_another_model_is_refused_with_both_values() -> None:
    with pytest.raises(Incompatible, match=r"model is 'tiny-gqa2:1 \(.*\)' here and 'tiny-gqa2 \(.*\)' there"):
        check_fit(_loaded("tiny-gqa2"), Shape(), _loaded("tiny-gqa2:1"), Shape())


@pytest.mark.parametrize(
    ("model", "change", "text"),
    [
        ("tiny-mamba", {"mamba_heads": 16}, "plane conv total_heads is 20 here and 12 there"),
        ("tiny-mamba", {"conv_taps": 5}, "plane conv head_size is 32 here and 24 there"),
        ("tiny-gqa8", {"kv_heads": 4}, "total_heads is 4 here and 8 there"),
        ("tiny-gqa8", {"head_size": 16}, "head_size is 16 here and 8 there"),
        ("tiny-mla", {"latent_size": 32}, "plane latent head_size is 40 here and 32 there"),
        ("tiny-swa", {"window": 8}, "window is 7 here and 23 there"),
    ],
)
def test_other_dimensions_are_refused_with_both_values(model: str, change: dict[str, int], text: str) -> None:
    """Behind the same fingerprint, which no two real models have."""
    source = _loaded(model)
    blueprint = msgspec.structs.replace(source.blueprint, **change)
    target = LoadedShaped(blueprint, source.config, source.model, source.tokenizer, source.name, source.fingerprint)
    with pytest.raises(Incompatible, match=text):
        check_fit(source, Shape(tp=2), target, Shape())


def test_heads_that_neither_divide_nor_replicate_are_refused() -> None:
    loaded = _loaded("tiny-gqa6")
    with pytest.raises(ConfigError, match="6 KV heads and tp is 4"):
        check_fit(loaded, Shape(tp=2), loaded, Shape(tp=4))


def _loaded(model: str) -> LoadedShaped:
    if model not in _kept:
        _kept[model] = load_shaped(model)
    return _kept[model]


_kept: dict[str, LoadedShaped] = {}
