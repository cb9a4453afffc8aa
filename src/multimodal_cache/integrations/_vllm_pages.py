"""What one of vLLM's workers keeps in host memory. Needs no vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from multimodal_cache.integrations._vllm_index import PAGE, taken

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Item:
    pages: list[torch.Tensor]
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class Pages:
    """Copies of tensors, by slot, in pages of host memory: pinned, if they are for CUDA.

    torch rounds pinned memory up to a power of two and keeps what is freed for another piece of
    that size: pages of one size waste nothing of that.

    Copies from and to CUDA are queued on the current stream, on which vLLM's workers also encode
    and read; nothing waits for them. Not thread-safe.
    """

    def __init__(self) -> None:
        self._items: dict[int, _Item] = {}

    @property
    def size(self) -> int:
        """Bytes of host memory."""
        return sum(len(item.pages) for item in self._items.values()) * PAGE

    def save(
        self, slot: int, tensor: torch.Tensor, limit: int, device: torch.device | None = None
    ) -> int | None:
        """Keeps a copy of a tensor in a slot. One that is there already stays.

        Args:
            slot: Where.
            tensor: Of any shape and strides.
            limit: Bytes of host memory that the copy may take: one that takes more isn't kept.
            device: Where ``load`` brings it; by default where it comes from.

        Returns:
            The bytes of the tensor, or None: there was no memory for a copy.
        """
        if slot in self._items:
            return self._items[slot].nbytes
        device = tensor.device if device is None else device
        data = tensor.detach().reshape(-1).view(torch.uint8)
        if taken(data.nbytes) > limit:
            return data.nbytes
        try:
            pages = [_new_page(device.type == "cuda") for _ in range(taken(data.nbytes) // PAGE)]
        except RuntimeError as error:
            logger.warning("no host memory to keep an item of %d bytes: %s", data.nbytes, error)
            return None
        for i, page in enumerate(pages):
            piece = data[i * PAGE : (i + 1) * PAGE]
            page[: len(piece)].copy_(piece, non_blocking=True)
        self._items[slot] = _Item(pages, data.nbytes, tensor.dtype, tensor.shape, device)
        return data.nbytes

    def load(self, slot: int) -> torch.Tensor:
        """Returns a new tensor, on the device for which it was saved, equal to that one.

        Raises:
            KeyError: There is none in this slot.
        """
        item = self._items[slot]
        data = torch.empty(item.nbytes, dtype=torch.uint8, device=item.device)
        for i, page in enumerate(item.pages):
            piece = data[i * PAGE : (i + 1) * PAGE]
            piece.copy_(page[: len(piece)], non_blocking=True)
        return data.view(item.dtype).view(item.shape)

    def evict(self, slots: Iterable[int]) -> None:
        """Drops what is in these slots, if anything is."""
        for slot in slots:
            self._items.pop(slot, None)


def _new_page(pinned: bool) -> torch.Tensor:
    return torch.empty(PAGE, dtype=torch.uint8, pin_memory=pinned)
