"""Ranks agree on what to encode: the same calls of ``encode`` on each, or an error on each.

The scenarios of ``rank_scenarios.py`` run in two and in three real processes, and again in two
threads with groups of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks as ranks_benchmark
import torch
import torch.distributed as dist
from rank_scenarios import SCENARIOS, TIMEOUT, run_all
from support import EncoderOfNumbers, run_python

from multimodal_cache import CachedEncoder, MultiModalStaticCache
from multimodal_cache.parallel import Ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

Seen = list[dict[str, Any]]  # by rank


def in_processes(size: int, folder: Path) -> Seen:
    script = Path(__file__).with_name("rank_scenarios.py")
    outputs = [folder / f"{rank}.json" for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), str(folder / "meeting"), output],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(errors)
    return [json.loads(output.read_text(encoding="utf-8")) for output in outputs]


def new_group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    """Makes a group without the process's one default group, so that a thread can be a rank."""
    group = dist.ProcessGroup(rank, size)
    gloo = dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
    group._register_backend(torch.device("cpu"), gloo, backend)
    if hasattr(group, "_set_default_backend"):  # since torch 2.6
        group._set_default_backend(gloo)
    return group


def in_threads(size: int) -> Seen:
    store = dist.HashStore()
    seen: Any = [None] * size

    def work(rank: int) -> None:
        seen[rank] = run_all(rank, new_group(store, rank, size))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return seen  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["2 processes", "3 processes", "2 threads"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank saw in all scenarios."""
    size, where = request.param.split()
    if where == "processes":
        return in_processes(int(size), tmp_path_factory.mktemp("ranks"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")  # it asks the default
        return in_threads(int(size))


Column = Callable[[str, str], list[Any]]


@pytest.fixture
def column(ranks: Seen) -> Column:
    """Returns, for a scenario, one of the things that each rank saw."""
    return lambda scenario, what: [seen[scenario][what] for seen in ranks]


DIFFERENTLY = "RuntimeError: the ranks of the group were called differently: "
ELSEWHERE = "RuntimeError: the call has failed on another rank of the group, before encode"


def same(values: list[Any]) -> Any:
    """Returns what all ranks saw."""
    assert all(value == values[0] for value in values), values
    return values[0]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_ranks_make_the_same_calls_of_encode(scenario: str, column: Column) -> None:
    calls = same(column(scenario, "calls"))
    assert calls or scenario == "no_features"


def test_what_one_rank_alone_has_fetched_is_encoded_on_all(column: Column) -> None:
    scenario = "stores_that_differ"
    assert same(column(scenario, "calls")) == [[1, 3], [7]]
    assert same(column(scenario, "fetched")) == 2
    first, *others = column(scenario, "answers")
    assert first == [[1, 2, 3], [5, 2], "OSError: what a store never does", [7, 1, 2]]
    assert all(other == [[1, 2, 3], [5, 2], ELSEWHERE, [7, 1, 2]] for other in others)
    gave_up = column(scenario, "gave up")
    assert gave_up == [1] + [0] * len(others)


def test_ranks_whose_caches_differ_get_the_same_right_answers(column: Column) -> None:
    answers = same(column("caches_of_different_sizes", "answers"))
    assert len(answers) == 60
    gave_up = column("caches_of_different_sizes", "gave up")
    assert gave_up[0] < gave_up[-1]
    encoded = same(column("caches_of_different_sizes", "encoded"))
    hits = same(column("caches_of_different_sizes", "hits"))
    assert 0 < encoded < sum(map(len, answers))
    assert hits > 0


def test_what_a_cleared_rank_misses_is_encoded_on_all(column: Column) -> None:
    assert same(column("a_cleared_cache", "calls")) == [[1, 2, 3], [3, 4], [1]]
    assert column("a_cleared_cache", "gave up")[:2] == [2, 0]
    assert same(column("a_cleared_cache", "hits")) == 3


def test_flags_beyond_the_first_message_are_agreed_on_too(column: Column) -> None:
    _, again = same(column("many_features", "calls"))
    size = len(column("many_features", "calls"))
    assert again == sorted(n for n in range(200) for rank in range(size) if n % 50 == 10 + rank)
    answers = same(column("many_features", "answers"))
    assert answers[1] == [*range(200), 7, 7]


def test_ranks_that_were_called_differently_are_told_so_and_agree_anew(column: Column) -> None:
    first, *differing, last = same(column("different_features", "answers"))
    assert (first, last) == ([1, 2], [1, 9])
    assert differing == [
        f"{DIFFERENTLY}other keys or lengths, or in another order",
        f"{DIFFERENTLY}other keys or lengths, or in another order",
        f"{DIFFERENTLY}number of features from 2 to 3",
        f"{DIFFERENTLY}number of features from 0 to 1",
        f"{DIFFERENTLY}other keys or lengths, or in another order",
    ]
    assert same(column("different_features", "calls")) == [[1, 2], [9]]


def test_calls_without_features_agree_too(column: Column) -> None:
    assert same(column("no_features", "answers")) == [[], [1], []]


@pytest.mark.parametrize(
    ("scenario", "culprit", "error", "times"),
    [
        ("bad_arguments_on_one_rank", 1, None, 3),
        ("a_key_that_cannot_be_made_on_one_rank", 0, "OSError: no such file", 1),
        ("a_lookup_that_fails_on_one_rank", 0, "OSError: no such cache", 1),
        ("a_closed_encoder_on_one_rank", 1, "RuntimeError: this CachedEncoder is closed", 1),
    ],
)
def test_who_fails_before_encode_tells_the_others(
    scenario: str, culprit: int, error: str | None, times: int, column: Column
) -> None:
    for rank, answers in enumerate(column(scenario, "answers")):
        failures = answers[1 : 1 + times]
        if rank != culprit:
            assert failures == [ELSEWHERE] * times
        elif error is not None:
            assert failures == [error]
        else:
            assert [each.split(":")[0] for each in failures] == [
                "ValueError", "TypeError", "ValueError",
            ]  # fmt: skip
        assert all(isinstance(each, list) for each in [answers[0], *answers[1 + times :]])


def test_an_encode_that_fails_on_one_rank_raises_there(column: Column) -> None:
    first, *others = column("an_encode_that_fails_on_one_rank", "answers")
    assert first == ["ValueError: out of luck", [1, 2], [1, 2]]
    assert same(others) == [[1, 2]] * 3
    assert same(column("an_encode_that_fails_on_one_rank", "calls")) == [[1, 2], [1, 2]]
    assert column("an_encode_that_fails_on_one_rank", "gave up")[:2] == [0, 2]


def test_ranks_that_count_their_calls_differently_agree_anew(column: Column) -> None:
    for answers in column("another_number_of_calls", "answers"):
        assert f"{DIFFERENTLY}number of the call from 1 to 3" in answers
        assert f"{DIFFERENTLY}number of the call from 3 to 4" in answers  # of the other encoder
        assert [2, 3] in answers
    assert same(column("another_number_of_calls", "calls")) == [[1], [2, 3]]


def test_an_entry_of_the_wrong_length_on_one_rank_is_encoded_on_all(column: Column) -> None:
    assert same(column("lengths_that_do_not_fit_on_one_rank", "calls")) == [[1, 2], [1]]
    assert same(column("lengths_that_do_not_fit_on_one_rank", "answers")) == [[1, 2]] * 3
    mismatches = column("lengths_that_do_not_fit_on_one_rank", "mismatches")
    assert mismatches[:2] == [1, 0]


def test_features_without_a_key_are_encoded_each_time(column: Column) -> None:
    assert same(column("features_without_a_key", "calls")) == [[4, 5, 5], [4, 5]]
    assert same(column("features_without_a_key", "answers")) == [[4, 5, 5]] * 2


def test_calls_come_one_at_a_time(column: Column) -> None:
    assert same(column("a_call_inside_a_call", "answers")) == [
        "RuntimeError: with a group, calls come one at a time, and another is under way",
        [1],
        "with a group, calls come one at a time: not by encode_async",
        [1],
    ]


def test_a_group_of_one_sends_nothing(ranks: Seen) -> None:
    if "a_group_of_one" not in ranks[0]:
        store = dist.HashStore()
        group = new_group(store, 0, 1)
        encoder = CachedEncoder(MultiModalStaticCache(100), EncoderOfNumbers(), group=group)
        assert encoder([1])[0].shape == (2, 1)
        assert encoder._ranks is None
        return
    for seen in ranks:
        assert seen["a_group_of_one"]["answers"] == [[1]]


def test_what_is_no_group_is_refused() -> None:
    cache = MultiModalStaticCache(100)
    for group in (-100, "WORLD", [0, 1]):
        with pytest.raises(TypeError, match="group must be a torch.distributed.ProcessGroup"):
            CachedEncoder(cache, EncoderOfNumbers(), group=group)  # type: ignore[arg-type]


def test_a_coroutine_function_is_refused() -> None:
    async def encode(numbers: list[int]) -> torch.Tensor:
        raise AssertionError("not called")

    group = new_group(dist.HashStore(), 0, 1)
    with pytest.raises(TypeError, match="with a group, encode must be a plain function"):
        CachedEncoder(MultiModalStaticCache(100), encode, group=group)


def test_on_a_group_without_a_cpu_backend_the_message_is_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    made: list[torch.device] = []
    tensor = torch.tensor

    def on_cpu(values: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(device)
        assert len(values) == ranks_benchmark.MESSAGE_WORDS
        return tensor(values, dtype=dtype)

    monkeypatch.setattr(torch, "tensor", on_cpu)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    ranks = Ranks(new_group(dist.HashStore(), 0, 1))
    with ranks.call():
        assert ranks.agree([(1, None)], [True]) == [True]
    assert made == [torch.device("cuda")]


def test_who_has_no_group_does_not_import_it() -> None:
    code = (
        "import sys, multimodal_cache as m\n"
        "m.CachedEncoder(m.MultiModalStaticCache(1), print)\n"
        "print('multimodal_cache.parallel' in sys.modules)"
    )
    assert run_python(code) == "False\n"
