"""Finding ports that are free, and saying clearly that one is not."""

from __future__ import annotations

import socket
import subprocess
import sys

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


PICKS = """
from kvbaton.launch import ports
ports._FIRST, ports._LAST = {first}, {last}
picker = ports.PortPicker()
print(*(picker.pick() for _ in range(60)), flush=True)
input()
"""


def test_two_processes_pick_different_ports_until_one_of_them_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = 12_000, 12_199
    monkeypatch.setattr(ports_module, "_FIRST", first)
    monkeypatch.setattr(ports_module, "_LAST", last)
    command = [sys.executable, "-c", PICKS.format(first=first, last=last)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = {int(each) for each in other.stdout.readline().split()}
        assert len(theirs) == 60
        picker = PortPicker()
        assert theirs.isdisjoint(picker.pick() for _ in range(60))
        a_port = min(theirs)
        assert not ports_module._RESERVED.take(range(a_port, a_port + 1))
        other.communicate("\n")
    assert ports_module._RESERVED.take(range(a_port, a_port + 1)), "the reservations of a process end with it"
    ports_module._RESERVED.give_back([a_port])


def test_two_pickers_pick_different_ports_while_both_live(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = PortPicker(), PortPicker()
    port = one.pick()
    monkeypatch.setattr(ports_module, "_FIRST", port)
    monkeypatch.setattr(ports_module, "_LAST", port)
    with pytest.raises(ConfigError, match="no free port"):
        other.pick()
    del one
    assert other.pick() == port
