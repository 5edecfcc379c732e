"""SGLang: so far the environment in which benchmarks call its planning code."""
