"""What tensor-parallel ranks agree on, so that all of them encode the same list.

An encoder that is sharded over ranks has collectives in it. Ranks whose caches differ, by a budget,
an eviction or a ``clear``, would call it with different images, and hang in it. So each call says
to the others what it wants and what it misses, in one all-reduce, before anything is encoded.

The message is a vector of fixed size under MAX. It has the number of the call, the phase in it, how
many features there are, and a digest of their keys and lengths: each of these words beside its
negative, so that the ranks agree in a word if and only if the two maxima are opposite. It has
whether the call has failed, and a flag for each of the first 64 things wanted: whether it is
missing. The flags of further ones follow in a message of their own, once the ranks have agreed how
many there are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from blake3 import blake3

from multimodal_cache._modes import outside_graphs

_FLAGS = 64  # in the first message
_WORDS = ("number of the call", "phase", "number of features")  # the others are the digest's

Asked = Sequence[tuple[int | None, int | None]]
"""The key and the length of each feature."""


class Ranks:
    """The ranks of a process group, as one of them sees them.

    Args:
        group: A process group of two ranks or more.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._on_cpu = "cpu:" in dist.get_backend_config(group)
        self._one_call = threading.Lock()
        self._call = self._phase = 0
        self._is_awaited = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call. If it raises where the others wait for it, they are told.

        Raises:
            RuntimeError: Another call is under way.
        """
        if not self._one_call.acquire(blocking=False):
            raise RuntimeError("with a group, calls come one at a time, and another is under way")
        try:
            self._call += 1
            self._phase = 0
            self._is_awaited = True
            yield
        except Exception:
            if self._is_awaited:
                with contextlib.suppress(Exception):  # a timeout mustn't hide what was raised
                    self._exchange([], [], failed=True)
            raise
        finally:
            self._one_call.release()

    def agree(
        self, asked: Asked, missing: Sequence[bool], *, more_to_come: bool = False
    ) -> list[bool]:
        """Returns what is missing on any rank.

        Args:
            asked: By this call: the same on all ranks.
            missing: For each thing wanted, whether this rank has it not. How many there are
                follows from ``asked``.
            more_to_come: There will be another phase, if anything is missing.

        Raises:
            RuntimeError: On each rank: they were called differently, or a call failed on one. Or
                on this one: a message timed out, or a rank was lost.
        """
        self._is_awaited = False  # what it raises, it raises on all ranks
        flags = self._exchange(asked, missing)
        self._is_awaited = more_to_come and any(flags)
        return flags

    @outside_graphs
    def _exchange(
        self, asked: Asked, missing: Sequence[bool], *, failed: bool = False
    ) -> list[bool]:
        self._phase += 1
        digest = blake3(repr(list(asked)).encode()).digest(16)
        parts = [int.from_bytes(digest[at : at + 4], "big") for at in range(0, 16, 4)]
        words = [self._call, self._phase, len(asked), *parts]
        first = [*missing[:_FLAGS], *[False] * (_FLAGS - len(missing))]
        message = self._max([*words, *(-word for word in words), failed, *first])
        most, least = message[: len(words)], [-word for word in message[len(words) :][: len(words)]]
        self._call = most[0]  # from the next call on the numbers agree, whatever they did before
        some_failed, *flags = message[2 * len(words) :]
        if failed:
            return []
        if some_failed:
            raise RuntimeError("the call has failed on another rank of the group, before encode")
        if most != least:
            raise RuntimeError(
                f"the ranks of the group were called differently: {_differences(most, least)}"
            )
        if len(missing) > _FLAGS:
            flags += self._max(missing[_FLAGS:])
        return [bool(flag) for flag in flags[: len(missing)]]

    def _max(self, values: Sequence[int]) -> list[int]:
        device = torch.device("cpu" if self._on_cpu else "cuda")
        message = torch.tensor([int(value) for value in values], dtype=torch.int64, device=device)
        dist.all_reduce(message, dist.ReduceOp.MAX, self._group)
        received: list[int] = message.tolist()
        return received


def ranks_of(group: object) -> Ranks | None:
    """Returns the ranks of a group; None where there is but one, which agrees with itself.

    Raises:
        TypeError: It isn't a process group.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "group must be a torch.distributed.ProcessGroup that this process is in, or None, got "
            f"{type(group).__name__}"
        )
    return Ranks(group) if group.size() > 1 else None


def _differences(most: Sequence[int], least: Sequence[int]) -> str:
    """Says in which words the ranks differ."""
    words = [
        f"{word} from {low} to {high}"
        for word, high, low in zip(_WORDS, most, least, strict=False)
        if high != low
    ]
    return ", ".join(words) or "other keys or lengths, or in another order"
