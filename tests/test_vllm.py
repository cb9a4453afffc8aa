"""The connector in vLLM's own scheduler and workers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multimodal_cache.integrations._vllm_index import PAGE

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm_engine  # needs vLLM
from vllm_checks import ROWS, answer, check, check_end, index_of, pages_of, random_traffic
from vllm_engine import Engine, configuration

from multimodal_cache.integrations.vllm import (
    ECConnectorRole,
    MultimodalCacheConnector,
    ResettingEncoderCacheManager,
    StepReport,
)

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeEngine]:
    """Makes engines with host memory for some pages in each worker; checks them at the end."""
    engines = []

    def new(*, pages: int = 4, cache_size: int = 16, **options: Any) -> Engine:
        config = configuration(tmp_path, settings={"max_size": pages * PAGE}, **options)
        engine = Engine(
            config, asynchronous=options.get("asynchronous", False), cache_size=cache_size
        )
        engines.append(engine)
        return engine

    yield new
    for engine in engines:
        check_end(engine)


# How often an image is encoded.


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_an_image_that_left_the_gpu_comes_back_from_host_memory(
    asynchronous: bool, ranks: int, make: MakeEngine
) -> None:
    engine = make(asynchronous=asynchronous, ranks=ranks)
    images = [(content, ROWS) for content in range(4)]
    for image in images * 3:
        answer(engine, image)
    assert [worker.model.encoded for worker in engine.workers] == [[0, 1, 2, 3]] * ranks


def test_what_left_the_gpu_last_is_evicted_last(make: MakeEngine) -> None:
    engine = make(pages=2)
    zero, one, two, three = ((content, ROWS) for content in range(4))
    for image in (zero, one, zero, zero, two):  # zero is hit on the GPU, which never asks
        answer(engine, image)
    assert answer(engine, three, zero) == [3]


def test_a_request_that_needs_more_than_a_step_is_answered(make: MakeEngine) -> None:
    engine = make(tokens=16, asynchronous=True)
    images = [(content, ROWS + 4) for content in range(3)]
    for _ in range(3):
        answer(engine, *images, tokens=3)


def test_rows_that_are_wider_than_expected_are_kept_once_their_width_is_known(
    make: MakeEngine,
) -> None:
    engine = make(pages=8)
    index = index_of(engine)
    index._row_bytes.clear()  # as in vLLM 0.30, which doesn't measure them
    assert index._default_row_bytes == 4 * vllm_engine.HIDDEN
    for content in [0, 1, 2] * 2:
        answer(engine, (content, 2 * ROWS))
    assert engine.encoded == [0, 1, 2, 0]


# (1) Yes only for what every rank has reported.


def test_what_is_not_reported_yet_is_encoded_again(make: MakeEngine) -> None:
    engine = make(pages=8, asynchronous=True)
    engine.depth = 2  # steps that the scheduler doesn't know the outcome of
    for content, rows in [(0, ROWS), (1, 2 * ROWS), (0, ROWS)]:  # 1 fills the GPU
        name = engine.ask((content, rows))
        engine.step()
        engine.abort([name])
    assert engine.encoded == [0, 1, 0]
    answer(engine, (2, 2 * ROWS))
    assert answer(engine, (0, ROWS)) == []


def test_what_a_rank_has_no_memory_for_is_not_promised(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(ranks=2)
    images = [(content, ROWS) for content in range(3)]
    with monkeypatch.context() as context:
        context.setattr(pages_of(engine.workers[1]), "save", lambda *_: None)
        for image in images * 2:
            answer(engine, image)
    for image in images * 2:
        answer(engine, image)
    assert engine.encoded == [0, 1, 2] * 3
    assert engine.workers[1].model.encoded == [0, 1, 2] * 3


def test_reports_that_lack_a_rank_say_nothing(make: MakeEngine) -> None:
    engine = make(ranks=2)
    engine.aggregator = OneOfThem()
    for content in [0, 1, 2] * 2:
        answer(engine, (content, ROWS))
    assert engine.encoded == [0, 1, 2] * 2


class OneOfThem:
    """In the place of vLLM's aggregator."""

    def aggregate(self, outputs: list[Any]) -> Any:
        return outputs[0]


def test_reports_of_several_ranks_are_what_they_agree_on() -> None:
    report = StepReport(3, {0: 10, 1: 20, 2: 30}).aggregate(StepReport(3, {0: 10, 1: 21}))
    assert report == StepReport(3, {0: 10, 1: None}, ranks=2)


# (2) A yes pins. This is how vLLM's ECCPUConnector loses what it has just promised.


def test_what_was_promised_is_there_though_another_item_of_the_step_needs_space(
    make: MakeEngine,
) -> None:
    engine = make(pages=1)
    answer(engine, (0, ROWS))
    answer(engine, (1, 2 * ROWS))
    assert answer(engine, (2, ROWS), (0, ROWS)) == [2]
    answer(engine, (1, 2 * ROWS))
    assert answer(engine, (2, ROWS)) == [2]


def test_a_promise_ends_with_its_step(make: MakeEngine) -> None:
    engine = make(pages=1)
    answer(engine, (0, ROWS))
    answer(engine, (1, 2 * ROWS))
    assert answer(engine, (0, ROWS)) == []
    for content, rows in [(2, ROWS), (1, 2 * ROWS), (2, ROWS)]:
        answer(engine, (content, rows))
    assert engine.encoded == [0, 1, 2, 1]


# (3) Bytes are reserved and freed in the order in which the workers take and free them.


def test_an_item_larger_than_the_host_memory_is_encoded_and_not_kept(make: MakeEngine) -> None:
    engine = make(pages=1)
    answer(engine, (0, ROWS))
    for _ in range(2):
        assert answer(engine, (1, ROWS + 1)) == [1]
        assert answer(engine, (2, 2 * ROWS)) == [2]
        assert answer(engine, (0, ROWS)) == []


def test_items_of_one_step_share_the_host_memory(make: MakeEngine) -> None:
    engine = make(pages=2, cache_size=4 * ROWS)
    assert answer(engine, *((content, ROWS) for content in range(4))) == [0, 1, 2, 3]
    check(engine)
    assert answer(engine, (4, 4 * ROWS)) == [4]
    assert answer(engine, *((content, ROWS) for content in range(4))) == [2, 3]


def test_a_load_and_an_eviction_of_one_step_do_not_meet(make: MakeEngine) -> None:
    engine = make(pages=2, cache_size=3 * ROWS)
    for content, rows in [(0, ROWS), (1, ROWS), (2, 3 * ROWS)]:
        answer(engine, (content, rows))
    engine.ask((3, ROWS), (0, ROWS))
    plan = engine.step().plan
    assert (len(plan.loads), len(plan.saves), len(plan.evictions)) == (1, 1, 1)
    check(engine)


# Other weights.


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_nothing_that_old_weights_have_encoded_is_used_after_a_reset(
    asynchronous: bool, make: MakeEngine
) -> None:
    engine = make(asynchronous=asynchronous)
    images = [(content, ROWS) for content in range(4)]
    for weights in range(3):
        engine.update_weights(weights)
        for image in images * 2:
            answer(engine, image)
    assert engine.encoded == [0, 1, 2, 3] * 3


def test_a_report_from_before_a_reset_changes_nothing(make: MakeEngine) -> None:
    engine = make(asynchronous=True)
    name = engine.ask((0, ROWS))
    engine.step()
    engine.abort([name])
    engine.update_weights(1)
    assert len(engine.unheard) == 1
    answer(engine, (1, 2 * ROWS))
    assert answer(engine, (0, ROWS)) == [0]


def test_a_request_that_a_reset_meets_in_its_middle_is_answered(make: MakeEngine) -> None:
    engine = make(tokens=16, asynchronous=True)
    engine.ask((0, ROWS), (1, ROWS), (0, ROWS), text=6, tokens=4)
    engine.step()
    engine.update_weights(1)
    engine.run()


# One identifier for two images: a client may choose it.


def test_an_image_with_other_rows_under_a_known_identifier_is_encoded(make: MakeEngine) -> None:
    engine = make()
    answer(engine, (0, ROWS, "uuid"))
    answer(engine, (1, 2 * ROWS))
    assert answer(engine, (2, ROWS // 2, "uuid")) == [2]
    answer(engine, (1, 2 * ROWS))
    assert answer(engine, (2, ROWS // 2, "uuid")) == []


# All at once.


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("seed", range(3))
def test_every_tensor_is_the_right_one(
    seed: int, asynchronous: bool, ranks: int, make: MakeEngine
) -> None:
    engine = make(pages=6, cache_size=3 * ROWS, asynchronous=asynchronous, ranks=ranks, blocks=10)
    random_traffic(engine, seed, steps=120)
    engine.run()
    assert engine.seen["loads"] > 4
    assert engine.seen["evictions"] > 20
    assert any(request.num_preemptions for request in engine.requests.values())


# The configuration.


def test_another_vllm_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    base = "vllm.distributed.ec_transfer.ec_connector.base"
    monkeypatch.setitem(sys.modules, base, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, vllm_engine.MODULE)
    with pytest.raises(ImportError, match="needs vLLM 0.30 or newer: import of vllm.distributed"):
        importlib.import_module(vllm_engine.MODULE)


def test_the_log_says_how_large_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = configuration(tmp_path, settings={"max_size": 3 * PAGE})
    MultimodalCacheConnector(config, ECConnectorRole.SCHEDULER)
    assert caplog.messages[-1] == (
        "MultimodalCacheConnector keeps encoder outputs in host memory, up to 786432 bytes "
        "(0.8 MiB) in each worker"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "max_size must be a number of bytes above 0, got None"),
        ({"max_size": 0}, "max_size must be a number of bytes above 0, got 0"),
        ({"max_size": "1 GiB"}, "max_size must be a number of bytes above 0, got '1 GiB'"),
        ({"max_size": True}, "max_size must be a number of bytes above 0, got True"),
        ({"max_size": 1, "b": 1, "a": 1}, r"has max_size, .*store_options only, got \['a', 'b'\]"),
    ],
)
@pytest.mark.parametrize("role", ECConnectorRole)
def test_settings_that_make_no_sense_are_refused(
    role: ECConnectorRole, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = configuration(tmp_path, settings=settings)
    with pytest.raises(ValueError, match=message):
        MultimodalCacheConnector(config, role)


@pytest.mark.parametrize(
    "manager", [None, "vllm.v1.core.encoder_cache_manager.EncoderCacheManager"]
)
def test_it_needs_the_manager_that_hears_of_resets(manager: str | None, tmp_path: Path) -> None:
    config = configuration(tmp_path, settings={"max_size": 1}, manager=manager)
    with pytest.raises(
        ValueError, match="what old weights have encoded would outlive them"
    ) as info:
        MultimodalCacheConnector(config, ECConnectorRole.SCHEDULER)
    assert vllm_engine.MANAGER in str(info.value)


def test_the_manager_needs_the_connector(tmp_path: Path) -> None:
    config = configuration(tmp_path, settings={"max_size": 1})
    with pytest.raises(ValueError, match="is of use only with MultimodalCacheConnector"):
        ResettingEncoderCacheManager.create_manager(cache_size=1, vllm_config=config)


def test_it_must_be_both_producer_and_consumer(tmp_path: Path) -> None:
    config = configuration(tmp_path, settings={"max_size": 1}, role="ec_consumer")
    with pytest.raises(ValueError, match="ec_role must be \"ec_both\", got 'ec_consumer'"):
        MultimodalCacheConnector(config, ECConnectorRole.SCHEDULER)


def test_encoder_decoder_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, settings={"max_size": 1})
    monkeypatch.setitem(vars(config.model_config), "is_encoder_decoder", True)
    with pytest.raises(ValueError, match="no encoder cache for encoder-decoder models"):
        MultimodalCacheConnector(config, ECConnectorRole.SCHEDULER)
