"""Parts of SGLang, unmodified, from its wheel, in a process that has no server.

Importing this module puts stand-ins for the rest of SGLang under its names, for good: it is for
processes of their own.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
import sys
from types import SimpleNamespace
from typing import Any

import peers
import torch

PACKAGES = [
    "sglang",
    "sglang.srt",
    "sglang.srt.managers",
    "sglang.srt.mem_cache",
    "sglang.srt.multimodal",
    "sglang.srt.multimodal.evs",
    "sglang.srt.multimodal.processors",
]


@dataclasses.dataclass
class MultimodalDataItem:
    """An image, a video or an audio of one request."""

    hash: int | None
    pad_value: int
    offsets: list[tuple[int, int]]  # of its placeholders in the request, ends included
    feature: torch.Tensor
    modality: str = "image"
    precomputed_embeddings: torch.Tensor | None = None
    model_specific_data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["model_specific_data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def is_audio(self) -> bool:
        return self.modality == "audio"

    def is_video(self) -> bool:
        return self.modality == "video"

    def can_defer_cuda_ipc_feature_reconstruction(self) -> bool:
        return False


class BaseMultimodalProcessor:
    @staticmethod
    def get_mm_items_offset(input_ids: torch.Tensor, mm_token_id: int) -> list[tuple[int, int]]:
        """Returns where each run of a token begins and ends."""
        inside = [False, *(token == mm_token_id for token in input_ids.tolist()), False]
        edges = [i for i, (one, other) in enumerate(itertools.pairwise(inside)) if one != other]
        return [(start, end - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def maybe_assert_sum(mask: torch.Tensor, expected: int, message: str) -> None:
    assert mask.sum().item() == expected, message


def stand_in(name: str, **attributes: Any) -> None:
    sys.modules[name] = peers.new_module(name, **attributes)


sys.modules.update((name, peers.package_of("sglang", name)) for name in PACKAGES)
stand_in("sglang.srt.mem_cache.allocator", BaseTokenToKVPoolAllocator=object)
stand_in("sglang.utils", logger=logging.getLogger("sglang"))
stand_in("sglang.srt.utils", **dict.fromkeys(["is_hip", "is_npu", "is_xpu"], lambda: False))
stand_in("sglang.srt.utils.async_probe", maybe_assert_sum=maybe_assert_sum)
stand_in(
    "sglang.srt.runtime_context", get_schedule=lambda: SimpleNamespace(chunked_prefill_size=-1)
)
stand_in("sglang.srt.managers.schedule_batch", MultimodalDataItem=MultimodalDataItem)
stand_in("sglang.srt.multimodal.transport.cuda_ipc", BORROW_CUDA_IPC_FEATURE_KEY="borrow")
stand_in(
    "sglang.srt.multimodal.processors.base_processor",
    BaseMultimodalProcessor=BaseMultimodalProcessor,
)
stand_in("transformers", PretrainedConfig=object)

# SGLang's own code, on these stand-ins.
multimodal_cache = importlib.import_module("sglang.srt.mem_cache.multimodal_cache")
EVSEmbeddingResult = importlib.import_module(
    "sglang.srt.multimodal.evs.evs_module"
).EVSEmbeddingResult
sys.modules["sglang.srt.multimodal.evs"].EVSEmbeddingResult = EVSEmbeddingResult  # type: ignore
mm_schedule = importlib.import_module("sglang.srt.managers.mm_schedule")
plugins = importlib.import_module("sglang.srt.plugins")
