"""What tests do with an engine of vLLM's parts, and what must hold of it. Needs vLLM."""

from __future__ import annotations

import random
from typing import Any

from vllm_engine import ROW_BYTES, Engine

from multimodal_cache.integrations._vllm_index import PAGE

ROWS = PAGE // ROW_BYTES  # of an item that takes one page of host memory


def check(engine: Engine) -> None:
    """What must hold after each step."""
    index = index_of(engine)
    index.check()
    for worker in engine.workers:
        assert pages_of(worker).size <= index.max_size


def check_end(engine: Engine) -> None:
    """What must hold once all is reported: each worker has what the index says, and no more."""
    engine.run()
    check(engine)
    assert len(engine.finished) == len(engine.requests)
    assert "error" not in engine.finished.values()
    slots = sorted(index_of(engine).slots().values())
    for worker in engine.workers:
        assert sorted(pages_of(worker)._items) == slots
        assert pages_of(worker).size == index_of(engine).size


def index_of(engine: Engine) -> Any:
    return engine.scheduler.ec_connector._index


def pages_of(worker: Any) -> Any:
    return worker.connector.ec_connector._pages


def answer(engine: Engine, *items: Any, tokens: int = 1) -> list[int]:
    """Answers one request, and returns what was encoded for it."""
    before = len(engine.encoded)
    engine.ask(*items, tokens=tokens)
    engine.run()
    return engine.encoded[before:]


def random_traffic(engine: Engine, seed: int, steps: int, resets: float = 0.02) -> None:
    """Requests, aborts, resets and failing memory, in an order of chance."""
    chance = random.Random(seed)
    saves = [pages_of(worker).save for worker in engine.workers]
    for _ in range(steps):
        if chance.random() < 0.4:
            contents = chance.choices(range(8), k=chance.choice([1, 1, 2, 3]))
            images = [(content, ROWS * (1 + content % 3) // 2) for content in contents]
            engine.ask(*images, text=chance.randint(1, 12), tokens=chance.randint(1, 12))
        if chance.random() < 0.05 and engine.requests:
            engine.abort([chance.choice([*engine.requests])])
        if chance.random() < resets:
            engine.update_weights(engine.workers[0].model.weights + 1)
        for worker, save in zip(engine.workers, saves, strict=True):
            pages_of(worker).save = save if chance.random() < 0.9 else lambda *_: None
        plan = engine.step().plan
        engine.seen.update(loads=len(plan.loads), evictions=len(plan.evictions))
        check(engine)
    for worker, save in zip(engine.workers, saves, strict=True):
        pages_of(worker).save = save
