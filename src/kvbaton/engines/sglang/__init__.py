"""SGLang: the transfer backend `kvbaton`, loaded by SGLang through the entry point `sglang.srt.plugins`.

`register` is that entry point. SGLang calls it in every one of its processes; nothing heavy is imported before.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Add the transfer backend `kvbaton` to SGLang. Raises ConfigError where a hook does not fit this release."""
    from kvbaton.engines.sglang.hooks import register_backend

    register_backend()
