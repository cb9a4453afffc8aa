"""What is kept alive is what is charged, for every kind of view and memory."""

from __future__ import annotations

import gc
import mmap
import sys
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import UNCOUNTABLE, filled, kept_bytes, keys, recount, result

from multimodal_cache import EmbeddingResult, EmbeddingTypeError, MultiModalStaticCache
from multimodal_cache._ownership import _plan_with_care, plan_ownership

ROOMY = 10**9


def store(tensor: torch.Tensor, **options: Any) -> tuple[MultiModalStaticCache, torch.Tensor]:
    """Caches one tensor; returns the cache and what it stored."""
    cache = MultiModalStaticCache(ROOMY, **options)
    value = EmbeddingResult(embedding=tensor)
    assert cache.set(1, value)
    assert value.embedding is tensor
    cache.check()
    assert recount(cache) == cache.current_size
    stored = cache.get_single(1)
    assert stored is not None
    return cache, stored.embedding


WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "reshaped": lambda t: t.reshape(-1, 2),
    "transposed": lambda t: t.T,
    "conjugated": lambda t: t.to(torch.complex64).conj(),
    "other dtype": lambda t: t.to(torch.bfloat16),
    "viewed as another dtype": lambda t: t.view(torch.int16),
    "0-d": lambda t: torch.tensor(1.0, device=t.device),
    "empty": lambda t: torch.zeros(0, 64, device=t.device),
    "inference": lambda t: in_inference_mode(lambda: t * 2),
    "parameter without grad": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
}
PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first rows": lambda t: t[:3],
    "last rows": lambda t: t[5:],
    "columns": lambda t: t[:, 1:3],
    "strided": lambda t: t[::2],
    "contiguous slice": lambda t: t[2:4].contiguous(),
    "slice moved to its own device": lambda t: t[2:4].to(t.device),
    "part of a split": lambda t: torch.split(t, [3, 5])[1],
    "no rows": lambda t: t[:0],
    "expanded": lambda t: torch.zeros(1, 64, device=t.device).expand(4096, 64),
    "overlapping windows": lambda t: t.flatten().unfold(0, 8, 1),
    "diagonal": lambda t: t.diagonal(),
    "reshaped slice": lambda t: t[:4].reshape(-1),
    "real part": lambda t: t.to(torch.complex64).real,
    "slice of inference": lambda t: in_inference_mode(lambda: (t * 2)[:3]),
    "slice with a graph": lambda t: (t.clone().requires_grad_() * 2)[:3],
    "window on a larger storage": lambda t: torch.zeros(99, device=t.device).set_(
        torch.zeros(99, device=t.device).untyped_storage(), 5, (10,), (1,)
    ),
}


def in_inference_mode(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return make()


@pytest.fixture
def batch(device: str) -> torch.Tensor:
    return torch.arange(32.0, device=device).reshape(8, 4)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_tensor_that_covers_its_storage_is_stored_as_it_is(
    kind: str, batch: torch.Tensor
) -> None:
    tensor = WHOLE[kind](batch)
    cache, stored = store(tensor)
    assert stored is tensor
    assert cache.current_size == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_copied_into_memory_of_its_own(kind: str, batch: torch.Tensor) -> None:
    tensor = PARTS[kind](batch)
    cache, stored = store(tensor)
    assert stored.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or (
        tensor.numel() == 0
    )
    assert cache.current_size == tensor.numel() * tensor.element_size()
    assert torch.equal(stored, tensor)
    assert (stored.dtype, stored.device, stored.shape) == (
        tensor.dtype, tensor.device, tensor.shape,
    )  # fmt: skip
    assert stored.is_contiguous()


@pytest.mark.parametrize("kind", [*WHOLE, *PARTS])
def test_copy_copies_every_kind(kind: str, batch: torch.Tensor) -> None:
    tensor = {**WHOLE, **PARTS}[kind](batch)
    _, stored = store(tensor, copy=True)
    before = stored.clone()
    with torch.inference_mode():
        tensor.detach().untyped_storage().fill_(7)
    assert torch.equal(stored, before)


FOREIGN: dict[str, Callable[[], tuple[Any, torch.Tensor]]] = {
    "numpy": lambda: (array := np.ones(4, np.float32), torch.from_numpy(array)),
    "slice of numpy": lambda: (array := np.ones(400, np.float32), torch.from_numpy(array)[:4]),
    "numpy slice": lambda: (array := np.ones(400, np.float32), torch.from_numpy(array[4:8])),
    "numpy by DLPack": lambda: (array := np.ones(4, np.float32), torch.from_dlpack(array)),
    "buffer": lambda: (
        array := np.ones(400, np.float32),
        torch.frombuffer(memoryview(array), dtype=torch.float32, count=4),
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_memory_from_elsewhere_is_copied_and_let_go(kind: str) -> None:
    owner, tensor = FOREIGN[kind]()
    owner = weakref.ref(owner)
    cache, stored = store(tensor)
    del tensor
    gc.collect()
    assert owner() is None
    assert cache.current_size == 16
    assert stored.tolist() == [1.0] * 4


def test_a_mapped_file_is_copied_and_let_go(tmp_path: Path) -> None:
    path = tmp_path / "embedding.bin"
    path.write_bytes(np.ones(400, np.float32).tobytes())
    mapped = torch.from_file(str(path), shared=False, size=400)
    _, stored = store(mapped)
    assert stored.data_ptr() != mapped.data_ptr()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the buffer is read-only, and so is what we do
            tensor = torch.frombuffer(mapping, dtype=torch.float32, count=4)
        _, stored = store(tensor)
        del tensor
    assert stored.tolist() == [1.0] * 4


def test_shared_memory_is_copied() -> None:
    shared = torch.ones(4).share_memory_()
    _, stored = store(shared)
    assert stored.data_ptr() != shared.data_ptr()
    assert not stored.is_shared()


def test_sub_byte_dtypes_are_copied_too() -> None:
    cache, stored = store(torch.arange(8, dtype=torch.uint8).view(torch.uint4)[2:5])
    assert cache.current_size == 3
    assert stored.view(torch.uint8).tolist() == [2, 3, 4]


def test_room_is_made_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the cache never holds more than its budget, not even while it copies."""
    cache = MultiModalStaticCache(120)
    old = [result(10) for _ in range(3)]
    dropped = [weakref.ref(value.embedding) for value in old]
    for key, value in enumerate(old):
        cache.set(key, value)
    del old, value
    seen = []

    def clone(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((cache.current_size, [ref() is None for ref in dropped]))
        return torch.ones_like(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    assert cache.set(9, EmbeddingResult(embedding=torch.zeros(99)[:20]))
    assert seen == [(40, [True, True, False])]


# Graphs, gradients and attributes


def graph_of(keep: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Any]:
    """Yields a tensor made from weights, then a weak reference to the weights."""
    weights = torch.ones(64, 64, requires_grad=True)
    yield keep(weights)
    reference = weakref.ref(weights)
    del weights
    yield reference


GRAPHS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "output": lambda weights: weights @ weights,
    "view of an output": lambda weights: (weights @ weights).reshape(-1, 2),
    "slice of an output": lambda weights: (weights @ weights)[:3],
    "view made under no_grad": lambda weights: view_without_grad(weights @ weights),
    "view made under no_grad of the weights": lambda weights: view_without_grad(weights),
}


def view_without_grad(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.view(-1)


@pytest.mark.parametrize("kind", GRAPHS)
def test_what_is_stored_keeps_no_graph(kind: str) -> None:
    steps = graph_of(GRAPHS[kind])
    tensor = next(steps)
    cache, stored = store(tensor)
    assert not stored.requires_grad
    assert stored.grad_fn is None
    del tensor
    weights = next(steps)
    gc.collect()
    assert weights() is None
    assert cache.current_size == recount(cache)


def test_a_leaf_that_requires_grad_is_detached_and_shares_its_memory() -> None:
    leaf = torch.ones(4, requires_grad=True)
    _, stored = store(leaf)
    assert not stored.requires_grad
    assert stored.data_ptr() == leaf.data_ptr()


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(2, 2)])
def test_a_gradient_is_not_kept(view: Any) -> None:
    leaf = torch.ones(4, requires_grad=True)
    leaf.sum().backward()
    leaf.requires_grad_(requires_grad=False)
    gradient = weakref.ref(leaf.grad)
    _, stored = store(view(leaf))
    assert stored.grad is None
    del leaf
    gc.collect()
    assert gradient() is None


def test_python_attributes_of_a_tensor_are_not_kept() -> None:
    tensor = torch.ones(4)
    tensor.source = torch.ones(1000)  # type: ignore[attr-defined]
    source = weakref.ref(tensor.source)  # type: ignore[attr-defined]
    cache, _ = store(tensor)
    del tensor
    gc.collect()
    assert source() is None
    assert cache.current_size == 16


# Results with more tensors


@dataclass(kw_only=True)
class Deepstack(EmbeddingResult):
    layers: list[torch.Tensor]
    extra: dict[str, Any] = field(default_factory=dict)
    pair: Any = ()
    label: str = "a cat"


@dataclass(frozen=True)
class Frozen:
    embedding: torch.Tensor
    size: tuple[int, int] = (3, 4)


@dataclass(slots=True)
class Slotted:
    embedding: torch.Tensor
    other: torch.Tensor | None = None
    unset: torch.Tensor = field(init=False)


class Private:
    __slots__ = ("__hidden", "embedding")

    def __init__(self, embedding: torch.Tensor, hidden: torch.Tensor) -> None:
        self.embedding = embedding
        self.__hidden = hidden

    def hidden(self) -> torch.Tensor:
        return self.__hidden


@dataclass
class WithSlot:
    """One attribute in ``__dict__``, another in a slot."""

    __slots__ = ("__dict__", "mask")
    embedding: torch.Tensor


Pair = namedtuple("Pair", "first second")


class Twice(tuple[Any, ...]):
    """A tuple whose constructor takes one iterable, like tuple's."""


def test_all_tensors_of_a_subclass_are_charged() -> None:
    value = Deepstack(
        embedding=torch.zeros(10),
        layers=[torch.zeros(5), torch.zeros(6)],
        extra={"a": torch.zeros(1), "b": {"c": [(torch.zeros(2),)]}, "n": 5},
        pair=Pair(torch.zeros(3), "x"),
    )
    cache = MultiModalStaticCache(108)
    assert cache.set(1, value)
    assert cache.get_single(1) is value
    assert cache.current_size == 4 * (10 + 5 + 6 + 1 + 2 + 3) == recount(cache)
    cache.resize(107)
    assert len(cache) == 0


def made(cls: type, attributes: dict[str, Any]) -> Any:
    instance = object.__new__(cls)
    vars(instance).update(attributes)
    return instance


OWN_WAYS: dict[str, Callable[..., Any]] = {
    "__new__": lambda cls, *_, **__: object.__new__(cls),
    "__setattr__": object.__setattr__,
    "__copy__": lambda self: made(type(self), vars(self)),
    "__reduce__": lambda self: (made, (type(self), vars(self))),
    "__reduce_ex__": lambda self, protocol: (made, (type(self), vars(self))),
    "__getstate__": lambda self: vars(self).copy(),
    "__setstate__": lambda self, state: vars(self).update(state),
}


@pytest.mark.parametrize("name", OWN_WAYS)
def test_a_result_is_copied_in_its_own_way(name: str) -> None:
    calls = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return OWN_WAYS[name](*args, **kwargs)

    own = type("Own", (EmbeddingResult,), {name: noted})
    value = own(embedding=torch.arange(100.0)[:10])
    calls.clear()
    cache = MultiModalStaticCache(ROOMY)
    assert cache.set(1, value)
    assert calls
    stored = cache.get_single(1)
    assert type(stored) is own
    assert (kept_bytes(stored), kept_bytes(value)) == (40, 400)


def test_a_frozen_result_is_copied() -> None:
    @dataclass(frozen=True)
    class FrozenResult:
        embedding: torch.Tensor

    value = FrozenResult(torch.arange(100.0)[:10])
    cache = MultiModalStaticCache(ROOMY)
    assert cache.set(1, value)  # type: ignore[arg-type]
    stored = cache.get_single(1)
    assert type(stored) is FrozenResult
    assert torch.equal(stored.embedding, value.embedding)
    assert kept_bytes(stored) == 40


def test_results_of_any_plain_class_are_copied_alike() -> None:
    own = type("Own", (), {})
    value = made(own, {"embedding": torch.arange(100.0)[:10]})
    cache = MultiModalStaticCache(ROOMY)
    assert cache.set(1, value)
    stored = cache.get_single(1)
    assert stored is not None
    assert type(stored) is own
    assert vars(stored).keys() == {"embedding"}
    assert torch.equal(stored.embedding, value.embedding)
    assert (kept_bytes(stored), kept_bytes(value)) == (40, 400)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    **{
        name: lambda make=make: make(torch.arange(32.0).reshape(8, 4))
        for name, make in {**WHOLE, **PARTS}.items()
    },
    **{name: lambda make=make: make()[1] for name, make in FOREIGN.items()},
    **UNCOUNTABLE,
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("make", [EmbeddingResult, SimpleNamespace])
def test_the_quick_way_is_that_with_care(kind: str, make: Callable[..., Any]) -> None:
    def plan(way: Callable[..., Any]) -> Any:
        try:
            nbytes, replacements = way(value, copy_all=False)
        except EmbeddingTypeError as error:
            return str(error)
        return nbytes, None if replacements is None else list(replacements)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = make(embedding=TENSORS[kind]())
    assert plan(plan_ownership) == plan(_plan_with_care)


def test_a_tensor_in_a_slot_beside_the_attributes_is_charged() -> None:
    value = WithSlot(torch.zeros(10))
    value.mask = torch.zeros(5)
    cache = MultiModalStaticCache(100)
    assert cache.set(1, value)  # type: ignore[arg-type]
    assert cache.get_single(1) is value
    assert cache.current_size == 60


def test_parts_are_owned_wherever_they_are_and_the_rest_stays() -> None:
    batch = torch.arange(100.0)
    kept = torch.zeros(7)
    value = Deepstack(
        embedding=batch[:2],
        layers=[batch[2:4], kept],
        extra=OrderedDict(a=batch[4:6], b=defaultdict(list, c=[(batch[6:8],)]), n=5),
        pair=Pair(batch[8:10], Twice([Frozen(batch[10:12])])),
    )
    before = vars(value).copy()
    cache = MultiModalStaticCache(ROOMY)
    assert cache.set(1, value)
    stored: Any = cache.get_single(1)
    assert type(stored) is Deepstack
    assert stored is not value
    assert cache.current_size == recount(cache) == 4 * (6 * 2 + 7)
    assert vars(value) == before
    assert value.layers[1] is stored.layers[1] is kept
    assert stored.label is value.label
    assert stored.extra["n"] == 5
    assert type(stored.extra) is OrderedDict
    assert list(stored.extra) == ["a", "b", "n"]
    assert stored.extra["b"].default_factory is list
    assert type(stored.pair) is Pair
    assert type(stored.pair.second) is Twice
    assert stored.pair.second[0].size is value.pair.second[0].size
    for ours, theirs in [
        (stored.embedding, value.embedding),
        (stored.layers[0], value.layers[0]),
        (stored.extra["a"], value.extra["a"]),
        (stored.extra["b"]["c"][0][0], value.extra["b"]["c"][0][0]),
        (stored.pair.first, value.pair.first),
        (stored.pair.second[0].embedding, value.pair.second[0].embedding),
    ]:
        assert torch.equal(ours, theirs)
        assert ours.data_ptr() != theirs.data_ptr()


def test_a_class_in_a_field_is_not_looked_into() -> None:
    @dataclass
    class WithDefault:
        other: torch.Tensor = torch.zeros(1000)[:1]

    value = Deepstack(embedding=torch.zeros(10), layers=[], extra={"class": WithDefault})
    cache = MultiModalStaticCache(40)
    assert cache.set(1, value)
    assert cache.get_single(1) is value


def test_containers_without_parts_stay_the_same_objects() -> None:
    batch = torch.arange(100.0)
    value = Deepstack(embedding=batch[:2], layers=[torch.zeros(7)], extra={"n": [1, 2]})
    value.pair = Frozen(torch.zeros(3))
    cache = MultiModalStaticCache(ROOMY)
    cache.set(1, value)
    stored: Any = cache.get_single(1)
    assert stored.layers is value.layers
    assert stored.extra is value.extra
    assert stored.pair is value.pair


def test_a_storage_that_several_tensors_share_is_charged_once() -> None:
    tensor = torch.zeros(10)
    value = Deepstack(embedding=tensor, layers=[tensor, tensor.view(2, 5), torch.zeros(1)])
    cache = MultiModalStaticCache(ROOMY)
    cache.set(1, value)
    assert cache.get_single(1) is value
    assert cache.current_size == 44 == recount(cache)
    cache.set(2, Deepstack(embedding=tensor, layers=[tensor.view(2, 5)]))
    assert cache.current_size == 44 + 40


def test_a_tensor_that_stands_twice_is_copied_once() -> None:
    part = torch.arange(100.0)[:10]
    cache = MultiModalStaticCache(ROOMY)
    cache.set(1, Deepstack(embedding=part, layers=[part]))
    stored: Any = cache.get_single(1)
    assert stored.embedding is stored.layers[0]
    assert cache.current_size == 40 == recount(cache)


def test_a_whole_and_a_part_of_it_are_charged_as_the_two_that_they_become() -> None:
    whole = torch.zeros(10)
    cache = MultiModalStaticCache(ROOMY)
    cache.set(1, Deepstack(embedding=whole, layers=[whole[:3]]))
    assert cache.current_size == 52 == recount(cache)


def test_one_of_several_tensors_is_detached_and_charged() -> None:
    value = Deepstack(embedding=torch.zeros(10), layers=[torch.zeros(5, requires_grad=True) * 2])
    cache = MultiModalStaticCache(ROOMY)
    cache.set(1, value)
    stored: Any = cache.get_single(1)
    assert not stored.layers[0].requires_grad
    assert stored.embedding is value.embedding
    assert cache.current_size == 60 == recount(cache)


class OwnSetattr:
    """A class that writes down what is assigned, and has no other memory of it."""

    def __init__(self, embedding: torch.Tensor) -> None:
        self.embedding = embedding

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setattr__("assigned", (*getattr(self, "assigned", ()), name))


@pytest.mark.parametrize(
    "value",
    [
        OwnSetattr(torch.arange(100.0)[:10]),
        Frozen(torch.arange(100.0)[:10]),
        Slotted(torch.arange(100.0)[:10], torch.arange(100.0)[10:20]),
        Private(torch.arange(100.0)[:10], torch.arange(100.0)[10:20]),
        SimpleNamespace(embedding=torch.arange(100.0)[:10], other=torch.arange(100.0)[10:20]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_object_with_a_tensor_in_its_attribute_embedding_is_a_result(value: Any) -> None:
    cache = MultiModalStaticCache(ROOMY)
    assert cache.set(1, value)
    stored: Any = cache.get_single(1)
    assert type(stored) is type(value)
    assert torch.equal(stored.embedding, value.embedding)
    assert kept_bytes(stored.embedding) == 40
    assert getattr(stored, "assigned", ("embedding",) * 2) == ("embedding",) * 2
    other = getattr(stored, "other", None) if type(value) is not Private else stored.hidden()
    assert cache.current_size == (40 if other is None else 80)
    assert other is None or kept_bytes(other) == 40


# What can't be counted is refused, and nothing changes


@pytest.mark.filterwarnings("ignore")  # torch warns about the prototypes among these
@pytest.mark.parametrize("kind", UNCOUNTABLE)
@pytest.mark.parametrize("key", [1, 3, None])
def test_a_tensor_that_can_not_be_counted_is_refused(kind: str, key: int | None) -> None:
    cache = MultiModalStaticCache(80)
    cache.set(1, result(10))
    cache.set(2, result(10))
    tensor = UNCOUNTABLE[kind]()
    before = cache.stats()
    for value in (
        EmbeddingResult(embedding=tensor),
        Deepstack(embedding=torch.zeros(1), layers=[tensor]),
    ):
        with pytest.raises(EmbeddingTypeError, match="can't be cached: tensors must") as caught:
            cache.set(key, value)
        assert isinstance(caught.value, AssertionError)
    assert keys(cache) == [1, 2]
    assert cache.stats() == before


class NoClone(torch.Tensor):
    def clone(self, **options: Any) -> Any:
        raise TypeError("it is only here")


class NoDetach(torch.Tensor):
    def detach(self) -> Any:
        raise OSError("it is only here")


class NoFunctions(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.clone, torch.Tensor.detach):
            raise TypeError("it is only here")
        return super().__torch_function__(func, types, args, kwargs or {})


class NoOptions(torch.Tensor):
    def clone(self) -> Any:
        return super().clone()


class BecomesNumpy(torch.Tensor):
    def clone(self, **options: Any) -> Any:
        return np.zeros(len(self), np.float32)

    detach = clone


@pytest.mark.parametrize(
    ("cls", "tensor", "message"),
    [
        (NoClone, torch.zeros(100)[:10], "failed: TypeError: it is only here"),
        (NoClone, torch.zeros(100)[::10], "failed: TypeError: it is only here"),
        (NoFunctions, torch.zeros(100)[:10], "failed: TypeError: it is only here"),
        (NoOptions, torch.zeros(100)[::10], "got an unexpected keyword argument 'memory_format'"),
        (BecomesNumpy, torch.zeros(100)[:10], "became ndarray"),
        (NoDetach, torch.zeros(10, requires_grad=True), "failed: OSError: it is only here"),
        (NoDetach, torch.zeros(99, requires_grad=True)[:10], "failed: OSError: it is only here"),
        (NoFunctions, torch.zeros(10, requires_grad=True), "failed: TypeError: it is only here"),
        (BecomesNumpy, torch.zeros(10, requires_grad=True), "became ndarray"),
    ],
)
@pytest.mark.parametrize("make", [EmbeddingResult, lambda embedding: Record(embedding, ())])
def test_a_tensor_whose_class_forbids_its_copy_is_refused_before_evictions(
    make: Any, cls: type[torch.Tensor], tensor: torch.Tensor, message: str
) -> None:
    cache = filled(80, 1, 2)
    before = cache.stats()
    with pytest.raises(EmbeddingTypeError, match=rf"a {cls.__name__} that must be .*{message}$"):
        cache.set(3, make(embedding=tensor.as_subclass(cls)))
    assert keys(cache) == [1, 2]
    assert cache.stats() == before


class Boxes(torch.Tensor):
    """A tensor whose copies need what hangs on it, in the way of its class."""

    __slots__ = ("scale", "unset")
    scale: float

    def clone(self, **options: Any) -> Boxes:
        if self.is_contiguous():
            assert not options
        made = super().clone(**options)
        made.format, made.scale = self.format, self.scale
        return made


@pytest.mark.parametrize(
    "part",
    [
        lambda t: t[2],
        lambda t: t[2, 3],
        lambda t: t[:, 1],
        lambda t: t[:0],
        lambda t: t[1:, ::2],
        lambda t: t.requires_grad_()[1:],
    ],
)
def test_a_tensor_is_asked_for_its_copy_with_what_hangs_on_it(part: Any) -> None:
    tensor = part(torch.arange(32.0).reshape(8, 4)).as_subclass(Boxes)
    tensor.format, tensor.scale = "XYXY", 2.0
    if tensor.requires_grad:  # detached first, which forgets them
        with pytest.raises(EmbeddingTypeError, match="a Boxes that must be copied"):
            MultiModalStaticCache(ROOMY).set(1, EmbeddingResult(embedding=tensor))
        return
    _, stored = store(tensor)
    assert type(stored) is Boxes
    assert (stored.format, stored.scale) == ("XYXY", 2.0)
    assert torch.equal(stored, tensor)


def test_an_error_of_torch_in_a_copy_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(tensor: torch.Tensor, **options: Any) -> Any:
        raise RuntimeError(f"the device of {tensor.dtype} is lost")

    cache = MultiModalStaticCache(ROOMY)
    monkeypatch.setattr(torch.Tensor, "clone", clone)
    with pytest.raises(RuntimeError, match="^the device of torch.float32 is lost$"):
        cache.set(1, EmbeddingResult(embedding=torch.zeros(99)[:20]))
    assert cache.check() is None


def test_the_refusal_says_what_came() -> None:
    cache = MultiModalStaticCache(80)
    with pytest.raises(EmbeddingTypeError) as caught:
        cache.set(1, EmbeddingResult(embedding=torch.eye(3).to_sparse()))
    assert str(caught.value).endswith(
        "got a Tensor with layout=torch.sparse_coo, dtype=torch.float32, is_nested=False, "
        "device=cpu"
    )
    with pytest.raises(EmbeddingTypeError, match=r"one that needs 40 bytes of a storage of 36$"):
        cache.set(1, EmbeddingResult(embedding=UNCOUNTABLE["shrunk"]()))


def test_a_stand_in_for_a_tensor_inside_vmap_is_refused() -> None:
    cache = MultiModalStaticCache(80)

    def encode(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(EmbeddingTypeError):
            cache.set(1, EmbeddingResult(embedding=row))
        return row

    torch.vmap(encode)(torch.zeros(3, 4))
    assert len(cache) == 0


class Computed:
    """An object whose embedding is not its own attribute."""

    @property
    def embedding(self) -> torch.Tensor:
        return torch.zeros(3)


class DictWithEmbedding(dict[str, torch.Tensor]):
    def __init__(self, embedding: torch.Tensor) -> None:
        super().__init__(embedding=embedding)
        self.embedding = embedding


class WithTensor:
    embedding = torch.zeros(3)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "NoneType"),
        (torch.zeros(3), "Tensor"),
        (np.zeros(3), "ndarray"),
        ({"embedding": torch.zeros(3)}, "dict"),
        ([torch.zeros(3)], "list"),
        (EmbeddingResult, "type"),
        (SimpleNamespace(embedding=None), "SimpleNamespace"),
        (EmbeddingResult(embedding=np.zeros(3)), "EmbeddingResult with ndarray there"),  # type: ignore[arg-type]
        (Computed(), "Computed"),
        (WithTensor, "type"),
        (Pair(1, 2), "Pair"),
        (DictWithEmbedding(torch.zeros(3)), "DictWithEmbedding"),
    ],
)  # fmt: skip
def test_what_is_no_result_is_named(value: Any, name: str) -> None:
    cache = MultiModalStaticCache(80)
    with pytest.raises(EmbeddingTypeError, match=rf"\(no property, no container\), got {name}$"):
        cache.set(1, value)


# Results that contain themselves


class ListWithAttribute(list[Any]):
    other: torch.Tensor


@dataclass
class Node:
    parts: Any


@dataclass(frozen=True, slots=True, eq=False)
class FrozenNode:
    parts: Any


class Record:
    """A result that is no dataclass."""

    def __init__(self, embedding: torch.Tensor, parts: Any) -> None:
        self.embedding = embedding
        self.parts = parts


def inside(value: Any) -> list[Any]:
    """Returns what a container of those above holds."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Record):
        return [value.embedding, value.parts]
    return [value.parts] if isinstance(value, (Node, FrozenNode)) else []


def graph(root: Any) -> dict[int, tuple[Any, list[Any]]]:
    """Returns all that can be reached, each with what it holds, by id."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    ahead = [root]
    while ahead:
        value = ahead.pop()
        if id(value) not in found:
            found[id(value)] = value, inside(value)
            ahead += inside(value)
    return found


def must_be_copied(value: Any) -> bool:
    """Whether a window on a larger storage can be reached."""
    return any(
        isinstance(part, torch.Tensor) and part.nbytes != part.untyped_storage().nbytes()
        for part, _ in graph(value).values()
    )


def assert_twins(original: Any, twin: Any) -> None:
    """They are one graph, in which all is shared that may be."""
    twins, originals = {id(original): twin}, {id(twin): original}
    for value, parts in graph(original).values():
        copied = twins[id(value)]
        assert (copied is value) is not must_be_copied(value)
        assert type(copied) is type(value)
        if isinstance(value, torch.Tensor):
            assert torch.equal(copied, value)
            assert not must_be_copied(copied)
        elif isinstance(value, dict):
            assert list(copied) == list(value)
        for part, its_twin in zip(parts, inside(copied), strict=True):
            assert twins.setdefault(id(part), its_twin) is its_twin
            assert originals.setdefault(id(its_twin), part) is part


def set_parts(node: Any, parts: list[Any]) -> None:
    if isinstance(node, dict):
        node.update(enumerate(parts))
    elif isinstance(node, list):
        node.extend(parts)
    else:
        object.__setattr__(node, "parts", parts[0] if parts else None)


@given(data=st.data())
def test_a_result_is_copied_as_the_graph_that_it_is(data: st.DataObject) -> None:
    batch = torch.arange(100.0)
    some: list[Any] = [batch[:2], batch[2:4], torch.zeros(3), "a cat"]
    makers: list[Callable[[], Any]] = [
        dict, OrderedDict, list, ListWithAttribute, lambda: Node(None), lambda: FrozenNode(None),
    ]  # fmt: skip
    record = Record(data.draw(st.sampled_from(some[:3])), None)
    nodes = [record, *(make() for make in data.draw(st.lists(st.sampled_from(makers), max_size=6)))]
    some += nodes
    for make in data.draw(st.lists(st.sampled_from([tuple, Pair._make, Twice]), max_size=4)):
        some.append(make(data.draw(st.lists(st.sampled_from(some), min_size=2, max_size=2))))
    for node in nodes:
        set_parts(node, data.draw(st.lists(st.sampled_from(some), max_size=3)))
    before = graph(record)

    cache = MultiModalStaticCache(ROOMY)
    assert cache.set(1, record)  # type: ignore[arg-type]
    stored: Any = cache.get_single(1)
    assert_twins(record, stored)
    after = graph(record)
    assert {key: list(map(id, parts)) for key, (_, parts) in after.items()} == {
        key: list(map(id, parts)) for key, (_, parts) in before.items()
    }
    kept = {id(v): v for v, _ in graph(stored).values() if isinstance(v, torch.Tensor)}
    assert cache.current_size == sum(v.untyped_storage().nbytes() for v in kept.values())


@pytest.mark.parametrize("make", [Record, lambda e, parts: Deepstack(embedding=e, layers=parts)])
def test_the_copy_of_a_result_that_contains_itself_contains_the_copy(make: Any) -> None:
    value = make(torch.arange(100.0)[:10], [])
    pair = (value, [])
    pair[1].append(pair)
    value.parent = {"results": [value], "pair": pair}
    cache = MultiModalStaticCache(40)
    assert cache.set(1, value)
    stored: Any = cache.get_single(1)
    assert stored is not value
    assert stored.parent["results"][0] is stored
    assert stored.parent["pair"][0] is stored
    assert stored.parent["pair"][1][0] is stored.parent["pair"]
    assert value.parent["results"][0] is value
    assert value.parent["pair"] is pair
    assert cache.current_size == kept_bytes(stored.embedding) == 40


def test_a_result_that_contains_itself_is_stored_as_it_is_if_nothing_must_be_copied() -> None:
    value = Record(torch.zeros(1), [torch.zeros(2)])
    value.parts.append(value)
    cache = MultiModalStaticCache(12)
    assert cache.set(1, value)  # type: ignore[arg-type]
    assert cache.get_single(1) is value
    assert cache.current_size == 12


def test_a_result_that_is_a_key_in_itself_is_refused() -> None:
    value = Record(torch.arange(100.0)[:10], {})
    value.parts[value] = 1
    with pytest.raises(EmbeddingTypeError, match="still holds that tensor"):
        MultiModalStaticCache(40).set(1, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("nest", [lambda inner: [inner], lambda inner: (inner,)])
def test_a_result_may_be_nested_deeper_than_calls_may(nest: Callable[[Any], Any]) -> None:
    depth = 10 * sys.getrecursionlimit()
    parts = torch.arange(100.0)[:10]
    for _ in range(depth):
        parts = nest(parts)
    cache = MultiModalStaticCache(80)
    assert cache.set(1, Record(torch.zeros(1), parts))  # type: ignore[arg-type]
    stored: Any = cache.get_single(1)
    found = stored.parts
    for _ in range(depth):
        (found,) = found
    assert kept_bytes(found) == 40


def test_containers_that_stand_often_are_looked_into_once_and_stay_shared() -> None:
    shared: list[Any] = [torch.zeros(9)[:2]]
    for _ in range(60):  # 2**60 ways lead to the tensor
        shared = [shared, shared]
    cache = MultiModalStaticCache(80)
    assert cache.set(1, Deepstack(embedding=torch.zeros(1), layers=shared))
    assert cache.current_size == 12
    stored: Any = cache.get_single(1)
    assert stored.layers is not shared
    assert stored.layers[0] is stored.layers[1]


class AttributeDict(dict[str, Any]):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class CopiesAreSame(EmbeddingResult):
    def __copy__(self) -> CopiesAreSame:
        return self


class TakesTwo(tuple[Any, ...]):
    def __new__(cls, one: Any, two: Any) -> TakesTwo:
        return super().__new__(cls, (one, two))


class NotCopyable(list[Any]):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OSError("it is only here")


def list_with_attribute(tensor: torch.Tensor) -> ListWithAttribute:
    made = ListWithAttribute()
    made.other = tensor
    return made


# Each holds the tensor, and can't be copied with another in its place.
REBUILDABLE_NOT: dict[str, Callable[[torch.Tensor], EmbeddingResult]] = {
    "attributes that are items": lambda t: holding(AttributeDict(a=t)),
    "attribute of a list": lambda t: holding(list_with_attribute(t)),
    "key of a dict": lambda t: holding({t: 1}),
    "copy returns self": lambda t: CopiesAreSame(embedding=t),
    "tuple with another constructor": lambda t: holding(TakesTwo(t, 1)),
    "copy raises": lambda t: holding(NotCopyable([t])),
}


def holding(value: Any) -> EmbeddingResult:
    return Deepstack(embedding=torch.zeros(1), layers=[], extra={"value": value})


@pytest.mark.parametrize("kind", REBUILDABLE_NOT)
def test_what_can_not_be_rebuilt_is_stored_whole_or_refused(kind: str) -> None:
    cache = MultiModalStaticCache(80)
    cache.set(1, result(10))
    cache.set(2, result(5))
    part = REBUILDABLE_NOT[kind](torch.zeros(100)[:10])
    before = cache.stats()
    with pytest.raises(EmbeddingTypeError, match="must be copyable, but"):
        cache.set(3, part)
    assert cache.stats() == before
    assert kept_bytes(part.embedding) == (400 if kind == "copy returns self" else 4)

    whole = REBUILDABLE_NOT[kind](torch.zeros(10))
    assert cache.set(3, whole)
    assert cache.get_single(3) is whole
    assert cache.check() is None
    assert cache.stats().evictions == 1


def test_containers_of_other_classes_are_rebuilt() -> None:
    class TaggedPair(Pair):
        label: str

    part = torch.arange(100.0)[:10]
    pair = TaggedPair(part, "x")
    pair.label = "a cat"
    layers = ListWithAttribute([part])
    value = Deepstack(embedding=torch.zeros(1), layers=layers, extra=Counter(a=part), pair=pair)
    cache = MultiModalStaticCache(1000)
    assert cache.set(1, value)
    stored: Any = cache.get_single(1)
    assert type(stored.layers) is ListWithAttribute
    assert torch.equal(stored.layers[0], part)
    assert layers[0] is part
    assert cache.current_size == 44 == recount(cache)
    assert type(stored.extra) is Counter
    assert torch.equal(stored.extra["a"], part)
    assert (type(stored.pair), stored.pair.label) == (TaggedPair, "a cat")
    assert torch.equal(stored.pair.first, part)


def test_a_view_whose_base_was_given_other_memory_lets_that_go() -> None:
    base = torch.zeros(10)
    view = base.view(2, 5)
    base.data = torch.zeros(1000)
    _, stored = store(view)
    assert stored is not view
    assert stored._base is None


def test_attributes_and_slots_of_a_tensor_subclass_are_not_kept() -> None:
    class Slotted(torch.Tensor):
        __slots__ = ("other",)
        other: torch.Tensor

    tensor = torch.zeros(10).as_subclass(Slotted)
    tensor.other = torch.zeros(1000)
    _, stored = store(tensor)
    assert stored is not tensor
    assert not hasattr(stored, "other")


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.int8, torch.complex128, torch.bool]),
    data=st.data(),
    copy=st.booleans(),
)
def test_any_view_is_charged_what_it_keeps(
    shape: list[int], dtype: torch.dtype, data: st.DataObject, copy: bool
) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    for _ in range(data.draw(st.integers(0, 3))):
        dim = data.draw(st.integers(0, tensor.ndim - 1))
        size = tensor.shape[dim]
        start, step = data.draw(st.integers(0, size)), data.draw(st.integers(1, 3))
        change = data.draw(st.sampled_from(["slice", "transpose", "expand", "unsqueeze"]))
        if change == "slice":
            tensor = tensor.narrow(dim, start, data.draw(st.integers(0, size - start)))
            tensor = tensor[::step]
        elif change == "transpose":
            tensor = tensor.transpose(0, dim)
        elif change == "expand":
            tensor = tensor.unsqueeze(0).expand(step, *tensor.shape)
        else:
            tensor = tensor.unsqueeze(dim)
    logical = tensor.numel() * tensor.element_size()
    cache, stored = store(tensor, copy=copy)
    assert cache.current_size == kept_bytes(stored) == logical
    assert torch.equal(stored, tensor)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x * 2,
        lambda x: (x * 2).view(-1),
        lambda x: x.view(-1),
        lambda x: (x * 2).T,
        lambda x: x[1:],
        lambda x: (x[:1] * 1).expand(5, 4),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch warns about itself
def test_inside_torch_compile(make: Callable[[torch.Tensor], torch.Tensor], backend: str) -> None:
    cache = MultiModalStaticCache(10_000)

    @torch.compile(backend=backend)
    def store(x: torch.Tensor, key: int) -> torch.Tensor:
        cache.set(key, EmbeddingResult(embedding=make(x)))
        found = cache.get_single(key)
        assert found is not None
        return found.embedding + 1

    x = torch.arange(12.0).reshape(3, 4)
    try:
        for key in (1, 2):
            assert torch.equal(store(x, key), make(x) + 1)
    finally:
        torch.compiler.reset()  # type: ignore[no-untyped-call]
    assert cache.current_size == recount(cache)
    cache.check()
