"""Chunked log-probs against the dense float64 definition: values, entropies, gradients, memory."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_dist.algorithms.kl import DIVERGENCES
from grpo_dist.policy import logprobs
from grpo_dist.policy.logprobs import token_logprobs
from grpo_dist.policy.packing import padded
from grpo_dist.types import TeacherStream

B, T, D, V = 3, 7, 5, 41


def problem(dtype=torch.float32, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64) * scale
    bias = torch.randn(V, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, V, (B, T), generator=generator)
    mask = torch.rand(B, T, generator=generator) < 0.6
    return [t.to(dtype).requires_grad_() for t in (hidden, weight, bias)], tokens, mask


def dense(leaves, tokens, mask, temperature):
    """Compute the definition from all logits in float64: the hidden state at t - 1 predicts position t."""
    hidden, weight, bias = (t.double() for t in leaves)
    logp = ((hidden @ weight.T + bias) / temperature).log_softmax(-1)
    logprobs, entropy = (torch.zeros(tokens.shape, dtype=torch.float64) for _ in range(2))
    for b in range(B):
        for t in range(1, T):
            if mask[b, t]:
                logprobs[b, t] = logp[b, t - 1, tokens[b, t]]
                entropy[b, t] = -(logp[b, t - 1].exp() * logp[b, t - 1]).sum()
    return logprobs, entropy


def gradients(values, leaves, seed=9):
    upstream = torch.randn(B, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad((values * upstream).sum(), leaves, retain_graph=True)


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "gradient_tolerance"),
    [(torch.float64, 1e-13, 1e-13), (torch.float32, 2e-6, 2e-6), (torch.bfloat16, 2e-6, 3e-3)],
)
def test_logprobs_entropy_and_gradients_are_those_of_all_logits_at_once(
    dtype, tolerance, gradient_tolerance, temperature, chunk_tokens
):
    """In bfloat16 only the dtype of the gradients rounds; log-probs are float32 throughout."""
    leaves, tokens, mask = problem(dtype)
    hidden, weight, bias = leaves
    actual, entropy = token_logprobs(
        hidden, weight, tokens, temperature=temperature, chunk_tokens=chunk_tokens, bias=bias,
        with_entropy=True, mask=mask,
    )  # fmt: skip
    expected, expected_entropy = dense(leaves, tokens, mask, temperature)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert actual.dtype == entropy.dtype == wide
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=tolerance, atol=tolerance)
    together, expected_together = actual + 0.3 * entropy, expected + 0.3 * expected_entropy
    for ours, theirs in ((actual, expected), (entropy, expected_entropy), (together, expected_together)):
        pairs = zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True)
        assert all(a.dtype == dtype and relative(a, b) < gradient_tolerance for a, b in pairs)


def test_entry_t_is_the_token_at_t_and_the_first_token_has_none():
    """The head predicts the same token again with certainty: only repetitions have log-prob 0."""
    tokens = torch.tensor([[2, 2, 1, 1, 1, 0]])
    hidden = torch.nn.functional.one_hot(tokens, 3).float()
    logprobs, entropy = token_logprobs(hidden, torch.eye(3) * 100, tokens, temperature=1.0, chunk_tokens=2)
    assert logprobs.tolist() == [[0.0, 0.0, -100.0, 0.0, 0.0, -100.0]] and entropy is None


def test_entropy_of_a_uniform_distribution_is_the_logarithm_of_its_size():
    _, entropy = token_logprobs(
        torch.zeros(1, 3, D), torch.randn(V, D), torch.zeros(1, 3, dtype=torch.long),
        temperature=1.0, chunk_tokens=8, with_entropy=True,
    )  # fmt: skip
    torch.testing.assert_close(entropy, torch.tensor([[0.0, 1, 1]]) * torch.log(torch.tensor(float(V))))


def test_chunk_size_and_row_split_leave_values_alone():
    (hidden, weight, _), tokens, mask = problem(scale=10.0)
    how = {"temperature": 0.9, "mask": mask}
    whole, _ = token_logprobs(hidden, weight, tokens, chunk_tokens=1000, **how)
    for chunk in (1, 2, 3, 5):
        values, _ = token_logprobs(hidden, weight, tokens, chunk_tokens=chunk, **how)
        torch.testing.assert_close(values, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_unwanted_positions_are_never_computed(garbage):
    (hidden, weight, _), tokens, mask = problem()
    mask[:, 0] = True  # nothing predicts the first token, for any mask
    used = torch.zeros(B, T, dtype=torch.bool)
    used[:, :-1] = mask[:, 1:]
    how = {"temperature": 1.0, "chunk_tokens": 4, "mask": mask}
    clean, _ = token_logprobs(hidden, weight, tokens, **how)
    spoilt = torch.where(used[..., None], hidden.detach(), garbage).requires_grad_()
    bad_tokens = torch.where(mask, tokens, -100)
    actual, _ = token_logprobs(spoilt, weight, bad_tokens, **how)
    assert torch.equal(actual, clean)
    assert torch.equal(actual[~mask], torch.zeros(int((~mask).sum())))
    assert torch.equal(actual[:, 0], torch.zeros(B))
    actual.sum().backward()
    assert torch.equal(spoilt.grad[~used], torch.zeros(int((~used).sum()), D))
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("width", [1, T])
def test_nothing_wanted_gives_zero_and_zero_gradient(width):
    (hidden, weight, bias), tokens, _ = problem()
    logprobs, entropy = token_logprobs(
        hidden[:, :width], weight, tokens[:, :width], temperature=1.0, chunk_tokens=4, bias=bias,
        with_entropy=True, mask=torch.zeros(B, width, dtype=torch.bool),
    )  # fmt: skip
    assert not logprobs.any() and not entropy.any()
    for gradient in torch.autograd.grad(logprobs.sum(), (hidden, weight, bias)):
        assert not gradient.any()


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_no_more_logits_exist_than_a_chunk_forward_and_backward():
    rows, chunk, vocabulary = 64, 4, 500
    hidden = torch.randn(2, rows, 3, requires_grad=True)
    weight = torch.randn(vocabulary, 3, requires_grad=True)
    tokens = torch.randint(0, vocabulary, (2, rows))
    with Largest() as seen:
        logprobs, _ = token_logprobs(
            hidden, weight, tokens, temperature=0.7, chunk_tokens=chunk, with_entropy=True
        )
        logprobs.sum().backward()
    assert seen.elements == chunk * vocabulary


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_score_norms_are_those_of_all_logits_at_once(dtype, tolerance, chunk_tokens):
    """The norm of autograd's gradient of log p by the logits; also with a temperature per row."""
    (hidden, weight, bias), tokens, mask = problem(dtype)
    for temperature in (0.7, torch.tensor([0.5, 1.0, 1.5])):
        layout = padded(tokens, mask, temperature if isinstance(temperature, torch.Tensor) else None)
        used = temperature if layout.temperature is None else layout.temperature
        rows = hidden.flatten(0, 1)[layout.sources]
        norms = logprobs.selected_score_norms(
            rows, weight, layout.targets, temperature=used, chunk_tokens=chunk_tokens, bias=bias
        )
        scaled = used[:, None].double() if isinstance(used, torch.Tensor) else used
        logits = ((rows.double() @ weight.double().T + bias.double()) / scaled).detach().requires_grad_()
        chosen = logits.log_softmax(-1).gather(1, layout.targets[:, None]).sum()
        (gradient,) = torch.autograd.grad(chosen, logits)
        assert norms.dtype == dtype and not norms.requires_grad
        exact = gradient.square().sum(dim=1)
        torch.testing.assert_close(norms.double(), exact, rtol=tolerance, atol=tolerance)


def test_the_score_norm_of_an_almost_certain_token_keeps_its_digits():
    """Two tokens 20 nats apart: 2 exp(-40), where 1 - 2 p + sum of p^2 is 0 in float32."""
    norms = logprobs.selected_score_norms(
        torch.ones(2, 1), torch.tensor([[20.0], [0.0]]), torch.tensor([0, 1]), temperature=1.0, chunk_tokens=2
    )
    torch.testing.assert_close(norms, torch.tensor([2 * math.exp(-40), 2.0]), rtol=1e-5, atol=0.0)


def test_the_weight_is_trained_through_both_uses_when_it_is_tied():
    """Embedding and head share a tensor: its gradient is the sum of both paths."""
    leaves, tokens, mask = problem(torch.float64)
    weight = leaves[1]

    def loss(embedding, head):
        hidden = torch.tanh(embedding[tokens])
        how = {"temperature": 1.0, "chunk_tokens": 4, "mask": mask}
        return token_logprobs(hidden, head, tokens, **how)[0].sum()

    (tied,) = torch.autograd.grad(loss(weight, weight), weight)
    separate = [weight.detach().clone().requires_grad_() for _ in range(2)]
    parts = torch.autograd.grad(loss(*separate), separate)
    assert relative(tied, parts[0] + parts[1]) < 1e-14


class OutTypes(TorchDispatchMode):
    """Computes products of bfloat16 with a float32 result, for which only GPUs have kernels."""

    def __init__(self):
        super().__init__()
        self.allocated = []  # operation and shape of every newly allocated result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.ops.aten.mm.dtype:
            a, b, dtype = args
            out = a.to(dtype) @ b.to(dtype)
        elif func == torch.ops.aten.addmm.dtype_out:
            total, a, b, dtype = args
            return kwargs["out"].copy_(total + a.to(dtype) @ b.to(dtype))
        else:
            out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and all(out is not a for a in args):
            self.allocated.append((str(func), tuple(out.shape)))
        return out


def test_on_tensor_cores_the_weights_gradient_is_added_up_in_place(monkeypatch):
    """In float32 [V, D] it is the largest tensor: a second one per block would double the memory traffic."""
    rows, vocabulary = 64, 500
    weight = torch.randn(vocabulary, 16).bfloat16()
    hidden, targets = torch.randn(rows, 16).bfloat16(), torch.randint(0, vocabulary, (rows,))
    upstream = torch.randn(rows)

    def gradient(use_tensor_cores):
        leaf = weight.clone().requires_grad_()
        init = logprobs._Head.__init__

        def on_a_gpu(head, *arguments):
            init(head, *arguments)
            head._tensor_cores, head._operand, head.weight = True, torch.bfloat16, arguments[1].detach()

        if use_tensor_cores:
            monkeypatch.setattr(logprobs._Head, "__init__", on_a_gpu)
        with OutTypes() as seen:
            values, *_ = logprobs.selected_logprobs(hidden, leaf, targets, temperature=0.7, chunk_tokens=8)
            values.backward(upstream)
        whole = [name for name, shape in seen.allocated if shape == (vocabulary, 16)]
        return leaf.grad, whole

    ours, whole = gradient(use_tensor_cores=True)
    reference, _ = gradient(use_tensor_cores=False)
    assert relative(ours, reference) < 3e-3
    assert not [name for name in whole if "mm" in name], whole


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
def test_each_token_has_the_log_probs_entropy_and_gradients_of_its_temperature(chunk_tokens):
    """Compared row by row with calls at one temperature, in float64."""
    (hidden, weight, bias), tokens, mask = problem(torch.float64)
    temperatures = torch.tensor([0.5, 1.0, 1.7], dtype=torch.float64)
    layout = padded(tokens, mask, temperatures)
    *actual, _ = logprobs.selected_logprobs(
        hidden.flatten(0, 1)[layout.sources], weight, layout.targets,
        temperature=layout.temperature, chunk_tokens=chunk_tokens, bias=bias, with_entropy=True,
    )  # fmt: skip
    values, entropies = (layout.unpack_rows(v) for v in actual)
    expected = [dense([hidden, weight, bias], tokens, mask, float(t)) for t in temperatures]
    for row in range(B):
        # float32 holds 1.7 to 1e-7 of its size
        assert torch.allclose(values[row], expected[row][0][row], atol=1e-5)
        assert torch.allclose(entropies[row], expected[row][1][row], atol=1e-5)
    sums = torch.stack([expected[row][0][row] + expected[row][1][row] for row in range(B)])
    leaves = (hidden, weight, bias)
    pairs = zip(gradients(values + entropies, leaves), gradients(sums, leaves), strict=True)
    assert all(relative(a, b) < 1e-6 for a, b in pairs)


@pytest.mark.parametrize("temperature", [1.0, "each"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "gradient_tolerance"),
    [(torch.float64, 1e-13, 1e-13), (torch.float32, 2e-6, 2e-6), (torch.bfloat16, 2e-6, 3e-3)],
)
def test_log_probs_of_further_tokens_and_all_gradients_are_those_of_all_logits_at_once(
    dtype, tolerance, gradient_tolerance, chunk_tokens, temperature
):
    """With and without gradients of the sampled tokens' log-probs and of entropies."""
    leaves, tokens, mask = problem(dtype)
    temperatures = torch.tensor([0.5, 1.0, 1.7]) if temperature == "each" else torch.ones(B)
    generator = torch.Generator().manual_seed(2)
    candidates = torch.stack([torch.randperm(V, generator=generator)[:4] for _ in range(B * T)]).view(B, T, 4)
    candidates[0, :, 1] = tokens[0]  # the teacher may find the sampled token likely
    teacher = TeacherStream(mask, torch.zeros(B, T), candidates, torch.zeros(candidates.shape))
    layout = padded(tokens, mask, temperatures, teacher=teacher)
    rows = leaves[0].flatten(0, 1)[layout.sources]
    actual = logprobs.selected_logprobs(
        rows, leaves[1], layout.targets, layout.candidates,
        temperature=layout.temperature, chunk_tokens=chunk_tokens, bias=leaves[2], with_entropy=True,
    )  # fmt: skip
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    by_token = temperatures[:, None].expand(B, T).double()[:, 1:][mask[:, 1:]]
    logits = exact[0].flatten(0, 1)[layout.sources] @ exact[1].T + exact[2]
    logp = (logits / by_token[:, None]).log_softmax(-1)
    values, picked = logp.gather(1, layout.targets[:, None])[:, 0], logp.gather(1, layout.candidates)
    expected = (values, -(logp.exp() * logp).sum(-1), picked)
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative(ours, theirs) < tolerance
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in expected]
    for used in ([2], [0, 2], [0, 1, 2]):
        gradients_of = [
            torch.autograd.grad(sum((each[i] * weights[i]).sum() for i in used), inputs, retain_graph=True)
            for each, inputs in ((actual, leaves), (expected, exact))
        ]
        for ours, theirs in zip(*gradients_of, strict=True):
            assert relative(ours, theirs) < gradient_tolerance


@pytest.mark.parametrize("vocabulary", [None, 30])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
def test_the_top_k_tokens_are_those_of_all_logits_at_once(chunk_tokens, vocabulary):
    """Of the first ``vocabulary`` tokens, if the policy has no more; log-probs of the whole distribution."""
    (hidden, weight, bias), tokens, mask = problem(torch.float64)
    layout = padded(tokens, mask)
    rows = hidden.flatten(0, 1)[layout.sources]
    values, ids, top = logprobs.top_logprobs(
        rows, weight, layout.targets, 5,
        temperature=0.7, chunk_tokens=chunk_tokens, bias=bias, vocabulary=vocabulary,
    )  # fmt: skip
    logp = ((rows @ weight.T + bias) / 0.7).log_softmax(-1)
    best = logp[:, :vocabulary].topk(5, dim=1)
    assert torch.equal(ids.long(), best.indices) and not top.requires_grad
    torch.testing.assert_close(top, best.values)
    torch.testing.assert_close(values, logp.gather(1, layout.targets[:, None])[:, 0])


@pytest.mark.parametrize("left", [1e-6, 4e-5, 2e-2])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_near_the_teacher_the_gradient_is_rounded_to_bfloat16_once(monkeypatch, name, left):
    """The gradient through a token's logit and through the normaliser nearly cancel: as two bfloat16 numbers,
    a tenth of the difference would be noise.
    """
    rows, width, count = 32, 64, 16
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, width, generator=generator).bfloat16()
    weight = (torch.randn(V * 4, width, generator=generator) / 4).bfloat16()
    weight[:count] += 0.05 * torch.randn(count, width, generator=generator).bfloat16()
    logits = hidden.double() @ weight.double().T
    bias = torch.zeros(V * 4, dtype=torch.float64)
    inside, outside = (part.logsumexp(1).mean() for part in (logits[:, :count], logits[:, count:]))
    bias[count:] = math.log(left) + inside - outside
    teacher = (logits + bias)[:, :count] + 0.05 * torch.randn(rows, count, generator=generator)
    teacher = teacher.log_softmax(1) + math.log(1 - 2 * left)
    ids, targets = torch.arange(count).expand(rows, count), torch.zeros(rows, dtype=torch.int64)

    def on_a_gpu(head, *arguments):
        init(head, *arguments)
        head._tensor_cores, head._operand, head.weight = True, torch.bfloat16, arguments[1].detach()

    init = logprobs._Head.__init__
    leaf, exact = bias.float().requires_grad_(), bias.clone().requires_grad_()
    monkeypatch.setattr(logprobs._Head, "__init__", on_a_gpu)
    with OutTypes():
        how = {"temperature": 1.0, "chunk_tokens": 8, "bias": leaf}
        *_, candidates = logprobs.selected_logprobs(hidden, weight, targets, ids, **how)
        DIVERGENCES[name](candidates, teacher.float()).sum().backward()
    DIVERGENCES[name]((logits + exact).log_softmax(1)[:, :count], teacher).sum().backward()
    assert relative(leaf.grad[:count], exact.grad[:count]) < 1e-2
