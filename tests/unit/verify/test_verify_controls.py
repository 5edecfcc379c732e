"""Controls that would leave out nothing, or something else than they name, are refused before anything is started."""

from __future__ import annotations

import pytest

from kvbaton.errors import ConfigError
from kvbaton.verify.run import VerifySettings, run_verify

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
    "one token, which nobody decodes": (
        VerifySettings(model="tiny", drop_writes=True, max_tokens=1),
        "--max-tokens is 1; it must be at least 2",
    ),
    "vllm leaves out": (VerifySettings(model="tiny", engine="vllm", drop="all"), "use --drop-writes with vllm"),
    "vllm dtype": (VerifySettings(model="tiny", engine="vllm", decode_cache_dtype="float16"), "use --drop-writes with vllm"),
    "vllm lacks": (VerifySettings(model="tiny", engine="vllm", decode_lacks="layer:0"), "use --drop-writes with vllm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_why(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        run_verify(settings, print, print)
