import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # Your own reward, and your own loop

    You write a reward, test it on answers whose score you know, and train on it with a loop that you
    write yourself: the four verbs `sample`, `score`, `update`, `sync`. It takes about two minutes on
    two CPU cores.
    """)
    return


@app.cell
def _():
    import json
    import subprocess
    import sys
    from pathlib import Path

    import marimo as mo
    import matplotlib.pyplot as plt
    import numpy as np

    steps = mo.cli_args().get("steps") or 12  # python own_reward.py --steps 3
    return Path, json, mo, np, plt, steps, subprocess, sys


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## A reward is a function

    It takes what it names of `completion`, `answer`, `problem` and the columns of the data. It returns
    a number, or None for an answer that it cannot score: such a sample leaves the statistics of its
    group. This one wants answers of half digits, half other signs.
    """)
    return


@app.cell
def _(Path):
    _size = Path("my_rewards.py").write_text('''\
def half_digits(completion: str, target: float = 0.5) -> float | None:
    """Return 1 for the target share of digits, less the farther from it; None for an empty answer."""
    if not completion:
        return None
    share = sum(c.isdigit() for c in completion) / len(completion)
    return max(0.0, 1.0 - abs(share - target) / target)
''')
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Trust it before you train on it

    `grpo-dist score` grades a file with the processes, deadline and memory limit of a run. Give it
    answers that you have scored by hand, and hostile ones: the policy will find what your reward
    forgets.
    """)
    return


@app.cell
def _(Path, json, mo, subprocess, sys):
    by_hand = {"1a2b": 1.0, "1234": 0.0, "abcd": 0.0, "1abc": 0.5, "": None}
    rows = [{"answer": "0", "completion": text} for text in by_hand]
    Path("by_hand.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["by_hand.jsonl", "--reward", "my_rewards:half_digits", "code_paths=[.]"]
    done = subprocess.run(  # bounded: the command has deadlines
        [sys.executable, "-m", "grpo_dist.cli", "score", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    scored = [json.loads(line) for line in Path("by_hand.scored.jsonl").read_text().splitlines()]
    assert [row["score"]["reward"] for row in scored] == list(by_hand.values())
    mo.ui.table(
        [{"completion": row["completion"], "reward": row["score"]["reward"]} for row in scored],
        selection=None,
    )
    return (scored,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## The workers, in your hands

    `grpo_dist.cluster` starts engines, graders and policy ranks of a configuration. The block ends
    them, whatever happens in it. The calls work in a notebook too, because the workers' event loop has
    a thread of its own.

    - `sample` returns the samples of each prompt, `score` their rewards.
    - `update` trains, with `algorithm` as configured, or with advantages of yours.
    - `sync` sends the new weights to the engines. If you forget it, `update` raises an error: it refuses
      samples that are older than `max_staleness` updates.
    """)
    return


@app.cell
def _(scored, steps):
    import grpo_dist

    assert scored
    config = {
        "name": "own_reward",
        "steps": steps,
        "model": {"path": "demo:tiny"},
        "data": {"train": [{"path": "demo:add3"}], "max_prompt_tokens": 64},
        "code_paths": ["."],
        "rewards": {"functions": [{"function": "my_rewards:half_digits"}]},
        "batch": {"prompts_per_step": 8, "samples_per_prompt": 8},
        "sampling": {"max_new_tokens": 16},
        "policy": {"optimizer": {"lr": 1.0e-3}},
        "rollout": {"threads": 1},
    }
    history = []
    with grpo_dist.cluster(config) as cluster:
        for prompts in cluster.batches():
            sampled = cluster.sample(prompts)
            groups = cluster.score(sampled)
            history.append(cluster.update(groups) | cluster.sync())
        shown = sampled[0].rollouts[0].text
    return config, grpo_dist, history, shown


@app.cell
def _(history, mo, plt, shown):
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(range(1, len(history) + 1), [metrics["reward/mean"] for metrics in history])
    axes.set(xlabel="step", ylabel="mean reward")
    mo.vstack([figure, mo.md(f"A sample of the last step: `{shown}`")])
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Advantages of your own

    This estimator is not among the presets: the best sample of each group gets +1, the worst -1, all
    others 0. Your loop may also sample a prompt twice, leave groups out, or keep samples for a later
    step.
    """)
    return


@app.cell
def _(config, grpo_dist, history, mo, np):
    def best_against_worst(rewards):
        """[0.2, 0.9, 0.5] -> [-1, 1, 0]; zeros for equal rewards."""
        advantages = np.zeros(len(rewards), np.float32)
        if np.isfinite(rewards).all() and np.ptp(rewards) > 0:
            advantages[rewards.argmax()], advantages[rewards.argmin()] = 1.0, -1.0
        return advantages

    assert history  # one cluster at a time
    rewards = []
    with grpo_dist.cluster(config) as workers:
        for batch in workers.batches():
            scored_groups = workers.score(workers.sample(batch))
            own = [best_against_worst(scored.group.rewards) for scored in scored_groups]
            rewards.append(workers.update(scored_groups, advantages=own)["reward/mean"])
            workers.sync()
        saved = workers.export("own_reward_model")
    mo.md(
        f"Mean reward {rewards[0]:.2f} in the first step, {rewards[-1]:.2f} in the last. "
        f"The model is in `{saved}`."
    )
    return


if __name__ == "__main__":
    app.run()
