"""Inputs that broke caches like this one, each reported in public, with the right answers.

The number of a test is the number of the case. Most are cut down further elsewhere; here they
stand as they were reported, so that each is found.
"""

from __future__ import annotations

import asyncio
import gc
import io
import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import (
    WRAP,
    EncoderOfNumbers,
    assert_distinct,
    assert_same,
    filled,
    kept_bytes,
    keys,
    recount,
    result,
)

from multimodal_cache import CachedEncoder, EmbeddingResult, EmbeddingTypeError, hash_feature
from multimodal_cache import MultiModalStaticCache as C

# Bytes and order


def test_case_01_a_slice_does_not_keep_its_batch(device: str) -> None:  # SGLang #38353
    batch = torch.arange(64_000.0, device=device).reshape(1000, 64)
    for part in (batch[:1], batch[:1].contiguous(), batch[:1].to(device), batch[7:8]):
        cache = C(1024)
        assert cache.set(1, EmbeddingResult(embedding=part))
        stored = cache.get_single(1)
        assert stored is not None
        assert cache.current_size == kept_bytes(stored) == 256
        assert torch.equal(stored.embedding, part)


def test_case_02_what_can_not_fit_evicts_nothing_and_is_not_copied(  # vLLM #52835
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = C(400)
    cache.set(1, result(10))
    cache.set(2, result(10))
    monkeypatch.setattr(torch.Tensor, "clone", lambda *a, **o: pytest.fail("it was copied"))
    assert cache.set(3, result(1000)) is False
    assert cache.set(3, EmbeddingResult(embedding=torch.zeros(2000)[:1000])) is False
    assert cache.set(3, EmbeddingResult(embedding=torch.zeros(1).expand(10**15))) is False
    assert (keys(cache), cache.current_size) == ([1, 2], 80)


def test_case_03_a_larger_value_under_a_present_key_costs_no_neighbour() -> None:  # cachetools #405
    cache = filled(120, 1, 2, 3)
    old = cache.mm_cache[1]
    assert cache.set(1, result(30)) is True
    assert cache.set(1, result(1000)) is True
    assert keys(cache) == [2, 3, 1]
    assert cache.get_single(1) is old
    assert cache.current_size == 120


def test_case_04_freeing_a_key_five_times() -> None:  # vLLM #55733
    cache = filled(120, 1, 2)
    assert [cache.free(1) for _ in range(5)] == [True, False, False, False, False]
    assert cache.current_size == 40


def test_case_05_a_tensor_that_changes_after_it_was_admitted() -> None:  # cachetools #401
    cache = C(1000)
    tensor = torch.ones(4)
    value = EmbeddingResult(embedding=tensor)
    cache.set(1, value)
    tensor.resize_(100)
    cache.check()
    assert cache.free(1)
    assert cache.current_size == 0
    cache.set(2, value := result(4))
    value.embedding = torch.zeros(1000)
    cache.check()
    cache.resize(0)
    assert (len(cache), cache.current_size, cache.stats().evicted_bytes) == (0, 0, 16)


@pytest.mark.parametrize("refresh", ["get", "get_single", "set"])
def test_case_06_only_the_least_recent_goes(refresh: str) -> None:  # mlx-node #29
    first = C.combine_hashes([1])
    cache = filled(120, first, 2, 3)
    {
        "get": lambda: cache.get([1]),
        "get_single": lambda: cache.get_single(first),
        "set": lambda: cache.set(first, result(10)),
    }[refresh]()
    cache.set(4, result(10))
    assert keys(cache) == [3, first, 4]


def test_case_06_has_does_not_refresh() -> None:
    cache = filled(120, 1, 2, 3)
    assert cache.has(1)
    assert 1 in cache
    cache.set(4, result(10))
    assert keys(cache) == [2, 3, 4]


@pytest.mark.filterwarnings("ignore")  # torch warns about the prototypes among these
def test_case_07_tensors_whose_size_formula_lies() -> None:  # PyTorch #29734, #58755
    cache = filled(2**21, 1)
    for uncountable in (
        torch.sparse_coo_tensor([[5]], [1.0], (10**6,)),
        torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.quint4x2),
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        torch.zeros(4, device="meta"),
    ):
        with pytest.raises(EmbeddingTypeError):
            cache.set(2, EmbeddingResult(embedding=uncountable))
        assert (keys(cache), cache.current_size) == ([1], 40)
    expanded = torch.ones(1, 64).expand(4096, 64)
    assert cache.set(2, EmbeddingResult(embedding=expanded))
    assert cache.current_size == 40 + 2**20 == recount(cache)


def test_case_08_further_tensors_in_the_fields_are_counted() -> None:  # vLLM #15114
    @dataclass(kw_only=True)
    class WithLayers(EmbeddingResult):
        layers: list[torch.Tensor] = field(default_factory=list)

    cache = C(10_000)
    cache.set(1, WithLayers(embedding=torch.zeros(1), layers=[torch.zeros(1000), torch.zeros(9)]))
    assert cache.current_size == 4 * 1010 == recount(cache)
    assert not cache.set(2, WithLayers(embedding=torch.zeros(1), layers=[torch.zeros(2500)]))


# Keys


def test_case_09_minus_one_and_minus_two_hash_alike() -> None:  # CPython #95695
    cache = C(1000)
    assert C.combine_hashes([-1]) == C.combine_hashes([-2])
    cache.set(C.combine_hashes([-1]), result(4))
    assert cache.get([-2]) is None
    assert cache.get([-1]) is not None


def test_case_10_ints_wrap_at_a_prime() -> None:  # vLLM #12621
    cache = C(1000)
    one, other = C.combine_hashes([5]), C.combine_hashes([5 + WRAP])
    assert one == other
    cache.set(one, result(4))
    assert cache.get([5 + WRAP]) is None
    assert cache.get_single(other) is None
    assert cache.has(other) is False
    assert cache.free(other) is False
    assert cache.get([5]) is not None


def test_case_10_longer_lists_that_were_solved_for() -> None:
    cache = C(1000)
    pair, solved = [1, 2], [1 + WRAP, 2 + 3 * WRAP]
    assert C.combine_hashes(pair) == C.combine_hashes(solved)
    cache.set(C.combine_hashes(pair), result(4))
    assert cache.get(solved) is None


def test_case_11_items_without_a_key_do_not_share_an_embedding() -> None:  # SGLang-JAX #1030
    cache = C(1000)
    assert cache.set(None, result(3)) is False
    assert cache.get([]) is None
    assert C.combine_hashes([1, None]) is None
    assert cache.get([1, None]) is None


def test_case_12_order_and_number_count() -> None:  # Rapid-MLX #22
    cache = C(1000)
    lists = [[1, 2], [2, 1], [1], [1, 1]]
    for n, mm_hashes in enumerate(lists, 1):
        assert cache.set(C.combine_hashes(mm_hashes), result(n))
    assert [cache.get(mm_hashes).embedding.numel() for mm_hashes in lists] == [1, 2, 3, 4]  # type: ignore[union-attr]


def test_case_13_what_equals_an_int_is_not_that_key() -> None:  # dace #2404
    cache = filled(1000, 1)
    for impostor in (True, 1.0, torch.tensor(1)):
        with pytest.raises(TypeError):
            cache.get_single(impostor)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            C.combine_hashes([impostor])  # type: ignore[list-item]
    assert cache.get_single(np.int64(1)) is not None


# Around the encoder


def test_case_14_shape_dtype_and_mode_are_content() -> None:  # CVE-2025-46722, Dynamo #8341
    pixels = bytes(range(72))
    assert_distinct(
        pixels,
        Image.frombytes("RGB", (6, 4), pixels),
        Image.frombytes("RGB", (4, 6), pixels),
        Image.frombytes("YCbCr", (6, 4), pixels),
        Image.frombytes("L", (12, 6), pixels),
    )
    assert_distinct(np.zeros((6, 4)), np.zeros((4, 6)), np.zeros(24), np.zeros((6, 4, 1)))
    assert_distinct(np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros(4, np.uint32))
    assert_distinct(torch.zeros(6, 4), torch.zeros(4, 6), torch.zeros(6, 4, dtype=torch.int32))


def test_case_15_the_colours_behind_the_indices_are_content() -> None:  # vLLM #24969
    images = []
    for palette, transparency in (
        ([255, 0, 0, 0, 255, 0], None),
        ([0, 255, 0, 255, 0, 0], None),
        ([255, 0, 0, 0, 255, 0], 0),
        ([255, 0, 0, 0, 255, 0], 1),
        ([255, 0, 0, 0, 255, 0], b"\x80\x40"),
    ):
        image = Image.frombytes("P", (2, 2), b"\0\1\1\0")
        image.putpalette(palette)
        if transparency is not None:
            image.info["transparency"] = transparency
        images.append(image)
    assert_distinct(*images)
    assert_same(images[0], images[0].copy())


def test_case_16_where_one_tensor_ends_is_content() -> None:  # SGLang #25462
    one = [torch.tensor([1, 2]), torch.tensor([3, 4, 5])]
    other = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    assert_distinct(one, other, torch.arange(1, 6), [torch.arange(1, 6)], [1, 2.0, "x"], [])
    assert_same([torch.tensor([1, 2]), torch.tensor([3, 4, 5])], one)


def test_case_17_tensors_of_every_kind(device: str) -> None:  # vLLM #23623, ray #52859
    grid = torch.arange(24.0, device=device).reshape(2, 3, 4)
    waves = torch.polar(grid, grid)
    for view in (
        grid.to(torch.bfloat16),
        grid[1, 2, 3],
        grid.transpose(0, 2),
        grid.clone().requires_grad_(),
        waves.conj(),
        waves.conj().imag,
        grid.flip(0),
        grid[:, ::2],
    ):
        assert_same(view, view.detach().resolve_conj().resolve_neg().clone().contiguous())
        assert_same(view, view.detach().cpu())
    backwards = np.arange(24.0).reshape(2, 3, 4)[::-1, :, ::-1]
    assert_same(backwards, backwards.copy(), torch.from_numpy(backwards.copy()))
    one, next_to_it = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    assert one != next_to_it
    assert_distinct(one, next_to_it, one.float())


def test_case_18_permutations_are_other_content() -> None:  # SGLang #8342
    ramp = torch.arange(6)
    assert_distinct(*(ramp[list(order)] for order in itertools.permutations(range(6))))
    assert_distinct(ramp.reshape(2, 3), ramp.reshape(2, 3).flip(0), ramp.reshape(3, 2).T)


def test_case_19_malformed_exif_is_ignored() -> None:  # vLLM #56527
    plain = Image.frombytes("RGB", (8, 8), bytes(192))
    files = []
    for options in ({"exif": b"Exif\0\0BADBADBADBAD"}, {}):
        file = io.BytesIO()
        plain.save(file, "JPEG", **options)
        files.append(file.getvalue())
    assert b"BADBAD" in files[0]
    bad = Image.open(io.BytesIO(files[0]))
    assert_same(bad, bad.copy(), Image.open(io.BytesIO(files[0])), Image.open(io.BytesIO(files[1])))
    other = bad.copy()
    other.putpixel((0, 0), (9, 9, 9))
    assert_distinct(bad, other)


def test_case_20_a_key_is_wide() -> None:  # LMCache #3301, SGLang #32404
    made = [hash_feature(n) for n in range(1000)]
    assert max(made).bit_length() == 256
    assert len({key % 2**64 for key in made}) == len({key >> 192 for key in made}) == 1000


def test_case_21_a_cached_entry_of_the_wrong_length() -> None:  # SGLang #36595
    cache = C(10_000)
    encode = EncoderOfNumbers(tokens=275)
    encoder = CachedEncoder(cache, encode)
    cache.set(1, result(256, 1))
    for _ in range(2):
        (rows,) = encoder([7], [1], [275])
        assert rows.shape == (275, 1)
    assert (encode.calls, encoder.stats().row_mismatches) == ([[7]], 1)


def test_case_21_one_key_and_different_lengths_in_one_batch() -> None:
    encoder = CachedEncoder(C(10_000), lambda features: [torch.ones(n, 4) for n in features])
    assert [len(rows) for rows in encoder([5, 6, 5], [1, 1, 1], [5, 6, 5])] == [5, 6, 5]
    assert encoder.stats().encoded == 2


def test_case_22_an_encoder_that_reuses_its_buffer(device: str) -> None:  # executorch #1229
    buffer = torch.zeros(4, device=device)

    def encode(value: float) -> EmbeddingResult:
        return EmbeddingResult(embedding=buffer.fill_(value))

    copying, plain = C(1000, copy=True), C(1000)
    for key in (1, 2):
        copying.set(key, encode(key))
        plain.set(key, encode(key))

    def seen(cache: C) -> list[Any]:
        return [cache.get_single(key).embedding[0].item() for key in (1, 2)]  # type: ignore[union-attr]

    assert seen(copying) == [1.0, 2.0]
    assert seen(plain) == [2.0, 2.0]  # as the docstring warns
    assert copying.current_size == recount(copying) == 32


def test_case_23_no_graph_is_stored(device: str) -> None:  # pytorch-pfn-extras #49
    encoder = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    encoder.to(device)
    weights = [weakref.ref(parameter) for parameter in encoder.parameters()]
    cache = C(1000)
    cache.set(1, EmbeddingResult(embedding=encoder(torch.ones(2, 8, device=device))))
    del encoder
    gc.collect()
    assert [weight() for weight in weights] == [None] * 4
    stored = cache.get_single(1)
    assert stored is not None
    assert (stored.embedding.requires_grad, cache.current_size) == (False, 32)


def test_case_25_a_weight_update() -> None:  # vLLM #45093, SGLang #36468
    cache = C(1000)
    old = result(4)
    tensor = weakref.ref(old.embedding)
    cache.set(1, old)
    began = cache.generation  # an encode begins
    late = result(4)
    del old
    cache.clear()
    assert tensor() is None
    assert cache.get_single(1) is None
    assert cache.set(1, late, generation=began) is False  # and ends
    assert cache.get_single(1) is None
    assert cache.set(1, result(4), generation=cache.generation) is True


# Single flight. Each letter has its threads and tasks in test_single_flight.py.


def test_case_24_a_an_error_is_not_remembered() -> None:  # cachebox #57
    outputs: list[Any] = [OSError("no such image"), torch.ones(1, 2, 4)]

    def encode(features: list[Any]) -> torch.Tensor:
        output = outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        assert isinstance(output, torch.Tensor)
        return output

    encoder = CachedEncoder(C(10_000), encode)
    with pytest.raises(OSError, match="no such image"):
        encoder([1])
    assert encoder([1])[0].shape == (2, 4)


@pytest.mark.parametrize("fails", [False, True])
def test_case_24_b_c_d_a_cancelled_leader_and_a_failure_in_between(fails: bool) -> None:
    encodes: list[asyncio.Future[None]] = []

    async def encode(features: list[Any]) -> torch.Tensor:
        assert all(other.done() for other in encodes), "two encode at once"
        encodes.append(asyncio.get_running_loop().create_future())
        await encodes[-1]
        return torch.ones(1, 2, 4)

    async def main() -> None:
        encoder = CachedEncoder(C(10_000), encode)
        tasks = [asyncio.ensure_future(encoder.encode_async([1], [1])) for _ in range(5)]
        while not encodes:
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        if fails:
            encodes[0].set_exception(OSError("no such image"))
        else:
            encodes[0].set_result(None)
        outcomes = await asyncio.gather(*tasks[1:], return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {OSError if fails else list}
        assert len(encodes) == 1

    asyncio.run(asyncio.wait_for(main(), 60))


def test_case_24_e_f_g_nested_calls_duplicates_and_other_keys() -> None:
    calls: list[list[Any]] = []

    def encode(features: list[Any]) -> torch.Tensor:
        calls.append(features)
        if features[0] == "outer":
            encoder(["inner", "inner"])  # another key goes on
            with pytest.raises(RuntimeError, match="inside encode"):
                encoder(["outer"])
        return torch.ones(len(features), 2, 4)

    encoder = CachedEncoder(C(10_000), encode)
    assert len(encoder(["outer", "outer"])) == 2
    assert calls == [["outer"], ["inner"]]


def test_case_25_an_encode_that_began_before_a_weight_update() -> None:
    cache = C(10_000)

    def encode(features: list[Any]) -> torch.Tensor:
        cache.clear()  # the weights change meanwhile
        return torch.ones(1, 2, 4)

    assert CachedEncoder(cache, encode)([1])[0].shape == (2, 4)
    assert len(cache) == 0
