"""A small server around a vision encoder, with the cache and without."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from multimodal_cache._demo.encoder import VisionTransformer

QUESTIONS_PER_CONVERSATION = 4
MAX_IMAGES_PER_REQUEST = 3
TOLERANCE = 1e-3  # the outputs of the encoder are layer-normalised, of size 1

Request = tuple[int, ...]
"""The images that a question is about, as indices."""
Batch = tuple[Sequence[torch.Tensor], torch.Tensor]
"""What the vision encoder was given, and what it made of it."""
Embed = Callable[[list[torch.Tensor]], Iterable[torch.Tensor]]


class WrongEmbeddingError(Exception):
    """An image got another embedding than the one that was encoded for it."""


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

    Attributes:
        images: As given.
    """

    def __init__(
        self, encoder: VisionTransformer, images: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._encoder = encoder
        self.images = images
        self._device = device
        self._batches: list[Batch] = []

    def encode(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns ``[images, tokens, hidden]``."""
        with torch.inference_mode():
            embeddings: torch.Tensor = self._encoder(torch.stack([*images]).to(self._device))
        self._batches.append((images, embeddings))
        return embeddings

    def answer(
        self, request: Request, embed: Embed
    ) -> tuple[list[torch.Tensor], list[Batch], float]:
        """Serves a request.

        Args:
            request: The images that it is about.
            embed: ``encode``, or a ``CachedEncoder`` around it.

        Returns:
            The embeddings, what was encoded for them, and the seconds that it took.
        """
        self._batches = []
        began = self._clock()
        embeddings = list(embed([self.images[index] for index in request]))
        return embeddings, self._batches, self._clock() - began

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Run:
    """One way of serving the requests, and what it took so far.

    Args:
        server: Serves them.
        embed: Its ``encode``, or a ``CachedEncoder`` around it.

    Attributes:
        encoder_calls: How often the vision encoder ran.
        images_encoded: The images that it got.
        seconds: The time in the encoder and, with a cache, in hashing and the cache.
        embeddings: What the images got, by their index.
    """

    def __init__(self, server: Server, embed: Embed) -> None:
        self._server = server
        self._embed = embed
        self._encoded: dict[bytes, torch.Tensor] = {}
        self.encoder_calls = self.images_encoded = 0
        self.seconds = 0.0
        self.embeddings: dict[int, torch.Tensor] = {}

    def serve(self, request: Request) -> None:
        """Serves one request, and checks the answer.

        Raises:
            WrongEmbeddingError: It differs, in one bit or more, from what was encoded for that
                image.
        """
        embeddings, batches, seconds = self._server.answer(request, self._embed)
        self.seconds += seconds
        for images, batch in batches:
            self.encoder_calls += 1
            self.images_encoded += len(images)
            for image, embedding in zip(images, batch, strict=True):
                self._encoded[_pixels(image)] = embedding.clone()
        for index, embedding in zip(request, embeddings, strict=True):
            expected = self._encoded[_pixels(self._server.images[index])]
            if not _same_bits(embedding, expected):
                raise WrongEmbeddingError(f"image {index} got what wasn't encoded for it")
            self.embeddings[index] = expected


def serve_in_turn(requests: Iterable[Request], runs: Sequence[Run]) -> None:
    """Serves each request in every way, so that what else the machine does meets all alike.

    The one that begins changes from request to request.

    Raises:
        WrongEmbeddingError: As ``Run.serve``.
    """
    order = list(runs)
    for request in requests:
        for run in order:
            run.serve(request)
        order.append(order.pop(0))


def _pixels(image: torch.Tensor) -> bytes:
    return image.numpy().tobytes()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # -0.0 isn't 0.0


def largest_difference(
    ones: Mapping[int, torch.Tensor], others: Mapping[int, torch.Tensor]
) -> float:
    """Compares the embeddings that two runs have for each image.

    Raises:
        WrongEmbeddingError: They differ by more than batched arithmetic does.
    """
    difference = max((one - others[index]).abs().max().item() for index, one in ones.items())
    if not difference <= TOLERANCE:
        raise WrongEmbeddingError(f"the runs with and without the cache differ by {difference}")
    return difference
