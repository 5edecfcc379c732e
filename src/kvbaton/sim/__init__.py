"""Deterministic simulation: production coordinators and rank agents on a virtual clock, network and memory, under faults."""
