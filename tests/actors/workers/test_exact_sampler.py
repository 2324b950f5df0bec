"""Exact speculation refuses, by name, what it would sample wrongly."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.machine  # imports the engine


def metadata(processors):
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    return SamplingMetadata(
        temperature=None, all_greedy=False, all_random=True, top_p=None, top_k=None, generators={},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=None,
        presence_penalties=None, repetition_penalties=None, output_token_ids=[], allowed_token_ids_mask=None,
        bad_words_token_ids={}, logitsprocs=LogitsProcessors(processors),
    )  # fmt: skip


def verify(sampler, drafts, drawn):
    """Verify ``drafts`` of each request against the tokens that will be drawn."""
    import torch

    # The sampler below draws what it gets.
    logits = torch.tensor([[token] for tokens in drawn for token in tokens], dtype=torch.int32)
    metadata_of_drafts = SimpleNamespace(
        num_draft_tokens=[len(draft) for draft in drafts],
        draft_token_ids=torch.tensor([token for draft in drafts for token in draft]),
    )
    settings = replace(metadata([]), output_token_ids=[[] for _ in drafts])
    return sampler.forward(metadata_of_drafts, None, logits, settings).sampled_token_ids.tolist()


def test_what_was_verified_is_counted_once():
    """Drafts 2: one with both tokens right, one with none of 2; a request without a draft is no draft."""
    from actors.workers.exact_sampler import ExactSampler

    sampler = object.__new__(ExactSampler)  # vLLM's constructor needs an engine's sampler
    object.__setattr__(
        sampler, "sampler",
        lambda logits, sampling_metadata: SimpleNamespace(sampled_token_ids=logits, logprobs_tensors=None),
    )  # fmt: skip
    drafts, drawn = [[5, 6], [], [7, 8]], [[5, 6, 9], [3], [4, 8, 1]]
    assert verify(sampler, drafts, drawn) == [[5, 6, 9], [3, -1, -1], [4, -1, -1]]
    assert sampler.take_counts() == (2, 4, 2)
    verify(sampler, [[5], [1]], [[5, 2], [1, 3]])
    verify(sampler, [[5]], [[5, 2]])
    assert sampler.take_counts() == (3, 3, 3) and sampler.take_counts() == (0, 0, 0)


class Doubles:
    """A logits processor of a plugin."""

    def is_argmax_invariant(self):
        return True


def builtin():
    """Return the engine's built-in processors, as it makes them for every batch."""
    import torch
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    )

    bias, tokens, probability = (
        object.__new__(kind)
        for kind in (LogitBiasLogitsProcessor, MinTokensLogitsProcessor, MinPLogitsProcessor)
    )
    bias.biases, tokens.min_toks, probability.min_p_count = {}, {}, 0
    probability.min_p = torch.zeros(2)
    return bias, tokens, probability


def test_a_processor_that_changes_logits_is_refused_by_its_name():
    from actors.workers.exact_sampler import check

    bias, tokens, probability = builtin()
    bias.biases, tokens.min_toks, probability.min_p_count = {0: {3: 1.0}}, {1: (2, [], set(), True)}, 1
    for processor in (bias, tokens, probability, Doubles()):
        with pytest.raises(NotImplementedError, match=f"logits processor {type(processor).__name__}"):
            check(metadata([processor]))


def test_the_names_match_the_engine():
    """A renamed class or attribute would be refused in every batch, or pass unnoticed."""
    import inspect

    from vllm.v1.sample.logits_processor import builtin as engine

    from actors.workers.exact_sampler import _WITHOUT_SETTING

    for name, attribute in _WITHOUT_SETTING.items():
        assert f"self.{attribute}" in inspect.getsource(getattr(engine, name).__init__)
    kinds = {
        name
        for name, kind in vars(engine).items()
        if inspect.isclass(kind) and kind.__module__ == engine.__name__
    }
    assert kinds == set(_WITHOUT_SETTING)
