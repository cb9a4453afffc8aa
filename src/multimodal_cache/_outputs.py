"""What a vision encoder returns, as one ``[tokens, hidden]`` for each feature."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from multimodal_cache._tensors import is_dense
from multimodal_cache.base import EmbeddingResult

_ONE_FOR_EACH = ": one for each feature, not several things about all of them"


def split_output(output: Any, lengths: Sequence[int | None]) -> list[torch.Tensor]:
    """Splits what ``encode`` returned into one ``[tokens, hidden]`` for each feature.

    Raises:
        ValueError: It is of another type, number or shape than expected.
    """
    if is_dense(output):
        parts = _split_tensor(output, lengths)
    elif isinstance(output, (list, tuple)) and _fields(output) is None:
        parts = _parts(output, len(lengths))
    else:
        raise ValueError(_refusal(output))
    for index, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if length is not None and part.shape[0] != length:
            raise ValueError(
                f"encode must return {length} tokens for feature {index}, as num_tokens says, "
                f"got {part.shape[0]}"
            )
    return parts


def _parts(output: Sequence[Any], count: int) -> list[torch.Tensor]:
    """Returns one part for each feature; refuses parts that can't be of one kind."""
    _close_coroutines(output)
    if len(output) != count:
        raise ValueError(f"encode must return {count} embeddings, got {len(output)}")
    parts = []
    for index, part in enumerate(output):
        rows = as_rows(part)
        if rows is None:
            raise ValueError(
                "encode must return dense tensors of rank 1 or more, got "
                f"{_describe(part)} for feature {index}{_advice(part)}"
            )
        if (part.ndim, part.shape[-1]) != (output[0].ndim, output[0].shape[-1]):
            raise ValueError(
                "encode must return tensors of one rank and hidden size, got "
                f"{_describe(output[0])} for feature 0 and {_describe(part)} for feature {index}"
                f"{_ONE_FOR_EACH}"
            )
        if part.is_floating_point() != output[0].is_floating_point():
            raise ValueError(
                "encode must return tensors that are all of floats, or none, got "
                f"{output[0].dtype} for feature 0 and {part.dtype} for feature {index}"
                f"{_ONE_FOR_EACH}"
            )
        parts.append(rows)
    return parts


def _refusal(output: Any) -> str:
    """Says what to return instead of something that is neither a tensor nor a list of them."""
    _close_coroutines([output])
    expected = "encode must return a dense tensor, or a list or tuple of them"
    return f"{expected}, got {_describe(output)}{_advice(output)}"


def _advice(output: Any) -> str:
    """Says how to get a tensor out of what isn't one, where that is known."""
    if isinstance(output, EmbeddingResult):
        return ": return its .embedding"
    if isinstance(output, np.ndarray):
        return ": return torch.from_numpy(...) of it"
    if isinstance(output, Mapping) and len(output):
        return f": return one of its values, such as output[{next(iter(output))!r}]"
    if inspect.isawaitable(output):  # of a wrapper, or of a module whose forward is async
        return ": await it in encode, as in: async def encode(images): return await model(images)"
    fields = _fields(output)
    if fields:
        return f": return one field, such as output.{fields[0]}"
    return ""


def _fields(output: Any) -> Sequence[str] | None:
    """Returns the names in a named tuple, or in one of torch's such as that of ``torch.max``."""
    if not isinstance(output, tuple):
        return None
    if hasattr(output, "n_sequence_fields"):
        return type(output).__match_args__  # type: ignore[attr-defined,no-any-return]
    return getattr(output, "_fields", None)


def _close_coroutines(items: Iterable[Any]) -> None:
    """Closes what nobody will await, or Python would warn of it."""
    for item in items:
        if inspect.iscoroutine(item):
            item.close()


def _split_tensor(output: torch.Tensor, lengths: Sequence[int | None]) -> list[torch.Tensor]:
    count = len(lengths)
    if output.ndim == 3 and output.shape[0] == count:
        return list(output)
    if output.ndim != 2:
        raise ValueError(
            f"encode must return [{count}, tokens, hidden] or [all tokens, hidden] or a list, "
            f"got {_describe(output)}"
        )
    if count == 1:
        return [output]
    known = [length for length in lengths if length is not None]
    if len(known) != count:
        if output.shape[0] == count:  # one row for each
            return list(torch.split(output, 1))
        raise ValueError(
            f"num_tokens is needed to cut {_describe(output)} into the embeddings of {count} "
            "features"
        )
    if sum(known) != output.shape[0]:
        raise ValueError(
            f"encode must return {sum(known)} tokens in all, as num_tokens says, "
            f"got {_describe(output)}"
        )
    return list(torch.split(output, known))


def as_rows(embedding: Any) -> torch.Tensor | None:
    """Returns ``[tokens, hidden]``, or None for what is no dense tensor of rank 1 or more."""
    if not is_dense(embedding):
        return None
    rank = embedding.ndim
    if rank == 2:
        return embedding
    if rank == 0:
        return None
    return embedding.unsqueeze(0) if rank == 1 else embedding.flatten(0, -2)


def _describe(value: Any) -> str:
    if is_dense(value):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, torch.Tensor):
        return f"a tensor with layout={value.layout}, is_nested={value.is_nested}, {value.device}"
    return type(value).__name__
