"""Finds a model by name or path, of whichever kind."""

from __future__ import annotations

from kvbaton.engines.embedded.seams import EngineModel
from kvbaton.engines.embedded.shaped.blueprint import is_blueprint
from kvbaton.engines.embedded.shaped.model import load_shaped
from kvbaton.engines.embedded.weights import Progress, load_model

__all__ = ["find_model"]


def find_model(model: str, *, progress: Progress | None = None) -> EngineModel:
    """Load `model`: one of the small ones ("tiny-gqa8", ...), or whatever `load_model` knows. Raises ModelError."""
    return load_shaped(model) if is_blueprint(model) else load_model(model, progress=progress)
