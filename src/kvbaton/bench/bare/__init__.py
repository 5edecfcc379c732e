"""Bare instances: real agents, sockets and transports over a synthetic cache, each in a process of its own, without a model."""
