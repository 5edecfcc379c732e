"""Controls that would leave out nothing, or something else than they name, are refused before anything is started."""

from __future__ import annotations

import pytest

from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings
from kvbaton.core.handoff import AuxChannel
from kvbaton.errors import ConfigError
from kvbaton.verify.run import VerifiedPair, run_verify
from kvbaton.verify.settings import VerifySettings

REFUSED = {
    "no such rank": (VerifySettings(model="tiny-gqa2", decode_shape="tp2", decode_lacks="rank:2"), "there are ranks 0 to 1"),
    "no such layer": (
        VerifySettings(model="tiny-gqa2", decode_lacks="layer:4"),
        "--decode-lacks layer:4: there are layers 0 to 3",
    ),
    "a layer of a model that is moved whole": (
        VerifySettings(model="tiny", drop="layer:1"),
        "--drop layer:1: of tiny only all",
    ),
    "a state that it does not have": (VerifySettings(model="tiny", drop="conv"), "--drop conv: of tiny only all"),
}
BY_VLLM = {
    "leaves out": (VerifySettings(model="tiny", drop="all"), "--drop 'all' names nothing of vLLM's caches; give one of writes"),
    "dtype": (VerifySettings(model="tiny", decode_cache_dtype="int8"), "--cache-dtype is int8; with vLLM it is float32"),
    "lacks": (VerifySettings(model="tiny", decode_lacks="layer:0"), "--decode-lacks is no control of vLLM"),
    "shape": (VerifySettings(model="tiny", decode_shape="cp2"), "shape cp2 has cp2; with vLLM on CPUs"),
    "model": (VerifySettings(model="tiny-gqa8"), "model tiny-gqa8 is one of the embedded engine; with vLLM use small-llama"),
    "another model": (VerifySettings(model="tiny", decode_model="tiny:1"), "--decode-model is tiny:1; with vLLM both sides"),
    "no room for a prompt": (
        VerifySettings(model="tiny", max_tokens=2048),
        "--max-tokens is 2048; the context has 2048 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_refusal_names_the_option(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        run_verify(VerifiedPair("embedded", "local", DEFAULT_HANDOFF), settings, print, print)


@pytest.mark.parametrize("name", BY_VLLM)
def test_vllm_refuses_what_it_does_not_support_before_anything_is_installed(name: str) -> None:
    settings, words = BY_VLLM[name]
    with pytest.raises(ConfigError, match=words):
        run_verify(VerifiedPair("vllm", "local", DEFAULT_HANDOFF), settings, print, print)


def test_an_aux_channel_that_the_connector_does_not_have_is_refused() -> None:
    data = VerifiedPair("vllm", "local", HandoffSettings(aux_channel=AuxChannel.DATA))
    with pytest.raises(ConfigError, match="--aux-channel is data; with vLLM it is control"):
        run_verify(data, VerifySettings(model="tiny"), print, print)


def test_one_token_is_refused_because_no_instance_decodes_it() -> None:
    with pytest.raises(ConfigError, match="--max-tokens is 1; it must be at least 2"):
        VerifySettings(drop_writes=True, max_tokens=1)


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"--engine is 'vlm', which is no engine; did you mean 'vllm'\?"):
        run_verify(VerifiedPair("vlm", "local", DEFAULT_HANDOFF), VerifySettings(), print, print)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pair_url": "http://a:1"}, "--pair-url and --single-url belong together"),
        ({"single_url": "http://a:1"}, "--pair-url and --single-url belong together"),
        ({"pair_url": "a:1", "single_url": "http://b:1"}, "--pair-url is 'a:1'"),
        ({"pair_url": "http://a:1", "single_url": "file:///b"}, "--single-url is 'file:///b'"),
        ({"pair_url": "http://a:1", "single_url": "http://b:1", "drop_writes": True}, "--drop-writes has no effect"),
    ],
)
def test_servers_that_run_already_are_named_in_full(given: dict[str, str | bool], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VerifySettings(**given)  # type: ignore[arg-type]
