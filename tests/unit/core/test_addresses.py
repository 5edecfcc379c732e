"""Control addresses and the request ids that carry them: what is read, what is refused, and that both sides agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.core.addresses import ControlAddress, check_embeddable, in_url, make_request_id, parse_request_id
from kvbaton.errors import AddressError

PREFILL = "host:10.0.0.1,handshake:6301,notify:61005"
DECODE = "host:10.0.0.2,handshake:6302,notify:61006"
TAIL = "0123456789abcdef0123456789abcdef"
PLAIN = f"___prefill_addr_{PREFILL}___decode_addr_{DECODE}_{TAIL}"

ports = st.integers(1, 65535)
names = st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z][a-z0-9_]{0,8}){0,2}", fullmatch=True)
hosts = st.one_of(st.ip_addresses().map(str), names)
addresses = st.builds(ControlAddress, hosts, ports, ports)
tails = st.text("0123456789abcdef", min_size=32, max_size=32)
prefixes = st.sampled_from(["", "cmpl-", "chatcmpl-"])
suffixes = st.sampled_from(["", "-0", "-17", "-deadbeef", "-0-deadbeef", "-anything at all_" + "f" * 32, "-\n"])


@given(addresses)
def test_an_address_is_read_back_as_it_was_written(address: ControlAddress) -> None:
    assert ControlAddress.parse(str(address)) == address


@given(addresses, addresses, tails, prefixes, suffixes)
def test_a_request_id_gives_both_addresses_whatever_an_engine_puts_round_it(
    prefill: ControlAddress, decode: ControlAddress, tail: str, prefix: str, suffix: str
) -> None:
    request_id = prefix + make_request_id(str(prefill), str(decode), tail) + suffix
    assert parse_request_id(request_id) == (prefill, decode)


def test_the_wire_form_is_the_one_of_other_routers() -> None:
    assert make_request_id(PREFILL, DECODE, TAIL) == PLAIN


def test_an_address_of_ours_has_one_port() -> None:
    assert str(ControlAddress.of("10.0.0.1", 7000)) == "host:10.0.0.1,handshake:7000,notify:7000"


@pytest.mark.parametrize(
    ("text", "host", "url"),
    [
        ("host:::1,handshake:1,notify:2", "::1", "tcp://[::1]:1"),
        ("host:[::1],handshake:1,notify:2", "::1", "tcp://[::1]:1"),
        ("host:2001:db8::7,handshake:65535,notify:1", "2001:db8::7", "tcp://[2001:db8::7]:65535"),
        ("host:fe80::1%eth0,handshake:9,notify:9", "fe80::1%eth0", "tcp://[fe80::1%eth0]:9"),
        ("host:node-7.cluster.local,handshake:5,notify:6", "node-7.cluster.local", "tcp://node-7.cluster.local:5"),
        ("host:prefill_0,handshake:5,notify:6", "prefill_0", "tcp://prefill_0:5"),
        ("host:127.0.0.1,handshake:80,notify:81", "127.0.0.1", "tcp://127.0.0.1:80"),
    ],
)
def test_hosts_of_every_kind_are_read(text: str, host: str, url: str) -> None:
    address = ControlAddress.parse(text)
    assert address.host == host
    assert f"tcp://{in_url(address.host)}:{address.handshake}" == url


@pytest.mark.parametrize(
    "text",
    [
        "notify:2,handshake:1,host:h",
        "handshake:1,host:h,notify:2",
        "host:h,handshake:1,notify:2,dp:0,colour:re:d",
        "zone:eu,host:h,handshake:1,notify:2",
        " host : h , handshake : 1 , notify : 2 ",
    ],
)
def test_order_is_free_and_unknown_keys_are_ignored(text: str) -> None:
    assert ControlAddress.parse(text) == ControlAddress("h", 1, 2)


@pytest.mark.parametrize("key", ["host", "handshake", "notify"])
def test_a_missing_key_is_named(key: str) -> None:
    pairs = {"host": "h", "handshake": "1", "notify": "2"}
    del pairs[key]
    with pytest.raises(AddressError, match=f"{key} is missing"):
        ControlAddress.parse(",".join(f"{k}:{v}" for k, v in pairs.items()))


@pytest.mark.parametrize("key", ["host", "handshake", "notify"])
def test_a_key_given_twice_is_named(key: str) -> None:
    with pytest.raises(AddressError, match=f"{key} is given twice"):
        ControlAddress.parse(f"{key}:7,host:h,handshake:1,notify:2")


@pytest.mark.parametrize("key", ["handshake", "notify"])
@pytest.mark.parametrize(
    "port", ["0", "-1", "65536", "abc", "", "1.5", "+1", "0x10", "\u0661", "\u00b2", "1_0", "000080", "9" * 5000]
)
def test_what_is_no_port_is_refused_by_name(key: str, port: str) -> None:
    other = "notify" if key == "handshake" else "handshake"
    with pytest.raises(AddressError, match=f"{key} .* is not a port"):
        ControlAddress.parse(f"host:h,{key}:{port},{other}:2")


@pytest.mark.parametrize(
    "host",
    [
        "",
        " ",
        "[]",
        "a b",
        "a\tb",
        "a\0b",
        "a/b",
        "user@h",
        "1.2.3.4:80",
        "::1::",
        "fe80::1%a b",
        "[::1",
        "[a]b",
        "*",
        "h\u00f6st",
        "h" * 254,
        "h" * 64,
        "a..b",
        ".",
        "0",
        "127.1",
        "1.2.3.4.5",
        "256.1.1.1",
        "0x7f.1",
        "10.0.0.08",
        "h%eth0",
    ],
)
def test_what_is_no_host_is_refused_by_name(host: str) -> None:
    with pytest.raises(AddressError, match=r"host .* is neither"):
        ControlAddress.parse(f"host:{host},handshake:1,notify:2")


@pytest.mark.parametrize(
    "text", ["", ",", "host", "host:h,handshake:1,notify:2,", "host=h,handshake=1,notify=2", "10.0.0.1:80"]
)
def test_what_is_no_list_of_pairs_is_refused(text: str) -> None:
    with pytest.raises(AddressError):
        ControlAddress.parse(text)


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-", "chatcmpl-cmpl-", "req_", "____"])
@pytest.mark.parametrize("suffix", ["", "-0", "-0-1a2b3c4d", "-1a2b3c4d", "-", f"-x_{TAIL}"])
def test_known_prefixes_and_suffixes(prefix: str, suffix: str) -> None:
    prefill, decode = parse_request_id(prefix + PLAIN + suffix)
    assert (str(prefill), str(decode)) == (PREFILL, DECODE)


REFUSED = {
    "nothing": "",
    "a plain id": "cmpl-8f14e45f",
    "two underscores": PLAIN.replace("___", "__"),
    "two underscores before decode": PLAIN.replace("___decode", "__decode"),
    "uppercase hex": PLAIN.replace(TAIL, TAIL.upper()),
    "one uppercase digit": PLAIN[:-1] + "F",
    "no uuid": PLAIN.removesuffix(f"_{TAIL}"),
    "a short uuid": PLAIN[:-1],
    "a long uuid": PLAIN + "0",
    "a uuid with dashes": PLAIN.removesuffix(TAIL) + "01234567-89ab-cdef-0123-456789abcdef",
    "junk after an underscore": PLAIN + "_x",
    "a newline at the end": PLAIN + "\n",
    "no prefill address": PLAIN.replace(PREFILL, ""),
    "no decode address": PLAIN.replace(DECODE, ""),
    "no decode mark": PLAIN.replace("___decode_addr_", ""),
    "no prefill mark": PLAIN.replace("___prefill_addr_", ""),
    "the marks the other way round": f"___decode_addr_{DECODE}___prefill_addr_{PREFILL}_{TAIL}",
    "a second pair in front": PLAIN + PLAIN,
    "a second pair behind": PLAIN + "-" + PLAIN,
    "a decode mark in front": "___decode_addr_x" + PLAIN,
    "a decode mark behind": PLAIN + "-___decode_addr_x",
    "a mark as an unknown key": PLAIN.replace(PREFILL, PREFILL + ",x:___prefill_addr_y"),
    "nine thousand characters": "x" * 9000 + PLAIN,
    "two prefill marks": f"___prefill_addr_{PREFILL}" + PLAIN,
    "a bad port on the prefill side only": PLAIN.replace("handshake:6301", "handshake:0"),
    "a bad port on the decode side only": PLAIN.replace("notify:61006", "notify:abc"),
    "an empty host on the prefill side only": PLAIN.replace("host:10.0.0.1", "host:"),
    "an empty host on the decode side only": PLAIN.replace("host:10.0.0.2", "host:"),
    "thousands of digits": PLAIN.replace("6301", "1" * 5000),
}


@pytest.mark.parametrize("request_id", REFUSED.values(), ids=REFUSED.keys())
def test_both_sides_refuse_together(request_id: str) -> None:
    """One function gives both addresses, so a side that can use its half of a broken id does not exist."""
    with pytest.raises(AddressError) as caught:
        parse_request_id(request_id)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "address",
    [
        f"host:a_{TAIL}-b,handshake:1,notify:2",
        "host:h,handshake:1,notify:2,x:___decode_addr_",
        "host:h,handshake:1,notify:2,x:___prefill_addr_",
    ],
)
def test_an_address_that_an_id_would_not_give_back_is_found_before_it_is_used(address: str) -> None:
    assert ControlAddress.parse(address)
    assert check_embeddable(address) is not None
    try:
        found = parse_request_id(make_request_id(address, address, TAIL))
    except AddressError:
        return
    assert found != (ControlAddress.parse(address),) * 2


@given(addresses)
def test_what_instances_call_themselves_can_stand_in_an_id(address: ControlAddress) -> None:
    assert check_embeddable(str(address)) is None


def test_a_hostile_id_full_of_marks_is_refused_in_linear_time() -> None:
    """Such an id would keep a backtracking pattern busy for minutes: the test's timeout is the check."""
    with pytest.raises(AddressError):
        parse_request_id("___prefill_addr_x" * 20_000 + "___decode_addr_y" * 20_000 + "_z" * 100_000)


@given(st.text(max_size=80) | st.text("_prefildcoa:,hstn0123-", max_size=120))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (ControlAddress.parse, parse_request_id):
        try:
            read(text)
        except AddressError:
            continue


@given(st.integers(0, len(PLAIN) - 1), st.characters())
def test_a_mutated_id_is_read_or_refused(position: int, character: str) -> None:
    try:
        pair = parse_request_id(PLAIN[:position] + character + PLAIN[position + 1 :])
    except AddressError:
        return
    assert all(0 < port < 65536 for address in pair for port in (address.handshake, address.notify))
