"""What a vision encoder returns, as one ``[tokens, hidden]`` for each feature."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch


def split_output(output: Any, lengths: Sequence[int | None]) -> list[torch.Tensor]:
    """Splits what ``encode`` returned into one ``[tokens, hidden]`` for each feature.

    Raises:
        ValueError: It is of another type, number or shape than expected.
    """
    count = len(lengths)
    if _is_dense(output):
        parts = _split_tensor(output, lengths)
    elif isinstance(output, (list, tuple)):
        if len(output) != count:
            raise ValueError(f"encode must return {count} embeddings, got {len(output)}")
        parts = []
        for index, part in enumerate(output):
            rows = as_rows(part)
            if rows is None:
                raise ValueError(
                    "encode must return dense tensors of rank 2 or more, got "
                    f"{_describe(part)} for feature {index}"
                )
            parts.append(rows)
    else:
        if inspect.iscoroutine(output):
            output.close()  # nobody will await it
            raise ValueError("encode returned a coroutine: it must be declared with async def")
        raise ValueError(
            "encode must return a dense tensor, or a list or tuple of them, got "
            f"{_describe(output)}"
        )
    for index, (part, length) in enumerate(zip(parts, lengths, strict=True)):
        if length is not None and part.shape[0] != length:
            raise ValueError(
                f"encode must return {length} tokens for feature {index}, as num_tokens says, "
                f"got {part.shape[0]}"
            )
    return parts


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
    """Returns ``[tokens, hidden]``, or None for what is no dense tensor of rank 2 or more."""
    if not _is_dense(embedding) or embedding.ndim < 2:
        return None
    return embedding if embedding.ndim == 2 else embedding.flatten(0, -2)


def _is_dense(value: Any) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_meta)
    )


def _describe(value: Any) -> str:
    if _is_dense(value):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, torch.Tensor):
        return f"a tensor with layout={value.layout}, is_nested={value.is_nested}, {value.device}"
    return type(value).__name__
