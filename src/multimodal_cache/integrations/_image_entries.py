"""What is stored of an image: its embedding and the layers of DeepStack, in one tensor.

An entry is ``[rows of header + tokens, width of all parts]``: the parts side by side, under a
header of bytes, each an element of the entry, which bfloat16 holds exactly. So an entry can be read
without the model that made it, also where a process has encoded nothing yet.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch


def packed(parts: Sequence[torch.Tensor], *, stacked: bool) -> torch.Tensor:
    """Returns the entry for an embedding ``[tokens, hidden]`` and its layers ``[tokens, any]``.

    Args:
        parts: The embedding, then the layers.
        stacked: Whether the embeddings of a batch are one tensor in the model's output.

    Raises:
        ValueError: The parts differ in dtype.
    """
    dtypes = {part.dtype for part in parts}
    if len(dtypes) != 1:
        raise ValueError(f"expected an embedding and layers of one dtype, got {dtypes}")
    values = torch.cat(list(parts), dim=1)
    width = values.shape[1]
    widths = [part.shape[1] for part in parts]
    header = struct.pack(f"<BB{len(parts)}I", stacked, len(parts), *widths)
    header += bytes(-len(header) % width)
    return torch.cat([values.new_tensor([*header]).reshape(-1, width), values])


def unpacked(entry: torch.Tensor) -> tuple[bool, tuple[torch.Tensor, ...]]:
    """Returns whether embeddings are stacked, and the parts: views of the entry."""
    elements = entry.flatten()
    stacked, count = map(int, elements[:2].tolist())
    end = 2 + 4 * count
    widths = struct.unpack(f"<{count}I", bytes(map(int, elements[2:end].tolist())))
    rows = -(-end // entry.shape[1])
    return bool(stacked), torch.split(entry[rows:], list(widths), dim=1)


def grouped(parts: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
    """Joins parts: as many to each tensor as ``counts`` says, which may be none."""
    if all(count == 1 for count in counts):
        return list(parts)
    remaining = iter(parts)
    nothing = parts[0][:0]
    return [torch.cat([nothing, *(next(remaining) for _ in range(count))]) for count in counts]
