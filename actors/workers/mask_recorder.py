"""Records sampling masks in an engine without a GPU: which tokens each token was sampled from.

vLLM's own recorder (`return_sampling_mask`) needs a model runner that runs on GPUs only. This one gives
vLLM's scheduler the same masks, which returns them with each request:

    sampler: logits of -inf are not kept --> output of the step --> scheduler --> output of the request
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler


class RecordingSampler(Sampler):
    """vLLM's sampler, which keeps the masks of the last step."""

    masks: SamplingMaskLists | None = None

    def sample(
        self, logits: torch.Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sampled, logprobs = super().sample(logits, sampling_metadata, logprobs_mode_override)
        assert logprobs is not None, "every request asks for log-probs"
        self.masks = kept_tokens(logprobs)
        return sampled, logprobs


def kept_tokens(logprobs: torch.Tensor) -> SamplingMaskLists:
    """Return the tokens of each request whose log-prob [B, V] is not -inf; none where all are."""
    kept = logprobs > -torch.inf
    kept &= ~kept.all(dim=1, keepdim=True)
    rows, ids = np.nonzero(kept.numpy())
    counts = np.bincount(rows, minlength=len(kept))
    return SamplingMaskLists(ids.astype(np.int32), np.concatenate([[0], np.cumsum(counts)]))


def record_masks(core: Any) -> None:
    """Have an engine's requests return their masks. ``core``: vLLM's, with its worker in this process."""
    runner = core.model_executor.driver_worker.worker.model_runner
    runner.sampler = RecordingSampler(runner.sampler.logprobs_mode, runner.sampler.use_fp64_gumbel)
    sample_tokens = runner.sample_tokens

    def with_masks(grammar_output: Any) -> Any:
        output = sample_tokens(grammar_output)
        output.sampling_masks, runner.sampler.masks = runner.sampler.masks, None
        return output

    runner.sample_tokens = with_masks
    core.scheduler.return_sampling_mask = True
