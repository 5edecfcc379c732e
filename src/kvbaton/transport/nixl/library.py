"""The few calls of the NIXL library that the transport uses, for one thread at a time; its errors become ours."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import numpy as np

from kvbaton.errors import ConfigError, PeerLost, TransportError
from kvbaton.transport.base import Region, Runs

__all__ = ["NixlLibrary", "Transfer"]

Transfer = Any
"""A transfer that NIXL knows; opaque."""

_MEMORY = "DRAM"


class NixlLibrary:
    """One NIXL agent, without NIXL's own progress thread, which spins. Raises ConfigError where there is no NIXL."""

    def __init__(self, name: str, regions: tuple[Region, ...], backends: tuple[str, ...]) -> None:
        try:
            self._api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise ConfigError(
                f"transport nixl needs the package nixl, which cannot be imported ({error}): pip install torch, then nixl"
            ) from error
        _keep_quiet()
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=list(backends))
        try:
            self._agent: Any = self._api.nixl_agent(name, config)
            described = [(region.address, region.region_bytes, 0, "") for region in regions]
            self._registered = self._agent.register_memory(described, _MEMORY)
        except Exception as error:
            raise ConfigError(f"transport nixl cannot start with {', '.join(backends)}: {_words(error)}") from error
        self.metadata: bytes = self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """Make another agent known by what it tells of itself; returns its name. Raises TransportError."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportError(f"the NIXL metadata of the peer is not usable: {_words(error)}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        """Forget another agent; what is in flight to it fails. Never raises: it may be unknown by now."""
        try:
            self._agent.remove_remote_agent(name)
        except Exception:  # noqa: BLE001 - an agent that is unknown is as forgotten as it can be
            return

    def start_read(self, name: str, source_address: int, target_address: int, runs: Runs) -> Transfer:
        """Begin to read `runs` from the agent `name`. Raises PeerLost or TransportError; then nothing is in flight."""
        sides = [_described(runs, column, address) for column, address in ((1, target_address), (0, source_address))]
        try:
            here, there = (self._agent.get_xfer_descs(side, _MEMORY) for side in sides)
            transfer = self._agent.initialize_xfer("READ", here, there, name)
            self._agent.transfer(transfer)
        except Exception as error:
            raise _ours(error) from error
        return transfer

    def is_done(self, transfer: Transfer) -> bool:
        """Whether every byte is in, after a step of progress. Raises PeerLost or TransportError when it has failed."""
        try:
            state = self._agent.check_xfer_state(transfer)
        except Exception as error:
            raise _ours(error) from error
        if state == "ERR":
            raise PeerLost("NIXL reports that the transfer failed")
        return bool(state == "DONE")

    def release(self, transfer: Transfer) -> bool:
        """Let go of a transfer; False while NIXL still moves bytes for it and cannot stop, so that it has to be asked again."""
        try:
            self._agent.release_xfer_handle(transfer)
        except Exception:  # noqa: BLE001 - NIXL raises exactly when the transfer is still active
            return False
        return True

    def progress(self) -> None:
        """Serve what peers want of this side's memory, where UCX cannot do it without this process."""
        self._agent.update_notifs()

    def close(self) -> None:
        """Withdraw the memory and end the agent."""
        try:
            self._agent.deregister_memory(self._registered)
        except Exception as error:
            raise TransportError(f"NIXL does not give the memory back: {_words(error)}") from error
        finally:
            self._agent = None


def _described(runs: Runs, column: int, address: int) -> Runs:
    described = np.zeros((len(runs), 3), np.uint64)
    described[:, 0] = runs[:, column] + np.uint64(address)
    described[:, 1] = runs[:, 2]
    return described


def _ours(error: Exception) -> PeerLost | TransportError:
    kind = type(error).__name__
    if "Disconnect" in kind or "Backend" in kind or "NotFound" in kind:
        return PeerLost(f"NIXL cannot reach the peer: {_words(error)}")
    return TransportError(f"NIXL failed: {_words(error)}")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _keep_quiet() -> None:
    """NIXL logs to standard output, where a program's own output goes; let the program's logging decide instead."""
    logger = logging.getLogger("nixl")
    logger.setLevel(logging.WARNING)
    logger.handlers.clear()
    logger.propagate = True
