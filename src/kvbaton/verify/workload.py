"""The requests that verify sends: seeded, of very different lengths, some sharing prefixes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

__all__ = ["make_prompts", "make_text"]

_SHARED = 0.3
_WORDS = tuple(
    (
        "river bridge morning letter engine harbour winter lantern garden market teacher stone window music signal "
        "paper mountain ship captain forest bread silver kitchen road doctor village number story machine summer "
        "island cloud painter clock valley station farmer glass winner copper sailor library wheel orchard thunder "
        "castle mirror field "
    ).split()
)
_FRAMES = (
    "The {} near the {} was older than anyone in the {} could remember.",
    "When the {} came back from the {}, none spoke about the {} again.",
    "She wrote {} short notes on the {} before the {} arrived.",
    "Every {} has a {}, and every {} has a reason to keep it.",
    "In the {}, between the {} and the {}, there is a small door.",
    "How does a {} turn a {} into a {}? First it waits, then it listens.",
)


def make_text(generator: random.Random, words: int) -> str:
    """Plain English of at least `words` words; never the same twice."""
    sentences: list[str] = []
    count = 0
    while count < words:
        frame = generator.choice(_FRAMES)
        sentence = frame.format(*(generator.choice(_WORDS) for _ in range(3)))
        sentences.append(sentence)
        count += sentence.count(" ") + 1
    return " ".join(sentences)


def make_prompts(
    encode: Callable[[str], Sequence[int]], requests: int, seed: int, longest: int, shortest: int = 1, whole_blocks: int = 0
) -> list[tuple[int, ...]]:
    """`requests` prompts as token ids, lengths log-uniform from `shortest` to `longest`; about a third share a prefix.

    With `whole_blocks`, each is one token longer than a number of blocks of so many tokens, and none shares a prefix: prompts
    whose prefixes are cached would be computed in other steps than alone.
    """
    generator = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    for _ in range(requests):
        length = round(math.exp(generator.uniform(math.log(shortest), math.log(longest))))
        own = tuple(encode(make_text(generator, length + 8)))[:length]
        if whole_blocks:
            own = own[: (len(own) - 1) // whole_blocks * whole_blocks + 1]
        elif prompts and generator.random() < _SHARED:
            other = generator.choice(prompts)
            cut = generator.randint(1, len(other))
            own = (other[:cut] + own)[: max(length, cut)]
        prompts.append(own)
    return prompts
