"""Weight deltas rebuild the weights bit by bit, and damaged ones are refused."""

import secrets

import pytest
import torch

from actors.transfer.stream import _packed, receive_changes, send_changes
from grpo_dist.policy.weight_buckets import Checksum, ParameterSpec, make_buckets
from grpo_dist.policy.weight_deltas import HeldWeights, SentWeights, _encoded, apply, difference

CPU = torch.device("cpu")
SPECS = [
    ParameterSpec("model.embed_tokens.weight", "bfloat16", (97, 16)),
    ParameterSpec("model.layers.0.mlp.experts.0.gate_proj.weight", "bfloat16", (33, 16)),
    ParameterSpec("model.layers.0.mlp.experts.1.gate_proj.weight", "bfloat16", (33, 16)),
    ParameterSpec("half", "float16", (501,)),
    ParameterSpec("scale", "float8_e4m3fn", (13,)),  # an odd number of bytes
    ParameterSpec("norm", "float32", (40,)),
    ParameterSpec("wide", "float64", (9,)),
    ParameterSpec("flags", "bool", (7,)),
    ParameterSpec("steps", "int64", (3,)),
    ParameterSpec("one", "bfloat16", ()),
    ParameterSpec("none", "bfloat16", (0,)),
]
BUCKET = 2000  # bytes: the first three tensors have one each, or share it


def random_bits(spec, generator):
    """Return random bits: NaNs with payloads, infinities, subnormal numbers, -0.0."""
    raw = torch.randint(0, 256, (spec.num_bytes,), dtype=torch.uint8, generator=generator)
    if spec.dtype == "bool":
        raw %= 2
    return raw.view(spec.torch_dtype).view(spec.shape)


def random_weights(seed=0):
    """Return random weights, and the generator that made them."""
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: random_bits(spec, generator) for spec in SPECS}, generator


def take(source, buckets):
    return source.take(buckets, SPECS, BUCKET, CPU, secrets.token_hex(4))


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def changed(weights, share, generator):
    """Return copies in which about ``share`` of the bytes differ."""
    copies = {}
    for name, tensor in weights.items():
        raw = bits(tensor).clone()
        where = torch.rand(len(raw), generator=generator) < share
        flips = torch.randint(1, 256, raw.shape, dtype=torch.uint8, generator=generator)
        raw = torch.where(where, raw ^ (flips % 2 if tensor.dtype == torch.bool else flips), raw)
        copies[name] = raw.view(tensor.dtype).view(tensor.shape)
    return copies


def buckets_of(weights):
    return [[(spec.name, weights[spec.name]) for spec in bucket] for bucket in make_buckets(SPECS, BUCKET)]


class Wire:
    """A transport within this process that keeps sent data until it is received."""

    device = CPU

    def __init__(self):
        self.rounds = []

    def outgoing(self, sizes):
        flats = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
        self.rounds.append(flats)
        yield from flats

    def incoming(self, sizes):
        flats = self.rounds.pop(0)
        assert [len(flat) for flat in flats] == list(sizes)
        yield from flats

    def agree(self, value):
        """Return ``value``: the receiver comes later, so nobody disagrees yet."""
        return value


def sent(source, weights, wire):
    changes = take(source, buckets_of(weights))
    return changes, send_changes(wire, changes, source.held)


def assert_equal_bits(held, weights):
    actual = {name: tensor for bucket in held.weights() for name, tensor in bucket}
    assert actual.keys() == weights.keys()
    for name, tensor in weights.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape
        assert torch.equal(bits(actual[name]), bits(tensor)), name


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_every_bit_of_every_type_arrives_over_many_updates(share, seed):
    weights, generator = random_weights(seed)
    source, held, wire = SentWeights(), HeldWeights(SPECS, BUCKET), Wire()
    first, _ = sent(source, weights, wire)
    assert first.base is None and first.changed_share == 1
    assert receive_changes(wire, held)
    for _ in range(4):
        before, weights = weights, changed(weights, share, generator)
        changes, metrics = sent(source, weights, wire)
        assert receive_changes(wire, held)
        assert_equal_bits(held, weights)
        assert held.checksum().value == changes.checksum.value == source.held.checksum().value
        if share == 0:
            assert changes.changed_share == 0 and metrics["sync/bytes"] == 16 * len(held) + 16
            assert all(torch.equal(bits(before[name]), bits(weights[name])) for name in weights)


def test_minus_zero_and_a_nan_of_another_payload_are_changes():
    old = torch.tensor([0.0, float("nan"), 1.0], dtype=torch.bfloat16)
    new = old.clone()
    new[0] = -0.0
    new.view(torch.int16)[1] ^= 1
    assert torch.isnan(new[1]) and new[0] == old[0]
    padded = [torch.cat([bits(t), torch.zeros(58, dtype=torch.uint8)]) for t in (old, new)]
    delta = difference(*padded)
    assert delta.changed == 2 and apply(delta.data, 2, padded[0])
    assert torch.equal(padded[0], padded[1])


def test_gaps_follow_the_example_in_their_documentation():
    assert _encoded(torch.tensor([1, 255, 600])).tolist() == [1, 255, 0, 255, 255, 90]
    old, new = torch.zeros(1 << 12, dtype=torch.int16), torch.zeros(1 << 12, dtype=torch.int16)
    at = [1, 2, 257, 258 + 255, 1300, 4095]
    new[at] = torch.arange(1, 7, dtype=torch.int16)
    delta = difference(old.view(torch.uint8), new.view(torch.uint8))
    assert delta.key == (6, len(delta.data))
    assert delta.data[12:].tolist() == [1, 0, 254, 255, 0, 255, 255, 255, 21, *[255] * 10, 244]
    again = old.clone()
    for _ in range(2):  # absolute words: twice is once
        assert apply(delta.data, 6, again.view(torch.uint8))
        assert torch.equal(again, new)


def test_an_impossible_delta_leaves_the_copy_unchanged():
    flat = torch.zeros(64, dtype=torch.uint8)
    words = torch.tensor([5, 6], dtype=torch.int16).view(torch.uint8)
    beyond = torch.cat([words, torch.tensor([3, 40], dtype=torch.uint8)])
    fewer = torch.cat([words, torch.tensor([3, 255], dtype=torch.uint8)])
    assert not apply(beyond, 2, flat) and not apply(fewer, 2, flat)
    assert not flat.any()


def test_a_thousandth_of_changed_words_is_sent_in_less_than_a_hundredth_of_the_bytes():
    specs = [ParameterSpec("w", "bfloat16", (1000, 1000))]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, 1000, generator=generator).bfloat16()
    source, wire = SentWeights(), Wire()
    source.take([[("w", weight)]], specs, 1 << 20, CPU, "t")
    moved = weight.clone()
    moved.view(torch.int16).view(-1)[torch.randperm(10**6, generator=generator)[:1000]] ^= 1
    changes = source.take([[("w", moved)]], specs, 1 << 20, CPU, "t")
    assert changes.changed_share == 0.001
    assert send_changes(wire, changes, source.held)["sync/bytes"] < 0.005 * 2e6


@pytest.mark.parametrize("bit", [0, 1000])
def test_a_flipped_bit_on_the_way_or_in_the_copy_is_noticed(bit):
    weights, generator = random_weights()
    source, held, wire = SentWeights(), HeldWeights(SPECS, BUCKET), Wire()
    sent(source, weights, wire)
    receive_changes(wire, held)
    sent(source, changed(weights, 0.01, generator), wire)
    if bit:
        held.slots[0][bit // 8] ^= 1 << bit % 8  # this word may be unchanged
    else:
        wire.rounds[1][0][0] ^= 1
    assert not receive_changes(wire, held) and held.token is None


def test_a_flipped_bit_anywhere_in_the_table_is_noticed_before_its_sizes_are_used():
    """In words, bytes, the weights' checksum and the table's checksum; also if the sizes stay possible."""
    weights, generator = random_weights()
    source, held, wire = SentWeights(), HeldWeights(SPECS, BUCKET), Wire()
    sent(source, weights, wire)
    receive_changes(wire, held)
    before = held.checksum().value
    changes, _ = sent(source, changed(weights, 0.01, generator), wire)
    (table,), buckets = wire.rounds
    assert len(table) == 16 * len(held) + 16 and len({delta.key for delta in changes.deltas}) > 2
    for bit in range(0, 8 * len(table), 3):  # each field has eight bytes: bits of all of them
        damaged = table.clone()
        damaged[bit // 8] ^= 1 << bit % 8
        wire.rounds = [[damaged]]  # asking for more fails
        held.token = "before"
        assert not receive_changes(wire, held) and held.token is None
        assert held.checksum().value == before
    wire.rounds = [[table], buckets]
    assert receive_changes(wire, held)
    assert held.checksum().value == changes.checksum.value


@pytest.mark.parametrize("key", [(-2, 0), (3, 5), (0, 1 << 40)])
def test_an_impossible_table_with_an_intact_checksum_is_damaged(key):
    held, wire = HeldWeights(SPECS, BUCKET), Wire()
    table = _packed([key] * len(held), held.checksum())
    for flat in wire.outgoing([len(table)]):
        flat.copy_(table)
    assert not receive_changes(wire, held) and not wire.rounds


def test_partially_taken_weights_are_no_base():
    weights, _ = random_weights()
    source = SentWeights()
    first = take(source, buckets_of(weights))

    def cut():
        yield buckets_of(weights)[0]
        raise RuntimeError("a rank is lost")

    with pytest.raises(RuntimeError, match="a rank is lost"):
        take(source, cut())
    assert source.changes is None and source.held.token is None
    second = take(source, buckets_of(weights))
    assert second.base is None and second.token != first.token
    assert take(source, buckets_of(weights)).base == second.token


def test_the_checksum_is_that_of_a_full_transfer():
    weights, _ = random_weights()
    whole, source = Checksum(), SentWeights()
    for bucket in buckets_of(weights):
        whole.add(torch.cat([bits(tensor) for _, tensor in bucket]))
    changes = take(source, buckets_of(weights))
    assert changes.checksum.value == whole.value


def test_pinned_memory_is_taken_in_blocks(monkeypatch):
    """torch rounds a pinned block up to a power of two: one for all weights might have twice their size."""
    zeros, blocks = torch.zeros, []

    def pinned(size, **settings):
        blocks.append((size, settings.pop("pin_memory")))
        return zeros(size, **settings)

    monkeypatch.setattr(torch, "zeros", pinned)
    plain = HeldWeights(SPECS, BUCKET)
    largest = max(len(slot) for slot in plain.slots)
    monkeypatch.setattr("grpo_dist.policy.weight_deltas._PINNED", 2 * largest)
    held = HeldWeights(SPECS, BUCKET, pinned=True)
    (whole, is_pinned), *parts = blocks
    assert not is_pinned and all(flag for _, flag in parts) and len(parts) > 1
    assert sum(size for size, _ in parts) == whole and all(size <= 2 * largest for size, _ in parts)
    assert [len(slot) for slot in held.slots] == [len(slot) for slot in plain.slots]
