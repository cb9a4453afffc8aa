"""Who wrote a tensor on which stream, and what a reader on another one must wait for.

The work of an accelerator is launched on streams, which run beside each other. And memory that is
freed goes back to the stream that it was allocated on, which may use it again at once, unless it
has been recorded to the other streams that use it: then when these have come past that point. The
CPU waits for nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def module_of(tensor: torch.Tensor) -> Any:
    """Returns torch's module of a tensor's device, such as ``torch.cuda``; None without streams.

    All that is asked of streams here goes through it.
    """
    if tensor.is_cpu:  # torch.cpu has streams, which do nothing
        return None
    try:
        module = torch.get_device_module(tensor.device)
    except RuntimeError:  # there is none, such as for meta
        return None
    return module if hasattr(module, "current_stream") else None  # MPS has one stream, and no name


def use_here(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the memory of tensors until what their current streams now do with it has run."""
    for tensor in tensors:
        module = module_of(tensor)
        if module is not None:
            tensor.record_stream(module.current_stream(tensor.device))


class Mark:
    """What was launched on the current stream of a device until now.

    Args:
        module: That of the device.
        device: Which.
    """

    __slots__ = ("_device", "_event", "_module", "_stream")

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._stream = module.current_stream(device)
        self._event = module.Event()
        self._event.record(self._stream)

    def wait(self) -> Any:
        """Makes the device's current stream wait, if it is another one; returns it then."""
        stream = self._module.current_stream(self._device)
        if stream == self._stream:
            return None
        stream.wait_event(self._event)
        return stream


class Written:
    """Tensors that were written on the current streams; a call makes them readable on others.

    Args:
        tensors: By their devices, each with its module.
        then: What else a call does.
    """

    __slots__ = ("_parts", "_then")

    def __init__(
        self,
        tensors: dict[tuple[Any, torch.device], list[torch.Tensor]],
        then: Callable[[], object] | None,
    ) -> None:
        self._parts = [(Mark(*where), part) for where, part in tensors.items()]
        self._then = then

    def __call__(self) -> None:
        """Makes the caller's current streams wait, and keeps the memory until they have read it."""
        for mark, tensors in self._parts:
            stream = mark.wait()
            if stream is not None:
                for tensor in tensors:
                    tensor.record_stream(stream)
        if self._then is not None:
            self._then()


def written_here(
    tensors: Iterable[torch.Tensor], then: Callable[[], object] | None = None
) -> Callable[[], object] | None:
    """Returns what a reader of tensors, written until now, must call; None if there is nothing."""
    by_device: dict[tuple[Any, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        module = module_of(tensor)
        if module is not None:
            by_device.setdefault((module, tensor.device), []).append(tensor)
    return Written(by_device, then) if by_device else then
