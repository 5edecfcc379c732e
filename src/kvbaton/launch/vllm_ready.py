"""Everything that vLLM servers of a local set-up need before they start: environment, model, options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbaton.config import DEFAULT_HANDOFF, HandoffSettings
from kvbaton.engines.embedded.weights import default_cache_dir, locate_model
from kvbaton.errors import ConfigError
from kvbaton.launch.local import new_cluster_key
from kvbaton.launch.vllm import VllmOptions
from kvbaton.launch.vllm_environment import VLLM_VERSION, ensure_environment
from kvbaton.launch.vllm_model import ensure_model

__all__ = ["ready_vllm"]


def ready_vllm(
    model: str,
    served_name: str,
    transport: str,
    engines: int,
    handoff: HandoffSettings,
    say: Callable[[str], None],
    settings: dict[str, Any] | None = None,
    cluster_key: str | None = None,
    version: str = VLLM_VERSION,
) -> VllmOptions:
    """Install vLLM and convert the model where that was not done before; then nothing takes long.

    Raises ConfigError for a way of handing over that the connector does not have.
    """
    if handoff.aux_way is not DEFAULT_HANDOFF.aux_way:
        raise ConfigError(f"--aux-way is {handoff.aux_way}; with vLLM it is {DEFAULT_HANDOFF.aux_way}, leave it out")
    cache_dir = default_cache_dir()
    environment = ensure_environment(cache_dir, say, version)
    path = ensure_model(locate_model(model, cache_dir), environment, say)
    return VllmOptions(
        environment,
        path,
        served_name,
        transport,
        engines,
        handoff,
        settings or {},
        cluster_key=cluster_key or new_cluster_key(),
    )
