"""The keys of arrays and tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import assert_distinct, assert_same, run_python

from multimodal_cache import _arrays, hash_feature

SHARED_DTYPES = sorted(_arrays.NUMPY_NAMES)
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
        assert_same(tensor, tensor.to(device), twin, twin.copy(order="F"), swapped)
    scalar = random_tensor(torch_dtype(name))
    assert_same(scalar, scalar.numpy(), scalar.numpy()[()])


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
        assert_same(view, twin, twin.cpu())
        assert_distinct(view, whole)


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
        assert_distinct(*zeros_of_one_size)


def test_shapes_differ_where_the_elements_are_the_same() -> None:
    data = torch.arange(12)
    shapes = [(12,), (12, 1), (1, 12), (3, 4), (4, 3), (2, 6), (2, 3, 2), (1, 1, 12)]
    assert_distinct(*[data.reshape(shape) for shape in shapes])
    assert_distinct(*[torch.zeros(shape) for shape in ((0,), (0, 1), (1, 0), (0, 0), (2, 0, 3))])


def test_all_values_of_bfloat16_stay_apart() -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert len({hash_feature(value) for value in patterns}) == 2**16


def test_arrays_of_text_and_time() -> None:
    times = np.array(["2020-01-01", "NaT"], "datetime64[D]")
    assert_distinct(times, times.astype("datetime64[s]"), times.astype("m8[D]"), times.view("i8"))
    assert_same(times, times.astype(">M8[D]"), times[::-1][::-1])
    names = np.array(["ab", "c"])
    assert_distinct(names, names.astype("U3"), names.astype("S"), ["ab", "c"], names[::-1])
    assert_same(names, names.astype(">U2"))
    empty = np.zeros(3, [("str", "U0"), ("bytes", "S0"), ("some", "u1")])  # np.zeros(3, "U0") is U1
    assert empty["str"].dtype.itemsize == empty["bytes"].dtype.itemsize == 0
    assert_distinct(empty["str"], empty["str"][:2], empty["bytes"], empty["some"][:0])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_lazy_views_of_tensors(device: str) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j], device=device)
    conjugated = values.conj()
    assert conjugated.is_conj()
    assert_same(conjugated, conjugated.resolve_conj().clone())
    assert_distinct(conjugated, values)
    negative = conjugated.imag
    assert negative.is_neg()
    assert_same(negative, negative.resolve_neg().clone())
    assert_distinct(negative, values.imag)
    half = random_tensor(torch.complex32, 5).to(device).conj()
    assert_same(half, torch.view_as_complex(torch.view_as_real(half.resolve_conj()).clone()))
    assert_distinct(half, half.conj())


def test_gradients_and_devices_do_not_count(device: str) -> None:
    plain = torch.arange(6.0)
    leaf = plain.to(device).requires_grad_()
    with torch.inference_mode():
        inference = plain.clone()
    assert_same(plain, leaf, leaf * 1, leaf.detach(), inference, torch.nn.Parameter(plain))
    assert leaf.grad is None
    (leaf * 1).sum().backward()
    assert_same(plain, leaf)


@pytest.mark.filterwarnings("ignore")  # torch warns about itself
def test_compiled_code_makes_the_same_keys_of_any_shape() -> None:
    @torch.compile(backend="eager")
    def keys(x: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        features = [x, x.mT, [x, {"half": x.half()}], torch.nn.Parameter(x)]
        return [hash_feature(feature) for feature in features], x + 1

    try:
        for size in (2, 3, 4):  # from the second on, torch compiles for any shape
            x = torch.ones(size, 5)
            expected = [hash_feature(feature) for feature in (x, x.mT, [x, {"half": x.half()}], x)]
            assert keys(x)[0] == expected
    finally:
        torch.compiler.reset()  # type: ignore[no-untyped-call]


def test_what_can_not_be_traced_is_hashed_outside_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = hash_feature(torch.ones(3))
    monkeypatch.setattr(
        torch.compiler, "_is_compiling_flag", True
    )  # not the function: dynamo knows it
    assert hash_feature(torch.ones(3)) == expected


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
    "expanded array": lambda: np.broadcast_to(np.ones((64, 1), np.float32), (64, 2**18)),
    "expanded tensor": lambda: torch.ones(64, 1).expand(64, 2**18),
    "strided": lambda: np.ones((64, 2**19), np.float32)[:, ::2],
    "big-endian": lambda: np.ones((64, 2**18), ">f4"),
    "image": lambda: __import__("PIL.Image").Image.new("RGBA", (4096, 4096)),
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
        *("requires_grad", "slice", "image"),
    ],
)
def test_contiguous_memory_is_hashed_in_place(kind: str) -> None:
    assert int(run_python(EXTRA_MEMORY, kind)) < 4 * 2**20


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak from some moment"
)
@pytest.mark.parametrize("kind", ["expanded array", "expanded tensor", "strided", "big-endian"])
def test_other_memory_is_copied_in_pieces(kind: str) -> None:
    assert int(run_python(EXTRA_MEMORY, kind)) < 3 * _arrays.PIECE_BYTES
