"""What a vLLM request wants: keys from its id, the source from its id or its parameters, a digest of its prompt."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from vllm_rig import EXTERNAL_ID, Request, Rig, source_params, target_params

from kvbaton.core.addresses import ControlAddress, make_request_id
from kvbaton.core.handoff import Incarnation, Mode, TransferId
from kvbaton.engines.vllm.requests import (
    AutomaticIds,
    HandoffInfo,
    SourceParams,
    answer_params,
    indices,
    named,
    prompt_digest,
    read_handoff,
    shorten_prompt,
)

IDS = {
    f"cmpl-{EXTERNAL_ID}-0-1a2b3c4d": (0, 0),
    f"cmpl-{EXTERNAL_ID}-3-12345678": (3, 0),
    f"cmpl-{EXTERNAL_ID}-3": (3, 0),
    f"2_cmpl-{EXTERNAL_ID}-1-1a2b3c4d": (1, 2),
    f"11_chatcmpl-{EXTERNAL_ID}-1a2b3c4d": (0, 11),
    f"chatcmpl-{EXTERNAL_ID}-12345678": (0, 0),
    f"chatcmpl-{EXTERNAL_ID}": (0, 0),
    f"chatcmpl-{EXTERNAL_ID}_0-1a2b3c4d": (0, 0),
    f"chatcmpl-{EXTERNAL_ID}_12-1a2b3c4d": (12, 0),
    f"3_chatcmpl-{EXTERNAL_ID}_2": (2, 3),
    "chatcmpl-x-7-12345678": (0, 0),
    "cmpl-chatcmpl-x-4-1a2b3c4d": (4, 0),
    "2_cmpl-chatcmpl-x-4-1a2b3c4d": (4, 2),
    "chatcmpl-cmpl-x-4-1a2b3c4d": (0, 0),
    "generate-tokens-cmpl-x-4-1a2b3c4d": (4, 0),
    "generate-tokens-x-4-1a2b3c4d": (0, 0),
    "": (0, 0),
}


@pytest.mark.parametrize("request_id", IDS)
def test_prompt_and_sample_come_from_the_id(request_id: str) -> None:
    assert indices(request_id) == IDS[request_id]


def test_both_sides_have_the_same_key_although_vllm_renames_them() -> None:
    source = read_handoff(Request(source_params(), request_id=f"1_cmpl-{EXTERNAL_ID}-2-aaaaaaaa"), Mode.PUSH, AutomaticIds())
    target = read_handoff(Request(target_params(), request_id=f"1_cmpl-{EXTERNAL_ID}-2-bbbbbbbb"), Mode.PUSH, AutomaticIds())
    assert source is not None
    assert target is not None
    assert source.key == target.key
    assert target.wanted is not None
    assert prompt_digest(Request(None)) == target.wanted.prompt


def test_the_digest_sees_tokens_images_and_adapters() -> None:
    plain = Request(None)
    other = Request(None, prompt_token_ids=(1, 2))
    image, adapter = Request(None), Request(None)
    image.mm_features = [SimpleNamespace(identifier="cat")]  # type: ignore[attr-defined]
    adapter.lora_request = SimpleNamespace(lora_name="poet")  # type: ignore[attr-defined]
    assert len({prompt_digest(request) for request in (plain, other, image, adapter)}) == 4
    assert prompt_digest(plain) == prompt_digest(Request(None))


SALTS = (None, "a", "b", "ab", "a|6 salt b", "poet", "\0", "\ud800")


def test_the_digest_sees_the_cache_salt() -> None:
    """Two tenants who send the same prompt never get each other's cache; without a salt nothing changes."""
    salted = [Request(None) for _ in SALTS]
    for request, salt in zip(salted, SALTS, strict=True):
        request.cache_salt = salt  # type: ignore[attr-defined]
    adapter = Request(None)
    adapter.lora_request = SimpleNamespace(lora_name="poet")  # type: ignore[attr-defined]
    assert len({prompt_digest(request) for request in (*salted, adapter)}) == len(SALTS) + 1
    assert prompt_digest(salted[0]) == prompt_digest(Request(None))


@pytest.mark.parametrize("side", [source_params, target_params])
def test_both_sides_send_the_digest_with_the_salt(side: Callable[[], dict[str, Any]]) -> None:
    """The source compares it with that of its own request and refuses another one; tests/unit/agent has that."""
    digests = []
    for salt in ("a", "b"):
        rig, request = Rig(), Request(side())
        request.cache_salt = salt  # type: ignore[attr-defined]
        rig.scheduler.begin(request)
        rig.step()
        ((name, argument),) = rig.port.calls
        digests.append(argument[1] if name == "expect_target" else argument.prompt)
    assert len(set(digests)) == 2


def test_a_prompt_without_token_ids_cannot_be_handed_off() -> None:
    wish = read_handoff(Request(source_params(), prompt_token_ids=None), Mode.PUSH, AutomaticIds())
    assert wish is not None
    assert "without token ids" in wish.problem


def test_log_lines_name_the_transfer() -> None:
    assert named(Request(source_params("tx-9"), request_id="r")) == "request r (transfer tx-9)"
    assert named(Request({"transfer_id": 7}, request_id="r")) == "request r (no transfer id)"
    assert len(named(Request(source_params("x" * 10_000), request_id="r"))) < 400


@pytest.mark.parametrize("transfer_id", ["tx\nERROR a line of its own", "tx\x1b[2J", "tx\u2028"])
def test_a_transfer_id_never_makes_log_lines_of_its_own(transfer_id: str) -> None:
    request = Request(source_params(transfer_id))
    wish = read_handoff(request, Mode.PUSH, AutomaticIds())
    assert wish is not None
    assert "cannot be printed" in wish.problem
    assert (wish.problem + named(request)).isprintable()


NO_ID = {"do_remote_decode": True}


def automatic(ids: AutomaticIds, request_id: str) -> tuple[str, int, int]:
    wish = read_handoff(Request(NO_ID, request_id=request_id), Mode.PUSH, ids)
    assert wish is not None
    assert wish.key is not None
    return wish.key.transfer_id, wish.key.prompt_index, wish.key.sample_index


TOGETHER = {
    "completions": ["cmpl-x-0-aaaaaaaa", "1_cmpl-x-0-aaaaaaaa", "cmpl-x-1-bbbbbbbb", "1_cmpl-x-1-bbbbbbbb"],
    "chat": ["0_chatcmpl-x-aaaaaaaa", "1_chatcmpl-x-aaaaaaaa"],
    "batch of chats": ["chatcmpl-x_0-aaaaaaaa", "chatcmpl-x_1-bbbbbbbb"],
    "not made random": ["cmpl-x-0", "cmpl-x-1"],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_without_a_transfer_id_all_of_one_http_request_get_the_same(name: str) -> None:
    """The answer to the router carries one transfer id for all of them."""
    ids = AutomaticIds()
    keys = [automatic(ids, request_id) for request_id in TOGETHER[name]]
    assert len({transfer_id for transfer_id, _, _ in keys}) == 1
    assert len(set(keys)) == len(keys)
    assert automatic(ids, "cmpl-y-0-aaaaaaaa")[0] != keys[0][0]


def test_a_request_id_that_is_used_again_gets_another_automatic_transfer_id() -> None:
    """A client that asks again under its id must not meet what is left of its first request."""
    ids = AutomaticIds()
    first = [automatic(ids, f"cmpl-x-{prompt}-aaaaaaaa") for prompt in range(2)]
    again = [automatic(ids, f"cmpl-x-{prompt}-bbbbbbbb") for prompt in range(2)]
    assert again[0][0] == again[1][0] != first[0][0]
    assert automatic(AutomaticIds(), "cmpl-x-0-aaaaaaaa") not in first, "nobody can guess it"


class Embeddings:
    def __init__(self, *values: float) -> None:
        self.values = np.array(values, np.float32)

    def float(self) -> Embeddings:
        return self

    def numpy(self) -> npt.NDArray[np.float32]:
        return self.values


@pytest.mark.parametrize("field", ["lora_request", "cache_salt", "mm_features", "prompt_embeds"])
def test_what_makes_two_caches_different_is_in_the_digest(field: str) -> None:
    values: dict[str, list[Any]] = {
        "lora_request": [SimpleNamespace(lora_name="a"), SimpleNamespace(lora_name="b"), None],
        "cache_salt": ["a", "b", None],
        "mm_features": [[SimpleNamespace(identifier="a")], [SimpleNamespace(identifier="b")], []],
        "prompt_embeds": [Embeddings(1.0), Embeddings(2.0), None],
    }
    digests = set()
    for value in values[field]:
        request = Request(source_params())
        setattr(request, field, value)
        digests.add(prompt_digest(request))
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("named", "stated", "dialled"),
    [(7001, None, 7004), (7001, 7004, 7004), (7004, 7004, 7004), (None, 7004, 7004)],
    ids=["one address for all ranks", "and the answer of the rank", "an address per rank", "the answer alone"],
)
def test_a_target_dials_the_rank_that_holds_the_cache(named: int | None, stated: int | None, dialled: int) -> None:
    params = {**target_params(), "remote_dp_rank": 3}
    if stated is not None:
        params |= {"remote_host": "127.0.0.1", "remote_port": stated}
    request_id = "x" if named is None else id_with(named)
    requested = read_handoff(Request(params, request_id=f"cmpl-{request_id}-0"), Mode.PUSH, AutomaticIds())
    assert requested is not None
    assert requested.wanted is not None
    assert requested.wanted.source == ControlAddress.of("127.0.0.1", dialled)


def id_with(port: int) -> str:
    """A request id that names this control port of a source."""
    return make_request_id(str(ControlAddress.of("127.0.0.1", port)), str(ControlAddress.of("127.0.0.1", 7200)), "0" * 32)


@pytest.mark.parametrize("rank", [-1, 65535 - 7000, 1 << 40])
def test_a_rank_that_can_have_no_port_is_refused_by_name(rank: int) -> None:
    params = {**target_params(), "remote_dp_rank": rank}
    requested = read_handoff(Request(params, request_id=f"cmpl-{id_with(7001)}-0"), Mode.PUSH, AutomaticIds())
    assert requested is not None
    assert "remote_dp_rank" in requested.problem
    assert str(rank) in requested.problem


def test_an_answer_names_the_address_and_the_number_of_its_own_rank() -> None:
    info = HandoffInfo(ControlAddress.of("127.0.0.1", 7001), Incarnation("p1"), tp_size=2, dp_rank=3)
    answer = answer_params(SourceParams(TransferId("tx")), info)
    assert (answer["remote_port"], answer["remote_dp_rank"], answer["tp_size"]) == (7001, 3, 2)


@pytest.mark.parametrize(("prompt", "block"), [(32, 16), (33, 16), (31, 16), (17, 16), (8, 16), (16, 16)])
def test_a_shortened_prompt_has_the_hashes_of_its_own_blocks(prompt: int, block: int) -> None:
    class Hashed:
        def __init__(self, tokens: list[int]) -> None:
            self.prompt_token_ids, self._all_token_ids = list(tokens), list(tokens)
            self.num_prompt_tokens, self.max_tokens = len(tokens), 7
            self.block_hashes: list[tuple[int, ...]] = []
            self.update_block_hashes()

        def update_block_hashes(self) -> None:
            while (start := len(self.block_hashes) * block) + block <= len(self._all_token_ids):
                self.block_hashes.append(tuple(self._all_token_ids[start : start + block]))

    request = Hashed(list(range(prompt)))
    shorten_prompt(request, prompt - 1)
    assert request.block_hashes == Hashed(list(range(prompt - 1))).block_hashes
    assert (request.num_prompt_tokens, request.max_tokens) == (prompt - 1, 1)
