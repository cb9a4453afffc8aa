"""A store in Mooncake, over RDMA or TCP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from multimodal_cache.stores import EmbeddingStore


class MooncakeStore(EmbeddingStore):
    """Keeps embeddings in Mooncake's distributed store, one object each.

    They lie in the segments of its clients (``global_segment_size``), and its master evicts when
    those are full. README.md, beside this file, says more.

    Args:
        store: A ``mooncake.store.MooncakeDistributedStore`` that is set up. Its
            ``local_buffer_size`` is shared by all calls: make it ten times the largest
            embedding. Close it after this store, never before: Mooncake crashes on a closed one.
        **options: As for ``EmbeddingStore``: ``namespace`` and the rest.

    Raises:
        TypeError: ``store`` isn't such a store, or as for ``EmbeddingStore``.
        ValueError: As for ``EmbeddingStore``.
    """

    def __init__(self, store: Any, **options: Any) -> None:
        methods = ("get", "is_exist", "upsert")
        if isinstance(store, type) or not all(
            callable(getattr(store, each, None)) for each in methods
        ):
            raise TypeError(
                f"store must be a MooncakeDistributedStore, got {type(store).__name__}: pip "
                "install mooncake-transfer-engine (with CUDA) or mooncake-transfer-engine-non-cuda"
            )
        self._store = store
        super().__init__(**options)

    def _get_many(self, names: Sequence[str]) -> Iterator[bytes | None]:
        for name in names:
            # `get` tells no failure from a miss, and hangs where the master is dead.
            value = self._store.get(name) if self._exists(name) else None
            if value == b"" and self._exists(name):
                raise RuntimeError(
                    "get failed: a peer is gone, or local_buffer_size is too small for the calls"
                )
            yield value or None

    def _exists(self, name: str) -> bool:
        answer = self._store.is_exist(name)
        if answer < 0:
            raise RuntimeError(f"is_exist failed with code {answer}")
        return bool(answer)

    def _set_many(self, values: Mapping[str, bytes]) -> None:
        for name, value in values.items():
            answer = self._store.upsert(name, value)  # `put` would keep what is there
            if answer != 0:
                raise RuntimeError(
                    f"upsert of {len(value)} bytes failed with code {answer}: "
                    f"{_MEANINGS.get(answer, 'see ErrorCode in types.h of Mooncake')}"
                )


_MEANINGS = {
    -200: "no space is left",
    -600: "larger than local_buffer_size, perhaps",
    -800: "the transfer failed",
    -900: "the master doesn't answer",
    -901: "the master doesn't answer",
}
