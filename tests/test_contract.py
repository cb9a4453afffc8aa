"""The contract of the reference, held by ours and by SGLang's own class.

The reference takes part where the `sglang` wheel is installed. It shows that these tests say
what SGLang does. The last part is where we differ: ours does it the one way, SGLang's release
the other, or the same by now.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import REFERENCE, kept_bytes, keys, recount, result

import multimodal_cache as ours
from multimodal_cache.static_cache import _get_tensor_size
from multimodal_cache.tiered import TieredCache


class Tiered(TieredCache):
    """As much host memory as the device has: so that both evict at once, like a plain cache."""

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size, max_size)


TIERED = SimpleNamespace(
    EmbeddingResult=ours.EmbeddingResult,
    MultimodalCache=ours.MultimodalCache,
    MultiModalStaticCache=Tiered,
)
OURS = {"ours": ours, "tiered": TIERED}
IMPLEMENTATIONS = OURS if REFERENCE is None else {**OURS, "sglang": REFERENCE}


@pytest.fixture(params=IMPLEMENTATIONS)
def api(request: pytest.FixtureRequest) -> Any:
    """A module with the names of the contract."""
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(params=OURS)
def own(request: pytest.FixtureRequest) -> Any:
    """One of this library."""
    return OURS[request.param]


def make(api: Any, *shape: int, **options: Any) -> Any:
    return api.EmbeddingResult(embedding=torch.zeros(*shape, **options))


def fill(api: Any, max_size: int, *mm_hashes: int) -> Any:
    """A cache with an entry of 40 bytes for each key."""
    cache = api.MultiModalStaticCache(max_size)
    for mm_hash in mm_hashes:
        assert cache.set(mm_hash, make(api, 10)) is True
    return cache


# Names and signatures


def test_embedding_result_is_a_keyword_only_dataclass_with_one_field(api: Any) -> None:
    assert is_dataclass(api.EmbeddingResult)
    (field,) = fields(api.EmbeddingResult)
    assert (field.name, field.kw_only) == ("embedding", True)


@pytest.mark.parametrize(
    ("cls", "method", "names"),
    [
        ("MultimodalCache", "combine_hashes", ["mm_hashes"]),
        ("MultimodalCache", "get", ["self", "mm_hashes", "combined_hash"]),
        ("MultimodalCache", "set", ["self", "mm_hash", "embedding", "mm_embedding_allocator"]),
        ("MultimodalCache", "has", ["self", "mm_hash"]),
        ("MultimodalCache", "free", ["self", "mm_hash", "mm_embedding_allocator"]),
        ("MultimodalCache", "clear", ["self"]),
        ("MultimodalCache", "available_size", ["self"]),
        ("MultiModalStaticCache", "__init__", ["self", "max_size"]),
        ("MultiModalStaticCache", "get", ["self", "mm_hashes", "combined_hash"]),
        ("MultiModalStaticCache", "get_single", ["self", "mm_hash"]),
        ("MultiModalStaticCache", "set", ["self", "mm_hash", "embedding", "loc"]),
        ("MultiModalStaticCache", "has", ["self", "mm_hash"]),
        ("MultiModalStaticCache", "free", ["self", "mm_hash", "mm_embedding_allocator"]),
        ("MultiModalStaticCache", "clear", ["self"]),
        ("MultiModalStaticCache", "__len__", ["self"]),
        ("MultiModalStaticCache", "available_size", ["self"]),
    ],
)
def test_positional_parameters(api: Any, cls: str, method: str, names: list[str]) -> None:
    parameters = inspect.signature(getattr(getattr(api, cls), method)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == names
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


def test_static_cache_is_a_multimodal_cache_with_the_attributes(api: Any) -> None:
    cache = api.MultiModalStaticCache(max_size=1000)
    assert isinstance(cache, api.MultimodalCache)
    assert (cache.max_size, cache.current_size, type(cache.mm_cache)) == (1000, 0, OrderedDict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_get_tensor_size_is_element_size_times_elements(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 7, dtype=dtype)
    assert _get_tensor_size(tensor) == dtype.itemsize * 21
    assert _get_tensor_size(tensor[:2]) == dtype.itemsize * 14


# Behaviour


def test_combine_hashes(api: Any) -> None:
    combine = api.MultimodalCache.combine_hashes
    assert combine([]) is None
    assert combine([1]) == hash((1,))
    assert combine([1, 2]) == hash((1, 2)) != combine([2, 1])


def test_get_looks_the_combination_up_and_never_the_single_items(api: Any) -> None:
    cache = fill(api, 1000, 1, 2)
    assert cache.get([1]) is None
    assert cache.get([1, 2]) is None
    both = make(api, 5)
    assert cache.set(cache.combine_hashes([1, 2]), both)
    assert cache.get([1, 2]) is both
    assert cache.get([2, 1]) is None
    assert cache.get([]) is None


def test_get_ignores_the_combined_hash_that_it_is_given(api: Any) -> None:
    cache = fill(api, 1000, 7)
    assert cache.get([1], 7) is None
    assert cache.get([1], combined_hash=7) is None


def test_get_single_looks_the_key_up_itself(api: Any) -> None:
    cache = fill(api, 1000, 7)
    assert cache.get_single(7) is cache.mm_cache[7]
    assert cache.get_single(8) is None


@pytest.mark.parametrize("refresh", ["get", "get_single", "set"])
def test_use_makes_most_recent(api: Any, refresh: str) -> None:
    combined = api.MultimodalCache.combine_hashes([9])
    cache = fill(api, 120, combined, 1, 2)
    if refresh == "get":
        assert cache.get([9]) is not None
    elif refresh == "get_single":
        assert cache.get_single(combined) is not None
    else:
        assert cache.set(combined, make(api, 10)) is True
    assert keys(cache) == [1, 2, combined]
    assert cache.set(4, make(api, 10)) is True
    assert keys(cache) == [2, combined, 4]


def test_has_does_not_make_most_recent(api: Any) -> None:
    cache = fill(api, 120, 1, 2, 3)
    assert cache.has(1) is True
    assert cache.has(5) is False
    assert keys(cache) == [1, 2, 3]


def test_set_of_a_present_key_keeps_the_old_value(api: Any) -> None:
    cache = fill(api, 120, 1, 2)
    old = cache.get_single(1)
    assert cache.set(1, make(api, 20)) is True
    assert cache.get_single(1) is old
    assert cache.current_size == 80


def test_set_evicts_from_the_old_end_until_it_fits_and_no_further(api: Any) -> None:
    cache = fill(api, 160, 1, 2, 3, 4)
    assert cache.set(5, make(api, 11)) is True
    assert keys(cache) == [3, 4, 5]
    assert cache.current_size == 124


def test_an_entry_may_fill_the_cache_to_the_last_byte(api: Any) -> None:
    cache = fill(api, 120, 1, 2, 3)
    assert keys(cache) == [1, 2, 3]
    assert cache.set(4, make(api, 30)) is True
    assert (keys(cache), cache.current_size) == ([4], 120)


def test_what_can_not_fit_an_empty_cache_is_refused(api: Any) -> None:
    cache = api.MultiModalStaticCache(39)
    assert cache.set(1, make(api, 10)) is False
    assert (len(cache), cache.current_size) == (0, 0)


@pytest.mark.parametrize("junk", [None, 5, "x", torch.zeros(3), {"embedding": torch.zeros(3)}])
def test_anything_but_a_result_fails_an_assertion(api: Any, junk: Any) -> None:
    cache = fill(api, 120, 1)
    with pytest.raises(AssertionError):
        cache.set(2, junk)
    with pytest.raises(AssertionError):
        cache.set(1, junk)
    assert (keys(cache), cache.current_size) == ([1], 40)


def test_set_takes_and_ignores_loc(api: Any) -> None:
    cache = api.MultiModalStaticCache(120)
    assert cache.set(1, make(api, 10), torch.arange(3)) is True
    assert cache.set(2, make(api, 10), loc=object()) is True


def test_free_says_whether_it_was_there_and_gives_the_bytes_back(api: Any) -> None:
    cache = fill(api, 120, 1, 2)
    assert cache.free(1, None) is True
    assert cache.free(1, None) is False
    assert cache.free(2, mm_embedding_allocator=object()) is True
    assert (len(cache), cache.current_size) == (0, 0)


def test_clear_leaves_nothing(api: Any) -> None:
    cache = fill(api, 120, 1, 2)
    entries = cache.mm_cache
    cache.clear()
    assert (len(cache), cache.current_size, cache.get_single(1)) == (0, 0, None)
    assert cache.mm_cache is entries


def test_len_and_available_size_are_the_number_of_entries(api: Any) -> None:
    cache = fill(api, 120, 1, 2)
    assert len(cache) == cache.available_size() == 2


def test_an_entry_of_no_bytes_is_stored_and_evicted_in_its_turn(api: Any) -> None:
    cache = api.MultiModalStaticCache(40)
    assert cache.set(1, make(api, 0, 64)) is True
    assert cache.set(2, make(api, 10)) is True
    assert keys(cache) == [1, 2]
    assert cache.set(3, make(api, 10)) is True
    assert keys(cache) == [3]


def test_subclasses_keep_their_class_and_fields(api: Any) -> None:
    @dataclass(kw_only=True)
    class WithFrames(api.EmbeddingResult):
        num_tokens_per_frame: list[int]

    value = WithFrames(embedding=torch.zeros(10, 4)[:3], num_tokens_per_frame=[1, 2])
    cache = api.MultiModalStaticCache(1000)
    assert cache.set(1, value) is True
    stored = cache.get_single(1)
    assert type(stored) is WithFrames
    assert stored.num_tokens_per_frame is value.num_tokens_per_frame


# Where we differ: the rows of the table, and what SGLang's release does there. The first two
# rows are of earlier releases; this one does as ours.

differs = pytest.mark.skipif(REFERENCE is None, reason="the sglang wheel is not installed")


def test_a_slice_is_copied_out_of_its_batch(api: Any) -> None:
    batch = torch.zeros(1000, 64)
    cache = api.MultiModalStaticCache(1024)
    assert cache.set(1, api.EmbeddingResult(embedding=batch[:1])) is True
    assert cache.current_size == kept_bytes(cache.get_single(1)) == 256


def test_what_is_too_large_evicts_nothing(api: Any) -> None:
    cache = fill(api, 120, 1, 2, 3)
    assert cache.set(4, make(api, 31)) is False
    assert keys(cache) == [1, 2, 3]


def test_the_bytes_given_back_are_those_charged(own: Any) -> None:
    cache = own.MultiModalStaticCache(1000)
    tensor = torch.ones(4)
    cache.set(1, own.EmbeddingResult(embedding=tensor))
    tensor.resize_(100)
    cache.free(1)
    assert cache.current_size == 0


@differs
def test_the_reference_measures_again_at_removal() -> None:
    cache = REFERENCE.MultiModalStaticCache(1000)
    tensor = torch.ones(4)
    cache.set(1, REFERENCE.EmbeddingResult(embedding=tensor))
    tensor.resize_(100)
    cache.free(1, None)
    assert cache.current_size == 16 - 400


def test_lists_whose_tuples_hash_alike_do_not_share_an_entry(own: Any) -> None:
    cache = own.MultiModalStaticCache(1000)
    cache.set(cache.combine_hashes([-1]), result(4))
    assert cache.get([-2]) is None


@differs
def test_in_the_reference_they_do() -> None:
    cache = REFERENCE.MultiModalStaticCache(1000)
    cache.set(cache.combine_hashes([-1]), make(REFERENCE, 4))
    assert cache.get([-2]) is not None


def test_none_is_no_key(own: Any) -> None:
    cache = own.MultiModalStaticCache(1000)
    assert cache.set(None, result(3)) is False
    assert cache.get([]) is None
    assert cache.get_single(None) is None


@differs
def test_in_the_reference_it_is() -> None:
    cache = REFERENCE.MultiModalStaticCache(1000)
    assert cache.set(None, make(REFERENCE, 3)) is True
    assert cache.get([]) is not None


def test_a_stored_tensor_has_no_graph(own: Any) -> None:
    weights = torch.ones(4, 4, requires_grad=True)
    cache = own.MultiModalStaticCache(1000)
    cache.set(1, own.EmbeddingResult(embedding=weights * 2))
    assert cache.get_single(1).embedding.grad_fn is None


@differs
def test_in_the_reference_it_keeps_it() -> None:
    weights = torch.ones(4, 4, requires_grad=True)
    cache = REFERENCE.MultiModalStaticCache(1000)
    cache.set(1, REFERENCE.EmbeddingResult(embedding=weights * 2))
    assert cache.get_single(1).embedding.grad_fn is not None


@differs
def test_ours_accepts_results_of_the_reference(own: Any) -> None:
    @dataclass(kw_only=True)
    class WithFrames(REFERENCE.EmbeddingResult):
        num_tokens_per_frame: list[int]

    cache = own.MultiModalStaticCache(1000)
    whole = make(REFERENCE, 10)
    assert cache.set(1, whole) is True
    assert cache.get_single(1) is whole
    part = WithFrames(embedding=torch.zeros(30)[:10], num_tokens_per_frame=[3, 7])
    assert cache.set(2, part) is True
    stored = cache.get_single(2)
    assert type(stored) is WithFrames
    assert stored.num_tokens_per_frame == [3, 7]
    assert recount(cache) == cache.current_size == 80


def test_assertions_do_not_vanish_under_optimisation() -> None:
    code = (
        "import torch, multimodal_cache as m\n"
        "cache = m.MultiModalStaticCache(100)\n"
        "try: cache.set(1, torch.zeros(3))\n"
        "except AssertionError as error: print(type(error).__name__, len(cache))"
    )
    shown = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True)
    assert (shown.returncode, shown.stdout) == (0, "EmbeddingTypeError 0\n")
