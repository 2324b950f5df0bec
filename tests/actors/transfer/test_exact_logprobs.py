"""Log-probs of a CPU engine with a large vocabulary are exact to rounding."""

import pytest
import torch

from actors.transfer.vllm_plugin import exact_logprobs


def logits(size, rows=6):
    """Peaked, as a model's are: the largest of a row has most of its probability."""
    values = torch.randn(rows, size, generator=torch.Generator().manual_seed(size)) * 4
    values[:, 0] = values.amax(dim=1) + 1
    return values


@pytest.mark.parametrize("size", [49152, 151_936, 50_257])
def test_log_probs_of_a_large_vocabulary_have_no_bias(size):
    values = logits(size)
    torchs, exact = values.log_softmax(dim=-1), values.double().log_softmax(dim=-1)
    ours = exact_logprobs(torchs.clone())
    assert float((ours - exact)[:, 0].abs().max()) < 3e-7
    assert float((torchs - exact)[:, 0].mean()) > 2e-6, "torch's sums are exact now: remove `exact_logprobs`"


def test_a_row_has_the_same_bits_alone_and_with_others_on_any_number_of_threads():
    values = logits(49152, rows=40).log_softmax(dim=-1)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            results.append(exact_logprobs(values.clone()))
            results.append(torch.cat([exact_logprobs(row[None].clone()) for row in values]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results)


def test_tokens_that_cannot_be_sampled_stay_impossible_and_small_vocabularies_as_they_are():
    values = logits(10_000)
    values[:, 5:9000] = -torch.inf
    exact = exact_logprobs(values.log_softmax(dim=-1))
    assert torch.isneginf(exact[:, 5:9000]).all()
    torch.testing.assert_close(exact.exp().double().sum(1), torch.ones(6).double(), atol=1e-6, rtol=0)
    small = logits(8000).log_softmax(dim=-1)
    assert exact_logprobs(small) is small
