"""kvbaton hands the KV cache of a language model from a prefill instance to a decode instance."""

__version__ = "0.1.0"

__all__ = ["__version__"]
