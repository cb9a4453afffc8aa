"""A simulated accelerator, on which whatever may go wrong between streams does.

A stream is a queue that runs when it is told to, or when something waits for it. Memory that is
freed goes back to the stream that it was allocated on, which uses it again at once: it is
overwritten there, after what was launched there before, and after what was launched until then on
the streams that it was recorded to.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

UNWRITTEN, REUSED = -1.0, -2.0


class Point:
    """A place in a queue, which has been passed or not."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.passed = False

    def __call__(self) -> None:
        self.passed = True


class Stream:
    """What was launched and hasn't run."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._queue: deque[Callable[[], object] | tuple[Point]] = deque()

    def launch(self, work: Callable[[], object]) -> None:
        self._accelerator.take_back()
        self._queue.append(work)

    def wait_event(self, event: Event) -> None:
        self._accelerator.take_back()
        self._queue.append((event.point,))

    def step(self) -> bool:
        """Runs one thing, if there is one that needn't wait."""
        if not self._queue:
            return False
        work = self._queue[0]
        if isinstance(work, tuple):
            if not work[0].passed:
                return False
        else:
            work()
        self._queue.popleft()
        self._accelerator.take_back()
        return True

    def run(self) -> None:
        """Runs all, and what it waits for on other streams."""
        while self._queue:
            if not self.step():
                point = self._queue[0][0]  # type: ignore[index]
                while not point.passed and point.stream.step():
                    pass
                if not point.passed:
                    point.stream.run()


class Event:
    """As ``torch.cuda.Event``."""

    def record(self, stream: Stream) -> None:
        self.point = Point(stream)
        stream.launch(self.point)


class Block:
    """Memory of the accelerator: until it is free, when nothing but this holds its storage."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, home: Stream) -> None:
        self.storage = storage
        self.device = device
        self.home = home
        self.recorded: set[Stream] = set()
        self.awaited: list[Point] | None = None  # when it is free

    def window(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Returns what makes another tensor of the same elements, and keeps no memory."""
        where = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return lambda: torch.empty(0).set_(self.storage, *where)  # type: ignore[call-overload]

    def overwrite(self) -> None:
        torch.empty(0).set_(self.storage).fill_(REUSED)  # type: ignore[call-overload]


class Accelerator:
    """A device module for ``_streams.module_of``, and what a test does with it."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], Stream] = {}
        self._here = threading.local()
        self._blocks: dict[int, Block] = {}
        self.wrong: list[str] = []  # what was read

    # What torch's modules have

    def current_stream(self, device: torch.device) -> Stream:
        return self.stream(getattr(self._here, "number", 0), device.index)

    def Event(self) -> Event:  # noqa: N802  # as torch calls it
        return Event()

    # What a test does

    def stream(self, number: int, device: int = 0) -> Stream:
        return self._streams.setdefault((number, device), Stream(self))

    @contextlib.contextmanager
    def on(self, number: int) -> Iterator[None]:
        """Makes the streams of a number current in this thread."""
        before = getattr(self._here, "number", 0)
        self._here.number = number
        try:
            yield
        finally:
            self._here.number = before

    def empty(self, *shape: int, device: int = 0) -> torch.Tensor:
        """Allocates on the current stream, memory in which nothing is written."""
        self.take_back()
        plain = torch.full(shape, UNWRITTEN)
        storage = plain.untyped_storage()
        where = torch.device("cuda", device)
        self._blocks[storage.data_ptr()] = Block(storage, where, self.current_stream(where))
        return plain.as_subclass(Accelerated)

    def full(self, value: float, *shape: int, device: int = 0) -> torch.Tensor:
        """Allocates and launches a write."""
        tensor = self.empty(*shape, device=device)
        window = self.block(tensor).window(tensor)  # type: ignore[union-attr]
        self.current_stream(tensor.device).launch(lambda: window().fill_(value))
        return tensor

    def read(self, tensor: torch.Tensor, value: float) -> None:
        """Launches a read, which must find the value everywhere."""
        window = self.block(tensor).window(tensor)  # type: ignore[union-attr]
        self.current_stream(tensor.device).launch(lambda: self._compare(window(), value))

    def run(self, *first: int) -> None:
        """Runs all streams, some of them first and as far as they get on their own."""
        self.take_back()
        for number in first:
            while self.stream(number).step():
                pass
        for stream in list(self._streams.values()):
            stream.run()

    # What its tensors do

    def block(self, tensor: torch.Tensor) -> Block | None:
        with torch._C.DisableTorchFunctionSubclass():
            return self._blocks.get(tensor.untyped_storage().data_ptr())

    def clone(self, source: torch.Tensor) -> torch.Tensor:
        block = self.block(source)
        if block is None:  # a small one that tells whether the class can be copied
            with torch._C.DisableTorchFunctionSubclass():
                return source.clone().as_subclass(Accelerated)
        return self.copy(self.empty(*source.shape, device=block.device.index), source)

    def empty_like(self, source: torch.Tensor, *, device: Any, **_: Any) -> torch.Tensor:
        if torch.device(device).type == "cpu":
            return torch.full(tuple(source.shape), UNWRITTEN)
        return self.empty(*source.shape, device=device.index)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Launches a copy; memory of the host is kept until it has run, as torch does."""
        windows = []
        for tensor in (target, source):
            block = self.block(tensor) if isinstance(tensor, Accelerated) else None
            windows.append(block.window(tensor) if block else tensor.detach)
        device = (target if isinstance(target, Accelerated) else source).device
        to, from_ = windows
        self.current_stream(device).launch(lambda: to().copy_(from_()))
        return target

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        block = self.block(tensor)
        if block is not None and stream is not block.home:
            block.recorded.add(stream)

    def take_back(self) -> None:
        """Uses again what is free by now."""
        for address, block in list(self._blocks.items()):
            if block.awaited is None:
                if torch._C._storage_Use_Count(block.storage._cdata) > 1:
                    continue
                block.awaited = [Point(stream) for stream in block.recorded]
                for point in block.awaited:
                    point.stream._queue.append(point)
            if all(point.passed for point in block.awaited):
                del self._blocks[address]
                block.home._queue.append(block.overwrite)

    def _compare(self, found: torch.Tensor, value: float) -> None:
        if not (found == value).all():
            self.wrong.append(f"{found.tolist()} in place of {value}")


class Accelerated(torch.Tensor):
    """A tensor of the accelerator that is simulated."""

    accelerator: Accelerator
    is_cpu = False  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        block = self.accelerator.block(self)
        return torch.device("cuda", 0) if block is None else block.device

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.accelerator.record_stream(self, stream)  # torch itself takes no other streams

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        accelerator = cls.accelerator
        if func is torch.Tensor.clone:
            return accelerator.clone(args[0])
        if func is torch.Tensor.copy_:
            return accelerator.copy(*args[:2])
        return super().__torch_function__(func, types, args, kwargs or {})
