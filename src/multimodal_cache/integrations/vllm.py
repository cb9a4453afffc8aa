"""A connector that puts host memory behind vLLM's encoder cache. Needs vLLM 0.30 or newer.

vLLM encodes an image again once its small cache on the GPU has dropped it. With this connector
the workers keep copies in host memory and bring them back. The scheduler's side owns the index
and says what is kept, loaded and dropped; the workers obey (see ``_vllm_index``). A store that
servers share may be behind that (see ``_vllm_store``). vLLM names the classes of this module on
its command line: ``README.md`` beside this file says how.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakValueDictionary

import torch

from multimodal_cache.integrations._vllm_index import Index, Plan
from multimodal_cache.integrations._vllm_pages import Pages
from multimodal_cache.integrations._vllm_store import (
    SCHEMES,
    TIMEOUT,
    Client,
    Fetches,
    Item,
    open_store,
)

try:
    from vllm.distributed.ec_transfer.ec_connector.base import (
        ECConnectorBase,
        ECConnectorMetadata,
        ECConnectorRole,
        ECConnectorWorkerMetadata,
    )
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
except ImportError as error:
    raise ImportError(f"{__name__} needs vLLM 0.30 or newer: {error}") from error

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
"""How long a request waits beyond a fetch's time-out: reports come at the end of a step."""

_schedulers: WeakValueDictionary[int, MultimodalCacheConnector] = WeakValueDictionary()
"""By the id of its configuration, which it keeps alive, the connector of each scheduler."""


@dataclass(frozen=True)
class StepPlan(ECConnectorMetadata):  # type: ignore[misc]  # vLLM's classes are Any
    """What the scheduler sends to each worker.

    Attributes:
        plan: The index's.
        offers: By identifier, the store's key of what is encoded in this step.
    """

    plan: Plan
    offers: dict[str, int]


@dataclass(frozen=True)
class StepReport(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers send back.

    Attributes:
        step: The plan's.
        sizes: The bytes of the tensor for each slot of the plan's saves; none where a worker
            didn't encode the item or had no memory for it. And for each slot whose fetch is over;
            None where a worker has found nothing, or workers disagree.
        ranks: How many workers this is of.
    """

    step: int
    sizes: dict[int, int | None]
    ranks: int = 1

    def aggregate(self, other: StepReport) -> StepReport:
        """Returns what both know of. vLLM calls this for the workers of one step."""
        sizes = {
            slot: nbytes if nbytes == other.sizes[slot] else None
            for slot, nbytes in self.sizes.items()
            if slot in other.sizes
        }
        return StepReport(self.step, sizes, self.ranks + other.ranks)


class MultimodalCacheConnector(ECConnectorBase):  # type: ignore[misc]
    """Keeps what vLLM encodes in host memory, byte for byte. vLLM makes it, one in each process.

    Args:
        vllm_config: vLLM's. ``ec_transfer_config.ec_connector_extra_config`` has ``max_size``,
            the bytes of host memory in each worker, and what ``_Settings`` tells of a store.
        role: Whether it is the scheduler's or a worker's.

    Raises:
        ImportError: The store's client isn't installed.
        ValueError: It is configured in a way in which it would do nothing or keep what is stale.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        settings = _settings(vllm_config)
        self._client: Client | None = None
        if role is not ECConnectorRole.SCHEDULER:
            self._pages = Pages()
            self._sizes: dict[int, int | None] = {}
            self._client = _client(vllm_config, settings)
            return
        max_size = settings.max_size
        self._index = _index(vllm_config, max_size)
        self._fetches = _fetches(vllm_config, settings, self._index)
        self._rows: dict[str, int] = {}
        parallel = vllm_config.parallel_config
        self._ranks = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
        _schedulers[id(vllm_config)] = self
        logger.info(
            "%s keeps encoder outputs in host memory, up to %d bytes (%.1f MiB) in each worker",
            type(self).__qualname__,
            max_size,
            max_size / 2**20,
        )

    # In the scheduler.

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Takes note of how many rows each item has; says if nothing is being fetched for it."""
        self._rows = {
            feature.identifier: request.get_num_encoder_embeds(i)
            for i, feature in enumerate(request.mm_features)
        }
        if self._fetches is None:
            return True
        needed = (
            Item(feature.identifier, feature.modality, self._rows[feature.identifier])
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        )
        return not self._fetches.must_wait(request.request_id, needed)

    def has_cache_item(self, identifier: str) -> bool:
        """Says whether the workers will have the item without encoding it."""
        return self._index.promise(identifier, self._rows.get(identifier, -1))

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Takes note of an item that is loaded or encoded in this step."""
        feature = request.mm_features[index]
        item = Item(feature.identifier, feature.modality, request.get_num_encoder_embeds(index))
        loaded = self._index.allocate(*item)
        if self._fetches is not None and not loaded:
            self._fetches.offer(item)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Returns what the workers do in this step."""
        self._index.refresh(scheduler_output.free_encoder_mm_hashes)
        offers = {} if self._fetches is None else self._fetches.end_step()
        return StepPlan(self._index.plan(), offers)

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes note of what the workers did in a step."""
        report: StepReport = connector_output.ec_connector_worker_meta
        complete = report.ranks >= self._ranks
        self._index.settle(report.step, report.sizes if complete else {})

    def reset(self) -> None:
        """Forgets all that the workers keep, since the weights have changed."""
        self._index.reset()
        if self._fetches is not None:
            self._fetches.reset()

    def request_finished(self, request: Any) -> tuple[bool, None]:
        """Takes note that a request is finished; nothing of it must be kept for this."""
        if self._fetches is not None:
            self._fetches.forget(request.request_id)
        return False, None

    # In the workers.

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Drops what the scheduler dropped, and brings back what it promised."""
        plan = self._get_connector_metadata().plan
        self._pages.evict(plan.evictions)
        if self._client is not None:
            self._client.begin_step(plan)
        for identifier, slot in plan.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = self._pages.load(slot)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Keeps a copy of an item that was just encoded, if the scheduler has space for it."""
        metadata = self._get_connector_metadata()
        save = metadata.plan.saves.get(mm_hash)
        if save is not None:
            slot, limit = save
            nbytes = self._pages.save(slot, encoder_cache[mm_hash], limit)
            if nbytes is not None:
                self._sizes[slot] = nbytes
        if self._client is not None and mm_hash in metadata.offers:
            self._client.offer(metadata.offers[mm_hash], encoder_cache[mm_hash])

    def build_connector_worker_meta(self) -> StepReport:
        """Returns what was encoded in this step, and what has been fetched."""
        sizes, self._sizes = self._sizes, {}
        if self._client is not None:
            self._client.end_step(self._pages)
            sizes |= self._client.sizes
        return StepReport(self._get_connector_metadata().plan.step, sizes)

    # In both.

    def shutdown(self) -> None:
        """Closes the store."""
        if self._client is not None:
            self._client.close()


class ResettingEncoderCacheManager(EncoderCacheManager):  # type: ignore[misc]
    """vLLM's own manager, which lets the connector know of a weight update. vLLM makes it."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> ResettingEncoderCacheManager:
        """Returns the manager of the scheduler whose connector was just made.

        Raises:
            ValueError: There is no such connector.
        """
        manager = super().create_manager(cache_size=cache_size, vllm_config=vllm_config)
        manager._connector = _schedulers.get(id(vllm_config))
        if manager._connector is None:
            raise ValueError(f"{cls.__qualname__} is of use only with MultimodalCacheConnector")
        if manager._connector._fetches is not None:
            manager._connector._fetches.on_gpu = manager.cached
        return manager  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Forgets what is on the GPU and what is in host memory."""
        super().reset()
        self._connector.reset()


@dataclass(frozen=True)
class _Settings:
    """What ``ec_connector_extra_config`` may have.

    Attributes:
        max_size: Bytes of host memory in each worker.
        store: What servers share, if anything: a URL of Redis, or Mooncake's settings.
        namespace: As for ``EmbeddingStore``.
        store_options: Of the store's class, such as ``timeout``.
    """

    max_size: int
    store: str | Mapping[str, Any] | None = None
    namespace: str | None = None
    store_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def timeout(self) -> float:
        """Seconds that a fetch takes at most."""
        return float(self.store_options.get("timeout", TIMEOUT))


def _settings(vllm_config: Any) -> _Settings:
    """Returns the settings of a configuration that makes sense."""
    transfer = vllm_config.ec_transfer_config
    if not (transfer.is_ec_producer and transfer.is_ec_consumer):
        raise ValueError(f'ec_role must be "ec_both", got {transfer.ec_role!r}')
    if vllm_config.model_config.is_encoder_decoder:
        raise ValueError("vLLM has no encoder cache for encoder-decoder models")
    manager = vllm_config.ec_manager_config.get_encoder_cache_manager_obj()
    if manager is None or not issubclass(manager, ResettingEncoderCacheManager):
        path = f"{__name__}.{ResettingEncoderCacheManager.__qualname__}"
        raise ValueError(
            "without its manager, what old weights have encoded would outlive them: add "
            f"""--ec-manager-config '{{"encoder_cache_manager_cls": "{path}"}}'"""
        )
    given = dict(transfer.ec_connector_extra_config)
    max_size = given.get("max_size")
    if type(max_size) is not int or max_size <= 0:
        raise ValueError(f"max_size must be a number of bytes above 0, got {max_size!r}")
    known = [each.name for each in fields(_Settings)]
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"ec_connector_extra_config has {', '.join(known)} only, got {unknown}")
    settings = _Settings(**given)
    if settings.store is not None:
        _require_shareable(vllm_config, settings)
    elif len(given) > 1:
        raise ValueError("namespace and store_options are of use only with store")
    return settings


def _require_shareable(vllm_config: Any, settings: _Settings) -> None:
    """Refuses a store that would be of no use, or bring what is of other images."""
    store, namespace = settings.store, settings.namespace
    url = isinstance(store, str) and store.startswith(SCHEMES)
    if not url and not (isinstance(store, Mapping) and store):
        raise ValueError(
            f"store must be a URL with {', '.join(SCHEMES)}, or an object with what "
            f"MooncakeDistributedStore.setup takes, got {store!r}"
        )
    if not isinstance(namespace, str) or not namespace:
        raise ValueError(
            "with store, namespace must be a text that says the model, the version of its weights "
            f"and what else changes an embedding, got {namespace!r}"
        )
    if not isinstance(settings.store_options, Mapping):
        raise ValueError(f"store_options must be an object, got {settings.store_options!r}")
    timeout = settings.store_options.get("timeout", TIMEOUT)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    multimodal = vllm_config.model_config.multimodal_config
    caching = vllm_config.cache_config.enable_prefix_caching
    if multimodal is not None and multimodal.mm_processor_cache_gb == 0 and not caching:
        raise ValueError(
            "vLLM doesn't hash images here, but counts them, which says nothing to other servers: "
            "with store, enable prefix caching, or set --mm-processor-cache-gb above 0"
        )
    if not getattr(vllm_config, "use_v2_model_runner", True):  # 0.30 has both
        raise ValueError(
            "vLLM's older model runner tells a connector nothing while all requests wait: with "
            "store, set VLLM_USE_V2_MODEL_RUNNER=1"
        )


def _index(vllm_config: Any, max_size: int) -> Index:
    """Returns an index that knows how wide the rows are, as far as vLLM knows it."""
    model = vllm_config.model_config
    itemsize = model.dtype.itemsize
    widths = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", {})  # not in 0.30
    row_bytes = {modality: width * itemsize for modality, width in widths.items()}
    return Index(max_size, row_bytes, model.get_inputs_embeds_size() * itemsize)


def _fetches(vllm_config: Any, settings: _Settings, index: Index) -> Fetches | None:
    """Returns what the scheduler needs for a store, if there is one."""
    if settings.store is None:
        return None
    model = vllm_config.model_config
    # A width that isn't the model's would end the server.
    known = f"{model.dtype} {model.get_inputs_embeds_size()}"
    return Fetches(index, known, settings.timeout + _REPORT_SECONDS)


def _client(vllm_config: Any, settings: _Settings) -> Client | None:
    """Returns what a worker needs for a store, if there is one."""
    if settings.store is None:
        return None
    assert settings.namespace is not None
    store = open_store(settings.store, settings.namespace, settings.store_options)
    first = vllm_config.parallel_config.rank == 0
    return Client(store, vllm_config.device_config.device, offers=first)
