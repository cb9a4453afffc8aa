"""What torch does differently by thread and by caller: its modes, and ``torch.compile``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia")


class Modes:
    """The modes of the thread that makes it, for another thread that works in its place.

    These are autocast, the inference mode and the default device. A thread's own
    ``TorchFunctionMode`` and ``TorchDispatchMode``, its current CUDA device and its current
    stream can't be carried over, or mustn't.
    """

    def __init__(self) -> None:
        self._autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
            if torch.is_autocast_enabled(device)
        ]
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Gives the calling thread these modes, until the block ends."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(device, dtype=dtype, cache_enabled=self._cache_enabled)
                )
            if self._inference:
                stack.enter_context(torch.inference_mode())
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            yield


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Breaks the graph of ``torch.compile`` around a function that it can't trace."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call,no-any-return]
        return function(*args, **kwargs)

    return call
