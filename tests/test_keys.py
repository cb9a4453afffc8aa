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
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from multimodal_cache import CombinedHash, MultiModalStaticCache, hash_feature, keys


def run_python(code: str, *arguments: str, **environment: str) -> str:
    """Runs a script in another process and returns what it printed."""
    command = [sys.executable, "-c", code, *arguments]
    shown = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def assert_distinct(features: Sequence[Any]) -> None:
    made = [hash_feature(feature) for feature in features]
    assert len(set(made)) == len(made), [
        (features[i], features[j]) for i in range(len(made)) for j in range(i) if made[i] == made[j]
    ]


def assert_same(features: Sequence[Any]) -> None:
    assert len({hash_feature(feature) for feature in features}) == 1


# Scalars, bytes, containers


def test_kinds_differ_whatever_is_equal_in_python() -> None:
    assert_distinct(
        [
            *(1, 1.0, True, "1", b"1", [1], (1,), {1: 1}, [[1]], ([1],), [(1,)]),
            *(np.int64(1), np.int32(1), np.float64(1), np.array([1]), torch.tensor(True)),
        ]
    )
    assert_distinct([0, 0.0, False, None, "", b"", [], (), {}, np.zeros(0), np.zeros(()), "0"])
    assert_distinct(["a", b"a", ["a"], np.str_("a"), np.bytes_(b"a"), {"a": None}, "aa"])


def test_where_one_item_ends_and_the_next_begins() -> None:
    assert_distinct([["ab", "c"], ["a", "bc"], ["abc"], "abc", ["a", "b", "c"], [["a", "bc"]]])
    assert_distinct([[1, [2]], [[1], 2], [[1, 2]], [1, 2], [[], 1, 2], [1, 2, []], [1, [2], []]])
    assert_distinct([{"a": {"b": 1}}, {"a": {}, "b": 1}, {"a": 1, "b": 1}, ["a", "b", 1]])
    assert_distinct([{1: 2, 3: 4}, {1: 4, 3: 2}, {1: 2}, {3: 4}, [{1: 2}, {3: 4}], {2: 1, 4: 3}])


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
    assert_same(views)


def test_floats_count_by_their_bits() -> None:
    assert_distinct([0.0, -0.0, float("nan"), -float("nan"), float("inf"), 5e-324, 1e-323, 1.0])
    assert_same([float("nan"), float("nan")])
    assert_distinct([np.array(0.0), np.array(-0.0)])


@pytest.mark.parametrize("bits", [7, 8, 15, 16, 63, 64, 127, 128, 8192, 8193])
def test_ints_at_the_edges_of_their_bytes(bits: int) -> None:
    edges = {sign * 2**bits + step for sign in (1, -1) for step in range(-2, 3)}
    assert_distinct(sorted(edges | {0, 1, -1, 255, 256, -255, -256}))


def test_all_buffers_of_the_same_bytes_are_one_feature() -> None:
    data = bytes(range(200))
    mapped = mmap.mmap(-1, len(data))
    mapped.write(data)
    backwards = memoryview(data[::-1])[::-1]
    spaced = memoryview(bytearray(byte for byte in data for _ in range(3)))[::3]
    assert not backwards.c_contiguous
    assert not spaced.c_contiguous
    assert_same(
        [
            data,
            bytearray(data),
            memoryview(data),
            backwards,
            spaced,
            mapped,
            array.array("B", data),
            (ctypes.c_ubyte * 200)(*data),
            pickle.PickleBuffer(data),
        ]
    )


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
    assert_same([memoryview(viewed), viewed, viewed.copy()])
    assert_distinct([viewed, viewed.tobytes()])


def test_other_buffers_are_the_arrays_that_they_hold() -> None:
    assert_same([array.array("d", [1, 2]), (ctypes.c_double * 2)(1, 2), np.array([1.0, 2.0])])


def test_an_instance_of_a_subclass_is_what_its_base_is() -> None:
    class Text(str):
        pass

    class Items(list[int]):
        pass

    class Point(collections.namedtuple("Point", "x y")):
        pass

    class Level(enum.IntEnum):
        HIGH = 3

    class Array(np.ndarray[Any, Any]):
        pass

    assert_same(["a", Text("a")])
    assert_same([[1, 2], Items([1, 2])])
    assert_same([(1, 2), Point(1, 2), torch.Size([1, 2])])
    assert_same([3, Level.HIGH])
    assert_same([hash((1, 2)), CombinedHash([1, 2])])
    assert_same([np.arange(3), np.arange(3).view(Array)])
    assert_same([torch.ones(2), torch.nn.Parameter(torch.ones(2))])


def test_one_object_may_stand_in_several_places() -> None:
    shared = [1]
    assert_same([[shared, shared, {"x": shared}], [[1], [1], {"x": [1]}]])


# What is refused


class Described(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))


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
        ((ctypes.c_void_p * 2)(), "'<P'"),
        (memoryview(bytes(16)).cast("P"), "'P'"),
        (np.array([None]), "numpy.ndarray with dtype object"),
        (np.zeros(2, "i4,f4"), "numpy.ndarray with dtype [('f0', '<i4'), ('f1', '<f4')]"),
        (np.zeros(2, "i4,f4")[0], "[('f0', '<i4'), ('f1', '<f4')]"),
        (np.zeros(2, "V3"), "|V3"),
        (np.zeros(2, np.longdouble), "longdouble"),
        (np.zeros(2, np.clongdouble), "longdouble"),
        (np.longdouble(1), "longdouble"),
        (np.ma.masked_array([1, 2], [True, False]), "numpy.ma.MaskedArray"),
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


def refused_tensors() -> dict[str, torch.Tensor]:
    freed = torch.zeros(10)
    freed.untyped_storage().resize_(0)
    return {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "jagged": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "meta": torch.zeros(2, device="meta"),
        "uninitialised": torch.nn.UninitializedParameter(),
        "freed": freed,
    }


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")
def test_tensors_without_memory_of_their_own_are_refused() -> None:
    for tensor in refused_tensors().values():
        with pytest.raises(TypeError, match="tensors must (be dense|have their memory)"):
            hash_feature({"pixels": tensor})


def test_a_tensor_that_stands_for_others_is_refused() -> None:
    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TypeError, match="tensors must be dense"):
            hash_feature(tensor)
        return tensor

    torch.func.vmap(inside)(torch.zeros(2, 3))


def test_a_structure_that_contains_itself_is_refused() -> None:
    items: list[Any] = [1]
    items.append((items,))
    pairs: dict[str, Any] = {}
    pairs["x"] = [pairs]
    for feature, named in ((items, "list"), (pairs, "dict"), ([items], "list")):
        with pytest.raises(ValueError, match=f"must not contain itself, got a {named} that does"):
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


def test_a_key_is_a_key_of_the_cache() -> None:
    key = hash_feature(b"image")
    cache = MultiModalStaticCache(100)
    assert cache.has(key) is False
    assert cache.combine_hashes([key]) == hash((key,))


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
    code = FOUR_PROCESSES.replace(', hash_feature(set("abc").pop)', "")
    shown = {run_python(code, PYTHONHASHSEED=seed) for seed in ("0", "1", "4242", "random")}
    assert len(shown) == 1


def test_threads_agree() -> None:
    features = [b"x" * (9 * 2**20), np.ones((600, 900)), {"a": [1, 2]}, torch.zeros(7, 7).T]
    alone = [hash_feature(feature) for feature in features]
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(hash_feature, features * 10)] == alone * 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_makes_the_same_keys() -> None:
    """BLAKE3's pool of threads is there in the child, but not its threads."""
    code = (
        "import os, signal\n"
        "from multimodal_cache import hash_feature, keys\n"
        "data = bytes(keys.PARALLEL_BYTES)\n"
        "key = hash_feature(data)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(60)\n"
        "    os._exit(0 if hash_feature(data) == key else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert run_python(code) == "0\n"


def test_several_threads_make_the_same_key_as_one() -> None:
    data = random.Random(0).randbytes(keys.PARALLEL_BYTES + 12345)
    with mock.patch.object(keys, "blake3", wraps=keys.blake3) as hasher:
        hasher.AUTO = keys.blake3.AUTO
        with mock.patch.object(keys, "PARALLEL_BYTES", sys.maxsize):
            alone = hash_feature(data)
        assert {call.kwargs["max_threads"] for call in hasher.call_args_list} == {1}
        assert hash_feature(data) == alone
        assert hasher.call_args_list[-2].kwargs["max_threads"] == hasher.AUTO


@pytest.mark.soak
def test_a_million_small_inputs_have_a_million_keys_of_64_bits() -> None:
    count = 250_000
    kinds: list[Callable[[int], Any]] = [int, str, float, lambda n: [n % 500, n // 500]]
    made = {hash_feature(kind(n), bits=64) for kind in kinds for n in range(count)}
    assert len(made) == 4 * count


# Arrays and tensors

SHARED_DTYPES = sorted(keys.NUMPY_NAMES)
TORCH_ONLY_DTYPES = [
    *("bfloat16", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint1", "uint4", "int4", "bits8"),
]


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    assert isinstance(dtype, torch.dtype)
    return dtype


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Returns a tensor of random bits, as far as they are values of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    data = torch.randint(0, top, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", SHARED_DTYPES)
def test_a_tensor_and_its_numpy_twin_are_one_feature(name: str, device: str) -> None:
    for shape in ((), (0,), (3, 0, 2), (7,), (3, 4, 5), (40, 50)):
        tensor = random_tensor(torch_dtype(name), *shape)
        twin = tensor.numpy()
        swapped = twin.astype(twin.dtype.newbyteorder())
        assert_same([tensor, tensor.to(device), twin, twin.copy(order="F"), swapped])
    scalar = random_tensor(torch_dtype(name))
    assert_same([scalar, scalar.numpy(), scalar.numpy()[()]])


@pytest.mark.parametrize("name", [*SHARED_DTYPES, *TORCH_ONLY_DTYPES])
def test_the_layout_of_a_tensor_does_not_count(name: str, device: str) -> None:
    whole = random_tensor(torch_dtype(name), 6, 8, 4).to(device)
    for view in (
        whole.transpose(0, 1),
        whole.permute(2, 0, 1),
        whole[1:4],
        whole[:, 2:3],
        whole[::2, :, 1],
        whole[0, 0, 0],
        whole[2].expand(3, 8, 4),
    ):
        twin = copy_by_element(view)
        assert_same([view, twin, twin.cpu()])
        assert_distinct([view, whole])


def copy_by_element(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor of any dtype, also of those for which torch has no copy."""
    as_bytes = tensor.unsqueeze(-1).view(torch.uint8)
    return as_bytes.clone(memory_format=torch.contiguous_format).view(tensor.dtype).squeeze(-1)


def test_dtypes_differ_where_the_bits_are_the_same() -> None:
    by_size: dict[int, list[torch.Tensor]] = {}
    for name in [*SHARED_DTYPES, *TORCH_ONLY_DTYPES]:
        if hasattr(torch, name):
            dtype = getattr(torch, name)
            zeros = torch.zeros(16, dtype=torch.uint8).view(dtype)
            by_size.setdefault(dtype.itemsize, []).append(zeros)
    for zeros_of_one_size in by_size.values():
        assert_distinct(zeros_of_one_size)


def test_shapes_differ_where_the_elements_are_the_same() -> None:
    data = torch.arange(12)
    shapes = [(12,), (12, 1), (1, 12), (3, 4), (4, 3), (2, 6), (2, 3, 2), (1, 1, 12)]
    assert_distinct([data.reshape(shape) for shape in shapes])
    assert_distinct([torch.zeros(shape) for shape in ((0,), (0, 1), (1, 0), (0, 0), (2, 0, 3))])


def test_all_values_of_bfloat16_stay_apart() -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert len({hash_feature(value) for value in patterns}) == 2**16


def test_arrays_of_text_and_time() -> None:
    times = np.array(["2020-01-01", "NaT"], "datetime64[D]")
    assert_distinct([times, times.astype("datetime64[s]"), times.astype("m8[D]"), times.view("i8")])
    assert_same([times, times.astype(">M8[D]"), times[::-1][::-1]])
    names = np.array(["ab", "c"])
    assert_distinct([names, names.astype("U3"), names.astype("S"), ["ab", "c"], names[::-1]])
    assert_same([names, names.astype(">U2")])
    assert_distinct([np.zeros(2, "U0"), np.zeros(3, "U0"), np.zeros(2, "S0")])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_lazy_views_of_tensors(device: str) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j], device=device)
    conjugated = values.conj()
    assert conjugated.is_conj()
    assert_same([conjugated, conjugated.resolve_conj().clone()])
    assert_distinct([conjugated, values])
    negative = conjugated.imag
    assert negative.is_neg()
    assert_same([negative, negative.resolve_neg().clone()])
    assert_distinct([negative, values.imag])
    half = random_tensor(torch.complex32, 5).to(device).conj()
    assert_same([half, torch.view_as_complex(torch.view_as_real(half.resolve_conj()).clone())])
    assert_distinct([half, half.conj()])


def test_gradients_and_devices_do_not_count(device: str) -> None:
    plain = torch.arange(6.0)
    leaf = plain.to(device).requires_grad_()
    with torch.inference_mode():
        inference = plain.clone()
    assert_same([plain, leaf, leaf * 1, leaf.detach(), inference, torch.nn.Parameter(plain)])
    assert leaf.grad is None
    (leaf * 1).sum().backward()
    assert_same([plain, leaf])


def test_what_is_hashed_is_not_changed() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T.requires_grad_()
    array_ = np.arange(12).reshape(3, 4)[:, ::-1]
    array_.flags.writeable = False
    items = {"a": [tensor, array_]}
    before = (tensor.stride(), tensor.data_ptr(), array_.strides, array_.copy())
    hash_feature(items)
    assert (tensor.stride(), tensor.data_ptr(), array_.strides) == before[:3]
    assert tensor.requires_grad
    assert tensor.is_leaf
    assert (array_ == before[3]).all()
    assert items == {"a": [tensor, array_]}


EXTRA_MEMORY = """
import re, sys
from pathlib import Path
import numpy as np, torch
from multimodal_cache import hash_feature

def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1]) * 1024

hash_feature(bytes(9 * 2**20))  # wakes the threads and their stacks
size = 64 * 2**20
feature = {
    "bytes": lambda: b"x" * size,
    "bytearray": lambda: bytearray(b"x") * size,
    "memoryview": lambda: memoryview(b"x" * size),
    "mapping": lambda: {"pixels": [b"x" * size]},
    "array": lambda: np.ones((64, 2**18), np.float32),
    "tensor": lambda: torch.ones(64, 2**18),
    "bfloat16": lambda: torch.ones(64, 2**19, dtype=torch.bfloat16),
    "requires_grad": lambda: torch.ones(64, 2**18, requires_grad=True),
    "slice": lambda: torch.ones(80, 2**18)[8:72],
}[sys.argv[1]]()
Path("/proc/self/clear_refs").write_text("5")  # from here on
before = peak()
hash_feature(feature)
print(peak() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak from some moment"
)
@pytest.mark.parametrize(
    "kind",
    [
        *("bytes", "bytearray", "memoryview", "mapping", "array", "tensor", "bfloat16"),
        *("requires_grad", "slice"),
    ],
)
def test_contiguous_memory_is_hashed_in_place(kind: str) -> None:
    assert int(run_python(EXTRA_MEMORY, kind)) < 4 * 2**20


# Images


def noise(mode: str = "RGB", size: tuple[int, int] = (6, 4), seed: int = 0) -> Image.Image:
    image = Image.new(mode, size)
    image.frombytes(random.Random(seed).randbytes(len(image.tobytes())))
    return image


def saved(image: Image.Image, image_format: str, **options: Any) -> Image.Image:
    """Returns the image as it is read from a file, not yet loaded."""
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return Image.open(io.BytesIO(file.getvalue()))


def oriented(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


MODES = [
    *("1", "L", "P", "PA", "LA", "La", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "LAB"),
    *("HSV", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"),
]


@pytest.mark.parametrize("mode", MODES)
def test_an_image_of_each_mode(mode: str) -> None:
    image = noise(mode, (7, 5))
    other = noise(mode, (7, 5), seed=1)
    assert_same([image, image.copy(), image.crop((0, 0, 7, 5)), pickle.loads(pickle.dumps(image))])
    assert_distinct([image, other, image.transpose(Image.Transpose.ROTATE_90), image.tobytes()])


def test_modes_differ_where_the_pixels_are_the_same() -> None:
    assert_distinct([Image.new(mode, (4, 4)) for mode in MODES if mode != "I;16N"])
    assert_distinct([Image.new("L", size) for size in ((0, 0), (0, 3), (3, 0), (1, 3), (3, 1))])


@pytest.mark.parametrize("mode", MODES)
def test_bands_do_not_show(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(mode, (150, 150))
    whole = hash_feature(image)
    for pixels in (1, 151, 7000, 22_499):
        monkeypatch.setattr(keys, "BAND_PIXELS", pixels)
        assert hash_feature(image) == whole


def test_palettes() -> None:
    def indexed(palette: Sequence[int], mode: str = "RGB") -> Image.Image:
        image = Image.frombytes("P", (2, 2), b"\0\1\2\0")
        image.putpalette(palette, mode)
        return image

    nine = [*range(9)]
    assert_distinct(
        [
            Image.frombytes("P", (2, 2), b"\0\1\2\0"),
            indexed(nine),
            indexed([*range(8), 99]),
            indexed([*range(12)], "RGBA"),
            indexed([*range(12)]),
            indexed(nine).convert("PA"),
            indexed(nine).convert("RGB"),
            Image.frombytes("L", (2, 2), b"\0\1\2\0"),
        ]
    )
    assert_same([indexed(nine), indexed(nine), indexed(nine).copy()])
    assert_distinct([indexed(colours).convert("PA") for colours in (nine, nine[::-1])])
    changed = indexed(nine)
    assert_same([changed, indexed(nine)])
    assert changed.palette is not None
    changed.palette.getcolor((200, 200, 200), changed)
    assert_distinct([changed, indexed(nine)])


def test_the_transparent_colour_counts() -> None:
    images = []
    for transparency in (None, 0, 1, b"\x00\xff", b"\x80\xff", (1, 2, 3)):
        image = Image.new("P", (2, 2))
        image.putpalette([*range(6)])
        if transparency is not None:
            image.info["transparency"] = transparency
        images.append(image)
    assert_distinct(images)
    assert_same([images[4], images[4].copy(), saved(images[4], "PNG")])


def test_orientations() -> None:
    image = noise()
    files = [saved(image, "PNG", exif=oriented(n)) for n in range(1, 9)]
    assert_distinct(files)
    assert_same([files[0], image, saved(image, "PNG")])
    for file in files:
        assert_same([file, file.copy()])
    in_memory = []
    for n in range(1, 9):
        copied = image.copy()
        copied.getexif()[0x0112] = n
        in_memory.append(copied)
    assert [*map(hash_feature, in_memory)] == [*map(hash_feature, files)]


@pytest.mark.parametrize("nonsense", [0, 9, 255, 65535])
def test_an_orientation_that_is_none_is_as_absent(nonsense: int) -> None:
    assert_same([noise(), saved(noise(), "PNG", exif=oriented(nonsense))])


def test_an_orientation_in_xmp_counts() -> None:
    image = noise()
    tagged = image.copy()
    tagged.info["xmp"] = b'<rdf tiff:Orientation="6"/>'
    assert_same([tagged, saved(image, "PNG", exif=oriented(6))])


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF", "MPO"])
def test_no_other_metadata_counts(image_format: str) -> None:
    image = noise(size=(32, 16))
    exif = oriented(1)
    exif[0x010E] = "a description"
    exif[0xA420] = "a unique id"
    options = {"quality": 90} if image_format in ("JPEG", "MPO") else {"lossless": True}
    plain = saved(image, image_format, **options)
    tagged = saved(image, image_format, exif=exif, dpi=(300, 300), **options)
    tagged.info["comment"] = b"a comment"
    assert_same([plain, tagged])
    assert_distinct([plain, noise(size=(32, 16), seed=1)])


def test_a_file_may_have_metadata_after_its_pixels() -> None:
    image = noise()
    file = io.BytesIO()
    image.save(file, "PNG", exif=oriented(3))
    data = file.getvalue()
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    moved = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    late = Image.open(io.BytesIO(moved))
    assert "exif" not in late.info
    assert_same([late, saved(image, "PNG", exif=oriented(3))])
    assert_distinct([late, image])


def test_the_current_frame_is_hashed() -> None:
    frames = [noise("P", seed=seed) for seed in range(3)]
    for frame in frames:
        frame.putpalette([*range(256)] * 3)
    file = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)
    made = []
    for index in (0, 1, 2):
        file.seek(index)
        made.append(hash_feature(file))
        assert made[-1] == hash_feature(file.copy())
    assert len(set(made)) == 3
    file.seek(0)
    assert hash_feature(file) == made[0]


def test_nothing_is_remembered_on_an_image() -> None:
    image = noise()
    before = dict(vars(image))
    first = hash_feature(image)
    assert vars(image) == before
    image.info["exif"] = oriented(6).tobytes()
    turned = hash_feature(image)
    image.info["exif"] = oriented(8).tobytes()
    assert len({first, turned, hash_feature(image)}) == 3
    del image.info["exif"]
    assert hash_feature(image) == first
    image.putpixel((0, 0), (1, 2, 3))
    assert hash_feature(image) != first


MALFORMED_EXIF = [
    b"",
    b"Exif\0\0",
    b"Exif\0\0BADBADBADBAD",
    b"BADBADBADBAD",
    b"Exif\0\0II*\0\x08\0\0\0",
    b"Exif\0\0II*\0\xff\xff\xff\xff",
    b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01",
    b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\xff\xff\xff\xff\0\0\0\0",
    b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x02A\0\0\0",
    oriented(6).tobytes()[:-8],
]


@pytest.mark.parametrize("exif", MALFORMED_EXIF)
def test_malformed_exif_is_no_error(exif: bytes) -> None:
    image = noise()
    image.info["exif"] = exif
    with_exif = hash_feature(image)
    assert with_exif == hash_feature(image.copy())
    image.putpixel((0, 0), (1, 2, 3))
    assert hash_feature(image) != with_exif


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("exif", MALFORMED_EXIF)
def test_malformed_exif_is_the_same_once_pillow_has_seen_it(exif: bytes) -> None:
    image = noise()
    image.info["exif"] = exif
    unseen = hash_feature(image)
    for _ in range(2):
        try:
            dict(image.getexif())
        except Exception:  # noqa: BLE001
            pass
        assert hash_feature(image) == unseen


def test_an_image_that_can_not_be_decoded_raises_what_pillow_raises() -> None:
    file = io.BytesIO()
    noise(size=(64, 64)).save(file, "PNG")
    data = file.getvalue()
    cut = Image.open(io.BytesIO(data[: len(data) // 2]))
    with pytest.raises(OSError, match="truncated"):
        hash_feature(cut)
    with pytest.raises(OSError, match="truncated"):
        hash_feature([cut])


@pytest.mark.parametrize(
    "errors",
    [
        {"__getitem__": KeyError},
        {"__len__": RuntimeError},
        {"__getitem__": KeyError, "__len__": RuntimeError},
    ],
)
def test_a_value_that_another_thread_fetches_is_not_missed(
    errors: dict[str, type[Exception]], monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = saved(noise(), "PNG", exif=oriented(6))
    expected = hash_feature(turned)

    def raise_once(error: type[Exception], method: Callable[..., Any]) -> Callable[..., Any]:
        ahead = [error]

        def called(*arguments: Any) -> Any:
            if ahead:
                raise ahead.pop()
            return method(*arguments)

        return called

    for name, error in errors.items():
        monkeypatch.setattr(Image.Exif, name, raise_once(error, getattr(Image.Exif, name)))
    assert hash_feature(turned) == expected


def test_threads_that_hash_one_turned_image_agree() -> None:
    """Pillow fetches a value of its EXIF when first asked, and two may ask at once."""
    file = io.BytesIO()
    noise().save(file, "JPEG", exif=oriented(6))
    expected = hash_feature(Image.open(file))

    def ask(image: Image.Image, barrier: threading.Barrier) -> int:
        barrier.wait(60)
        return hash_feature(image)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(50):
                image = Image.open(file)
                image.load()
                barrier = threading.Barrier(4)
                asked = [pool.submit(ask, image, barrier) for _ in range(4)]
                assert {future.result(60) for future in asked} == {expected}
    finally:
        sys.setswitchinterval(switching)


def test_pillow_is_not_imported_and_not_needed() -> None:
    without = (
        "import sys\n"
        "sys.modules['PIL'] = sys.modules['PIL.Image'] = None\n"
        "import torch\n"
        "from multimodal_cache import hash_feature\n"
        "print(hash_feature([torch.zeros(2), b'x', {'a': memoryview(b'y')}]))\n"
        "try:\n"
        "    hash_feature(object())\n"
        "except TypeError as error:\n"
        "    print(error)\n"
    )
    key, error = run_python(without).splitlines()
    assert int(key) == hash_feature([torch.zeros(2), b"x", {"a": b"y"}])
    assert error.endswith("got object")
    unasked = (
        "import sys, multimodal_cache as m; m.hash_feature(bytearray(b'')); print(*sys.modules)"
    )
    assert not [name for name in run_python(unasked).split() if name.startswith("PIL")]
