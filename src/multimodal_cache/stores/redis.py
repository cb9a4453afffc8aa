"""A store in Redis or Valkey."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from multimodal_cache.base import as_int
from multimodal_cache.stores import EmbeddingStore


class RedisStore(EmbeddingStore):
    """Keeps embeddings in Redis or Valkey, one key each.

    The server should be one for caches alone: ``maxmemory`` set, ``maxmemory-policy allkeys-lru``,
    and beside it room for clients' buffers, of twice the largest value for each that writes. An
    ACL of ``~multimodal-cache:* +get +getex +set +ping`` is enough. TLS and passwords are the
    client's. README.md, beside this file, says more.

    Args:
        client: A client of redis-py or valkey-py, for one server or a cluster; with an answer in
            bytes (without ``decode_responses``), and not for asyncio. Give it a
            ``socket_timeout``: the store waits no longer than ``timeout`` in any case, but it
            begins no new call while one hangs. It isn't closed with the store.
        ttl: Seconds after which the server drops an embedding that nobody has got meanwhile;
            by default none, and the server evicts when it is full.
        prefix: Begins every key, for ACLs and for ``SCAN``.
        **options: As for ``EmbeddingStore``: ``namespace`` and the rest.

    Raises:
        TypeError: ``client`` isn't such a client, ``prefix`` isn't str, ``ttl`` isn't an int, or
            as for ``EmbeddingStore``.
        ValueError: ``client`` has ``decode_responses``, ``ttl`` is below 1, or as for
            ``EmbeddingStore``.
    """

    _max_value_bytes = 512_000_000
    """The server closes the connection on what is longer (512 MiB), after it was sent."""

    def __init__(
        self,
        client: Any,
        *,
        ttl: SupportsIndex | None = None,
        prefix: str = "multimodal-cache:",
        **options: Any,
    ) -> None:
        _require_client(client)
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be str, got {type(prefix).__name__}")
        if ttl is not None:
            ttl = as_int("ttl", ttl)
            if ttl < 1:
                raise ValueError(f"ttl must be 1 second or more, got {ttl}")
        self._client = client
        self._ttl = ttl
        self._key_prefix = prefix
        super().__init__(**options)

    # One command for each: MGET fails where keys are in several slots of a cluster, and is no
    # faster for values of this size.

    def _get_many(self, names: Sequence[str]) -> Iterator[bytes | None]:
        for name in names:
            key = self._key_prefix + name
            if self._ttl is None:
                yield self._client.get(key)
            else:
                yield self._client.getex(key, ex=self._ttl)

    def _set_many(self, values: Mapping[str, bytes]) -> None:
        for name, value in values.items():
            self._client.set(self._key_prefix + name, value, ex=self._ttl)


def _require_client(client: Any) -> None:
    methods = ("get", "getex", "set", "get_encoder")
    if isinstance(client, type) or not all(
        callable(getattr(client, each, None)) for each in methods
    ):
        raise TypeError(
            f"client must be one of redis-py or valkey-py, got {type(client).__name__}: "
            'pip install "multimodal-cache[redis]", and give redis.Redis(...)'
        )
    if inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
        raise TypeError("client must not be one for asyncio: give redis.Redis(...)")
    if client.get_encoder().decode_responses:
        raise ValueError("client must not have decode_responses: values are bytes")
