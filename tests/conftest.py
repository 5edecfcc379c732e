"""Makes the helpers in this directory importable by every test, and lets properties be tested on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
