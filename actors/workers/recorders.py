"""Record sampling masks, and the experts of every token, in the worker process of an engine without a GPU.
vLLM's recorders (`return_sampling_mask`, `enable_return_routed_experts`) need a model runner that runs on
GPUs only. These recorders give vLLM's scheduler the same data, which it returns with each request:

    sampler: logits of -inf are not kept --> output of the step --> scheduler --> output of the request
    router of a layer --top-k--> RouteRecorder: [slots of the key-value cache, layers, k]
    scheduler: a request has a new token --> RecordedRoutes reads the slots of its blocks --> its output

Routes are stored per slot of the cache, so a prefix-cache hit also finds the routes of that prefix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker


class RecordingSampler(Sampler):
    """vLLM's sampler; it also keeps the masks of the last step."""

    masks: SamplingMaskLists | None = None

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, logprobs = super().sample(logits, sampling_metadata, logprobs_mode_override)
        assert logprobs is not None, "every request asks for log-probs"
        self.masks = kept_tokens(logprobs)
        return sampled, logprobs


def kept_tokens(logprobs: torch.Tensor) -> SamplingMaskLists:
    """Return each request's tokens whose log-prob [B, V] is not -inf; none if all tokens are kept."""
    kept = logprobs > -torch.inf
    kept &= ~kept.all(dim=1, keepdim=True)
    rows, ids = np.nonzero(kept.numpy())
    counts = np.bincount(rows, minlength=len(kept))
    return SamplingMaskLists(ids.astype(np.int32), np.concatenate([[0], np.cumsum(counts)]))


def record_masks(core: Any) -> None:
    """Make an engine's requests return their masks. ``core``: vLLM's, with its worker in this process."""
    runner = core.model_executor.driver_worker.worker.model_runner
    runner.sampler = RecordingSampler(runner.sampler.logprobs_mode, runner.sampler.use_fp64_gumbel)
    sample_tokens = runner.sample_tokens

    def with_masks(grammar_output: Any) -> Any:
        output = sample_tokens(grammar_output)
        output.sampling_masks, runner.sampler.masks = runner.sampler.masks, None
        return output

    runner.sample_tokens = with_masks
    core.scheduler.return_sampling_mask = True


_recorder: RouteRecorder | None = None  # this process's recorder; None: the cache is not allocated yet


class RouteRecorder:
    """The experts of every token in the key-value cache, logical ids.

    ``slots``: capacity of the cache, tokens. ``layers``: decoder layers; layers without experts stay 0.
    """

    def __init__(self, slots: int, block_size: int, layers: int, experts: int, per_token: int) -> None:
        self._block_size = block_size
        self._rows = np.zeros((slots, layers, per_token), np.uint8 if experts <= 256 else np.uint16)

    def record(self, layer: int, slots: np.ndarray, experts: np.ndarray) -> None:
        """Store ``experts`` [N, k] of the tokens in ``slots`` [N]; -1: the token is not cached."""
        cached = slots >= 0
        self._rows[slots[cached], layer] = experts[cached]

    def routes(self, blocks: list[int], begin: int, end: int) -> np.ndarray:
        """Return the routes of tokens [begin, end) of the sequence in ``blocks``: [end - begin, L, k]."""
        tokens = np.arange(begin, end)
        size = self._block_size
        copied: np.ndarray = self._rows[np.asarray(blocks)[tokens // size] * size + tokens % size]
        return copied


@torch.library.custom_op("grpo_dist::record_routes", mutates_args=("experts",), device_types="cpu")
def record_routes(experts: torch.Tensor, layer: int) -> None:
    """Record the experts [N, k] of this step's tokens. A single operation for the compiler, which keeps it
    because it is declared to mutate ``experts``.
    """
    slots = get_forward_context().slot_mapping
    if _recorder is None or not isinstance(slots, dict) or not slots:  # a profiling run, which caches nothing
        return
    token_slots = next(iter(slots.values()))[: len(experts)]
    _recorder.record(layer, token_slots.numpy(), experts.numpy())


@record_routes.register_fake
def _(experts: torch.Tensor, layer: int) -> None:
    return None


class RecordingWorker(CPUWorker):
    """vLLM's worker with a route recorder."""

    def load_model(self, **how: Any) -> None:
        super().load_model(**how)
        bind(self.model_runner.model)  # before it is compiled

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        groups, model = kv_cache_config.kv_cache_groups, self.model_config
        spec = groups[0].kv_cache_spec
        if len(groups) > 1 or not isinstance(spec, FullAttentionSpec):
            raise ValueError(
                "policy.router_replay: the engine forgets the routes outside of this model's sliding window; "
                "use a model without one, or remove policy.router_replay"
            )
        global _recorder
        self.route_recorder = _recorder = RouteRecorder(
            kv_cache_config.num_blocks * spec.block_size,
            spec.block_size,
            model.get_total_num_hidden_layers(),
            model.get_num_experts(),
            model.get_num_experts_per_tok(),
        )


def bind(model: torch.nn.Module) -> None:
    """Make the routers of ``model`` report to the recorder. Raises ValueError if one cannot."""
    runners = [module for module in model.modules() if isinstance(module, MoERunner)]
    for runner in runners:
        if runner.is_monolithic or not isinstance(runner.router, BaseRouter):
            raise ValueError(
                "policy.router_replay: this processor's kernel for experts does not show its routes; remove "
                "policy.router_replay"
            )
        runner.router.set_capture_fn(_reporter(runner.layer_id))


def _reporter(layer: int) -> Any:
    return lambda experts: record_routes(experts, layer)


class RecordedRoutes:
    """Gives vLLM's scheduler the routes of its requests; replaces its connector."""

    def __init__(self, scheduler: Any, recorder: RouteRecorder) -> None:
        self._cache, self._recorder = scheduler.kv_cache_manager, recorder
        self._taken: dict[str, int] = {}  # tokens per request whose routes were returned

    def build_connector_meta(self, *_: Any) -> None:
        """Do nothing: the recorder needs no metadata."""

    def take_output(self, request: Any, _: Any) -> np.ndarray | None:
        """Return the routes of the tokens computed since the last call; the newest token is not computed."""
        begin, end = self._taken.get(request.request_id, 0), request.num_tokens - 1
        if end <= begin:
            return None
        self._taken[request.request_id] = end
        (blocks,) = self._cache.get_block_ids(request.request_id)
        return self._recorder.routes(blocks, begin, end)

    def request_finished(self, request: Any) -> None:
        """Forget a finished request. A preempted one continues where it was."""
        if request.is_finished():
            self._taken.pop(request.request_id, None)

    def reset(self) -> None:
        """Do nothing: the recorder's rows change with the cache."""


def attach(engine: Any) -> None:
    """Make the requests of ``engine`` return their routes. ``engine``: vLLM's, in this process, with a
    `RecordingWorker`.
    """
    core = engine.engine_core.engine_core
    recorder = core.model_executor.driver_worker.worker.route_recorder
    core.scheduler.aux_output_connector = RecordedRoutes(core.scheduler, recorder)
