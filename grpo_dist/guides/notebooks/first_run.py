import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # A first run

    You train a small model with random weights, watch its reward rise, and read what it wrote. It takes
    about two minutes on two CPU cores. Files go to the current directory: `first_run.yaml` and
    `runs/first_run`.

    Run this file as a program (`python first_run.py`) or edit it (`marimo edit first_run.py`).
    """)
    return


@app.cell
def _():
    import json
    from pathlib import Path

    import marimo as mo
    import matplotlib.pyplot as plt
    import pyarrow.parquet as pq

    from grpo_dist.runtime.processes import run_command

    steps = mo.cli_args().get("steps") or 40  # python first_run.py --steps 4
    return Path, json, mo, plt, pq, run_command, steps


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## The configuration

    It names what differs from the defaults. `demo:add3` are additions that this project makes;
    `demo:tiny` is a model of 0.8 M random weights. Such a model never adds right. So a second reward
    counts the digits in its answer: something that it can learn in a minute.
    """)
    return


@app.cell
def _(Path, steps):
    Path("digits.py").write_text(
        "def share(completion: str) -> float:\n"
        "    return sum(c.isdigit() for c in completion) / max(1, len(completion))\n"
    )
    config = Path("first_run.yaml")
    _size = config.write_text(f"""\
name: first_run
steps: {steps}
model: {{path: "demo:tiny"}}
data:
  train: [{{path: "demo:add3"}}]
  max_prompt_tokens: 64
code_paths: [.]
rewards:
  functions: [{{function: math}}, {{function: "digits:share", name: digits}}]
batch: {{prompts_per_step: 8, samples_per_prompt: 8}}
sampling: {{max_new_tokens: 16}}
policy: {{optimizer: {{lr: 1.0e-3}}}}
rollout: {{threads: 1}}
""")
    return (config,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Check, then train

    `grpo-dist check` starts nothing. It reports every problem at once, shows a prompt as the model sees
    it, and how the batch divides. `grpo-dist train` runs. Interrupted, the same command resumes.
    """)
    return


@app.cell
def _(config, mo, run_command):
    checked = run_command("check", str(config))
    mo.plain_text(checked)
    return (checked,)


@app.cell
def _(checked, config, mo, run_command):
    assert checked
    trained = run_command("train", str(config), "checkpoint.resume=never")
    mo.plain_text("\n".join(line for line in trained.splitlines() if line.startswith("step"))[-2000:])
    return (trained,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## What happened

    `metrics.jsonl` has one object a step. `reward/mean` is the mean over all samples; the two parts
    have their own names. `policy/entropy` falls, because the model becomes sure of digits.
    """)
    return


@app.cell
def _(Path, json, plt, trained):
    assert trained
    run = Path("runs/first_run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [line for line in lines if "reward/mean" in line]  # the others are of evaluations alone
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for name in ("reward/digits", "reward/math"):
        left.plot([m["step"] for m in metrics], [m[name] for m in metrics], label=name)
    left.set(xlabel="step", ylabel="mean reward")
    left.legend()
    right.plot([m["step"] for m in metrics], [m["policy/entropy"] for m in metrics])
    right.set(xlabel="step", ylabel="entropy, nats a token")
    figure
    return metrics, run


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## What it wrote

    `samples/` has every completion with its rewards. Read some of the first and of the last step before
    you trust a curve: a reward can rise for a reason that you did not mean. Here it did, on purpose.
    """)
    return


@app.cell
def _(metrics, mo, pq, run):
    def written(step: int) -> list[dict]:
        rows = pq.read_table(run / f"samples/step_{step:06d}.parquet").to_pylist()[:4]
        return [{"step": step, "completion": row["completion"], "reward": row["reward"]} for row in rows]

    mo.ui.table(written(1) + written(metrics[-1]["step"]), selection=None)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    Next: [your own reward](own_reward.py), and [the report](../../tools/report/README.md) of this run.
    """)
    return


if __name__ == "__main__":
    app.run()
