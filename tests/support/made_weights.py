"""A run's directory with the weights of its policy, as saved by a rank at ZeRO stage 0."""

import json
from dataclasses import asdict

import torch

from grpo_dist.config.files import dump_config
from grpo_dist.policy.model import TokenLogprobs, trainable_model
from grpo_dist.runs.checkpoint import CheckpointState, write_manifest


def write_run(run_dir, config, base, step=1, dtype=torch.float32):
    """Write a checkpoint of ``step`` with weights that differ from ``base``. Return the trained model."""
    policy = config.policy.model_copy(update={"zero_stage": 0})
    section = config.model.model_copy(update={"packing": False, "attention": "auto"})
    model = trainable_model(str(base), dtype, section, policy, config.seed).eval()
    generator = torch.Generator().manual_seed(step)
    names = dict(TokenLogprobs(model, temperature=1.0, chunk_mib=1).named_parameters())
    with torch.no_grad():
        for parameter in (p for p in names.values() if p.requires_grad):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(dtype))
    half = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
    state = {
        "module": {name: p.detach() for name, p in names.items() if p.requires_grad},
        "optimizer": {"state": {}},
        "dp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 0}} | half,
    }
    checkpoint = run_dir / f"checkpoints/step_{step:06d}"
    (checkpoint / "policy/state").mkdir(parents=True)
    torch.save(state, checkpoint / "policy/state/mp_rank_00_model_states.pt")
    (checkpoint / "state.json").write_text(json.dumps(asdict(CheckpointState(step, "", ""))))
    for directory in (run_dir, checkpoint):
        (directory / "config.yaml").write_text(dump_config(config))
    write_manifest(checkpoint)
    return model


def write_scores(run_dir, scores):
    """Write pass@1 and its standard error of the set `held` by step."""
    lines = [
        {"step": step, "eval/held/pass@1": value, "eval/held/pass@1_stderr": error, "reward/mean": 0.5}
        for step, (value, error) in scores.items()
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
