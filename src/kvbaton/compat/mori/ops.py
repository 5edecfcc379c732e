"""What `mori.ops` is here: one name that vLLM mentions in a signature, which cannot be used."""

from __future__ import annotations

__all__ = ["EpDispatchCombineOp"]


class EpDispatchCombineOp:
    """MoRI's expert-parallel kernels, which need its hardware."""

    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("this mori is kvbaton's, which has MoRI-IO only: expert-parallel kernels need AMD's mori")
