"""liger-kernel's norms, rotary positions and activations, on a CPU by Triton's interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from grpo_dist.config import ModelConfig, PolicyConfig, TeacherConfig
from grpo_dist.policy import layer_kernels
from grpo_dist.policy import model as trainable_model
from grpo_dist.policy.layer_kernels import _ACTIVATIONS, kernels_problem, use_kernels
from grpo_dist.policy.model import load_causal_lm
from grpo_dist.runs import start_checks
from grpo_dist.tools.plan.memory import Sizes, activation_bytes
from grpo_dist.tools.plan.models import from_config_json
from tests.support.fakes import config
from tests.support.kept_tensors import SHAPE
from tests.support.models import SHAPES, architecture
from tests.support.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 11,
}  # fmt: skip
QWEN2 = Qwen2Config(**SMALL)


@pytest.mark.slow
def test_kernels_compute_what_torchs_operations_do_and_a_plan_counts_the_activations_they_keep(tmp_path):
    """Every architecture in both dtypes; the head norms of Qwen3 have a row per head and token."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    command = [sys.executable, "-m", "tests.support.interpreted_layers", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert {SHAPES[name][0] for name in results["architectures"]} == set(_ACTIVATIONS)
    for name, (hidden, gradients, kernels) in results["architectures"].items():
        assert hidden < 1e-5 and gradients < 1e-5, name
        activation = "geglu" if SHAPES[name][0] == "gemma" else "swiglu"
        for part in ("rms_norm", "rope", activation):
            assert any(part in kernel for kernel in kernels), (name, part, kernels)
        assert any("backward" in kernel for kernel in kernels), name
    shape = from_config_json(SHAPE, "")
    for (expected, stream, rows), itemsize in zip(results["kept"], (4, 2), strict=True):
        sizes = Sizes(True, itemsize, 0, 0, 0, varlen=itemsize == 2, kernels=True)
        how = {"tokens": stream, "attended": rows, "longest": 128, "checkpointing": False}
        assert activation_bytes(shape, sizes, **how) == pytest.approx(expected, rel=0.02)
    assert max(results["many rows"]) < 2e-6
    # A worker loads its model without running a kernel, since meta tensors cannot be read; later models keep
    # torch's operations.
    kernels, replaced, classes = results["loaded"]
    assert kernels == [] and replaced == [True, False] and classes == ["Qwen3RMSNorm", "Qwen3MLP"]


def test_a_gpu_with_the_package_uses_them_for_known_models(monkeypatch):
    replaced = []
    monkeypatch.setattr(layer_kernels, "replace_operations", replaced.append)
    monkeypatch.setattr(layer_kernels, "has_layer_kernels", lambda: True)
    model = Qwen2ForCausalLM(QWEN2)
    assert not use_kernels(model, "auto", "cpu") and not use_kernels(model, "torch", "cuda")
    assert use_kernels(model, "auto", "cuda") and use_kernels(model, "liger", "cuda")
    assert replaced == [model, model]
    monkeypatch.setattr(layer_kernels, "has_layer_kernels", lambda: False)
    assert not use_kernels(model, "auto", "cuda")


class _Qwen2(Qwen2ForCausalLM):
    """Custom model code: of a known type, with other operations."""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Qwen2ForCausalLM(Qwen2Config(**SMALL, hidden_act="gelu")),
         "Qwen2ForCausalLM of type qwen2 with gelu"),
        (_Qwen2(QWEN2), "_Qwen2 of type qwen2"),
        (Starcoder2ForCausalLM(Starcoder2Config(**SMALL)), "Starcoder2ForCausalLM of type starcoder2"),
    ],
)  # fmt: skip
def test_models_that_compute_something_else_keep_torchs_operations(monkeypatch, model, words):
    monkeypatch.setattr(layer_kernels, "has_layer_kernels", lambda: True)
    assert not use_kernels(model, "auto", "cuda")
    with pytest.raises(ValueError, match=rf"`model\.kernels` = liger is for .* exaone4, gemma.*{words}"):
        use_kernels(model, "liger", "cuda")


@pytest.mark.parametrize(
    ("device", "has_package", "words"),
    [("cpu", True, "computes on GPUs, and the run has none"),
     ("cuda", False, "needs the package liger-kernel")],
)  # fmt: skip
def test_kernels_are_refused_without_a_gpu_or_the_package(device, has_package, words):
    problem = kernels_problem("liger", Qwen2ForCausalLM(QWEN2), device, has_package=has_package)
    assert words in problem and "use model.kernels=auto" in problem


def test_a_head_node_without_gpus_need_not_have_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(start_checks, "has_layer_kernels", lambda: False)
    path = architecture(tmp_path, "qwen3")
    settings = config(model={"path": str(path), "kernels": "liger"})
    assert not [p for p in start_checks.model_problems(settings, "cuda", path) if "kernels" in p]
    monkeypatch.setattr(start_checks, "device_type", lambda: "cuda")
    problems = start_checks.model_problems(settings, "cuda", path)
    assert [p for p in problems if "needs the package liger-kernel" in p]


def test_a_valid_model_is_built_once_and_one_with_a_problem_each_time(monkeypatch, tmp_path):
    builds: list[str] = []
    real = start_checks.empty_model
    monkeypatch.setattr(start_checks, "empty_model", lambda *a, **how: builds.append("") or real(*a, **how))
    path = architecture(tmp_path, "qwen3")
    fits, odd = config(model={"path": str(path)}), config(rollout={"tensor_parallel_size": 3})

    def problems(config):
        return [p for p in start_checks.model_problems(config, "cpu", path) if "positions" not in p]

    assert [problems(fits), problems(fits)] == [[], []] and len(builds) == 1
    assert all("does not divide the" in problems(odd)[0] for _ in range(2)) and len(builds) == 3
    (path / "config.json").write_text((path / "config.json").read_text() + "\n")
    assert problems(fits) == [] and len(builds) == 4


@pytest.mark.parametrize("compiled, kernels", [(False, "auto"), (True, "torch")])
def test_compiled_layers_have_torchs_operations(monkeypatch, tmp_path, compiled, kernels):
    requested = []

    def load(*args, **how):
        requested.append(how.pop("kernels"))
        return load_causal_lm(*args, **how)

    monkeypatch.setattr(trainable_model, "load_causal_lm", load)
    path = str(architecture(tmp_path, "qwen3"))
    policy = PolicyConfig(compile=compiled, zero_stage=2)
    trainable_model.trainable_model(path, torch.float32, ModelConfig(path=path), policy, 0)
    assert requested == [kernels]


def test_a_teacher_has_kernels_only_if_they_support_it():
    teacher = TeacherConfig(name="large", model="large")
    for kernels, expected in (("torch", "torch"), ("auto", "auto"), ("liger", "auto")):
        assert teacher.model_section(ModelConfig(path="small", kernels=kernels)).kernels == expected


def test_a_model_without_them_is_untouched():
    model = Qwen2ForCausalLM(QWEN2)
    tokens = torch.arange(7)[None]
    before = model(tokens).logits
    assert not use_kernels(model, "torch", "cuda")
    assert torch.equal(model(tokens).logits, before)
