"""liger-kernel's norms, rotary positions and activations, on a CPU by Triton's interpreter."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_dist.policy import layer_kernels
from grpo_dist.policy.layer_kernels import _ACTIVATIONS, kernels_problem, use_kernels
from grpo_dist.tools.plan.memory import Sizes, activation_bytes
from grpo_dist.tools.plan.models import from_config_json
from tests.support.architectures import SHAPES
from tests.support.kept_tensors import SHAPE
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
QWEN2 = Qwen2Config(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=11,
)  # fmt: skip


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    directory = tmp_path_factory.mktemp("models")
    command = [sys.executable, "-m", "tests.support.interpreted_layers", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_hidden_states_and_gradients_are_those_of_torchs_operations(interpreted):
    assert {SHAPES[name][0] for name in interpreted["architectures"]} == set(_ACTIVATIONS)
    for name, (hidden, gradients, _) in interpreted["architectures"].items():
        assert hidden < 1e-5 and gradients < 1e-5, name


def test_norms_positions_and_activations_are_computed_by_kernels(interpreted):
    for name, (_, _, kernels) in interpreted["architectures"].items():
        activation = "geglu" if SHAPES[name][0] == "gemma" else "swiglu"
        for part in ("rms_norm", "rope", activation):
            assert any(part in kernel for kernel in kernels), (name, part, kernels)
        assert any("backward" in kernel for kernel in kernels), name


@pytest.mark.parametrize("index, itemsize", [(0, 4), (1, 2)])
def test_plan_knows_what_a_forward_pass_keeps_with_them(interpreted, index, itemsize):
    kept, stream, rows = interpreted["kept"][index]
    sizes = Sizes(True, itemsize, 0, 0, 0, kernels=True)
    shape = from_config_json(SHAPE, "")
    found = activation_bytes(shape, sizes, tokens=stream, attended=rows, checkpointing=False)
    assert found == pytest.approx(kept, rel=0.02)


def test_a_gpu_with_the_package_has_them_for_known_models(monkeypatch):
    replaced = []
    monkeypatch.setattr(layer_kernels, "replace_operations", replaced.append)
    monkeypatch.setattr(layer_kernels, "_installed", lambda: True)
    model = Qwen2ForCausalLM(QWEN2)
    assert not use_kernels(model, "auto", "cpu") and not use_kernels(model, "torch", "cuda")
    assert use_kernels(model, "auto", "cuda") and use_kernels(model, "liger", "cuda")
    assert replaced == [model, model]
    monkeypatch.setattr(layer_kernels, "_installed", lambda: False)
    assert not use_kernels(model, "auto", "cuda")


def test_an_activation_that_the_kernel_does_not_compute_stays_torchs(monkeypatch):
    monkeypatch.setattr(layer_kernels, "_installed", lambda: True)
    other = Qwen2Config(**QWEN2.to_diff_dict() | {"hidden_act": "gelu"})
    assert not use_kernels(SimpleNamespace(config=other), "auto", "cuda")
    assert "this is qwen2 with gelu" in kernels_problem("liger", other, "cuda")


@pytest.mark.parametrize(
    ("kind", "device", "installed", "said"),
    [
        ("qwen2", "cpu", True, "computes on GPUs, and the run has none; use model.kernels=auto"),
        ("qwen2", "cuda", False, "needs the package liger-kernel"),
        ("starcoder2", "cuda", True, "is for models of type exaone4, gemma, .*, and this is starcoder2"),
    ],
)
def test_kernels_that_cannot_be_had_are_refused(monkeypatch, kind, device, installed, said):
    monkeypatch.setattr(layer_kernels, "_installed", lambda: installed)
    config = SimpleNamespace(model_type=kind, hidden_act="silu")
    with pytest.raises(ValueError, match=rf"`model\.kernels` = liger {said}"):
        use_kernels(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)), "liger", device)


def test_a_model_without_them_is_untouched():
    model = Qwen2ForCausalLM(QWEN2)
    tokens = torch.arange(7)[None]
    before = model(tokens).logits
    assert not use_kernels(model, "torch", "cuda")
    assert torch.equal(model(tokens).logits, before)
