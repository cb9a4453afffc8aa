"""Requests, and a server that prefills them in SGLang's way, for ``sglang_paths.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from sglang_stand_ins import MultimodalDataItem, mm_schedule

HIDDEN = 4
ROW = HIDDEN * 4  # bytes
FIRST_PLACEHOLDER = 10_000


def embedding_of(number: int, rows: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """What the encoder makes of a medium: no two rows are equal, of one medium or of two."""
    column = 100 * number + torch.arange(rows, device=device) / 3
    return column[:, None].repeat(1, HIDDEN)


@dataclass(frozen=True)
class Medium:
    """An image, or anything else that an encoder turns into rows."""

    number: int
    spans: tuple[int, ...]  # the lengths of its runs of placeholders
    mm_hash: int | None
    modality: str = "image"


def image(number: int, rows: int, mm_hash: int | None = None) -> Medium:
    return Medium(number, (rows,), 1000 + number if mm_hash is None else mm_hash)


def video(number: int, *spans: int) -> Medium:
    return Medium(number, spans, 1000 + number, "video")


class Request:
    """A prompt: text before each run of placeholders, and after the last."""

    def __init__(self, *media: Medium) -> None:
        self.input_ids: list[int] = []
        self.items: list[MultimodalDataItem] = []
        rows = [torch.zeros(0, HIDDEN)]
        for medium in media:
            placeholder = FIRST_PLACEHOLDER + medium.number
            offsets = []
            for length in medium.spans:
                self.input_ids += [1, 2]
                start = len(self.input_ids)
                offsets.append((start, start + length - 1))
                self.input_ids += [placeholder] * length
            feature = torch.tensor(medium.number)
            self.items.append(
                MultimodalDataItem(medium.mm_hash, placeholder, offsets, feature, medium.modality)
            )
            rows.append(embedding_of(medium.number, sum(medium.spans)))
        self.input_ids += [3]
        self.rows = torch.cat(rows)

    def whole(self) -> Chunk:
        return Chunk(self, 0, len(self.input_ids))

    def chunks(self, length: int) -> list[Chunk]:
        total = len(self.input_ids)
        return [Chunk(self, start, min(length, total - start)) for start in range(0, total, length)]


@dataclass(frozen=True)
class Chunk:
    """The part of a request that is prefilled at once."""

    request: Request
    prefix_length: int
    extend_length: int

    @property
    def input_ids(self) -> list[int]:
        return self.request.input_ids[self.prefix_length :][: self.extend_length]

    @property
    def rows(self) -> torch.Tensor:
        """The right embeddings of its placeholders, found without SGLang."""
        before, inside = (
            sum(token >= FIRST_PLACEHOLDER for token in tokens)
            for tokens in (self.request.input_ids[: self.prefix_length], self.input_ids)
        )
        return self.request.rows[before : before + inside]


def waves(requests: list[Request], length: int) -> list[list[Chunk]]:
    """Batches: the first chunk of each request, then the second, and so on."""
    columns = itertools.zip_longest(*(request.chunks(length) for request in requests))
    return [[chunk for chunk in column if chunk is not None] for column in columns]


# The forms in which the encoders of SGLang's models return what they made of each item.
OUTPUTS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": list,
    "list of 3-d tensors": lambda parts: [part[None] for part in parts],
    "concatenated": torch.cat,
    "concatenated, 3-d": lambda parts: torch.cat(parts)[None],
    "column by column in memory": lambda parts: torch.cat(parts).t().contiguous().t(),
    "part of a buffer": lambda parts: torch.cat([*parts, parts[0]])[: sum(map(len, parts))],
}


class Server:
    """SGLang's chunked prefill around one class, with an encoder that remembers its calls.

    With ``per_request``, SGLang encodes the images request by request, as it does on ROCm.
    """

    def __init__(
        self, cls: type, max_size: int, output: str = "list", per_request: bool = False
    ) -> None:
        self.calls: list[list[int]] = []
        self.output = output
        self.patches = {"MultiModalStaticCache": cls, "_is_hip": per_request}
        with mock.patch.multiple(mm_schedule, embedding_cache=None, **self.patches):
            mm_schedule.init_mm_embedding_cache(max_size)
            self.cache: Any = mm_schedule.embedding_cache
        assert type(self.cache) is cls

    def encode(self, items: list[MultimodalDataItem]) -> Any:
        """Encodes items, which the server has moved to its device."""
        self.calls.append([int(item.feature) for item in items])
        parts = [
            embedding_of(
                int(item.feature),
                sum(end - start + 1 for start, end in item.offsets),
                item.feature.device,
            )
            for item in items
        ]
        return OUTPUTS[self.output](parts)

    def prefill(
        self, *chunks: Chunk, device: str = "cpu"
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Prefills chunks of several requests; returns the embeddings, their mask, the tokens."""
        items = [item for chunk in chunks for item in chunk.request.items]
        placeholders = sorted({item.pad_value for item in items})
        input_ids = [token for chunk in chunks for token in chunk.input_ids]
        counts = (len(chunk.request.items) for chunk in chunks)
        spans = [
            [span for item in chunk.request.items for span in item.offsets] for chunk in chunks
        ]
        with mock.patch.multiple(mm_schedule, embedding_cache=self.cache, **self.patches):
            return mm_schedule.get_embedding_and_mask(
                self.encode,
                items,
                torch.tensor(placeholders, device=device),
                torch.tensor(input_ids, device=device),
                [0, *itertools.accumulate(counts)],
                [chunk.prefix_length for chunk in chunks],
                [chunk.extend_length for chunk in chunks],
                spans,
            )
