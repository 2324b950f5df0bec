import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # Scaling: plan, then submit

    You predict memory, time and price of a run on machines that you do not have, change the
    configuration until the plan is good, and print what a submission would send. Nothing is started and
    no GPU is needed.
    """)
    return


@app.cell
def _():
    import subprocess
    import sys
    from pathlib import Path

    import marimo as mo

    from grpo_dist.runtime.commands import run_command

    return Path, mo, run_command, subprocess, sys


@app.cell
def _(Path):
    Path("problems.jsonl").write_text('{"question": "2+3=", "answer": "5"}\n' * 64)
    config = Path("scaling.yaml")
    _size = config.write_text("""\
name: scaling
steps: 200
model: {path: Qwen/Qwen2.5-1.5B-Instruct}
data:
  train: [{path: problems.jsonl, problem_column: question, answer_column: answer}]
  eval: [{path: problems.jsonl, name: held_out, problem_column: question, answer_column: answer}]
batch: {prompts_per_step: 64, samples_per_prompt: 8}
sampling: {max_new_tokens: 1024}
policy: {num_workers: 2, zero_stage: 2, optimizer: {lr: 1.0e-6}}
rollout: {num_workers: 2}
evaluation: {every: 20}
""")
    return (config,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## As it is, on four GPUs

    `grpo-dist plan` places the workers as a real run does, adds up the memory of each, and simulates
    the real loop on a clock of its own. `--cluster 1x4xA100-80GB` is one node with four such cards. The
    plan reports what bounds the step, and which split of the GPUs is faster.
    """)
    return


@app.cell
def _(config, mo, run_command):
    small = run_command("plan", str(config), "--cluster", "1x4xA100-80GB")
    mo.plain_text(small)
    return (small,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Larger, and without waiting

    Sixteen GPUs, a 7B model in ZeRO-3, sampling one step ahead of training, and evaluation on an engine
    of its own (`evaluation.num_workers`): keys of the command line come last and win. Compare tokens a
    second and the price.
    """)
    return


@app.cell
def _(config, mo, run_command, small):
    wide = [
        "model.path=Qwen/Qwen2.5-7B-Instruct", "model.gradient_checkpointing=true", "max_staleness=1",
        "policy.num_workers=8", "policy.zero_stage=3", "rollout.num_workers=7",
        "batch.prompts_per_step=256", "evaluation.num_workers=1",
    ]  # fmt: skip
    large = run_command("plan", str(config), "--cluster", "2x8xH100", *wide)

    def rates(text: str) -> str:
        return next(line for line in text.splitlines() if "tokens/s (" in line)

    mo.vstack([mo.plain_text(rates(small)), mo.plain_text(rates(large)), mo.plain_text(large)])
    return (wide,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## What does not fit is reported

    The same 7B model on one small card: the plan names the role, the bytes, and what to change.
    """)
    return


@app.cell
def _(config, mo, subprocess, sys):
    small_card = [
        "--cluster",
        "1x2xL4",
        "model.path=Qwen/Qwen2.5-7B-Instruct",
        "policy.num_workers=1",
        "rollout.num_workers=1",
    ]
    refused = subprocess.run(  # bounded: the command has deadlines
        [sys.executable, "-m", "grpo_dist.cli", "plan", str(config), *small_card],
        capture_output=True,
        text=True,
    )
    message = refused.stdout + refused.stderr
    assert "policy: a worker needs" in message
    mo.plain_text(message[:1500])
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Submit

    `grpo-dist submit` sends the run to Ray, Slurm or KubeRay, with the fewest nodes that hold it;
    `--dry-run` prints exactly what it would send. Submitting again resumes. `grpo-dist status`, `logs`
    and `stop` follow it.
    """)
    return


@app.cell
def _(config, mo, run_command, wide):
    script = run_command("submit", str(config), "--to", "slurm", "--gpus-per-node", "8", "--dry-run", *wide)
    asked = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert any("--nodes=2" in line for line in asked)
    mo.plain_text("\n".join(asked))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    More: [plan](../../tools/plan/README.md), [launching](../../../launch/README.md), [GPUs](../gpus.md).
    """)
    return


if __name__ == "__main__":
    app.run()
