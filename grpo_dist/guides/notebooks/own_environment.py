import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    # Your own environment

    An environment answers the policy over several turns. You write one, play an episode of it by hand,
    let `check` look at it, and train two steps on it. It takes about two minutes on two CPU cores.
    """)
    return


@app.cell
def _():
    from pathlib import Path

    import marimo as mo
    import pyarrow.parquet as pq

    from grpo_dist.runtime.commands import run_command

    steps = mo.cli_args().get("steps") or 2
    return Path, mo, pq, run_command, steps


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## The class

    One instance serves one episode. `start` returns the user's message, `step` answers an action of the
    policy. Tools are plain functions; here the policy may use the calculator that comes with grpo-dist.
    """)
    return


@app.cell
def _(Path):
    _size = Path("games.py").write_text('''\
from grpo_dist.environments.base import Environment, Step
from grpo_dist.environments.builtin import calculator


class Guess(Environment):
    """The policy guesses a number below 100; it may use the calculator."""

    tools = [calculator]

    def start(self, problem):
        self.number = int(problem.answer)
        return "Guess a number below 100. Answer with the number alone."

    def step(self, action):
        if not action.strip().isdigit():
            return Step("Answer with a number.", reward=-0.1)
        guess = int(action)
        if guess == self.number:
            return Step(reward=1.0, done=True)
        return Step("Too low." if guess < self.number else "Too high.", reward=0.0)

    @classmethod
    def problems(cls, split, count):
        yield from ({"problem": f"number {n}", "answer": str(n)} for n in range(split == "test", 100, 2))
''')
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Play it by hand

    It is a plain class: look for the number 42 by halving, and see what it answers.
    """)
    return


@app.cell
def _(mo):
    import importlib
    import sys

    from grpo_dist.environments.base import Problem

    sys.path.insert(0, "")  # the working directory, where games.py is
    games = importlib.import_module("games")
    game = games.Guess()
    opening = game.start(Problem("number 42", "42", {}))
    low, high, turns = 0, 100, []
    while True:
        guess = (low + high) // 2
        step = game.step(str(guess))
        turns.append({"action": guess, "observation": step.observation, "reward": step.reward})
        if step.done:
            break
        low, high = (guess + 1, high) if step.observation == "Too low." else (low, guess)
    assert turns[-1] == {"action": 42, "observation": None, "reward": 1.0}
    mo.vstack([mo.md(f"> {opening}"), mo.ui.table(turns, selection=None)])
    return (turns,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Check it

    The tokens of an episode are those that the policy sampled and those that it was given; only the
    first are trained. `check` shows the first prompt, the tools, and what the environment answers.
    """)
    return


@app.cell
def _(Path, mo, run_command, steps, turns):
    assert turns
    Path("guess.yaml").write_text(f"""\
name: guess
steps: {steps}
model: {{path: "demo:tiny"}}
data:
  train: [{{environment: "games:Guess"}}]
code_paths: [.]
environments: {{max_turns: 4}}
rewards: {{functions: [{{function: environment}}]}}
batch: {{prompts_per_step: 2, samples_per_prompt: 4}}
sampling: {{max_new_tokens: 100}}
rollout: {{threads: 1}}
""")

    checked = run_command("check", "guess.yaml")
    mo.plain_text(checked)
    return (checked,)


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    ## Train on it

    A model of random weights will not guess a number. What you see is that its episodes run: turns,
    observations and rewards are in `samples/`, and `grpo-dist report runs/guess` shows each with its
    tokens.
    """)
    return


@app.cell
def _(checked, mo, pq, run_command):
    assert checked
    run_command("train", "guess.yaml", "checkpoint.resume=never")
    rows = pq.read_table("runs/guess/samples/step_000001.parquet").to_pylist()
    mo.ui.table(
        [{"problem": r["problem"], "reward": r["reward"], "ended by": r["finish_reason"]} for r in rows],
        selection=None,
    )
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md("""
    More: tools, sandboxed code and budgets are in [write an environment](../write_an_environment.md).
    """)
    return


if __name__ == "__main__":
    app.run()
