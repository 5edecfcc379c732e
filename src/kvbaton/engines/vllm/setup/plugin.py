"""vLLM behind the engine seam: installed on first use in an environment of its own, served on this machine's CPUs."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvbaton.core.addresses import in_url
from kvbaton.core.handoff import AuxChannel
from kvbaton.engines.base import CommandRequest, EngineOptions, EnginePlugin, ModelFacts, Progress, Support
from kvbaton.engines.embedded.models import find_model
from kvbaton.engines.embedded.shaped.blueprint import is_blueprint
from kvbaton.engines.embedded.tiny import byte_tokenizer
from kvbaton.engines.embedded.tokenizer import Tokenizer
from kvbaton.engines.embedded.weights import locate_model
from kvbaton.engines.vllm.controls import DROPS
from kvbaton.engines.vllm.settings import parse_settings
from kvbaton.engines.vllm.setup.environment import (
    MSGPACK_VERSION,
    VLLM_VERSION,
    VllmEnvironment,
    ensure_environment,
    ensure_msgpack,
    find_gpu_environment,
)
from kvbaton.engines.vllm.setup.models import ensure_model
from kvbaton.engines.vllm.setup.servers import (
    CONNECTORS,
    GPU_MODEL_TOKENS,
    MAX_MODEL_TOKENS,
    VllmServers,
    check_shape,
    gpu_cache_bytes,
    https_arguments,
    serve_arguments,
    transfer_config,
)
from kvbaton.engines.vllm.setup.small_models import (
    CACHE_BYTES,
    CONTEXT_TOKENS,
    SMALL_MODELS,
    ensure_small_model,
    find_small_model,
    is_small_model,
)
from kvbaton.errors import ConfigError
from kvbaton.launch.installing import NIXL_VERSION, default_cache_dir, ensure_nixl
from kvbaton.transport.table import TRANSPORTS, MemoryKind, transport_entry

__all__ = ["VllmPlugin"]

_SPECIAL_TOKENS = 16
"""Models keep their first tokens for ends and pads."""


class VllmPlugin(EnginePlugin):
    """vLLM of one release."""

    name = "vllm"
    title = "vLLM"
    support = Support(
        aux_channels=(AuxChannel.CONTROL,),
        devices=("cpu", "cuda"),
        connectors=tuple(CONNECTORS),
        controls=("drop_writes", "drop"),
        shapes=True,
        hosts=True,
        cache_dtypes=("float32", "float16", "bfloat16"),
    )
    healthy_within_s = 900.0
    server_bytes = 2_700_000_000
    start_notice = "vLLM servers take one to two minutes to start, and about 2.5 GB of memory each"

    def __init__(self, version: str = VLLM_VERSION) -> None:
        self._version = version

    def check(self, prefill: EngineOptions, decode: EngineOptions, progress: Progress) -> ModelFacts:
        """The tokenizer is read by the embedded engine's loader, without vLLM."""
        if prefill.model != decode.model:
            raise ConfigError(f"--decode-model is {decode.model}; with vLLM both sides have {prefill.model}, leave it out")
        if is_blueprint(prefill.model):
            known = ", ".join(SMALL_MODELS)
            raise ConfigError(f"model {prefill.model} is one of the embedded engine; with vLLM use {known}, or a real one")
        for side in (prefill, decode):
            check_shape(side.shape)
            _check_drop(side)
        if prefill.device != "cpu":
            _check_gpu_transport(prefill.transport)
        if is_small_model(prefill.model):
            find_small_model(prefill.model)
            tokenizer = Tokenizer(byte_tokenizer(), prefill.model)
            return ModelFacts(prefill.model, min(CONTEXT_TOKENS, MAX_MODEL_TOKENS), tokenizer.encode, range(32, 256))
        if prefill.device != "cpu":
            return _facts_of_directory(Path(prefill.model))
        loaded = find_model(prefill.model, progress=progress)
        return ModelFacts(loaded.name, min(loaded.config.context_tokens, MAX_MODEL_TOKENS), loaded.tokenizer.encode)

    def prepare(self, options: EngineOptions, progress: Progress) -> VllmServers:
        """Install vLLM, and what the connector needs, and convert the model, where that was not done before."""
        cache_dir = default_cache_dir()
        environment: VllmEnvironment
        if options.device != "cpu":
            environment = find_gpu_environment()
            if not is_small_model(options.model):
                model = Path(options.model)
                cache_bytes = gpu_cache_bytes(model, options.cache_dtype)
                return VllmServers(environment, model, options, cache_bytes=cache_bytes, context_tokens=GPU_MODEL_TOKENS)
        else:
            environment = ensure_environment(cache_dir, progress, self._version)
            if options.connector in _PACKAGES:
                _PACKAGES[options.connector][1](environment, progress)
        if is_small_model(options.model):
            made = ensure_small_model(options.model, environment, progress)
            options = replace(options, arguments=(*made.arguments, *options.arguments))
            return VllmServers(environment, made.directory, options, cache_bytes=CACHE_BYTES)
        return VllmServers(environment, ensure_model(locate_model(options.model, cache_dir), environment, progress), options)

    def accepted_drafts(self, base_url: str) -> int | None:
        """Read off vLLM's metrics, over all engines of a server; None where it does not answer."""
        try:
            with urllib.request.urlopen(f"{base_url}/metrics", timeout=_METRICS_S) as answer:  # noqa: S310 - a server of ours
                found = _ACCEPTED.findall(answer.read().decode())
        except OSError:
            return None
        return round(sum(map(float, found))) if found else None

    def versions(self, connector: str) -> dict[str, str]:
        """vLLM, and the package of the connector."""
        return {"vllm": self._version} | ({connector: _PACKAGES[connector][0]} if connector in _PACKAGES else {})

    def command_line(self, request: CommandRequest) -> str:
        """A complete `vllm serve` line with the connector."""
        self.check_support(EngineOptions(request.model, request.transport, handoff=request.handoff))
        if request.role == "both" and request.routers:
            raise ConfigError(
                "--router with --role both: routers take prefill or decode instances; choose one, or leave --router out"
            )
        config = transfer_config(request.role, request.handoff, _extra_config(request))
        settings = parse_settings(config["kv_connector_extra_config"])
        settings.check_bind(request.host)
        arguments = serve_arguments(request.model, request.host, request.port, config)
        return "vllm " + shlex.join([*arguments, *https_arguments(request.tls_dir)])


_METRICS_S = 20.0
_ACCEPTED = re.compile(r"^vllm:spec_decode_num_accepted_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def _check_drop(options: EngineOptions) -> None:
    """Raise ConfigError for a control that would leave out nothing: it would prove nothing."""
    drop = options.controls.drop
    if drop not in ("", *DROPS):
        raise ConfigError(f"--drop {drop!r} names nothing of vLLM's caches; give one of {', '.join(DROPS)}")
    kinds = find_small_model(options.model).kinds if is_small_model(options.model) else ("heads", "layers")
    if drop and drop not in ("writes", *kinds):
        raise ConfigError(f"--drop {drop}: {options.model} has nothing of that kind; it has {', '.join(kinds)}")


_PACKAGES = {"nixl": (NIXL_VERSION, ensure_nixl), "moriio": (MSGPACK_VERSION, ensure_msgpack)}
"""What connectors need that vLLM does not bring along: the release, and what installs it."""


def _check_gpu_transport(name: str) -> None:
    """Raise ConfigError for a transport that does not move GPU memory: vLLM would end with it after half a minute."""
    if MemoryKind.GPU not in transport_entry(name).memory:
        others = ", ".join(entry.name for entry in TRANSPORTS.values() if MemoryKind.GPU in entry.memory)
        raise ConfigError(f"--transport is {name}, which moves main memory only; with caches on a GPU choose one of {others}")


def _facts_of_directory(directory: Path) -> ModelFacts:
    """What the configuration in a directory of Hugging Face safetensors shows. Raises ConfigError for one that is none.

    Prompts are tokens: a hash of each word and its place in the text, spread over the vocabulary. Any model takes them.
    """
    try:
        config = json.loads((directory / "config.json").read_text())
        vocabulary, context = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--model is {directory}; with --device cuda it is a directory of Hugging Face safetensors ({error})"
        ) from error

    def encode(text: str) -> list[int]:
        usable = max(1, vocabulary - _SPECIAL_TOKENS)
        return [_SPECIAL_TOKENS + zlib.crc32(f"{place} {word}".encode()) % usable for place, word in enumerate(text.split())]

    return ModelFacts(directory.name, min(context, GPU_MODEL_TOKENS), encode)


def _extra_config(request: CommandRequest) -> dict[str, Any]:
    extra = {"control_port": request.control_port, "control_host": request.host}
    extra |= request.settings() | request.changed_limits()
    if request.routers:
        extra["http_address"] = f"{in_url(request.advertise_host or request.host)}:{request.port}"
    return extra
