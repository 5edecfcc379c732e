"""Text to token ids and back, and chat templates."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.ext
import msgspec
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvbaton.errors import BadRequest, ModelError

__all__ = ["Tokenizer", "TokenizerFiles"]


_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TokenizerFiles(msgspec.Struct, frozen=True):
    """What a model's own files contain about its tokenizer; `chat_template` is empty when there is none."""

    tokenizer_json: str
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""
    eos_ids: tuple[int, ...] = ()


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads."""

    def __init__(self, files: TokenizerFiles, where: str) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:
            raise ModelError(f"{where}: the tokenizer cannot be built: {error}; use the model's own tokenizer.json") from error
        self._backend.no_padding()
        self._backend.no_truncation()
        self._template = _compiled(files.chat_template, where)
        self._bos_token, self._eos_token = files.bos_token, files.eos_token
        self._special = frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)
        self._is_byte_level = _is_byte_level(files.tokenizer_json)
        self.eos_ids = frozenset(files.eos_ids)
        self.vocab_size = int(self._backend.get_vocab_size())
        self.longest_token_bytes = max(map(self._length, self._backend.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. Special tokens in it are recognised; characters outside the vocabulary are left out."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """How one token is shown in logprobs."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes one token stands for (none for a special token), or None when they depend on its neighbours."""
        if token_id in self._special:
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self._is_byte_level:
            return None
        try:
            return bytes(map(_BYTE_OF.__getitem__, token))
        except KeyError:
            return str(token).encode()

    def _length(self, token: str) -> int:
        """Bytes of a vocabulary entry; byte-level BPE writes every byte as one character."""
        return len(token) if self._is_byte_level and _BYTE_OF.keys() >= set(token) else len(token.encode())

    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str:
        """The prompt of a chat, up to where the assistant's answer begins. Raises BadRequest when the template refuses."""
        if self._template is None:
            raise BadRequest("messages", "this model has no chat template; use /v1/completions")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, bos_token=self._bos_token, eos_token=self._eos_token
            )
        except _TEMPLATE_FAULTS as error:
            raise BadRequest("messages", f"the model's chat template refused the messages: {error}") from error


def _is_byte_level(tokenizer_json: str) -> bool:
    decoder = json.loads(tokenizer_json).get("decoder")
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, other bytes for characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(shifted)}


_BYTE_OF = _byte_of_character()


def _compiled(chat_template: str, where: str) -> jinja2.Template | None:
    if not chat_template:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.datetime.now().strftime(pattern)
    try:
        return environment.from_string(chat_template)
    except jinja2.TemplateError as error:
        raise ModelError(f"{where}: chat_template cannot be compiled: {error}; correct it or remove it") from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
