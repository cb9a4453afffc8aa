"""A connector that puts host memory behind vLLM's encoder cache. Needs vLLM 0.30 or newer.

vLLM encodes an image again once its small cache on the GPU has dropped it. With this connector
the workers keep copies in host memory and bring them back. The scheduler's side owns the index
and says what is kept, loaded and dropped; the workers obey (see ``_vllm_index``). vLLM names the
classes of this module on its command line: ``README.md`` beside this file says how.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from multimodal_cache.integrations._vllm_index import Index, Plan
from multimodal_cache.integrations._vllm_pages import Pages

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

_schedulers: WeakValueDictionary[int, MultimodalCacheConnector] = WeakValueDictionary()
"""By the id of its configuration, which it keeps alive, the connector of each scheduler."""


@dataclass(frozen=True)
class StepPlan(ECConnectorMetadata):  # type: ignore[misc]  # vLLM's classes are Any
    """What the scheduler sends to each worker."""

    plan: Plan


@dataclass(frozen=True)
class StepReport(ECConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers send back.

    Attributes:
        step: The plan's.
        sizes: The bytes of the tensor for each slot of the plan's saves; none where a worker
            didn't encode the item or had no memory for it.
        ranks: How many workers agree on this.
    """

    step: int
    sizes: dict[int, int]
    ranks: int = 1

    def aggregate(self, other: StepReport) -> StepReport:
        """Returns what both say. vLLM calls this for the workers of one step."""
        sizes = dict(self.sizes.items() & other.sizes.items())
        return StepReport(self.step, sizes, self.ranks + other.ranks)


class MultimodalCacheConnector(ECConnectorBase):  # type: ignore[misc]
    """Keeps what vLLM encodes in host memory, byte for byte. vLLM makes it, one in each process.

    Args:
        vllm_config: vLLM's. ``ec_transfer_config.ec_connector_extra_config`` has ``max_size``,
            the bytes of host memory in each worker.
        role: Whether it is the scheduler's or a worker's.

    Raises:
        ValueError: It is configured in a way in which it would do nothing or keep what is stale.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        max_size = _max_size(vllm_config)
        if role is not ECConnectorRole.SCHEDULER:
            self._pages = Pages()
            self._sizes: dict[int, int] = {}
            return
        self._index = _index(vllm_config, max_size)
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
        """Takes note of how many rows each item of the request has; returns True."""
        self._rows = {
            feature.identifier: request.get_num_encoder_embeds(i)
            for i, feature in enumerate(request.mm_features)
        }
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """Says whether the workers will have the item without encoding it."""
        return self._index.promise(identifier, self._rows.get(identifier, -1))

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Takes note of an item that is loaded or encoded in this step."""
        feature = request.mm_features[index]
        rows = request.get_num_encoder_embeds(index)
        self._index.allocate(feature.identifier, feature.modality, rows)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Returns what the workers do in this step."""
        self._index.refresh(scheduler_output.free_encoder_mm_hashes)
        return StepPlan(self._index.plan())

    def update_connector_output(self, connector_output: Any) -> None:
        """Takes note of what the workers did in a step."""
        report: StepReport = connector_output.ec_connector_worker_meta
        complete = report.ranks >= self._ranks
        self._index.settle(report.step, report.sizes if complete else {})

    def reset(self) -> None:
        """Forgets all that the workers keep, since the weights have changed."""
        self._index.reset()

    # In the workers.

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Drops what the scheduler dropped, and brings back what it promised."""
        plan = self._get_connector_metadata().plan
        self._pages.evict(plan.evictions)
        for identifier, slot in plan.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = self._pages.load(slot)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Keeps a copy of an item that was just encoded, if the scheduler has space for it."""
        save = self._get_connector_metadata().plan.saves.get(mm_hash)
        if save is not None:
            slot, limit = save
            nbytes = self._pages.save(slot, encoder_cache[mm_hash], limit)
            if nbytes is not None:
                self._sizes[slot] = nbytes

    def build_connector_worker_meta(self) -> StepReport:
        """Returns what was encoded in this step."""
        sizes, self._sizes = self._sizes, {}
        return StepReport(self._get_connector_metadata().plan.step, sizes)


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
        return manager  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Forgets what is on the GPU and what is in host memory."""
        super().reset()
        self._connector.reset()


def _max_size(vllm_config: Any) -> int:
    """Returns the configured size, in bytes, of a configuration that makes sense."""
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
    settings = dict(transfer.ec_connector_extra_config)
    max_size = settings.pop("max_size", None)
    if type(max_size) is not int or max_size <= 0:
        raise ValueError(f"max_size must be a number of bytes above 0, got {max_size!r}")
    if settings:
        raise ValueError(f"ec_connector_extra_config has max_size only, got {sorted(settings)}")
    return max_size


def _index(vllm_config: Any, max_size: int) -> Index:
    """Returns an index that knows how wide the rows are, as far as vLLM knows it."""
    model = vllm_config.model_config
    itemsize = model.dtype.itemsize
    widths = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", {})  # not in 0.30
    row_bytes = {modality: width * itemsize for modality, width in widths.items()}
    return Index(max_size, row_bytes, model.get_inputs_embeds_size() * itemsize)
