"""A small server around a vision encoder, with the cache and without."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from multimodal_cache import EmbeddingResult, MultiModalStaticCache, hash_feature
from multimodal_cache._demo.encoder import VisionTransformer

QUESTIONS_PER_CONVERSATION = 4
MAX_IMAGES_PER_REQUEST = 3
TOLERANCE = 1e-3  # the outputs of the encoder are layer-normalised, of size 1

Request = tuple[int, ...]
"""The images that a question is about, as indices."""


class WrongEmbeddingError(Exception):
    """The cache returned something else than what was encoded."""


@dataclass(frozen=True)
class Run:
    """What it took to serve all the requests.

    Attributes:
        encoder_calls: How often the encoder ran, on the images of one request each time.
        images_encoded: The images that it got.
        seconds: The time in the encoder and, with a cache, in hashing and the cache.
        outputs: The embeddings that each distinct list of images got, by their keys.
    """

    encoder_calls: int
    images_encoded: int
    seconds: float
    outputs: dict[tuple[int, ...], torch.Tensor]


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

    def encode(self, request: Request) -> torch.Tensor:
        """Returns ``[tokens of all the images, hidden]``."""
        pixels = torch.stack([self._images[index] for index in request]).to(self._device)
        with torch.inference_mode():
            embedding: torch.Tensor = self._encoder(pixels)
        return embedding.flatten(0, 1)

    def run(self, requests: Iterable[Request]) -> Run:
        """Serves requests, encoding for each."""
        seconds = 0.0
        calls = images = 0
        outputs: dict[tuple[int, ...], torch.Tensor] = {}
        for request in requests:
            began = self._clock()
            embedding = self.encode(request)
            seconds += self._clock() - began
            calls += 1
            images += len(request)
            outputs.setdefault(tuple(self._mm_hashes(request)), embedding)
        return Run(calls, images, seconds, outputs)

    def run_cached(self, requests: Iterable[Request], cache: MultiModalStaticCache) -> Run:
        """Serves requests, encoding only what isn't in the cache.

        Raises:
            WrongEmbeddingError: A hit differs, in one bit or more, from what was encoded.
        """
        seconds = 0.0
        calls = images = 0
        outputs: dict[tuple[int, ...], torch.Tensor] = {}
        for request in requests:
            began = self._clock()
            mm_hashes = self._mm_hashes(request)
            result = cache.get(mm_hashes)
            hit = result is not None
            if result is None:
                result = EmbeddingResult(embedding=self.encode(request))
                cache.set(cache.combine_hashes(mm_hashes), result)
                calls += 1
                images += len(request)
            seconds += self._clock() - began
            if not hit:
                outputs[tuple(mm_hashes)] = result.embedding.clone()
            elif not _same_bits(result.embedding, outputs[tuple(mm_hashes)]):
                raise WrongEmbeddingError(f"a hit differs from what was encoded for {request}")
        return Run(calls, images, seconds, outputs)

    def _mm_hashes(self, request: Request) -> list[int]:
        namespace = self._encoder.version  # other weights make other embeddings
        return [hash_feature(self._images[index], namespace=namespace) for index in request]

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # -0.0 isn't 0.0


def largest_difference(one: Run, other: Run) -> float:
    """Compares what two runs answered to each request.

    Raises:
        WrongEmbeddingError: They differ by more than batched arithmetic does.
    """
    difference = max(
        (one.outputs[mm_hashes] - other.outputs[mm_hashes]).abs().max().item()
        for mm_hashes in one.outputs
    )
    if not difference <= TOLERANCE:
        raise WrongEmbeddingError(f"the runs with and without the cache differ by {difference}")
    return difference
