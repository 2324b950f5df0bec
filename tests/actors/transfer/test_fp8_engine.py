"""A weight sync into an engine in fp8: weights travel in bfloat16, and vLLM's own reload quantises them.

The quantisation is vLLM's, on the CPU. Only the product of two fp8 matrices, which needs a GPU, is replaced.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config.quantization import resolve_quantization_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

from actors.transfer import vllm_receiver
from actors.transfer.stream import send
from actors.transfer.vllm_receiver import PackedWeightTransfer, UpdateInfo
from grpo_dist.policy.weight_buckets import ParameterSpec, make_buckets
from tests.support.engine_arguments import arguments
from tests.support.engines import one_process_of

FAN_IN, WIDTHS = 32, (48, 16)


@pytest.fixture
def one_process(tmp_path, monkeypatch):
    class Product:
        def process_weights_after_loading(self, layer):
            pass

    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: Product())
    monkeypatch.setattr(fp8, "expose_input_quant_key", lambda layer, kernel: None)
    with one_process_of(torch.bfloat16, tmp_path):
        yield


class Model(nn.Module):
    """Two matrices of a checkpoint in one layer, such as gate and up."""

    def __init__(self, quantization):
        super().__init__()
        settings = OnlineQuantizationConfig(resolve_quantization_config(quantization, None))
        options = {"bias": False, "quant_config": settings, "prefix": "both", "params_dtype": torch.bfloat16}
        self.both = MergedColumnParallelLinear(FAN_IN, list(WIDTHS), **options)

    def load_weights(self, weights):
        for name, value in weights:
            weight = self.both.weight
            weight.weight_loader(weight, value, int(name))


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = enumerate((width, FAN_IN) for width in WIDTHS)
    return [(str(i), torch.randn(shape, generator=generator).bfloat16()) for i, shape in shapes]


def engine(seed):
    """A model loaded from a bfloat16 checkpoint, as in an engine with `rollout.quantization` = fp8."""
    engine_args = EngineArgs(**arguments("cuda", dtype="bfloat16", quantization="fp8"))
    model = Model(engine_args.quantization)
    record_metadata_for_reloading(model)
    model.load_weights(weights(seed))
    finalize_layerwise_processing(model, SimpleNamespace(dtype=torch.bfloat16))
    return model


class Loopback:
    """The sender's buffers, read in place. They are overwritten when the next one is filled."""

    device = torch.device("cpu")

    def __init__(self, sent):
        specs = [ParameterSpec.from_tensor(name, tensor) for name, tensor in sent]
        self.specs, self.bucket_bytes = specs, specs[0].num_bytes
        self._buckets = make_buckets(specs, self.bucket_bytes)
        self._sent, self._memory, self._filled = dict(sent), None, []

    def outgoing(self, sizes):
        for size in sizes:
            flat = torch.empty(size, dtype=torch.uint8)
            yield flat
            self._filled.append(flat)

    def incoming(self, sizes):
        buckets = ([(s.name, self._sent[s.name]) for s in bucket] for bucket in self._buckets)
        send(self, buckets, self.specs, self.bucket_bytes)
        memory = torch.empty(max(sizes), dtype=torch.uint8)
        for flat in self._filled:
            memory[: len(flat)] = flat
            yield memory[: len(flat)]
            memory.zero_()


def sync(model, sent):
    transport = Loopback(sent)
    receiver = object.__new__(PackedWeightTransfer)
    receiver.model, receiver._transport = model, transport
    receiver.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=SimpleNamespace())
    receiver.start_weight_update()
    parameters = [[spec.name, spec.dtype, list(spec.shape)] for spec in transport.specs]
    receiver.receive_weights(UpdateInfo(parameters, transport.bucket_bytes))
    receiver.finish_weight_update()


def held(model):
    """The fp8 weight, [in, out], and the scale of each output."""
    layer = model.both
    return layer.weight.data, layer.weight_scale.data


def test_an_fp8_engine_quantises_the_bfloat16_weights_that_it_receives(one_process):
    model = engine(seed=0)
    before = [(t.data_ptr(), t.clone()) for t in held(model)]
    assert held(model)[0].dtype == torch.float8_e4m3fn and held(model)[0].shape == (FAN_IN, sum(WIDTHS))
    for seed in (1, 2):
        sync(model, weights(seed))
        fresh = held(engine(seed))
        for ours, theirs, (place, old) in zip(held(model), fresh, before, strict=True):
            assert torch.equal(ours.float(), theirs.float())  # to the last bit, as if loaded from disk
            assert not torch.equal(ours.float(), old.float())
            assert ours.data_ptr() == place  # where CUDA graphs read it
        exact = torch.cat([w for _, w in weights(seed)]).float()
        whole = held(model)[0].float().T * held(model)[1]
        assert float((whole - exact).abs().max()) <= float(exact.abs().max()) * 2**-4  # 3 mantissa bits
        assert float((whole - exact).norm() / exact.norm()) < 0.04


def test_an_update_that_was_cut_short_is_quantised_from_the_next_alone(one_process, monkeypatch):
    model = engine(seed=0)
    receive = vllm_receiver.receive

    def only_first(*arguments):
        yield next(receive(*arguments))
        raise ConnectionError("the policy is gone")

    monkeypatch.setattr(vllm_receiver, "receive", only_first)
    with pytest.raises(ConnectionError, match="the policy is gone"):
        sync(model, weights(1))
    monkeypatch.setattr(vllm_receiver, "receive", receive)
    sync(model, weights(2))
    for ours, theirs in zip(held(model), held(engine(2)), strict=True):
        assert torch.equal(ours.float(), theirs.float())
