import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # Reading a report

    A run records what it does in its directory. Here you look at one run in its files, ask the questions
    that every run must answer, and build the page that shows all of it. Without a run `runs/first_run`
    the notebook trains one, which takes about two minutes on two CPU cores.
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
    import pyarrow.parquet as pq

    return Path, json, mo, plt, pq, subprocess, sys


@app.cell
def _(Path, mo, subprocess, sys):
    run = Path("runs/first_run")
    if not (run / "DONE").exists():
        first = Path(__file__).with_name("first_run.py")
        steps = str(mo.cli_args().get("steps") or 40)
        subprocess.run(
            [sys.executable, str(first), "--steps", steps], check=True
        )  # bounded: the command has deadlines
    sorted(path.name for path in run.iterdir())
    return (run,)


@app.cell
def _(json, run):
    def lines(name: str) -> list[dict]:
        return [json.loads(line) for line in (run / name).read_text().splitlines()]

    # The other lines are of evaluations alone.
    metrics = [line for line in lines("metrics.jsonl") if "reward/mean" in line]
    events = lines("events.jsonl")
    last = metrics[-1]
    return events, last, lines, metrics


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Is what I train what I sample from?

    Before anything is learned, engine and trainer must be the same model. `mismatch/logprob_diff_max`
    is the largest difference of their log-probs on the same tokens: about 1e-6 in float32. The ratio of
    the first update is 1, the KL 0. A run that fails this stops.
    """)
    return


@app.cell
def _(metrics, mo):
    worst = max(m["mismatch/logprob_diff_max"] for m in metrics)
    assert worst < 1e-4 and metrics[0]["first_update/policy/ratio_max"] == 1.0
    mo.md(f"Engine against trainer: {worst:.1e} nats at most, over {len(metrics)} steps.")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Does it learn, and from what?

    The reward alone does not say. Look at its parts, at the share of groups without signal (all rewards
    equal: they teach nothing), at the length, and at how many answers were cut off.
    """)
    return


@app.cell
def _(metrics, plt):
    shown = {
        "reward": ("reward/mean", "reward/digits", "reward/math"),
        "groups and answers": ("group/no_signal_share", "rollout/truncated_share"),
        "policy": ("policy/entropy",),
        "gradient": ("policy/grad_norm",),
    }
    figure, axes = plt.subplots(1, 4, figsize=(13, 3), layout="constrained")
    for chart, (title, names) in zip(axes, shown.items(), strict=True):
        for name in names:
            chart.plot([m["step"] for m in metrics], [m[name] for m in metrics], label=name.split("/")[1])
        chart.set(title=title, xlabel="step")
        chart.legend(fontsize=8)
    figure
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Was every prompt used, and what went wrong?

    The ledger has the outcome of every prompt: trained, without signal, or dropped with a reason.
    `events.jsonl` has every warning, and each comparison of an engine with the policy.
    """)
    return


@app.cell
def _(events, last, lines, mo):
    ledger = lines("ledger.jsonl")
    counts: dict[str, int] = {}
    for entry in ledger:
        for outcome, uids in entry.items():
            if isinstance(uids, list):
                counts[outcome] = counts.get(outcome, 0) + len(uids)
    assert sum(counts.values()) == 8 * last["step"]  # 8 prompts a step
    mo.vstack([mo.md(f"Prompts: {counts}"), mo.ui.table(events, selection=None)])
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Where does the time go?

    Seconds of the last step, by phase of the loop. `grpo-dist bench` compares them with what the
    machine can do.
    """)
    return


@app.cell
def _(last, mo):
    phases = ("sample", "stage", "update", "drain", "sync", "step")
    mo.ui.table([{"phase": p, "seconds": round(last[f"time/{p}_s"], 3)} for p in phases], selection=None)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Read the samples

    The best and the worst of the last step. If the best ones are not what you want, the reward is
    wrong, not the model.
    """)
    return


@app.cell
def _(last, mo, pq, run):
    rows = pq.read_table(run / f"samples/step_{last['step']:06d}.parquet").to_pylist()
    rows.sort(key=lambda row: row["reward"])
    mo.ui.table(
        [{"reward": row["reward"], "problem": row["problem"], "completion": row["completion"]}
         for row in (*rows[:3], *rows[-3:])],
        selection=None,
    )  # fmt: skip
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## The page

    `grpo-dist report` puts all of this into one HTML file: curves, a timeline of all actors, every
    rollout with its tokens, events, settings. It takes several runs at once, and `--serve` follows a
    run.
    """)
    return


@app.cell
def _(mo, run, subprocess, sys):
    page = run / "report.html"
    subprocess.run(  # bounded: the command has deadlines
        [sys.executable, "-m", "grpo_dist.cli", "report", str(run)], check=True, capture_output=True
    )
    assert page.stat().st_size > 100_000
    mo.md(f"Open `{page.resolve()}` in a browser.")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    More: [diagnose a run](../diagnose_a_run.md), [every metric](../../observe/README.md).
    """)
    return


if __name__ == "__main__":
    app.run()
