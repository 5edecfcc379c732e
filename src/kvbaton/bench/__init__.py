"""Benchmarks: what kvbaton costs beside its peers, measured side by side in one run."""
