"""Layers of vLLM loaded from a held copy: changes of the weights give what a fresh load gives, to the bit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from actors.transfer import vllm_receiver
from actors.transfer.stream import HeldTransfer, send, send_changes
from actors.transfer.vllm_receiver import PackedWeightTransfer, UpdateInfo
from grpo_dist.policy.weight_buckets import ParameterSpec, make_buckets
from grpo_dist.policy.weight_deltas import SentWeights
from tests.support.engines import one_process_of

CPU, BUCKET, WIDTH, WORDS = torch.device("cpu"), 20_000, 64, 128
SHAPES = {
    "embed_tokens.weight": (WORDS, WIDTH), "q_proj.weight": (64, WIDTH), "k_proj.weight": (32, WIDTH),
    "v_proj.weight": (32, WIDTH), "q_proj.bias": (64,), "k_proj.bias": (32,), "v_proj.bias": (32,),
    "gate_proj.weight": (96, WIDTH), "up_proj.weight": (96, WIDTH), "down_proj.weight": (WIDTH, 96),
}  # fmt: skip
SPECS = [ParameterSpec(name, "float32", shape) for name, shape in SHAPES.items()]
FUSED = {"q_proj": ("qkv", "q"), "k_proj": ("qkv", "k"), "v_proj": ("qkv", "v")}
FUSED |= {"gate_proj": ("gate_up", 0), "up_proj": ("gate_up", 1)}


class Model(nn.Module):
    """One layer of each kind: matrices that a checkpoint stores apart are fused, and the head is tied."""

    def __init__(self):
        super().__init__()
        plain = {"bias": False, "params_dtype": torch.float32}
        self.embed_tokens = VocabParallelEmbedding(WORDS, WIDTH, params_dtype=torch.float32)
        self.qkv = QKVParallelLinear(WIDTH, 32, 2, 1, bias=True, params_dtype=torch.float32)
        self.gate_up = MergedColumnParallelLinear(WIDTH, [96, 96], **plain)
        self.down_proj = RowParallelLinear(96, WIDTH, **plain)
        self.lm_head = ParallelLMHead(WORDS, WIDTH, params_dtype=torch.float32)
        self.loaded = []

    def load_weights(self, weights):
        for name, value in weights:
            self.loaded.append(name)
            stem, kind = name.split(".")
            layer, shard = FUSED.get(stem, (stem, None))
            parameter = getattr(getattr(self, layer), kind)
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, value, *(() if shard is None else (shard,)))

    def outputs(self):
        """Return what every layer computes, float32."""
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))
        gate_up = self.gate_up(x)[0]
        hidden = [self.qkv(x)[0], gate_up, self.down_proj(gate_up[:, :96].contiguous())[0]]
        head = self.lm_head.quant_method.apply(self.lm_head, x)
        return [*hidden, self.embed_tokens(torch.arange(WORDS)), head]


@pytest.fixture
def one_process(tmp_path):
    with one_process_of(torch.float32, tmp_path):
        yield


def first_weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def moved(weights, seed, *names):
    """Return copies of ``weights`` with 1 % of the elements of ``names`` changed."""
    generator, copies = torch.Generator().manual_seed(seed), dict(weights)
    for name in names:
        where = torch.rand(SHAPES[name], generator=generator) < 0.01
        where.view(-1)[seed] = True  # also in the small ones
        copies[name] = weights[name] + torch.randn(SHAPES[name], generator=generator) * where
    return copies


def loaded_model(weights):
    """Load ``weights`` as an engine does when it starts; the head is packed from the same embedding."""
    model = Model()
    record_metadata_for_reloading(model)
    model.load_weights(weights.items())
    model.lm_head.weight.data.copy_(weights["embed_tokens.weight"])
    config = SimpleNamespace(
        dtype=torch.float32, quantization=None, word_embeddings_untied_by_checkpoint=False
    )
    process_weights_after_loading(model, config, CPU)
    return model


class Wire:
    """A transport within this process."""

    device = CPU

    def __init__(self):
        self.rounds = []

    def outgoing(self, sizes):
        flats = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self.rounds.append(flats)
        yield from flats

    def incoming(self, sizes):
        buffer = torch.empty(max(sizes), dtype=torch.uint8)  # one for all, overwritten each time
        for size, flat in zip(sizes, self.rounds.pop(0), strict=True):
            assert len(flat) == size
            buffer[:size] = flat
            yield buffer[:size]

    def agree(self, fact):
        return fact


class Engine:
    """The receiving side in one process, and a sender for it."""

    def __init__(self):
        self.model, self.source = loaded_model(first_weights()), SentWeights()
        self.receiver = object.__new__(PackedWeightTransfer)
        self.receiver.model = self.model
        hf = SimpleNamespace(tie_word_embeddings=True)
        self.receiver.model_config = SimpleNamespace(dtype=torch.float32, hf_text_config=hf)
        self.receiver._transport = self.wire = Wire()
        self.count = 0

    def sync(self, weights, *, whole=False, spoil=None):
        """Send ``weights``; return the names of the tensors that the model loaded. ``spoil``: flip a bit in
        the round of the table (0) or of the changes (1).
        """
        self.count += 1
        buckets = [[(s.name, weights[s.name]) for s in bucket] for bucket in make_buckets(SPECS, BUCKET)]
        changes = self.source.take(buckets, SPECS, BUCKET, CPU, f"w{self.count}")
        base = None if whole else changes.base
        self.model.loaded.clear()
        self.receiver.start_weight_update()
        if base is None:
            send(self.wire, self.source.held.weights(), SPECS, BUCKET)
        else:
            send_changes(self.wire, changes, self.source.held)
            if spoil is not None:
                self.wire.rounds[spoil][0][8] ^= 1
        parameters = [[s.name, s.dtype, list(s.shape)] for s in SPECS]
        info = UpdateInfo(parameters, BUCKET, held=HeldTransfer(changes.token, base))
        self.receiver.receive_weights(info)
        if self.receiver.held.token is not None:
            self.receiver.finish_weight_update()
            assert self.receiver.held.token == changes.token
        return set(self.model.loaded)


def assert_computes(model, weights):
    for ours, theirs in zip(model.outputs(), loaded_model(weights).outputs(), strict=True):
        assert torch.equal(ours, theirs)


def test_after_changes_every_layer_computes_what_a_fresh_load_computes(one_process):
    engine, weights = Engine(), first_weights()
    assert engine.sync(weights) == set(SHAPES)
    places = [p.data_ptr() for p in engine.model.parameters()]
    for seed, names in enumerate((SHAPES, SHAPES, ["k_proj.bias"], ["embed_tokens.weight"])):
        weights = moved(weights, seed, *names)
        assert engine.sync(weights) == set(SHAPES)
        assert_computes(engine.model, weights)
        assert places == [p.data_ptr() for p in engine.model.parameters()]


@pytest.mark.parametrize("spoiled", [0, 1])
def test_changes_with_a_wrong_bit_touch_no_layer_and_whole_weights_follow(spoiled, one_process):
    engine, weights = Engine(), moved(first_weights(), 9, *SHAPES)
    engine.sync(weights)
    other = moved(weights, 1, *SHAPES)
    assert engine.sync(other, spoil=spoiled) == set()
    assert engine.receiver.held.token is None
    engine.wire.rounds.clear()  # a sender that learns of it stops
    assert_computes(engine.model, weights)
    assert engine.sync(other, whole=True) == set(SHAPES)
    assert_computes(engine.model, other)
    assert engine.sync(moved(other, 2, "down_proj.weight")) == set(SHAPES)


def test_an_update_that_was_cut_short_loads_all_the_next_time(one_process, monkeypatch):
    engine, weights = Engine(), moved(first_weights(), 9, *SHAPES)
    engine.sync(weights)
    load = engine.model.load_weights

    def cut(bucket):
        load(bucket[:1])
        raise ConnectionError("the engine was interrupted")

    weights = moved(weights, 1, *SHAPES)
    engine.model.load_weights = cut
    with pytest.raises(ConnectionError, match="interrupted"):
        engine.sync(weights)
    engine.model.load_weights = load
    weights = moved(weights, 2, "down_proj.weight")
    assert engine.sync(weights) == set(SHAPES)
    assert_computes(engine.model, weights)


def test_changes_of_other_weights_than_the_copy_are_refused(one_process):
    engine, weights = Engine(), first_weights()
    engine.sync(weights)
    engine.receiver.held.token = "others"
    with pytest.raises(RuntimeError, match="changes of w1, this engine holds others"):
        engine.sync(moved(weights, 1, *SHAPES))


def test_changes_are_loaded_if_every_process_of_the_engine_has_them(one_process, monkeypatch):
    """A process that fails votes, too: the others wait for it."""
    engine, weights, votes = Engine(), moved(first_weights(), 9, *SHAPES), []
    engine.sync(weights)

    def others_say(agreed):
        monkeypatch.setattr(vllm_receiver, "is_true_in_all", lambda fact: votes.append(fact) or agreed)

    others_say(False)  # a copy is damaged
    other = moved(weights, 1, "down_proj.weight")
    assert engine.sync(other) == set() and engine.receiver.held.token is None
    assert_computes(engine.model, weights)
    assert engine.sync(other, whole=True) == set(SHAPES)
    engine.receiver.held.token = "others"
    with pytest.raises(RuntimeError, match="this engine holds others"):
        engine.sync(moved(other, 3, "down_proj.weight"))
    assert votes == [True, False]
