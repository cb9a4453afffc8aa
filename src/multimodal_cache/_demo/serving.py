"""A small server around a vision encoder, with the cache and without."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from multimodal_cache._demo.encoder import VisionTransformer

QUESTIONS_PER_CONVERSATION = 4
MAX_IMAGES_PER_REQUEST = 3
TOLERANCE = 1e-3  # the outputs of the encoder are layer-normalised, of size 1

Request = tuple[int, ...]
"""The images that a question is about, as indices."""


class WrongEmbeddingError(Exception):
    """An image got another embedding than the one that was encoded for it."""


@dataclass(frozen=True)
class Run:
    """What it took to serve all the requests.

    Attributes:
        encoder_calls: How often the vision encoder ran.
        images_encoded: The images that it got.
        seconds: The time in the encoder and, with a cache, in hashing and the cache.
        embeddings: What the images got, by their index.
    """

    encoder_calls: int
    images_encoded: int
    seconds: float
    embeddings: dict[int, torch.Tensor]


def plan_requests(count: int, num_images: int, seed: int) -> list[Request]:
    """Draws requests from conversations, each of several questions about the same images."""
    rng = random.Random(seed)
    sizes = range(1, min(MAX_IMAGES_PER_REQUEST, num_images) + 1)
    conversations = [
        tuple(rng.sample(range(num_images), rng.choice(sizes)))
        for _ in range(-(-count // QUESTIONS_PER_CONVERSATION))
    ]
    return [rng.choice(conversations) for _ in range(count)]


class Server:
    """Answers requests for embeddings.

    Args:
        encoder: The vision encoder.
        images: ``[3, 224, 224]`` bytes each, on the CPU, as a server gets them.
        device: Where the encoder runs and the embeddings are kept.
    """

    def __init__(
        self, encoder: VisionTransformer, images: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._encoder = encoder
        self._images = images
        self._device = device
        self._batches: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []

    def encode(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns ``[images, tokens, hidden]``."""
        with torch.inference_mode():
            embeddings: torch.Tensor = self._encoder(torch.stack([*images]).to(self._device))
        self._batches.append((images, embeddings))
        return embeddings

    def run(
        self,
        requests: Iterable[Request],
        embed: Callable[[list[torch.Tensor]], Iterable[torch.Tensor]],
    ) -> Run:
        """Serves requests.

        Args:
            requests: The images of each.
            embed: ``encode``, or a ``CachedEncoder`` around it.

        Raises:
            WrongEmbeddingError: An answer differs, in one bit or more, from what was encoded for
                that image.
        """
        calls = encoded = 0
        seconds = 0.0
        truth: dict[bytes, torch.Tensor] = {}
        answers: dict[int, torch.Tensor] = {}
        for request in requests:
            self._batches = []
            began = self._clock()
            embeddings = embed([self._images[index] for index in request])
            seconds += self._clock() - began
            for images, batch in self._batches:
                calls += 1
                encoded += len(images)
                for image, embedding in zip(images, batch, strict=True):
                    truth[image.numpy().tobytes()] = embedding.clone()
            for index, embedding in zip(request, embeddings, strict=True):
                answers[index] = truth[self._images[index].numpy().tobytes()]
                if not _same_bits(embedding, answers[index]):
                    raise WrongEmbeddingError(f"image {index} got what wasn't encoded for it")
        return Run(calls, encoded, seconds, answers)

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # -0.0 isn't 0.0


def largest_difference(one: Run, other: Run) -> float:
    """Compares what two runs answered for each image.

    Raises:
        WrongEmbeddingError: They differ by more than batched arithmetic does.
    """
    difference = max(
        (embedding - other.embeddings[index]).abs().max().item()
        for index, embedding in one.embeddings.items()
    )
    if not difference <= TOLERANCE:
        raise WrongEmbeddingError(f"the runs with and without the cache differ by {difference}")
    return difference
