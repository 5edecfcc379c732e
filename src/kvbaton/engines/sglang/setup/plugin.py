"""SGLang behind the engine seam: installed on first use in an environment of its own, served on this machine's CPUs."""

from __future__ import annotations

import json
import shlex
from typing import Any

from kvbaton.core.handoff import AuxChannel, Mode
from kvbaton.core.topology import Shape
from kvbaton.engines.base import CommandRequest, EngineOptions, EnginePlugin, ModelFacts, Progress, Support, ssl_arguments
from kvbaton.engines.embedded.models import find_model
from kvbaton.engines.embedded.weights import locate_model
from kvbaton.engines.sglang.settings import CONFIG_VARIABLE, parse_settings
from kvbaton.engines.sglang.setup.environment import SGLANG_VERSION, ensure_sglang
from kvbaton.engines.sglang.setup.servers import (
    BACKENDS,
    MAX_MODEL_TOKENS,
    SglangServers,
    backend_settings,
    serve_arguments,
)
from kvbaton.engines.vllm.setup.models import ensure_model
from kvbaton.errors import ConfigError
from kvbaton.launch.installing import NIXL_VERSION, default_cache_dir, ensure_nixl

__all__ = ["SglangPlugin"]

_PUSH_ONLY = ("mori",)
_PACKAGES = {"nixl": (NIXL_VERSION, ensure_nixl)}
"""What backends need that SGLang does not bring along: the release, and what installs it."""


class SglangPlugin(EnginePlugin):
    """SGLang of one release."""

    name = "sglang"
    title = "SGLang"
    support = Support(aux_channels=(AuxChannel.CONTROL,), connectors=tuple(BACKENDS), crosses=True, shapes=True)
    healthy_within_s = 900.0
    meets_in_rooms = True
    server_bytes = 2_300_000_000
    start_notice = "SGLang servers take one to two minutes to start, and about 2.2 GB of memory each"

    def __init__(self, version: str = SGLANG_VERSION) -> None:
        self._version = version

    def check(self, prefill: EngineOptions, decode: EngineOptions, progress: Progress) -> ModelFacts:
        """The tokenizer is read by the embedded engine's loader, without SGLang."""
        for role, side in (("prefill", prefill), ("decode", decode)):
            shape = Shape.parse(side.shape)
            if shape != Shape(tp=shape.tp, pp=shape.pp):
                raise ConfigError(
                    f"the shape of {role} is {side.shape}; instances of SGLang can be cut by tp and pp so far, such as tp2"
                )
        if prefill.connector in _PUSH_ONLY and prefill.handoff.mode is not Mode.PUSH:
            raise ConfigError(f"--mode is {prefill.handoff.mode}; SGLang's own {prefill.connector} only pushes, leave it out")
        if prefill.model != decode.model:
            raise ConfigError(f"--decode-model is {decode.model}; with SGLang both sides have {prefill.model}, leave it out")
        loaded = find_model(prefill.model, progress=progress)
        vocabulary = loaded.config.vocab_size
        return ModelFacts(
            loaded.name,
            min(loaded.config.context_tokens, MAX_MODEL_TOKENS),
            loaded.tokenizer.encode,
            # SGLang refuses a prompt with a token that the model does not have; a small model has few.
            range(min(1000, vocabulary // 4), min(40_000, vocabulary * 3 // 4)),
        )

    def prepare(self, options: EngineOptions, progress: Progress) -> SglangServers:
        """Install SGLang, and what the backend needs, and convert the model, where that was not done before."""
        cache_dir = default_cache_dir()
        environment = ensure_sglang(cache_dir, progress, self._version)
        if options.connector in _PACKAGES:
            _PACKAGES[options.connector][1](environment, progress)
        model = ensure_model(locate_model(options.model, cache_dir), environment, progress, self.title)
        return SglangServers(environment, model, options)

    def versions(self, connector: str) -> dict[str, str]:
        """SGLang, and the package of the backend."""
        return {"sglang": self._version} | ({connector: _PACKAGES[connector][0]} if connector in _PACKAGES else {})

    def command_line(self, request: CommandRequest) -> str:
        """A complete line with the backend and its settings."""
        self.check_support(EngineOptions(request.model, request.transport, handoff=request.handoff))
        if request.role == "both":
            raise ConfigError("--role both: an SGLang server is a prefill or a decode instance, choose one")
        settings = json.dumps(backend_settings(request.handoff, _extra_settings(request)))
        parsed = parse_settings(settings)
        parsed.check_bind(request.host)
        arguments = serve_arguments(request.model, request.host, request.port, request.role, "kvbaton", request.control_port)
        arguments += ssl_arguments(request.tls_dir)
        return f"{CONFIG_VARIABLE}={shlex.quote(settings)} python -m sglang.launch_server {shlex.join(arguments)}"


def _extra_settings(request: CommandRequest) -> dict[str, Any]:
    extra = request.settings()
    extra |= {"control_port": request.control_port} if request.role == "decode" else {}
    limits = request.changed_limits()
    return extra | ({"limits": limits} if limits else {})
