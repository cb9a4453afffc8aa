"""Keys and the abstract base."""

from __future__ import annotations

import copy
import enum
import json
import pickle
import re
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import WRAP

from multimodal_cache import (
    CombinedHash,
    EmbeddingResult,
    EmbeddingTypeError,
    MultimodalCache,
    MultiModalStaticCache,
)

combine_hashes = MultimodalCache.combine_hashes
NOT_INTS = [True, 1.0, "1", b"1", torch.tensor(1), np.True_, np.float64(1), [1], object()]


class Colour(enum.IntEnum):
    RED = 3


class OnlyAbstractMethods(MultimodalCache):
    """A user's own cache, written against the reference."""

    def get(self, mm_hashes: list[int], combined_hash: int | None = None) -> None:
        return None

    def set(self, mm_hash: int, embedding: Any, mm_embedding_allocator: Any) -> bool:
        return False

    def has(self, mm_hash: int) -> bool:
        return False

    def free(self, mm_hash: int, mm_embedding_allocator: Any) -> bool:
        return False

    def clear(self) -> None:
        return None

    def available_size(self) -> int:
        return 0


def test_subclass_with_only_the_abstract_methods_instantiates() -> None:
    assert OnlyAbstractMethods().combine_hashes([1, 2]) == hash((1, 2))


@pytest.mark.parametrize("name", sorted(MultimodalCache.__abstractmethods__))
def test_each_abstract_method_is_required(name: str) -> None:
    methods = {
        method: getattr(OnlyAbstractMethods, method)
        for method in MultimodalCache.__abstractmethods__ - {name}
    }
    with pytest.raises(TypeError, match=name):
        type("Incomplete", (MultimodalCache,), methods)()


def test_abstract_methods_are_those_of_the_reference() -> None:
    assert MultimodalCache.__abstractmethods__ == {
        "available_size", "clear", "free", "get", "has", "set",
    }  # fmt: skip


def test_embedding_result_takes_its_field_by_keyword_only() -> None:
    tensor = torch.zeros(2, 3)
    assert EmbeddingResult(embedding=tensor).embedding is tensor
    with pytest.raises(TypeError, match="positional"):
        EmbeddingResult(tensor)  # type: ignore[misc]


def test_embedding_type_error_is_a_type_error_and_an_assertion_error() -> None:
    assert issubclass(EmbeddingTypeError, TypeError)
    assert issubclass(EmbeddingTypeError, AssertionError)


@given(st.lists(st.integers(), min_size=1))
def test_combined_hash_is_the_hash_of_the_tuple_and_remembers_it(mm_hashes: list[int]) -> None:
    combined = combine_hashes(mm_hashes)
    assert type(combined) is CombinedHash
    assert combined == hash(tuple(mm_hashes))
    assert combined.mm_hashes == tuple(mm_hashes)


@pytest.mark.parametrize("nothing", [None, [], (), iter([]), np.array([], dtype=np.int64)])
def test_no_items_have_no_key(nothing: Any) -> None:
    assert combine_hashes(nothing) is None


@pytest.mark.parametrize("mm_hashes", [[None], [1, None], [None, 1], (np.int64(1), None)])
def test_a_list_with_an_item_without_key_has_no_key(mm_hashes: Any) -> None:
    assert combine_hashes(mm_hashes) is None


@pytest.mark.parametrize(
    "mm_hashes",
    [
        [1, 3],
        (1, 3),
        iter([1, 3]),
        np.array([1, 3]),
        [np.int64(1), np.uint8(3)],
        [np.array(1), 3],
        [1, Colour.RED],
        range(1, 4, 2),
        {1: "a", 3: "b"}.keys(),
    ],
)
def test_any_integers_in_any_ordered_iterable_mean_the_same_key(mm_hashes: Any) -> None:
    combined = combine_hashes(mm_hashes)
    assert combined == hash((1, 3))
    assert combined.mm_hashes == (1, 3)
    assert {type(item) for item in combined.mm_hashes} == {int}


@pytest.mark.parametrize("bad", NOT_INTS, ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("others", [[], [1], [None]])
def test_an_item_that_is_no_int_is_named(bad: Any, others: list[Any]) -> None:
    message = (
        f"an item of mm_hashes must be an int, got {type(bad).__name__}: hash_feature makes one, "
        "int(digest, 16) one of a hex digest"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        combine_hashes([*others, bad])


def test_a_bool_of_numpy_is_no_int_although_old_ones_have_an_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OldBool:  # as it is before NumPy 2
        def __index__(self) -> int:
            return 1

    assert combine_hashes([OldBool()]) == combine_hashes([1])
    monkeypatch.setattr(np, "bool_", OldBool)
    with pytest.raises(TypeError, match="an item of mm_hashes must be an int, got OldBool"):
        combine_hashes([OldBool()])


@pytest.mark.parametrize(
    "bad",
    [
        5,
        "12",
        b"12",
        bytearray(b"12"),
        {1, 2},
        frozenset(),
        {1: 2},
        np.array(5),
        torch.tensor(5),
        MappingProxyType({1: 2}),
    ],
)
def test_what_is_no_ordered_iterable_is_named(bad: Any) -> None:
    message = (
        "mm_hashes must be a list of ints or another ordered iterable (for one key [key], or "
        f"get_single), got {type(bad).__name__}"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        combine_hashes(bad)


def test_a_combined_hash_is_no_item() -> None:
    nested = CombinedHash([1, 2])
    for make in (combine_hashes, CombinedHash, MultiModalStaticCache(0).get):
        with pytest.raises(TypeError, match="got the CombinedHash of 2 items"):
            make([3, nested])


def test_a_combined_hash_of_no_items_is_refused() -> None:
    with pytest.raises(ValueError, match="^mm_hashes must hold an item or more, got none$"):
        CombinedHash([])


def test_an_iterator_that_fails_is_not_mistaken_for_a_bad_argument() -> None:
    def failing() -> Any:
        yield 1
        raise LookupError("upstream")

    with pytest.raises(LookupError, match="upstream"):
        combine_hashes(failing())


def test_combined_hash_behaves_as_its_int() -> None:
    combined = CombinedHash([1, 2])
    value = hash((1, 2))
    assert combined == value
    assert hash(combined) == hash(value)
    assert {value: "found"}[combined] == "found"
    assert repr(combined) == repr(value)
    assert str(combined) == str(value)
    assert f"{combined:x}" == f"{value:x}"
    assert f"{combined:d}" == str(value)
    assert json.dumps(combined) == json.dumps(value)
    assert combined + 1 == value + 1


def test_combined_hashes_that_share_an_int_are_equal_but_remember_other_items() -> None:
    first, second = CombinedHash([5]), CombinedHash([5 + WRAP])
    assert first == second
    assert first.mm_hashes != second.mm_hashes


def test_the_items_of_a_combined_hash_can_not_be_replaced() -> None:
    with pytest.raises(AttributeError):
        CombinedHash([1]).mm_hashes = (2,)  # type: ignore[misc]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_combined_hash_survives_pickling(protocol: int) -> None:
    combined = CombinedHash([1, 2**100])
    twin = pickle.loads(pickle.dumps(combined, protocol))
    assert type(twin) is CombinedHash
    assert (twin, twin.mm_hashes) == (combined, combined.mm_hashes)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_combined_hash_survives_copying(duplicate: Any) -> None:
    twin = duplicate(CombinedHash([1, 2]))
    assert (type(twin), twin.mm_hashes) == (CombinedHash, (1, 2))
