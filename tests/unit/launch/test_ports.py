"""Finding ports that are free, and saying clearly that one is not."""

from __future__ import annotations

import socket

import pytest

from kvbaton.errors import ConfigError
from kvbaton.launch import ports as ports_module
from kvbaton.launch.ports import PortPicker, check_port, check_port_free


def test_picked_ports_are_free_distinct_and_below_the_range_of_outgoing_connections() -> None:
    picker = PortPicker()
    picked = [picker.pick() for _ in range(50)]
    assert len(set(picked)) == 50
    for port in picked:
        assert 10_000 <= port < 32_768
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "0.0.0.0", "::1"])  # noqa: S104
def test_a_port_in_use_on_any_address_is_never_picked(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("THIS MACHINE HAS NO IPv6: not tried")
    first = PortPicker().pick()
    monkeypatch.setattr(ports_module, "_FIRST", first)
    monkeypatch.setattr(ports_module, "_LAST", first)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, first), family=family), pytest.raises(ConfigError, match=f"no free port between {first}"):
        PortPicker().pick()
    assert PortPicker().pick() == first


def test_a_picker_runs_out_instead_of_repeating_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    port = PortPicker().pick()
    monkeypatch.setattr(ports_module, "_FIRST", port)
    monkeypatch.setattr(ports_module, "_LAST", port)
    picker = PortPicker()
    picker.pick()
    with pytest.raises(ConfigError, match="no free port"):
        picker.pick()


def test_a_port_in_use_is_named_with_the_option_to_change_it() -> None:
    port = PortPicker().pick()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is in use; .*--port"),
    ):
        check_port_free("127.0.0.1", port, "--port")
    check_port_free("127.0.0.1", port, "--port")


@pytest.mark.parametrize("port", [0, -1, 65536, 10**20])
def test_what_is_no_port_is_refused_by_option(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port is {port}; it must be between 1 and 65535"):
        check_port(port, "--port")
    with pytest.raises(ConfigError, match=f"--port is {port}; it must be between 1 and 65535"):
        check_port_free("127.0.0.1", port, "--port")


def test_an_address_that_is_not_ours_is_not_called_in_use() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 12345: .*--host") as caught:
        check_port_free("192.0.2.1", 12345, "--port")
    assert "in use" not in str(caught.value)
