"""``hash_feature``: what is one feature, what isn't, and what is refused."""

from __future__ import annotations

import array
import collections
import ctypes
import decimal
import enum
import io
import mmap
import os
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from blake3 import blake3
from support import UNCOUNTABLE, assert_distinct, assert_same, result, run_python

from multimodal_cache import CombinedHash, MultiModalStaticCache, _hashing, hash_feature

# Scalars, bytes, containers


def test_kinds_differ_whatever_is_equal_in_python() -> None:
    assert_distinct(
        *(1, 1.0, True, "1", b"1", [1], (1,), {1: 1}, [[1]], ([1],), [(1,)]),
        *(np.int64(1), np.int32(1), np.float64(1), np.array([1]), torch.tensor(True)),
    )
    assert_distinct(0, 0.0, False, None, "", b"", [], (), {}, np.zeros(0), np.zeros(()), "0")
    assert_distinct("a", b"a", ["a"], np.str_("a"), np.bytes_(b"a"), {"a": None}, "aa")


def test_where_one_item_ends_and_the_next_begins() -> None:
    assert_distinct(["ab", "c"], ["a", "bc"], ["abc"], "abc", ["a", "b", "c"], [["a", "bc"]])
    assert_distinct([1, [2]], [[1], 2], [[1, 2]], [1, 2], [[], 1, 2], [1, 2, []], [1, [2], []])
    assert_distinct({"a": {"b": 1}}, {"a": {}, "b": 1}, {"a": 1, "b": 1}, ["a", "b", 1])
    assert_distinct({1: 2, 3: 4}, {1: 4, 3: 2}, {1: 2}, {3: 4}, [{1: 2}, {3: 4}], {2: 1, 4: 3})


def test_the_order_of_a_dict_does_not_count() -> None:
    one = {"a": 1, 2: [3], None: {"x": 1, "y": 2}}
    other = {None: {"y": 2, "x": 1}, 2: [3], "a": 1}
    views: list[Any] = [
        one,
        other,
        collections.OrderedDict(other),
        collections.UserDict(one),
        types.MappingProxyType(other),
    ]
    assert_same(*views)


def test_floats_count_by_their_bits() -> None:
    assert_distinct(0.0, -0.0, float("nan"), -float("nan"), float("inf"), 5e-324, 1e-323, 1.0)
    assert_same(float("nan"), float("nan"))
    assert_distinct(np.array(0.0), np.array(-0.0))


@pytest.mark.parametrize("bits", [7, 8, 15, 16, 63, 64, 127, 128, 8192, 8193])
def test_ints_at_the_edges_of_their_bytes(bits: int) -> None:
    edges = {sign * 2**bits + step for sign in (1, -1) for step in range(-2, 3)}
    assert_distinct(*sorted(edges | {0, 1, -1, 255, 256, -255, -256}))


@pytest.mark.parametrize("size", [0, 200, 5000])
def test_all_buffers_of_the_same_bytes_are_one_feature(size: int) -> None:
    data = random.Random(0).randbytes(size)

    class Bytes(bytes):
        def __len__(self) -> int:
            return 0

        def __bytes__(self) -> bytes:
            return b"other"

    features: list[Any] = [
        data,
        Bytes(data),
        bytearray(data),
        memoryview(data),
        memoryview(data[::-1])[::-1],
        memoryview(bytearray(byte for byte in data for _ in range(3)))[::3],
        array.array("B", data),
        (ctypes.c_ubyte * size)(*data),
        memoryview((ctypes.c_ubyte * (2 * size))(*data, *data))[:size],
        pickle.PickleBuffer(data),
        np.frombuffer(data, np.uint8).data,
    ]
    if size:
        mapped = mmap.mmap(-1, size)
        mapped.write(data)
        features.append(mapped)
    assert_same(*features)


@pytest.mark.parametrize(
    "viewed",
    [
        np.arange(12, dtype=np.uint8).reshape(3, 4),
        np.array(7, np.uint8),
        np.arange(5, dtype=np.int8),
        np.arange(5, dtype=np.float16),
        np.arange(5, dtype=">u4"),
        np.arange(24.0).reshape(2, 3, 4).T,
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=str,
)
def test_other_memoryviews_are_the_arrays_that_they_view(viewed: np.ndarray[Any, Any]) -> None:
    assert_same(memoryview(viewed), viewed, viewed.copy())
    assert_distinct(viewed, viewed.tobytes())


def test_other_buffers_are_the_arrays_that_they_hold() -> None:
    assert_same(array.array("d", [1, 2]), (ctypes.c_double * 2)(1, 2), np.array([1.0, 2.0]))


def test_an_instance_of_a_subclass_is_what_its_base_is() -> None:
    class Text(str):
        pass

    class Items(list[int]):
        pass

    class First(list[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(self[:1])

    class Point(collections.namedtuple("Point", "x y")):
        pass

    class Level(enum.IntEnum):
        HIGH = 3

    class Int(int):
        def __invert__(self) -> int:
            return 0

    class Array(np.ndarray[Any, Any]):
        shape = (99,)  # type: ignore[assignment]

    class Tensor(torch.Tensor):
        shape = torch.Size([99])  # type: ignore[assignment]

        def numpy(self, **options: Any) -> Any:
            return np.zeros(1)

    assert_same("a", Text("a"))
    assert_same([1, 2], Items([1, 2]))
    assert_same([1], First([1, 2]))  # a container is what iterating over it gives
    assert_same((1, 2), Point(1, 2), torch.Size([1, 2]))
    assert_same(3, Level.HIGH)
    assert_same(-1000, Int(-1000))
    assert_same(np.arange(3), np.arange(3).view(Array))
    assert_same(torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Tensor))


def test_one_object_may_stand_in_several_places() -> None:
    shared = [1]
    assert_same([shared, shared, {"x": shared}], [[1], [1], {"x": [1]}])


# What is refused


class Described(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))


class Packed(ctypes.Structure):
    _layout_ = "ms"
    _pack_ = 1
    _fields_ = (("a", ctypes.c_uint8 * 8),)


# Older Pythons don't tell the format of a packed structure.
PACKED = (
    "memoryviews must have a format that NumPy knows, got 'B'"
    if memoryview((Packed * 4)()).format == "B"
    else "numpy.ndarray with dtype [('a', 'u1', (8,))]"
)


@pytest.mark.parametrize(
    ("feature", "named"),
    [
        ({1, 2}, "set"),
        (frozenset(), "frozenset"),
        (1j, "complex"),
        (object(), "object"),
        (int, "type"),
        (len, "builtin_function_or_method"),
        (decimal.Decimal(1), "decimal.Decimal"),
        (Path("x"), "Path"),
        (range(3), "range"),
        (iter([1]), "list_iterator"),
        (collections.deque([1]), "collections.deque"),
        (collections.UserList([1]), "collections.UserList"),
        (mock.Mock(spec=dict), "unittest.mock.Mock"),
        (torch.float32, "torch.dtype"),
        (torch.zeros(2).untyped_storage(), "torch.storage.UntypedStorage"),
        (Described(), "with dtype [('a', '<i4'), ('b', '<f4')]"),
        (CombinedHash([1, 2]), "CombinedHash, whose items would not count"),
        ((Packed * 4)(), PACKED),
        ((ctypes.c_void_p * 2)(), "'<P'"),
        (memoryview(bytes(16)).cast("P"), "'P'"),
        (np.array([None]), "numpy.ndarray with dtype object"),
        (np.zeros(2, "i4,f4"), "numpy.ndarray with dtype [('f0', '<i4'), ('f1', '<f4')]"),
        (np.zeros(2, "i4,f4")[0], "[('f0', '<i4'), ('f1', '<f4')]"),
        (np.zeros(2, "V3"), "|V3"),
        (np.zeros(2, np.longdouble), "longdouble"),
        (np.zeros(2, np.clongdouble), "longdouble"),
        (np.longdouble(1), "longdouble"),
        (np.ma.masked_array([1, 2], [True, False]), f"{np.ma.MaskedArray.__module__}.MaskedArray"),
        (np.ma.masked, "MaskedConstant"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [0, (x,)], lambda x: {"k": x}])
def test_other_types_are_refused_by_name(
    feature: Any, named: str, wrap: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError) as caught:
        hash_feature(wrap(feature))
    assert named in str(caught.value)


def test_who_gives_a_file_is_told_to_give_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"content")
    for wrap in (lambda x: x, lambda x: ["caption", x]):
        with pytest.raises(TypeError, match=r"Path: give path\.read_bytes\(\)$"):
            hash_feature(wrap(path))
        with pytest.raises(TypeError, match=r"got _io\.BytesIO: give file\.read\(\)$"):
            hash_feature(wrap(io.BytesIO(b"content")))
        with path.open("rb") as file, pytest.raises(TypeError, match=r"give file\.read\(\)$"):
            hash_feature(wrap(file))


@pytest.mark.filterwarnings("ignore")  # torch warns about the prototypes among these
@pytest.mark.parametrize("kind", UNCOUNTABLE)
def test_tensors_without_memory_of_their_own_are_refused(kind: str) -> None:
    with pytest.raises(TypeError, match="^tensors must (be dense|have their memory)"):
        hash_feature({"pixels": UNCOUNTABLE[kind]()})


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize])
def test_a_tensor_that_stands_for_others_is_refused(transform: Callable[..., Any]) -> None:
    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TypeError, match="tensors must be dense"):
            hash_feature(tensor)
        return tensor

    transform(inside)(torch.zeros(2, 3))


def test_a_structure_that_contains_itself_is_refused() -> None:
    items: list[Any] = [1]
    items.append((items,))
    pairs: dict[str, Any] = {}
    pairs["x"] = [pairs]
    for feature in (items, pairs, [items]):
        with pytest.raises(ValueError, match="does it contain itself?"):
            hash_feature(feature)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}])
def test_a_hundred_levels_are_enough(wrap: Callable[[Any], Any]) -> None:
    feature: Any = 1
    for _ in range(100):
        feature = wrap(feature)
    hash_feature(feature)
    with pytest.raises(ValueError, match="nested at most 100 deep, got more"):
        hash_feature(wrap(feature))


def test_a_closed_buffer_is_refused() -> None:
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(ValueError, match="released"):
        hash_feature(view)


@pytest.mark.parametrize("bits", [0, 8, 56, 63, 65, 100, 255, 257, 264, 512, -64])
def test_a_bad_width_is_refused(bits: int) -> None:
    with pytest.raises(
        ValueError, match=f"bits must be a multiple of 8 from 64 to 256, got {bits}"
    ):
        hash_feature(b"", bits=bits)


@pytest.mark.parametrize("bits", [64.0, "64", None, True, torch.tensor(64)])
def test_a_width_that_is_no_int_is_refused(bits: Any) -> None:
    with pytest.raises(TypeError, match=f"bits must be an int, got {type(bits).__name__}"):
        hash_feature(b"", bits=bits)


@pytest.mark.parametrize("namespace", [None, 1, bytearray(b"a"), ["a"], ("a", "b")])
def test_a_namespace_of_another_type_is_refused(namespace: Any) -> None:
    kind = type(namespace).__name__
    with pytest.raises(TypeError, match=f"namespace must be str or bytes, got {kind}"):
        hash_feature(b"", namespace=namespace)


# Keys


@pytest.mark.parametrize("bits", range(64, 257, 8))
def test_a_key_is_an_unsigned_int_of_that_width(bits: int) -> None:
    made = [hash_feature(n, bits=bits) for n in range(200)]
    assert {type(key) for key in made} == {int}
    assert min(made) >= 0
    assert max(key.bit_length() for key in made) == bits
    assert made == [hash_feature(n) >> (256 - bits) for n in range(200)]
    assert hash_feature(0, bits=np.int64(bits)) == made[0]


def test_a_namespace_keeps_keys_apart() -> None:
    names: list[str | bytes] = ["", b"", "a", b"a", "b", "ab", "a\0", "é", "é".encode(), "s", "N"]
    made = [hash_feature(feature, namespace=name) for name in names for feature in ("", "a", None)]
    assert len(set(made)) == len(made)
    assert hash_feature("x") == hash_feature("x", namespace="")


def test_a_namespace_of_a_subclass_is_that_of_its_base() -> None:
    class Model(str):
        __slots__ = ()

        def encode(self, *_: Any) -> bytes:  # type: ignore[override]
            return b"another"

    assert hash_feature("x", namespace=Model("a")) == hash_feature("x", namespace="a")


def test_a_key_is_a_key_of_the_cache() -> None:
    key = hash_feature(b"image")
    cache = MultiModalStaticCache(100)
    assert cache.set(key, result(10))
    assert cache.get_single(key) is not None
    assert cache.get_single(hash_feature(b"another")) is None


FOUR_PROCESSES = """
import numpy as np, torch
from PIL import Image
from multimodal_cache import hash_feature
image = Image.frombytes("P", (2, 2), bytes(4))
image.putpalette(range(12))
feature = {
    "text": ["a", b"a", 1, 1.5, None, True],
    ("t", 2): np.arange(6).reshape(2, 3),
    "bf16": torch.arange(3, dtype=torch.bfloat16),
    "image": image,
    **{f"key {n}": n for n in range(50)},
}
print(hash_feature(feature, namespace="model"))
"""


def test_four_processes_agree() -> None:
    shown = {
        run_python(FOUR_PROCESSES, PYTHONHASHSEED=seed) for seed in ("0", "1", "4242", "random")
    }
    assert len(shown) == 1


def test_threads_agree() -> None:
    features = [b"x" * (9 * 2**20), np.ones((600, 900)), {"a": [1, 2]}, torch.zeros(7, 7).T]
    alone = [hash_feature(feature) for feature in features]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(hash_feature, features * 10)] == alone * 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("kind", ["large", "image"])
def test_a_forked_child_makes_the_same_keys(kind: str) -> None:
    """It has BLAKE3's pool of threads, but not the threads, nor those that hold locks."""
    code = (
        "import os, signal, sys, threading\n"
        "from PIL import Image\n"
        "from multimodal_cache import _hashing, _images, hash_feature\n"
        "large = bytes(_hashing.PARALLEL_BYTES)\n"
        "feature = large if sys.argv[1] == 'large' else Image.new('L', (9, 9))\n"
        "key = hash_feature(feature)\n"
        "hash_feature(large)\n"
        "done = threading.Event()\n"
        "held = threading.Barrier(2)\n"
        "def hold():\n"
        "    for lock in _images._load_locks:\n"
        "        lock.acquire()\n"
        "    held.wait(60)\n"
        "    done.wait(60)\n"
        "holder = threading.Thread(target=hold)\n"
        "holder.start()\n"
        "held.wait(60)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(60)\n"
        "    os._exit(0 if hash_feature(feature) == key else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "done.set()\n"
        "holder.join()\n"
    )
    assert run_python(code, kind) == "0\n"


def test_several_threads_make_the_same_key_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(0).randbytes(_hashing.PARALLEL_BYTES + 12345)
    hasher = mock.Mock(wraps=_hashing.blake3)
    monkeypatch.setattr(_hashing, "blake3", hasher)
    together = hash_feature(data)
    monkeypatch.setattr(_hashing, "PARALLEL_BYTES", sys.maxsize)
    assert hash_feature(data) == together
    used = [call.kwargs["max_threads"] for call in hasher.call_args_list]
    assert used == [blake3.AUTO, 1, 1, 1]  # the data, and what it is a part of; twice


@pytest.mark.soak
def test_a_million_small_inputs_have_a_million_keys_of_64_bits() -> None:
    count = 250_000
    kinds: list[Callable[[int], Any]] = [int, str, float, lambda n: [n % 500, n // 500]]
    made = {hash_feature(kind(n), bits=64) for kind in kinds for n in range(count)}
    assert len(made) == 4 * count
