"""Router replay: tokens take the recorded experts, in any layout of the rows."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, sigmoid, silu
from transformers import AutoModelForCausalLM

from grpo_dist.policy.attention import block_spans
from grpo_dist.policy.model import TokenLogprobs, load_causal_lm
from grpo_dist.policy.packing import packed, padded
from grpo_dist.policy.router_replay import check_routes, replay_routes
from grpo_dist.policy.sequence_parallel import SequenceGroup
from grpo_dist.types import HeldRoutes
from tests.support import made_groups
from tests.support.losses import change
from tests.support.models import EXPERT_SHAPES, expert_model

KINDS = sorted(EXPERT_SHAPES)


def load(model_dir, *, replays=True, **how):
    settings = {"dtype": torch.float32, "attention": "auto", "trust_remote_code": False}
    model = load_causal_lm(str(model_dir), **settings | how)
    if replays:
        replay_routes(model, str(model_dir))
    return model.train()


def layout_of(batch, *, packing):
    if packing:
        return packed(batch, batch.wanted, block_spans)
    return padded(batch.tokens, batch.wanted, None, batch.routes)


def both(model, layout):
    """Return log-probs, and the gradient of their sum, float64."""
    model.zero_grad()
    values = TokenLogprobs(model, temperature=1.0, chunk_mib=8)(layout)[0]
    values.sum().backward()
    return values.detach(), torch.cat([p.grad.flatten() for p in model.parameters()]).double()


def chosen_routes(model, batch):
    """Return the routes of each row of ``batch``, uint8 [T - 1, 2, 2], as ``model`` chooses them."""
    chosen = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for layer in model.get_decoder().layers
    ]
    with torch.no_grad():
        model.get_decoder()(input_ids=batch.tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    experts = torch.stack([layer.view(*batch.tokens.shape, -1) for layer in chosen], 2)
    return tuple(
        HeldRoutes(row[: length - 1].numpy().astype(np.uint8))
        for row, length in zip(experts, batch.lengths.tolist(), strict=True)
    )


def other_routes(batch, seed=0):
    """Return random routes, the same for the prompt of every row of a group."""
    rng = np.random.default_rng(seed)
    of_prompts = rng.permuted(np.tile(np.arange(4), (3, 40, 2, 1)), axis=3)[..., :2].astype(np.uint8)
    routes, columns = [], (batch.group_ids, batch.prompt_lengths, batch.lengths)
    for group, prompt, length in zip(*(column.tolist() for column in columns), strict=True):
        experts = rng.permuted(np.tile(np.arange(4), (length - 1, 2, 1)), axis=2)[..., :2].astype(np.uint8)
        experts[:prompt] = of_prompts[group, :prompt]
        routes.append(HeldRoutes(experts))
    return tuple(routes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", [False, True])
def test_routes_that_the_model_chose_change_no_bit(tmp_path, kind, packing):
    model_dir, batch = expert_model(tmp_path, kind), made_groups.batch()
    plain, replaying = (load(model_dir, packing=packing, replays=replays) for replays in (False, True))
    recorded = replace(batch, routes=chosen_routes(load(model_dir, replays=False), batch))
    expected = both(plain, layout_of(batch, packing=packing))
    for rows in (recorded, batch):  # without routes the model chooses
        values, gradient = both(replaying, layout_of(rows, packing=packing))
        assert torch.equal(values, expected[0])
        assert torch.equal(gradient, expected[1])


def plain_block(mlp, x, experts):
    """Compute a layer's experts one token at a time, from the definition. x [N, D], experts [N, k]."""
    p = torch.softmax(linear(x, mlp.gate.weight).float(), dim=-1)
    rows = []
    for token, chosen in zip(range(len(x)), experts.tolist(), strict=True):
        weights = p[token, chosen]
        if getattr(mlp.gate, "norm_topk_prob", True):
            weights = weights / weights.sum()
        out = 0.0
        for weight, expert in zip(weights, chosen, strict=True):
            gate, up = (mlp.experts.gate_up_proj[expert] @ x[token]).chunk(2)
            out = out + weight * (mlp.experts.down_proj[expert] @ (silu(gate) * up))
        if hasattr(mlp, "shared_expert"):
            out = out + sigmoid(mlp.shared_expert_gate(x[token])) * mlp.shared_expert(x[token])
        rows.append(out)
    return torch.stack(rows)


def plain_forward(mlp, experts, x):
    return plain_block(mlp, x.flatten(0, 1), experts).view(x.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_other_routes_give_the_numbers_of_the_definition(tmp_path, kind):
    """Log-probs and gradients, including the router's, in float64 token by token."""
    model_dir, batch = expert_model(tmp_path, kind), made_groups.batch(groups=2, samples=2, longest=5)
    batch = replace(batch, routes=other_routes(batch))
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    count = batch.tokens.shape[1]
    experts = torch.zeros(len(batch), count, 2, 2, dtype=torch.long)
    for row, routes in enumerate(batch.routes):
        experts[row, : len(routes.experts)] = torch.from_numpy(routes.experts.astype(np.int64))
    experts[..., -1][experts[..., 0] == experts[..., 1]] += 1  # tokens without routes, which nothing sees
    for index, layer in enumerate(plain.get_decoder().layers):
        layer.mlp.forward = partial(plain_forward, layer.mlp, experts[:, :, index].flatten(0, 1))
    values, gradient = both(plain, layout_of(replace(batch, routes=None), packing=False))
    for packing in (False, True):
        actual = both(load(model_dir, packing=packing), layout_of(batch, packing=packing))
        assert (actual[0] - values).abs().max() < 1e-5
        assert (actual[1] - gradient).norm() / gradient.norm() < 1e-5
    chosen = both(load(model_dir), layout_of(replace(batch, routes=None), packing=False))
    assert (chosen[0] - values).abs().max() > 0.1


def test_samples_share_a_prompt_only_where_it_took_the_same_experts(tmp_path):
    """Packed rows whose prompt took other experts have a separate prompt, and the numbers of padded rows."""
    model_dir, batch = expert_model(tmp_path, "qwen3_moe"), made_groups.batch()
    routes = list(other_routes(batch))
    routes[1] = HeldRoutes(routes[1].experts[:, :, ::-1].copy())  # the same experts in another order
    alike, changed = (replace(batch, routes=r) for r in (other_routes(batch), tuple(routes)))
    layouts = [layout_of(rows, packing=True) for rows in (batch, alike, changed)]
    widths = [layout.tokens.shape[1] for layout in layouts]
    assert widths == [widths[0], widths[0], widths[0] + int(batch.prompt_lengths[1])]
    for rows in (alike, changed):
        values, gradient = both(load(model_dir, packing=True), layout_of(rows, packing=True))
        expected = both(load(model_dir), layout_of(rows, packing=False))
        torch.testing.assert_close(values, expected[0], atol=1e-5, rtol=0)
        assert (gradient - expected[1]).norm() / expected[1].norm() < 1e-5


def test_rows_without_routes_choose_their_experts(tmp_path):
    """Demonstrations among samples, and the last token of every sample."""
    model_dir, batch = expert_model(tmp_path, "mixtral"), made_groups.batch()
    routes = (*other_routes(batch)[:6], *[None] * 6)
    model = load(model_dir)
    values, _ = both(model, layout_of(replace(batch, routes=routes), packing=False))
    chosen, _ = both(model, layout_of(batch, packing=False))
    assert torch.equal(values[6:], chosen[6:])
    assert not torch.equal(values[:6], chosen[:6])


@pytest.mark.parametrize("packing", [False, True])
def test_checkpointed_layers_are_computed_again_with_the_same_routes(tmp_path, packing):
    """Also when another batch went through the model in between."""
    model_dir, batch = expert_model(tmp_path, "qwen3_moe"), made_groups.batch()
    first, second = (
        layout_of(replace(batch, routes=other_routes(batch, seed)), packing=packing) for seed in (1, 2)
    )
    values, gradient = both(load(model_dir, packing=packing), first)
    model = load(model_dir, packing=packing, gradient_checkpointing=True)
    assert model.get_decoder().layers[0].gradient_checkpointing
    module = TokenLogprobs(model, temperature=1.0, chunk_mib=8)
    again = module(first)[0]
    with torch.no_grad():
        module(second)
    again.sum().backward()
    assert torch.equal(again.detach(), values)
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters()]).double(), gradient)


def test_ranks_that_share_a_stream_take_its_parts():
    batch = made_groups.batch()
    batch = replace(batch, routes=other_routes(batch))
    layout = packed(batch, batch.wanted, block_spans, multiple=4)
    parts = [SequenceGroup(None, 4, i).own_slice(layout)[0] for i in range(4)]
    assert all(len(part.routes) == part.tokens.shape[1] for part in parts)
    assert torch.equal(torch.cat([part.routes for part in parts]), layout.routes)


def test_a_model_without_experts_is_refused_by_name(tiny_model):
    with pytest.raises(ValueError, match=r"policy\.router_replay: qwen2 has no experts; it replays mixtral"):
        load(tiny_model)


def test_trained_rows_without_routes_are_refused():
    batch = made_groups.batch()
    routes = other_routes(batch)
    check_routes(replace(batch, routes=routes))
    with pytest.raises(ValueError, match=r"12 of 12 samples have no routes: [^;]*; start a new run$"):
        check_routes(batch)
    with pytest.raises(ValueError, match="2 of 12 samples have no routes"):
        check_routes(replace(batch, routes=(None, None, *routes[2:])))
    untrained = batch.policy.mask.clone()
    untrained[:2] = False
    check_routes(change(batch, policy={"mask": untrained}, routes=(None, None, *routes[2:])))
