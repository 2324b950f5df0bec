"""Verify drafted tokens without changing a sample: a draft is right if it is the token that would be drawn.

vLLM's own rejection sampler draws from the right distribution, but with other random numbers: the same seed
gives another text. Here the engine's own sampler draws each position with the request's own generator, one
position after the other, and a request reaches the next position only where its draft was the token drawn.
So a request makes the draws that it would have made without drafts, in their order, and no others.

This is of vLLM's model runner 1: the only one on CPUs, and the one that an engine with drafts takes on GPUs.
Without drafts an engine on GPUs takes runner 2, unless VLLM_USE_V2_MODEL_RUNNER=0. That one draws Gumbel
noise from a hash of seed, position and token: against it the same seed gives another text, of the same
distribution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

# vLLM's own processors, and the attribute that is 0 or empty where no request has the setting.
_WITHOUT_SETTING = {
    "MinPLogitsProcessor": "min_p_count",
    "LogitBiasLogitsProcessor": "biases",
    "MinTokensLogitsProcessor": "min_toks",
}


class DraftCounts(NamedTuple):
    """What an engine verified since the last reading: drafts of one sample each, their tokens, and those that
    were right.
    """

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*(a + b for a, b in zip(self, other, strict=True)))


class ExactSampler(RejectionSampler):
    """Takes the place of vLLM's rejection sampler in the engine's model runner."""

    _counts = DraftCounts()

    def take_counts(self) -> DraftCounts:
        """Return what was verified since the last call. A draft that the engine gave up, because its sample
        had ended, does not count. Right tokens count as drawn, before the engine cuts a sample at its end.
        """
        counts, self._counts = self._counts, DraftCounts()
        return counts

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Return the tokens drawn of each request [B, D + 1] with D drafts at most, -1 after the last, and
        their log-probs. ``logits``: [drafts of all requests + B, V], each request's positions together.
        """
        check(sampling_metadata)
        drafted = metadata.num_draft_tokens
        first = _first_rows(drafted)
        drafts = _by_request(metadata.draft_token_ids.tolist(), drafted)
        tokens = torch.full(
            (len(drafted), max(drafted) + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=logits.device
        )
        logprobs: LogprobsTensors | None = None
        going, right = list(range(len(drafted))), 0  # requests whose drafts were right so far; their tokens
        for position in range(max(drafted) + 1):
            rows = [first[request] + position for request in going]
            row_metadata = select_requests(sampling_metadata, going)
            drawn = self.sampler(logits=logits[rows], sampling_metadata=row_metadata)
            tokens[going, position] = drawn.sampled_token_ids[:, 0]
            if drawn.logprobs_tensors is not None:
                logprobs = _noted(logprobs, drawn.logprobs_tensors, tokens.shape, going, position)
            sampled = drawn.sampled_token_ids[:, 0].tolist()
            going = [
                request
                for request, token in zip(going, sampled, strict=True)
                if drafts[request][position : position + 1] == [token]
            ]
            right += len(going)
            if not going:
                break
        self._counts = self._counts.plus(DraftCounts(sum(map(bool, drafted)), sum(drafted), right))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def check(metadata: SamplingMetadata) -> None:
    """Raise NotImplementedError for settings that depend on the tokens before: the engines of a run have
    none of them.
    """
    depends = {
        "penalties": not metadata.no_penalties,
        "bad words": bool(metadata.bad_words_token_ids),
        "allowed tokens": metadata.allowed_token_ids_mask is not None,
        "log-probs of chosen tokens": bool(metadata.logprob_token_ids),
    }
    unsupported = [name for name, used in depends.items() if used] + _processors(metadata)
    if unsupported:
        raise NotImplementedError(f"exact speculation does not know {', '.join(unsupported)}")


def _processors(metadata: SamplingMetadata) -> list[str]:
    """Return the logits processors that would change a logit. They know requests by their rows in the batch,
    which are other rows here. The engine has its own three always, and they do nothing without a request's
    setting; any other comes from a plugin.
    """
    processors = []
    for processor in metadata.logitsprocs.all:
        name = type(processor).__name__
        if name not in _WITHOUT_SETTING or getattr(processor, _WITHOUT_SETTING[name]):
            processors.append(f"the logits processor {name}")
    return processors


def select_requests(metadata: SamplingMetadata, requests: list[int]) -> SamplingMetadata:
    """Return the sampling settings of some requests of a batch, which share their generators with it."""

    def rows(of_all: torch.Tensor | None) -> Any:
        return None if of_all is None else of_all[requests]

    generators = {
        row: metadata.generators[request]
        for row, request in enumerate(requests)
        if request in metadata.generators
    }
    return replace(
        metadata,
        temperature=rows(metadata.temperature),
        top_p=rows(metadata.top_p),
        top_k=rows(metadata.top_k),
        generators=generators,
        output_token_ids=[metadata.output_token_ids[request] for request in requests]
        if metadata.output_token_ids
        else [],
        spec_token_ids=None,
    )


def _first_rows(drafted: list[int]) -> list[int]:
    """Return the row of each request's first position: [3, 0, 2] drafts -> [0, 4, 5]."""
    first, row = [], 0
    for count in drafted:
        first.append(row)
        row += count + 1
    return first


def _by_request(drafts: list[int], drafted: list[int]) -> list[list[int]]:
    result, start = [], 0
    for count in drafted:
        result.append(drafts[start : start + count])
        start += count
    return result


def _noted(
    noted: LogprobsTensors | None,
    drawn: LogprobsTensors,
    shape: torch.Size,
    requests: list[int],
    position: int,
) -> LogprobsTensors:
    """Enter the log-probs of one position into those of all, [B * (D + 1), tokens asked for]."""
    if noted is None:
        count, width = shape.numel(), drawn.logprobs.shape[1]
        noted = LogprobsTensors(
            drawn.logprob_token_ids.new_zeros((count, width)),
            drawn.logprobs.new_zeros((count, width)),
            drawn.selected_token_ranks.new_zeros(count),
        )
    at = [request * shape[1] + position for request in requests]
    noted.logprob_token_ids[at] = drawn.logprob_token_ids
    noted.logprobs[at] = drawn.logprobs
    noted.selected_token_ranks[at] = drawn.selected_token_ranks
    return noted
