"""Engines that kvbaton plugs into. They translate between an engine and its agents; they do not decide."""
