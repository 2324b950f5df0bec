import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # From SFT to RL to distillation

    A model of random weights learns three-digit addition with written carries from demonstrations of
    which four in ten have a slip. GRPO makes it right. Its right answers teach a model of less than
    half the size, which then samples its own answers and learns from the large one's probabilities of
    their tokens. The whole takes about a quarter of an hour on two CPU cores.
    """)
    return


@app.cell
def _():
    import json
    from pathlib import Path

    import marimo as mo
    import matplotlib.pyplot as plt

    from grpo_dist.runtime.processes import run_command

    # python sft_rl_distill.py --steps 2 --sft_steps 60
    arguments = mo.cli_args()
    steps, sft_steps = arguments.get("steps") or 30, arguments.get("sft_steps") or 450
    return Path, json, mo, plt, run_command, sft_steps, steps


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## One configuration, five stages

    A pipeline is a list of ordinary configurations that name each other's results. `sft` stages
    minimise the cross-entropy of demonstrations, `grpo` stages train on rewards, and `sample` stages
    keep right answers. The last stage is on-policy distillation: a `grpo` stage with a teacher, whose
    rewards are only measured (`reward_coef: 0`).
    """)
    return


@app.cell
def _(Path, sft_steps, steps):
    Path("addition.yaml").write_text("""\
model: {path: sft}
sft: {model: "demo:tiny", data: {path: "demo:add3", noise: 0.4}, lr: 2.0e-3, threads: 1}
data:
  train: [{path: "demo:add3", split: train}]
  eval: [{path: "demo:add3", split: test, max_rows: 128}]
  max_prompt_tokens: 64
batch: {prompts_per_step: 16, samples_per_prompt: 16, updates_per_step: 2, micro_batch_tokens: 16384}
sampling: {max_new_tokens: 44}
algorithm: {loss: {clip_high: 0.28}}
policy: {optimizer: {lr: 2.0e-4, betas: [0.9, 0.95], warmup_steps: 4}}
rollout: {threads: 1}
evaluation: {samples_per_prompt: 2}
checkpoint: {every: 0}
""")
    pipeline = Path("lessons.yaml")
    pipeline.write_text(f"""\
name: lessons
stages:
  - name: cold_start
    kind: sft
    config: addition.yaml
    overrides: {{sft.steps: {sft_steps}, evaluation.before: false}}
  - name: reasoning
    kind: grpo
    config: addition.yaml
    overrides: {{model.path: "${{stage:cold_start}}", steps: {steps}}}
  - name: teaching
    kind: sample
    config: addition.yaml
    overrides:
      model.path: ${{stage:reasoning}}
      rejection: {{max_prompts: 2000, samples_per_prompt: 2, keep_per_prompt: 1, max_pass_rate: 1.0}}
  - name: distilled
    kind: sft
    config: addition.yaml
    overrides:
      sft: {{model: "demo:micro", data: "${{stage:teaching}}/sft.jsonl", noise: 0.0, steps: {sft_steps}}}
      evaluation.before: false
  - name: on_policy
    kind: grpo
    config: addition.yaml
    overrides:
      model.path: ${{stage:distilled}}
      steps: {steps}
      batch: {{samples_per_prompt: 4, epochs_per_batch: 2}}
      distillation: {{teachers: [{{name: large, model: "${{stage:reasoning}}"}}], reward_coef: 0.0}}
""")
    return (pipeline,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Check all stages, then run them

    `--check` refuses an error in any stage before the first one starts. The same command skips finished
    stages and resumes the one that was interrupted.
    """)
    return


@app.cell
def _(mo, pipeline, run_command):
    checked = run_command("pipeline", str(pipeline), "--check")
    mo.plain_text(checked[-1500:])
    return (checked,)


@app.cell
def _(checked, mo, pipeline, run_command):
    assert checked
    finished = run_command("pipeline", str(pipeline))
    mo.plain_text(finished[-1500:])
    return (finished,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## What each stage gained

    Accuracy on held-out problems with one standard error: after the cold start, after GRPO, and of the
    small model, which has only seen right answers of the large one, then also what that thinks of its
    own answers.
    """)
    return


@app.cell
def _(Path, finished, json, plt):
    assert finished
    records = [json.loads(path.read_text()) for path in sorted(Path("runs/lessons").glob("*/stage.json"))]
    measured = {
        record["stage"]: record["after"] for record in records if "eval/add3/pass@1" in record["after"]
    }
    assert list(measured) == ["cold_start", "reasoning", "distilled", "on_policy"]
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.bar(
        list(measured),
        [m["eval/add3/pass@1"] for m in measured.values()],
        yerr=[m["eval/add3/pass@1_stderr"] for m in measured.values()],
    )
    axes.set(ylabel="held-out accuracy", ylim=(0, 1))
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    More: [recipes of several stages](../../tools/recipe/README.md), with the numbers of R1's stages on
    this problem.
    """)
    return


if __name__ == "__main__":
    app.run()
