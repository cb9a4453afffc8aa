"""What becomes of an error of ``encode``: whose it is, and what it keeps alive."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from encoders import LIMIT, gated, joined, limited, settle, wait_for
from support import numbers

from multimodal_cache import CachedEncoder, MultiModalStaticCache
from multimodal_cache._errors import Failure, copy_error

# What is freed when the callers let go of their errors, by reference counting alone


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Failing:
    """Allocates a tensor and raises, as where memory runs out."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.allocated: list[weakref.ref[torch.Tensor]] = []

    def allocate(self) -> torch.Tensor:
        tensor = torch.ones(4)
        self.allocated.append(weakref.ref(tensor))
        return tensor

    def __call__(self, features: list[Any]) -> Any:
        tensor = self.allocate()
        if self.error is not None:
            raise self.error
        raise OSError(f"no such image among {len(tensor)}")

    def alive(self) -> int:
        return sum(ref() is not None for ref in self.allocated)


class FailingLater(Failing):
    """The same in a coroutine function, when its gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[asyncio.Future[None]] = []

    async def __call__(self, features: list[Any]) -> Any:
        tensor = self.allocate()
        self.gates.append(asyncio.get_running_loop().create_future())
        await self.gates[-1]
        raise OSError(f"no such image among {len(tensor)}")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("features", [[1], [1, 2]])
def test_calls_leave_nothing(features: list[int], count: int) -> None:
    encode = Failing()
    encoder = CachedEncoder(MultiModalStaticCache(1000), encode)
    with no_collector():
        for _ in range(count):
            with pytest.raises(OSError, match="no such image"):
                encoder(features)
        assert (len(encode.allocated), encode.alive()) == (count, 0)


def test_an_interrupted_call_leaves_nothing() -> None:
    encode = Failing(KeyboardInterrupt())
    encoder = CachedEncoder(MultiModalStaticCache(1000), encode)
    with no_collector():
        with contextlib.suppress(KeyboardInterrupt):
            encoder([1])
        assert encode.error is not None
        encode.error.__traceback__ = None  # it is kept here
        assert encode.alive() == 0


class OddError(BaseException):
    """One that isn't an ``Exception``."""


@pytest.mark.parametrize("plain", [True, False])
def test_a_task_leaves_nothing_of_an_encode_that_raises_what_is_no_exception(plain: bool) -> None:
    failing = Failing()

    def encode(features: list[Any]) -> Any:
        tensor = failing.allocate()
        raise OddError(len(tensor))

    async def encode_later(features: list[Any]) -> Any:
        encode(features)

    encoder = CachedEncoder(MultiModalStaticCache(1000), encode if plain else encode_later)

    async def call() -> None:
        with contextlib.suppress(OddError):
            await encoder.encode_async([1])

    with no_collector():
        asyncio.run(call())
        assert (len(failing.allocated), failing.alive()) == (1, 0)


@pytest.mark.parametrize("plain", [True, False])
def test_tasks_leave_nothing_whether_they_lead_wait_or_are_cancelled(plain: bool) -> None:
    encode = Failing() if plain else FailingLater()
    encoder = CachedEncoder(MultiModalStaticCache(1000), encode)

    async def call(cancel_first: bool) -> None:
        tasks = [asyncio.ensure_future(encoder.encode_async([1], [1])) for _ in range(3)]
        await settle()
        if cancel_first:
            tasks[0].cancel()
            await settle()
        if isinstance(encode, FailingLater):
            encode.gates.pop().set_result(None)
        await asyncio.wait(tasks)
        for task in tasks[cancel_first:]:
            assert isinstance(task.exception(), OSError)

    async def main() -> None:
        for cancel_first in (False, True) * 3:
            await call(cancel_first)
            await settle()
            if cancel_first and plain:
                encoder._executor.submit(int).result(LIMIT)  # the encode has ended
            await settle()

    with no_collector():
        limited(main())
        encoder.close()
        assert len(encode.allocated) >= 6
        assert encode.alive() == 0


def test_threads_that_wait_leave_nothing() -> None:
    class FailingAtTheGate(Failing):
        def __call__(self, features: list[Any]) -> Any:
            tensor = self.allocate()
            gate(features)
            return super().__call__([tensor])

    with no_collector(), gated() as (encoder, gate, run):
        encoder._encode = encode = FailingAtTheGate()
        calls = [run(encoder, [1])]
        wait_for(gate.begun)
        calls += [run(encoder, [1]) for _ in range(3)]
        joined(encoder, 3)
        gate.gate.set()
        for call in calls:
            assert isinstance(call.exception(LIMIT), OSError)
        del call
        calls.clear()
        # Each thread drops its last work item when it takes another one.
        for _ in range(8):
            run(int).result(LIMIT)
        assert len(encode.allocated) == 2
        assert encode.alive() == 0


# Whose an error is


def failed(count: int) -> tuple[BaseException, list[BaseException]]:
    """Returns the error of a call, and those of calls that waited for its encode."""
    encode = FailingLater()
    encoder = CachedEncoder(MultiModalStaticCache(1000), encode)

    async def main() -> list[BaseException]:
        tasks = [asyncio.ensure_future(encoder.encode_async([1], [1])) for _ in range(1 + count)]
        await settle()
        encode.gates[0].set_result(None)
        return await asyncio.gather(*tasks, return_exceptions=True)  # type: ignore[return-value]

    first, *others = limited(main())
    assert len(encode.allocated) == 1
    return first, others


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def test_each_waiter_has_an_error_of_its_own_that_leads_to_the_encode() -> None:
    first, others = failed(20)
    assert len({id(error) for error in (first, *others)}) == 21
    for error in others:
        assert (type(error), error.args) == (OSError, first.args)
        assert error.__cause__ is others[0].__cause__ is not first
        assert "raise OSError(f" in shown(error)
    with contextlib.suppress(OSError):
        raise others[0]
    others[0].__dict__["of"] = "this caller"
    assert not hasattr(others[1], "of")


def test_what_is_printed_does_not_grow_with_the_number_of_waiters() -> None:
    (few,), many = failed(1)[1], failed(1000)[1]
    assert {len(shown(error)) for error in many[1:]} == {len(shown(few))}
    frames = [[*traceback.walk_tb(error.__traceback__)] for error in many]
    assert {len(each) for each in frames} == {len(frames[0])}
    assert len({id(each[0][0]) for each in frames}) == 1000  # nobody's is another's


class CodedError(Exception):
    """Makes another message of its arguments."""

    def __init__(self, code: int) -> None:
        super().__init__(f"failed: {code}")
        self.code = code


class KeywordOnlyError(Exception):
    def __init__(self, *, code: int) -> None:
        self.code = code


class SlottedError(OSError):
    __slots__ = ("code", "other")

    def __init__(self, code: int) -> None:
        self.code = code


class NewWithTwoError(Exception):
    def __new__(cls, one: int, other: int) -> NewWithTwoError:
        return super().__new__(cls, one)

    def __init__(self, one: int, other: int) -> None:
        self.other = other


class BothError(ValueError, OSError):
    pass


class NoPickleError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


ERRORS: list[Exception] = [
    CodedError(3),
    KeywordOnlyError(code=3),
    SlottedError(3),
    NewWithTwoError(1, 2),
    BothError("x"),
    NoPickleError("x"),
    OSError(2, "no such image", "a.png"),
    OSError(2, "no such image", "a.png", None, "b.png"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    json.JSONDecodeError("bad", "{", 1),
    ImportError("bad", name="a", path="b"),
    KeyError("x"),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_any_type_are_copied(error: Exception) -> None:
    error.__dict__["more"] = [1]
    copied = copy_error(error)
    assert copied is not error
    assert type(copied) is type(error)
    assert (str(copied), repr(copied)) == (str(error), repr(error))
    assert (copied.args, vars(copied)) == (error.args, vars(error))
    for name in ("filename", "filename2", "errno", "code", "start", "object", "name", "path"):
        assert getattr(copied, name, "none") == getattr(error, name, "none")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes yet")
def test_notes_are_not_shared() -> None:
    error = OSError("bad")
    error.add_note("of encode")  # type: ignore[attr-defined]  # since Python 3.11
    shared = Failure(error)
    one, other = shared.new_error(), shared.new_error()
    one.add_note("of this caller")  # type: ignore[attr-defined]
    assert other.__notes__ == ["of encode"]  # type: ignore[attr-defined]


def test_an_error_that_encode_raised_from_another_leads_to_that_too() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise OSError("then") from first
    except OSError as error:
        copied = Failure(error).new_error()
    assert copied.__cause__ is not None
    assert isinstance(copied.__cause__.__cause__, KeyError)
    assert "KeyError: 'first'" in shown(copied)


class UncopyableError(OSError):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise TypeError("not this one either")


def changed_error() -> OSError:
    error = OSError("bad")
    error.args = (2, "bad")  # of which Python makes a FileNotFoundError
    return error


@pytest.mark.parametrize("error", [UncopyableError("bad"), changed_error()])
def test_who_waits_for_what_can_not_be_copied_tries_again(error: Exception) -> None:
    with pytest.raises(TypeError):
        Failure(error)
    with gated() as (encoder, encode, run):
        encode.fail[1] = error
        first = run(encoder, [1])
        wait_for(encode.begun)
        other = run(encoder, [1])
        joined(encoder)
        encode.gate.set()
        assert first.exception(LIMIT) is error
        assert numbers(other.result(LIMIT)) == [1]


RAISING: list[Callable[[CachedEncoder], Any]] = [
    lambda encoder: encoder([1]),
    lambda encoder: asyncio.run(encoder.encode_async([1])),
]


@pytest.mark.parametrize("call", RAISING)
def test_the_caller_that_encodes_gets_the_very_error(call: Callable[[CachedEncoder], Any]) -> None:
    error = OSError("no such image")
    encoder = CachedEncoder(MultiModalStaticCache(1000), Failing(error))
    with pytest.raises(OSError, match="no such image") as caught:
        call(encoder)
    assert caught.value is error
    assert error.__cause__ is None
