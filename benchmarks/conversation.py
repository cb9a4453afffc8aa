"""What a cache saves in a conversation with a model of ``transformers`` about the same photographs.

Run it from the root of the repository, on an otherwise idle machine::

    pip install -e '.[bench]'
    python benchmarks/conversation.py

The model is a small SmolVLM, built from its configuration with seeded random weights, without
downloads; ``--model tiny`` is a toy. The defaults take some minutes on two cores. The report is
Markdown, on standard output, and with ``--output`` also in a file.

How to read it: in each turn the model gets the conversation so far, with both photographs in it,
and answers greedily in eight tokens. A round holds a conversation without a cache, and the same one
with ``cache_image_features`` and an empty cache, in an order that is drawn anew; the answers have
to be the same. Encodes are of tiles, into which SmolVLM cuts a photograph. Seconds are of a turn,
the median of the rounds and their quartiles, with all that ``generate`` does, keys and lookups
included, without the image processor; the last column is the median of the ratios, round by round.
A real model has a larger language model and longer answers beside its encoder: what is saved is the
encoder's time, and how much that is of a turn is the model's matter.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from reporting import QUARTILES, Parser, conditions, run, spread, table
from transformers import (
    GenerationConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)

from multimodal_cache import MultiModalStaticCache
from multimodal_cache.integrations.transformers import cache_image_features

BUDGET = 2**30
ANSWER = 8
QUESTION = 12
IMAGE = 1
WORDS = range(2, 256)


@dataclass(frozen=True)
class Size:
    """How large a model is, its tiles, and the longest edge of a photograph, in pixels."""

    hidden: int
    layers: int
    tile: int
    edge: int


SIZES = {"small": Size(256, 4, 256, 512), "tiny": Size(32, 1, 32, 64)}


class Conversation:
    """A chat over photographs, of ids that mean nothing.

    Args:
        size: Of the model.
        turns: How many questions.
        seed: Of weights, photographs and questions.
    """

    def __init__(self, size: Size, turns: int, seed: int) -> None:
        torch.manual_seed(seed)
        shared = {
            "hidden_size": size.hidden,
            "intermediate_size": 4 * size.hidden,
            "num_hidden_layers": size.layers,
            "num_attention_heads": 4,
        }
        config = SmolVLMConfig(
            text_config={
                "model_type": "llama",
                "vocab_size": WORDS.stop,
                "num_key_value_heads": 4,
                "pad_token_id": 0,
                **shared,
            },
            vision_config={
                "model_type": "smolvlm_vision",
                "image_size": size.tile,
                "patch_size": 16,
                **shared,
            },
            image_token_id=IMAGE,
            scale_factor=2,
        )
        self.model = SmolVLMForConditionalGeneration(config).eval()
        self.model.generation_config = GenerationConfig(
            max_new_tokens=ANSWER, do_sample=False, pad_token_id=0
        )
        rng = np.random.default_rng(seed)
        processor = SmolVLMImageProcessorPil(
            size={"longest_edge": size.edge}, max_image_size={"longest_edge": size.tile}
        )
        photographs = [photograph(rng, size.edge) for _ in range(2)]
        self.pixels = dict(processor([photographs], return_tensors="pt"))
        tokens = (size.tile // 16) ** 2 // 4 * self.pixels["pixel_values"].shape[1]
        self.questions = rng.integers(WORDS.start, WORDS.stop, (turns, QUESTION)).tolist()
        self.beginning = [IMAGE] * tokens
        self.encodes = 0
        self.model.model.vision_model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.encodes += len(kwargs["pixel_values"])

    def hold(self, *, cached: bool) -> Talk:
        """Holds the conversation from its start."""
        talk = Talk()
        ids = list(self.beginning)
        with ExitStack() as stack:
            if cached:
                cache = MultiModalStaticCache(BUDGET)
                stack.enter_context(cache_image_features(self.model, cache, namespace="SmolVLM"))
            for question in self.questions:
                ids += question
                self.encodes = 0
                start = time.perf_counter()
                tokens = self.model.generate(
                    input_ids=torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                    **self.pixels,
                )
                talk.seconds.append(time.perf_counter() - start)
                talk.encodes.append(self.encodes)
                ids = tokens[0].tolist()
        talk.ids = ids
        return talk


@dataclass
class Talk:
    """What a conversation took, turn by turn, and how it ended."""

    seconds: list[float] = field(default_factory=list)
    encodes: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)


def photograph(rng: np.random.Generator, edge: int) -> Image.Image:
    """Returns light and shade with some noise."""
    y, x = np.mgrid[: edge * 3 // 4, :edge] * (6 / edge)
    waves = [128 + 90 * np.sin(rng.random() * x + rng.random() * y + phase) for phase in range(3)]
    pixels = np.stack(waves, axis=-1) + rng.normal(0, 8, (*x.shape, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def compare(chat: Conversation, rounds: int, rng: random.Random) -> dict[bool, list[Talk]]:
    """Holds the conversation with the cache and without, round by round."""
    chat.hold(cached=False)  # the first one pays for torch's own set-up
    talks: dict[bool, list[Talk]] = {False: [], True: []}
    for _ in range(rounds):
        for cached in rng.sample((True, False), 2):
            talks[cached].append(chat.hold(cached=cached))
    if len({tuple(talk.ids) for each in talks.values() for talk in each}) != 1:
        raise RuntimeError("the answers with the cache aren't those without")
    return talks


def rows(talks: dict[bool, list[Talk]]) -> Iterator[tuple[str, ...]]:
    """Yields the row of each turn, and that of all."""
    turns = len(talks[True][0].seconds)
    chosen = [(str(turn + 1), slice(turn, turn + 1)) for turn in range(turns)]
    for name, part in [*chosen, ("all", slice(None))]:
        seconds = {
            cached: [sum(talk.seconds[part]) for talk in each] for cached, each in talks.items()
        }
        pairs = zip(seconds[False], seconds[True], strict=True)
        yield (
            name,
            " / ".join(str(sum(talks[cached][0].encodes[part])) for cached in (False, True)),
            spread(seconds[False], digits=3),
            spread(seconds[True], digits=3),
            f"{statistics.median(without / cached for without, cached in pairs):.2f}",
        )


def report(options: argparse.Namespace) -> Iterator[str]:
    """Measures, and yields the paragraphs of the report."""
    torch.set_num_threads(options.threads)
    size = SIZES[options.model]
    chat = Conversation(size, options.turns, options.seed)
    yield conditions(options.seed, ["torch", "transformers", "multimodal-cache"])
    count = sum(parameter.numel() for parameter in chat.model.parameters())
    yield (
        f"SmolVLM, {count / 1e6:.1f} million parameters, two photographs in "
        f"{chat.pixels['pixel_values'].shape[1]} tiles of {size.tile} x {size.tile} pixels, "
        f"{options.rounds} rounds; seconds are the {QUARTILES}:"
    )
    talks = compare(chat, options.rounds, random.Random(options.seed))
    header = (
        "Turn",
        "Tiles encoded without / with the cache",
        "Seconds without",
        "Seconds with",
        "Ratio",
    )
    yield table(header, rows(talks))


def main() -> None:
    """Parses the command line and prints the report."""
    parser = Parser(__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=SIZES, default="small", help="the model")
    parser.add_number("--turns", 8, 1, "questions in a conversation")
    parser.add_number("--threads", torch.get_num_threads(), 1, "threads of torch")
    parser.add_number("--rounds", 5, 2, "conversations of each kind")
    run(parser, report)


if __name__ == "__main__":
    main()
