"""Interfaces of other libraries, implemented on our transports, so that their users run without their hardware."""
