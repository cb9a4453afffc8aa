"""vLLM's scheduler, encoder cache, connector calls and encoder runner, unmodified, on the CPU.

What stands between them in vLLM, an engine and its worker processes, is a loop here; the model is
a formula.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ECTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.config.ec_manager_config import EncoderCacheManagerConfig
    from vllm.distributed.ec_transfer import ec_transfer_state
    from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    try:
        from vllm.v1.worker.cpu.ec_connector import ActiveECConnector
        from vllm.v1.worker.cpu.encoder_cache import EncoderCache
        from vllm.v1.worker.cpu.encoder_runner import EncoderRunner
    except ImportError:  # vLLM 0.30 has them for the GPU only; without pinned memory they run
        from vllm.utils import torch_utils

        torch_utils.PIN_MEMORY = torch.cuda.is_available()
        from vllm.v1.worker.gpu.ec_connector import ActiveECConnector
        from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
        from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

BLOCK = 16  # tokens
HIDDEN = 64
WIDTH = 8192  # of an encoded row, so that eight of them fill one page of host memory
ROW_BYTES = 4 * WIDTH
MODULE = "multimodal_cache.integrations.vllm"
OURS = {"ec_connector": "MultimodalCacheConnector", "ec_connector_module_path": MODULE}
MANAGER = f"{MODULE}.ResettingEncoderCacheManager"


def configuration(
    directory: Path,
    *,
    settings: dict[str, Any],
    connector: dict[str, Any] = OURS,
    role: str = "ec_both",
    manager: str | None = MANAGER,
    ranks: int = 1,
    asynchronous: bool = False,
    blocks: int = 64,
    tokens: int = 64,
) -> VllmConfig:
    """What vLLM makes of its command line, for a language model of one layer."""
    language_model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 128,
        "max_position_embeddings": 512,
    }
    (directory / "config.json").write_text(json.dumps(language_model), encoding="utf-8")
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=False)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=512
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=tokens,
            max_model_len=512,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        ec_transfer_config=ECTransferConfig(
            **connector, ec_role=role, ec_connector_extra_config=settings
        ),
        ec_manager_config=EncoderCacheManagerConfig(encoder_cache_manager_cls=manager),
    )
    cache.num_gpu_blocks = blocks
    config.parallel_config.tensor_parallel_size = ranks  # by hand: there is one CPU
    if hasattr(config.ec_transfer_config, "mm_encoder_output_widths"):
        config.ec_transfer_config.mm_encoder_output_widths = {"image": WIDTH}
    return config


def encoded(content: int, rows: int, weights: int) -> torch.Tensor:
    """What the encoder makes of an image."""
    start = 7919 * content + 104729 * weights
    return torch.arange(start, start + rows * WIDTH, dtype=torch.float32).view(rows, WIDTH)


class Model:
    """An encoder that returns views of a batch, as vLLM's do."""

    def __init__(self) -> None:
        self.weights = 0
        self.encoded: list[int] = []

    def embed_multimodal(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        items = image.tolist()
        self.encoded += [content for content, _ in items]
        batch = torch.cat([encoded(content, rows, self.weights) for content, rows in items])
        return batch.split([rows for _, rows in items])


class Worker:
    """What a rank does in one step."""

    def __init__(self, config: VllmConfig) -> None:
        ec_transfer_state._EC_CONNECTOR_AGENT = None
        ec_transfer_state.ensure_ec_transfer_initialized(config)
        self.cache = EncoderCache()
        self.connector = ActiveECConnector(config, self.cache.encoder_outputs)
        self.model = Model()
        self.runner = EncoderRunner(
            self.model, 512, HIDDEN, self.cache, torch.float32, torch.device("cpu")
        )

    def execute(self, step: Any, requests: dict[str, Any]) -> ModelRunnerOutput:
        for each in step.finished_req_ids:
            self.cache.remove_request(each)
        for each in step.free_encoder_mm_hashes:
            self.cache.free_encoder_cache(each)
        for new in step.scheduled_new_reqs:
            self.cache.add_request(new.req_id, new.mm_features)
        for request, updates in getattr(step, "encoder_input_updates", {}).items():
            self.cache.update_encoder_inputs(request, updates)
        if not step.total_num_scheduled_tokens:
            return self.connector.no_forward(step)
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        with self.connector.maybe_get_output(step) as ec_output:
            hashes, inputs = self.runner.prepare_mm_inputs(step.scheduled_encoder_inputs)
            if inputs:
                outputs = self.runner.execute_mm_encoder(inputs)
                self.cache.encoder_outputs.update(zip(hashes, outputs, strict=True))
            self.gather(step, starts, requests)
        return self.sample(step, starts, requests, ec_output)

    def gather(self, step: Any, starts: dict[str, int], requests: dict[str, Any]) -> None:
        """Checks what the language model gets, row by row."""
        names = list(starts)
        counts = np.array([step.num_scheduled_tokens[name] for name in names])
        found, _ = self.runner.gather_mm_embeddings(
            names,
            int(counts.sum()),
            counts,
            np.concatenate([[0], counts.cumsum()]),
            np.array([requests[name].num_prompt_tokens for name in names]),
            np.array([starts[name] for name in names]),
        )
        expected = []
        for name, count in zip(names, counts, strict=True):
            for feature in requests[name].mm_features:
                content, rows = feature.data["image"].data.tolist()
                first = max(starts[name] - feature.mm_position.offset, 0)
                end = min(starts[name] + int(count) - feature.mm_position.offset, rows)
                if first < end:
                    expected.append(encoded(content, rows, self.model.weights)[first:end])
        assert len(found) == len(expected)
        for ours, right in zip(found, expected, strict=True):
            assert ours.dtype == right.dtype
            assert torch.equal(ours.view(torch.uint8), right.view(torch.uint8))

    def sample(
        self, step: Any, starts: dict[str, int], requests: dict[str, Any], ec_output: Any
    ) -> ModelRunnerOutput:
        ends = {name: starts[name] + step.num_scheduled_tokens[name] for name in starts}
        result = {
            "req_ids": list(starts),
            "sampled_token_ids": [
                [1] if end >= requests[name].num_tokens else [] for name, end in ends.items()
            ],
            "ec_connector_output": ec_output,
        }
        if "req_id_to_index" in {each.name for each in fields(ModelRunnerOutput)}:  # vLLM 0.30
            result["req_id_to_index"] = {name: i for i, name in enumerate(starts)}
        return ModelRunnerOutput(**result)


class Engine:
    """What vLLM's engine does with a scheduler and its workers.

    Args:
        config: For them.
        asynchronous: Whether a step is scheduled before the scheduler hears of the last one.
        cache_size: Rows in the GPU's encoder cache, and rows encoded in one step.
    """

    def __init__(
        self, config: VllmConfig, *, asynchronous: bool = False, cache_size: int = 16
    ) -> None:
        attention = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        blocks = config.cache_config.num_gpu_blocks
        self.scheduler = (AsyncScheduler if asynchronous else Scheduler)(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        manager = type(self.scheduler.encoder_cache_manager)
        self.scheduler.encoder_cache_manager = manager.create_manager(
            cache_size=cache_size, vllm_config=config
        )
        self.scheduler.max_num_encoder_input_tokens = cache_size
        self.workers = []
        for rank in range(config.parallel_config.tensor_parallel_size):
            config.parallel_config.rank = rank  # as in that worker's process
            self.workers.append(Worker(config))
        self.requests: dict[str, Any] = {}
        self.finished: dict[str, str] = {}
        self.unheard: deque[tuple[Any, Any]] = deque()
        self.depth = int(asynchronous)
        self.aggregator: Any = ECOutputAggregator()
        self.seen: Counter[str] = Counter()

    @property
    def encoded(self) -> list[int]:
        """What the first rank has encoded."""
        return self.workers[0].model.encoded

    def ask(
        self, *items: tuple[int, int] | tuple[int, int, str], text: int = 1, tokens: int = 1
    ) -> str:
        """Adds a request.

        Args:
            items: Content and rows of each image, and its identifier if that isn't its own.
            text: Tokens before, between and behind the images.
            tokens: To generate.
        """
        features, offset = [], text
        for content, rows, *identifier in items:
            elem = MultiModalFieldElem(
                data=torch.tensor([content, rows]), field=MultiModalBatchedField()
            )
            features.append(
                MultiModalFeatureSpec(
                    data=MultiModalKwargsItem({"image": elem}),
                    modality="image",
                    identifier=identifier[0] if identifier else f"{content}x{rows}",
                    mm_position=PlaceholderRange(offset=offset, length=rows),
                )
            )
            offset += rows + text
        name = f"request {len(self.requests)}"
        self.requests[name] = Request(
            request_id=name,
            prompt_token_ids=[0] * offset,
            sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
            pooling_params=None,
            mm_features=features,
        )
        self.scheduler.add_request(self.requests[name])
        return name

    def step(self) -> Any:
        """Schedules and executes a step, and hears of the one that is due; returns its plan."""
        step = self.scheduler.schedule()
        sent = pickle.dumps(step.ec_connector_metadata)
        outputs = []
        for worker in self.workers:
            step.ec_connector_metadata = pickle.loads(sent)  # as if it were in another process
            outputs.append(worker.execute(step, self.requests))
        output = self.aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        self.unheard.append((step, output))
        while len(self.unheard) > self.depth:
            self.hear()
        return pickle.loads(sent)

    def hear(self) -> None:
        """Tells the scheduler of the oldest step that it hasn't heard of."""
        for outputs in self.scheduler.update_from_output(*self.unheard.popleft()).values():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    self.finished[output.request_id] = str(output.finish_reason)

    def run(self, steps: int = 1000) -> None:
        """Takes steps until no request is left, and two for what is left to tell."""
        while self.scheduler.has_unfinished_requests():
            self.step()
            steps -= 1
            assert steps, "no end"
        for _ in range(2):  # the second one evicts what the first one's report dropped
            self.step()
            while self.unheard:
                self.hear()

    def abort(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.finished:
                self.finished[name] = "abort"
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def update_weights(self, weights: int) -> None:
        """Loads other weights and resets the encoder caches, as vLLM's engine does."""
        for worker in self.workers:
            worker.model.weights = weights
        self.scheduler.reset_encoder_cache()
        for worker in self.workers:
            worker.cache.reset_encoder_cache()
