"""The optimiser's states are made before the first update, which then takes as long as the others."""

import torch

from grpo_dist.policy.deepspeed_engine import make_states


def trained(made, steps=3):
    """Return weights and states after some steps, and how many elements the states had before the first."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 7, generator=generator).requires_grad_() for n in (3, 40)]
    weights[0].data[0, 0] = -0.0
    optimizer = torch.optim.AdamW(weights, lr=1e-2, betas=(0.5, 0.95), weight_decay=0.1, fused=True)
    first = [w.detach().clone() for w in weights]
    if made:
        make_states(optimizer)
        assert all(torch.equal(w, old) and w.grad is None for w, old in zip(weights, first, strict=True))
        assert torch.equal(weights[0].signbit(), first[0].signbit())
    before = sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in optimizer.state.values())
    for _ in range(steps):
        for w in weights:
            w.grad = torch.randn(w.shape, generator=generator)
        optimizer.step()
    return [w.detach() for w in weights], [optimizer.state[w] for w in weights], before


def test_states_made_beforehand_change_no_bit_of_a_step():
    (weights, states, before), (expected, theirs, none) = trained(True), trained(False)
    assert (before, none) == (2 * 43 * 7, 0)
    for ours, other in zip(weights, expected, strict=True):
        assert torch.equal(ours, other)
    for ours, other in zip(states, theirs, strict=True):
        assert ours.keys() == other.keys() and float(ours["step"]) == 3.0
        assert all(torch.equal(ours[name], other[name]) for name in other)
