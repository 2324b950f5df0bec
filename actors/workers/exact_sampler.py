"""Verify drafts losslessly: accept a draft only if it is the token that would be sampled.

vLLM's rejection sampler draws from the right distribution, but with other random numbers: the same seed gives
another text. Here the engine's sampler draws position after position with the request's generator, and a
request reaches the next position only if its draft equals the drawn token. So a request makes exactly the
draws that it would make without drafts, in the same order.

This is for vLLM's model runner 1: the only one on CPUs, and the one that an engine with drafts uses on GPUs.
Without drafts, an engine on GPUs uses runner 2, unless VLLM_USE_V2_MODEL_RUNNER=0. Runner 2 draws Gumbel
noise from a hash of seed, position and token: with the same seed it gives another text, of the same
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

# vLLM's built-in processors, and the attribute that is 0 or empty if no request has the setting.
_WITHOUT_SETTING = {
    "MinPLogitsProcessor": "min_p_count",
    "LogitBiasLogitsProcessor": "biases",
    "MinTokensLogitsProcessor": "min_toks",
}


class DraftCounts(NamedTuple):
    """An engine's verified drafts since the last reading, one sample each; their tokens; accepted tokens."""

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*(a + b for a, b in zip(self, other, strict=True)))


class ExactSampler(RejectionSampler):
    """Replaces vLLM's rejection sampler in the engine's model runner."""

    _counts = DraftCounts()

    def take_counts(self) -> DraftCounts:
        """Return the counts since the last call. A draft that the engine dropped, because its sample had
        ended, does not count. Accepted tokens count as drawn, before the engine truncates a sample.
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
        """Return the drawn tokens of each request [B, D + 1] with at most D drafts, -1 after the last, and
        their log-probs. ``logits``: [drafts of all requests + B, V], grouped by request.
        """
        check(sampling_metadata)
        drafted = metadata.num_draft_tokens
        first = _first_rows(drafted)
        drafts = _split_by_request(metadata.draft_token_ids.tolist(), drafted)
        tokens = torch.full(
            (len(drafted), max(drafted) + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32, device=logits.device
        )
        logprobs: LogprobsTensors | None = None
        active, accepted = list(range(len(drafted))), 0  # requests with all drafts accepted; their tokens
        for position in range(max(drafted) + 1):
            rows = [first[request] + position for request in active]
            row_metadata = select_requests(sampling_metadata, active)
            output = self.sampler(logits=logits[rows], sampling_metadata=row_metadata)
            tokens[active, position] = output.sampled_token_ids[:, 0]
            if output.logprobs_tensors is not None:
                logprobs = _add_logprobs(logprobs, output.logprobs_tensors, tokens.shape, active, position)
            sampled = output.sampled_token_ids[:, 0].tolist()
            active = [
                request
                for request, token in zip(active, sampled, strict=True)
                if drafts[request][position : position + 1] == [token]
            ]
            accepted += len(active)
            if not active:
                break
        self._counts = self._counts.plus(DraftCounts(sum(map(bool, drafted)), sum(drafted), accepted))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def check(metadata: SamplingMetadata) -> None:
    """Raise NotImplementedError for settings that depend on previous tokens; a run's engines use none."""
    depends = {
        "penalties": not metadata.no_penalties,
        "bad words": bool(metadata.bad_words_token_ids),
        "allowed tokens": metadata.allowed_token_ids_mask is not None,
        "log-probs of chosen tokens": bool(metadata.logprob_token_ids),
    }
    unsupported = [name for name, used in depends.items() if used] + _processors(metadata)
    if unsupported:
        raise NotImplementedError(f"exact speculation does not support {', '.join(unsupported)}")


def _processors(metadata: SamplingMetadata) -> list[str]:
    """Return the logits processors that would change a logit. They identify requests by their rows in the
    batch, which differ here. The three built-in ones are always present and do nothing unless a request has
    their setting; others come from plugins.
    """
    processors = []
    for processor in metadata.logitsprocs.all:
        name = type(processor).__name__
        if name not in _WITHOUT_SETTING or getattr(processor, _WITHOUT_SETTING[name]):
            processors.append(f"the logits processor {name}")
    return processors


def select_requests(metadata: SamplingMetadata, requests: list[int]) -> SamplingMetadata:
    """Return the sampling settings of some requests of a batch; generators are shared with the batch."""

    def rows(values: torch.Tensor | None) -> Any:
        return None if values is None else values[requests]

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


def _split_by_request(drafts: list[int], drafted: list[int]) -> list[list[int]]:
    result, start = [], 0
    for count in drafted:
        result.append(drafts[start : start + count])
        start += count
    return result


def _add_logprobs(
    logprobs: LogprobsTensors | None,
    position_logprobs: LogprobsTensors,
    shape: torch.Size,
    requests: list[int],
    position: int,
) -> LogprobsTensors:
    """Write one position's log-probs into ``logprobs`` of all positions, [B * (D + 1), requested tokens]."""
    if logprobs is None:
        count, width = shape.numel(), position_logprobs.logprobs.shape[1]
        logprobs = LogprobsTensors(
            position_logprobs.logprob_token_ids.new_zeros((count, width)),
            position_logprobs.logprobs.new_zeros((count, width)),
            position_logprobs.selected_token_ranks.new_zeros(count),
        )
    rows = [request * shape[1] + position for request in requests]
    logprobs.logprob_token_ids[rows] = position_logprobs.logprob_token_ids
    logprobs.logprobs[rows] = position_logprobs.logprobs
    logprobs.selected_token_ranks[rows] = position_logprobs.selected_token_ranks
    return logprobs
