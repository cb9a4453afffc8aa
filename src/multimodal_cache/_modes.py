"""What torch does differently by thread and by caller: its modes, and ``torch.compile``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_AUTOCAST_DEVICES = [
    device
    for device in ("cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia")
    if torch.amp.is_autocast_available(device)  # older torches raise for some
]


def _autocast(device: str) -> tuple[str, torch.dtype, bool, bool]:
    """Returns what ``torch.autocast`` would be given to set what is set in this thread."""
    return (
        device,
        torch.get_autocast_dtype(device),
        torch.is_autocast_enabled(device),
        torch.is_autocast_cache_enabled(),
    )


class Modes:
    """The modes of the thread that makes it, for another thread that works in its place.

    These are autocast, with its dtypes also where it isn't enabled, the inference mode and the
    default device. A thread's own ``TorchFunctionMode`` and ``TorchDispatchMode``, its current
    CUDA device, its current stream and the like can't be carried over, or mustn't.
    """

    def __init__(self) -> None:
        self._autocast = [_autocast(device) for device in _AUTOCAST_DEVICES]
        self._inference = torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Gives the calling thread these modes, until the block ends."""
        with contextlib.ExitStack() as stack:
            for autocast in self._autocast:
                if autocast != _autocast(autocast[0]):
                    stack.enter_context(torch.autocast(*autocast))
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
