"""`grpo-dist eval` with fake workers: stored parts, repeated sampling, refusals."""

import asyncio
import json
import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import actors.cluster
from grpo_dist.cli import main
from grpo_dist.config import DataConfig, EnvironmentsConfig, RewardsConfig
from grpo_dist.config.files import load_config
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.runs import run_directory as dated_config
from grpo_dist.runtime.concurrency import deadline
from grpo_dist.runtime.files import alone
from grpo_dist.tools.evaluate import run, store
from grpo_dist.tools.evaluate.run import evaluate_model
from grpo_dist.tools.evaluate.target import configuration
from grpo_dist.tools.plan.virtual_clock import run_virtually
from grpo_dist.tools.recipe import run as stages
from grpo_dist.types import Group
from tests.support import fakes
from tests.support.documents import ROOT, blocks
from tests.support.fakes import World, fake_cluster
from tests.support.patience import HANG_S

PROBLEMS = [
    {"problem": f"{i} + 1", "answer": str(i + 1), "level": str(i % 2), "source": "made"} for i in range(10)
]


class Engine(World):
    """Samples one prompt at a time: a third of the samples is right, the others give one of two answers. It
    fails at ``fail_on``, once the directory "cut" has a part, and fails every later request too.
    """

    def __init__(self, fail_on):
        super().__init__()
        self._room, self._end_at, self._dead = asyncio.Lock(), fail_on, False

    async def sample(self, prompt, *, seeds, sampling):
        async with self._room:
            if prompt.text == self._end_at:
                async with asyncio.timeout(HANG_S):
                    while not parts_in("cut"):
                        await asyncio.sleep(0.01)
                self._dead = True
            if self._dead:
                raise RuntimeError("the engine died")
            return await super().sample(prompt, seeds=seeds, sampling=sampling)

    async def score(self, prompt, rollouts):
        parity = [int(r.completion_ids[0]) % 3 for r in rollouts]
        rewards = np.array([float(p == 0) for p in parity], np.float32)
        outcomes = tuple("correct" if p == 0 else "wrong" for p in parity)
        samples = [replace(r, text=f"\\boxed{{{-p if p else prompt.answer}}}")
                for r, p in zip(rollouts, parity, strict=True)]  # fmt: skip
        return Group(prompt, tuple(samples), rewards, {"math": rewards}, outcomes)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with data. ``worlds``: started engines; ``failing``: prompts at which the next fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRPO_DATA", raising=False)
    write("data.jsonl", PROBLEMS)

    class Here:
        worlds: list[Engine] = []  # noqa: RUF012
        failing: list[str] = []  # noqa: RUF012

    def make():
        return Engine(Here.failing.pop() if Here.failing else None)

    Here.worlds, Here.failing = [], []
    monkeypatch.setattr(actors.cluster, "Cluster", fake_cluster(Here.worlds, make))
    return Here


def write(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


ARGUMENTS = (
    "sampling.max_new_tokens=4",
    "data.max_prompt_tokens=256",
    "evaluation.samples_per_prompt=32",  # two problems per part
    "evaluation.k=[1,4]",
)


def evaluate(*arguments, data=("data.jsonl",), directory="out"):
    """Return the exit code and the contents of result.json and problems.jsonl."""
    output = ("--output", directory) if directory else ()
    code = main(["eval", "demo:tiny", *data, *ARGUMENTS, *output, *arguments])
    return code, *(Path(f"{directory}/{name}").read_text() for name in ("result.json", "problems.jsonl"))


def write_config(directory):
    """Write a configuration with an evaluation set, and return it."""
    path = directory / "config.yaml"
    path.write_text(
        "model: {path: 'demo:tiny'}\ndata: {train: [{path: data.jsonl}], eval: [{path: data.jsonl, "
        "name: own, max_rows: 3}], max_prompt_tokens: 32}\nsampling: {max_new_tokens: 4}\n"
    )
    return load_config(path)


def parts_in(directory):
    return list(Path(f"{directory}/verdicts/data").glob("part_*.jsonl"))


def test_results_are_those_of_the_samples_overall_and_by_level(here, capsys):
    code, result, problems = evaluate()
    rows = [json.loads(line) for line in problems.splitlines()]
    measured = json.loads(result)["measured"]
    assert code == 0 and [row["problem"] for row in rows] == [p["problem"] for p in PROBLEMS]
    total, even, odd = measured
    assert [(m["set"], m["by"], m["value"]) for m in measured] == [
        ("data", None, None), ("data", "level", "0"), ("data", "level", "1")
    ]  # fmt: skip
    shares = [np.mean(row["correct"]) for row in rows]
    assert total["estimates"]["avg@32"]["value"] == pytest.approx(np.mean(shares))
    assert even["estimates"]["pass@1"]["value"] == pytest.approx(np.mean(shares[::2]))
    assert odd["estimates"]["pass@1"]["value"] == pytest.approx(np.mean(shares[1::2]))
    assert total["samples"] == 320 and total["unscored"] == 0 and total["length_tokens"] == 2
    assert set(total["estimates"]) == {"pass@1", "pass@4", "avg@32", "maj@4", "cons@32"}
    for row in rows:  # one number for each of the three answers
        kinds = {(n, a) for n, a in zip(row["numbers"], row["answers"], strict=True)}
        assert len(kinds) == 3 and len({n for n, _ in kinds}) == 3
    out = capsys.readouterr().out
    assert "avg@32" in out and "= pass@1" in out and "level 1" in out and "results: out" in out


def test_repeating_an_evaluation_or_changing_k_starts_no_engine(here, capsys):
    _, result, _ = evaluate()
    assert evaluate()[1] == result and len(here.worlds) == 1
    _, other, _ = evaluate("evaluation.k=[2,8]")
    assert "maj@8" in other and len(here.worlds) == 1
    assert "all 10 problems are done: out" in capsys.readouterr().out


def test_a_second_evaluation_on_another_day_asks_with_the_date_of_the_first(
    here, tiny_model, tmp_path, monkeypatch
):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    template = model / "chat_template.jinja"
    template.write_text("<|system|>{{ strftime_now('%Y-%m-%d') }}" + template.read_text())

    def on(day, *arguments):
        monkeypatch.setattr(dated_config, "date", SimpleNamespace(today=lambda: date.fromisoformat(day)))
        assert main(["eval", str(model), "data.jsonl", *ARGUMENTS, "output_dir=.", *arguments]) == 0
        return [json.loads(file.read_text()) for file in Path("evaluations").glob("*/evaluation.json")]

    (first,) = on("2026-07-31")
    assert first["settings"]["data"]["template_date"] == "2026-07-31"
    assert on("2026-08-01") == [first] and len(here.worlds) == 1
    assert len(on("2026-08-01", "data.template_date=2026-08-01")) == 2 and len(here.worlds) == 2


def test_an_interrupted_evaluation_resumes_to_the_same_bytes(here, capsys):
    whole = evaluate(directory="whole")
    here.failing.append("7 + 1")
    with pytest.raises(RuntimeError, match="engine died"):
        evaluate(directory="cut")
    parts = parts_in("cut")
    assert 0 < len(parts) < 5 and len(here.worlds[1].sampled) == 7
    assert evaluate(directory="cut") == whole
    assert len(here.worlds[2].sampled) == 10 - 2 * len(parts)
    assert f"{2 * len(parts)} of 10 problems are done" in capsys.readouterr().out


def test_samples_written_without_their_verdicts_are_sampled_again(here):
    whole = evaluate()
    last = Path("out/verdicts/data/part_00004.jsonl")
    last.unlink()
    assert evaluate() == whole and len(here.worlds[1].sampled) == 2
    assert last.exists() and len(list(Path("out/samples/data").iterdir())) == 5


def test_a_problem_of_which_nothing_was_scored_is_sampled_again_and_no_other(here, monkeypatch):
    _, result, problems = evaluate(directory="whole")
    with monkeypatch.context() as outage:
        unscored(outage, ("2 + 1", "7 + 1"))
        assert '"unscored": 64' in evaluate()[1]
    _, again, rows = evaluate()
    uids = {row["uid"] for row in map(json.loads, rows.splitlines()) if row["problem"] in ("2 + 1", "7 + 1")}
    assert {uid for uid, *_ in here.worlds[2].sampled} == uids and len(here.worlds[2].sampled) == 2
    assert (again, rows) == (result, problems)
    assert evaluate()[1] == again and len(here.worlds) == 3


def test_a_problem_that_the_grader_has_no_time_for_is_done(here, monkeypatch):
    unscored(monkeypatch, ("2 + 1",), outcome="timeout")
    _, result, problems = evaluate()
    assert json.loads(problems.splitlines()[2])["timeouts"] == 32
    assert evaluate()[1:] == (result, problems) and len(here.worlds) == 1


def test_more_data_is_sampled_and_changed_problems_are_noticed(here):
    evaluate("data.eval.0.max_rows=4")
    _, result, _ = evaluate()
    assert len(here.worlds[1].sampled) == 6 and json.loads(result)["measured"][0]["problems"] == 10
    write("data.jsonl", [{**PROBLEMS[0], "answer": "99"}, *PROBLEMS[1:]])
    _, _, problems = evaluate()
    assert len(here.worlds[2].sampled) == 1 and json.loads(problems.splitlines()[0])["answer"] == "99"


def test_columns_that_rewards_read_are_part_of_the_problem(here):
    columns = "data.eval.0.columns=[level]"
    evaluate(columns)
    write("data.jsonl", [{**PROBLEMS[0], "level": "7"}, *PROBLEMS[1:]])
    evaluate(columns)
    assert len(here.worlds[1].sampled) == 1
    here.worlds.clear()
    evaluate(directory="unseen")
    write("data.jsonl", PROBLEMS)
    evaluate(directory="unseen")  # a column used only for reporting decides no sample
    assert len(here.worlds) == 1


def test_another_model_or_setting_gets_its_own_directory_and_is_refused_in_a_used_one(here, capsys):
    evaluate()
    code, *_ = evaluate("evaluation.temperature=0.5", "rewards.timeout_s=2")
    error = capsys.readouterr().err
    assert code == 2 and "out: holds another evaluation" in error and "another --output" in error
    assert "`evaluation.temperature` was 1.0 and is 0.5" in error and "`rewards.timeout_s` was 5.0" in error
    assert evaluate("seed=1")[0] == 2 and "the model was demo:tiny" in capsys.readouterr().err
    assert len(here.worlds) == 1
    for changes in ([], ["seed=1"], []):
        assert main(["eval", "demo:tiny", "data.jsonl", *ARGUMENTS, *changes]) == 0
    assert len(here.worlds) == 3
    assert len(list(Path("runs/evaluations").iterdir())) == 2


def test_several_sets_have_their_own_rows_and_a_mean(here):
    write("other.jsonl", [{"problem": "x", "answer": "2"}, {"problem": "y", "answer": "3"}])
    _, result, _ = evaluate(data=("data.jsonl", "other.jsonl"))
    measured = {(m["set"], m["value"]): m for m in json.loads(result)["measured"]}
    assert set(measured) == {("data", None), ("data", "0"), ("data", "1"), ("other", None),
                             ("all problems", None), ("mean of sets", None)}  # fmt: skip
    one, two, both, mean = (
        measured[name, None]["estimates"]["avg@32"]["value"]
        for name in ("data", "other", "all problems", "mean of sets")
    )
    assert both == pytest.approx((10 * one + 2 * two) / 12) and mean == pytest.approx((one + two) / 2)


def unscored(monkeypatch, problems, outcome="error"):
    """Make every sample of ``problems`` unscored."""

    async def score(self, prompt, rollouts, original=Engine.score):
        group = await original(self, prompt, rollouts)
        if prompt.text not in problems:
            return group
        unknown = np.full(len(rollouts), np.nan, np.float32)
        return replace(
            group, rewards=unknown, reward_parts={"math": unknown}, outcomes=(outcome,) * len(rollouts)
        )

    monkeypatch.setattr(Engine, "score", score)


def test_a_set_that_could_not_be_scored_has_no_numbers_and_takes_none_from_the_others(
    here, monkeypatch, capsys
):
    write("other.jsonl", [{"problem": "x", "answer": "2"}, {"problem": "y", "answer": "3"}])
    unscored(monkeypatch, ("x", "y"))
    config = configuration("demo:tiny", ["data.jsonl", "other.jsonl"], ARGUMENTS)
    result = evaluate_model(config, print, directory=Path("out"))
    measured = {m.set: m for m in result.measured if m.by is None}
    assert result.unscored_sets == ["other"] and measured["other"].unscored == 64
    one, both, mean = (measured[name].estimates for name in ("data", "all problems", "mean of sets"))
    assert set(both) == set(mean) == {"pass@1", "pass@4", "avg@32", "maj@4", "cons@32"}
    assert both["avg@32"].value == mean["avg@32"].value == one["avg@32"].value
    assert both["avg@32"].problems == mean["avg@32"].problems == 10
    metrics = result.metrics()
    for name in ("pass@1", "pass@4", "avg@32"):  # as in evaluations during training
        assert np.isnan(metrics[f"eval/other/{name}"]) and np.isnan(metrics[f"eval/other/{name}_stderr"])
        assert metrics[f"eval/data/{name}"] > 0
    rows = [json.loads(line) for line in Path("out/problems.jsonl").read_text().splitlines()]
    assert rows[-1]["values"] == {"pass@1": None, "pass@4": None, "avg@32": None}
    assert "no sample of other could be scored" in capsys.readouterr().out
    assert main(["eval", "--compare", "out", "out"]) == 0
    out = capsys.readouterr().out
    assert "all problems" in out and "data" in out and "nan" not in out.lower()


def test_a_directory_with_other_contents_is_refused(here, capsys, tmp_path):
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy/file").write_text("")
    assert main(["eval", "demo:tiny", "data.jsonl", *ARGUMENTS, "--output", "busy"]) == 2
    assert "busy: exists, but holds no evaluation" in capsys.readouterr().err
    assert here.worlds == []


def test_a_configuration_is_evaluated_on_its_own_sets_or_on_others(here, tmp_path):
    write_config(tmp_path)
    assert main(["eval", "config.yaml", "--output", "a"]) == 0
    assert json.loads(Path("a/result.json").read_text())["measured"][0]["problems"] == 3
    assert main(["eval", "config.yaml", "data.jsonl", "--output", "b"]) == 0
    assert json.loads(Path("b/result.json").read_text())["measured"][0]["problems"] == 10


@pytest.mark.slow
def test_a_set_with_the_environment_of_the_guide_is_asked_as_in_training(here, monkeypatch, capsys):
    """Prompts keep their environment, the engines get its code, and changed code is another evaluation."""
    guide = ROOT / "grpo_dist/guides/write_an_environment.md"
    for block in blocks(guide):
        if block.file:
            Path(block.file).write_text(block.text)
    configs, tasks, make = [], [], actors.cluster.Cluster

    def cluster(config, *arguments, **keywords):
        configs.append(config)
        return make(config, *arguments, **keywords)

    async def sample(self, prompt, *, seeds, sampling):
        tasks.append(prompt.task)
        return await World.sample(self, prompt, seeds=seeds, sampling=sampling)

    monkeypatch.setattr(actors.cluster, "Cluster", cluster)
    monkeypatch.setattr(Engine, "sample", sample)
    arguments = ("eval", "guess.yaml", "data.eval.0.max_rows=3", "evaluation.samples_per_prompt=2")
    assert main([*arguments, "--output", "a"]) == 0
    assert [task.environment for task in tasks] == ["games:Guess"] * 3
    assert {tool["function"]["name"] for task in tasks for tool in task.tools} == {"calculator"}
    (config,) = configs
    assert config.environments == load_config("guess.yaml").environments and config.environments.code_paths
    Path("games.py").write_text(Path("games.py").read_text() + "\n# changed\n")
    assert main([*arguments, "--output", "a"]) == 2 and len(tasks) == 3
    assert "games.py" in capsys.readouterr().err


def test_two_results_are_compared_on_the_command_line(here, capsys):
    evaluate(directory="a")
    evaluate("evaluation.temperature=0.7", "seed=3", directory="b")
    capsys.readouterr()
    assert main(["eval", "--compare", "a", "b/result.json", "--output", "difference.json"]) == 0
    out = capsys.readouterr().out
    assert "B - A" in out and "warning: A and B were measured with different settings" in out
    rows = json.loads(Path("difference.json").read_text())["rows"]
    assert {row["measure"] for row in rows} == {"pass@1", "pass@4", "avg@32", "maj@4", "cons@32"}
    write("data.jsonl", PROBLEMS[:9])
    evaluate(directory="c")
    assert main(["eval", "--compare", "a", "c"]) == 2
    assert "a has 1 that c lacks (1 of data), e.g. '9 + 1'" in capsys.readouterr().err
    assert main(["eval", "--compare", "a", "b", "seed=1"]) == 2
    assert main(["eval"]) == 2


def test_a_second_process_is_refused(here, capsys):
    evaluate()
    with alone(Path("out"), "here"):
        assert evaluate()[0] == 2
        assert "out: another process is at this evaluation" in capsys.readouterr().err
    assert len(here.worlds) == 1


def test_a_pipeline_stage_is_evaluated_the_same_way_and_keeps_its_result(here, tiny_model, tmp_path):
    config = write_config(tmp_path)
    measures = stages.evaluate_stage(config, tiny_model, tmp_path / "stage", lambda _: None)
    again = stages.evaluate_stage(config, tiny_model, tmp_path / "stage", lambda _: None)
    assert measures == again and len(here.worlds) == 1
    names = ("pass@1", "pass@1_stderr", "length_tokens", "problems", "unscored")
    assert set(measures) == {f"eval/own/{name}" for name in names}
    (directory,) = (tmp_path / "stage/evaluations").iterdir()
    measured = json.loads((directory / "result.json").read_text())["measured"][0]
    assert measured["estimates"]["pass@1"]["value"] == measures["eval/own/pass@1"]


def test_a_deadline_restarts_with_each_progress():
    async def steps(count, seconds):
        async with deadline(0.5, "evaluate: the next prompt") as still_going:
            for _ in range(count):
                await asyncio.sleep(seconds)
                still_going()

    run_virtually(lambda: steps(8, 0.1))
    with pytest.raises(TimeoutError, match=r"stage evaluate: the next prompt: not finished within 0\.5 s"):
        run_virtually(lambda: steps(1, 5.0))


def test_verdicts_of_different_graders_are_not_mixed(monkeypatch):
    before = store.sample_settings(fakes.config())
    monkeypatch.setattr(store, "installed", lambda name: "99.0" if name == "math-verify" else None)
    after = store.sample_settings(fakes.config())
    assert before["versions"]["math-verify"] != "99.0"
    assert after == before | {"versions": {"math-verify": "99.0"}}


@pytest.mark.parametrize(
    ("section", "key"),
    [("rollout", {"quantization": "fp8"}), ("evaluation", {"temperature": 0.3}), ("seed", 5)],
)
def test_settings_that_change_samples_make_another_evaluation(section, key):
    model = {"path": "demo:tiny", "dtype": "bfloat16"}  # quantised layers compute in bfloat16
    before = store.sample_settings(fakes.config(model=model))
    after = store.sample_settings(fakes.config(model=model, **{section: key}))
    assert [name for name in before if before[name] != after[name]] == [section]


@pytest.mark.parametrize(("longest", "decides"), [(None, False), (100_000, False), (40, True)])
def test_a_longest_sequence_decides_samples_where_it_shortens_completions(longest, decides):
    limited = fakes.config(
        sampling={"max_new_tokens": 16},
        model={"path": "demo:tiny", "max_length": longest},
        data={"train": [{"path": "demo:add3"}], "max_prompt_tokens": 32},
    )
    assert (store.sample_settings(limited)["model"]["max_length"] is not None) == decides


def test_a_further_data_set_is_sampled_alone_and_the_result_has_the_sets_that_were_asked_for(here):
    write("other.jsonl", [{"problem": "x", "answer": "2"}, {"problem": "y", "answer": "3"}])
    _, first, rows = evaluate()
    _, other, _ = evaluate(data=("other.jsonl",))
    assert [m["set"] for m in json.loads(other)["measured"]] == ["other"] and len(here.worlds[1].sampled) == 2
    _, both, all_rows = evaluate(data=("data.jsonl", "other.jsonl"))
    measured = json.loads(both)["measured"]
    assert measured[:3] == json.loads(first)["measured"] and all_rows.startswith(rows)
    assert [m["set"] for m in measured[3:]] == ["other", "all problems", "mean of sets"]
    assert len(here.worlds) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"a":' * 100_000])
def test_a_damaged_evaluation_is_refused_by_name(here, capsys, content):
    evaluate()
    Path("out/evaluation.json").write_text(content)
    code, *_ = evaluate()
    err = capsys.readouterr().err
    assert code == 2 and "evaluation.json" in err and "another --output" in err and "Traceback" not in err


def test_a_damaged_result_is_not_compared(here, capsys):
    evaluate(directory="a")
    evaluate("seed=3", directory="b")
    Path("a/result.json").write_text('{"model"')
    assert main(["eval", "--compare", "a", "b"]) == 2
    assert "a: the result is incomplete" in capsys.readouterr().err


_GUESSED = """
from grpo_dist.environments.base import Environment, Step


class Guessed(Environment):
    def start(self, problem):
        return f"Guess {len(str(problem.columns['secret']))} digits"

    def step(self, action):
        return Step(done=True)

    @classmethod
    def problems(cls, split, count):
        yield {"problem": "one digit", "secret": 7, "size": "small"}
        yield {"problem": "two digits", "secret": 42, "size": "large"}
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", [(), ("size",)])
def test_prompts_keep_the_columns_that_an_environment_brings_also_by_a_breakdown(tmp_path, by):
    """`start` of the environment reads them in every episode."""
    (tmp_path / "guessed.py").write_text(_GUESSED)
    source = {"environment": "guessed:Guessed", "split": "test"}
    sections = SimpleNamespace(
        data=DataConfig(train=(source,), eval=(source,)),
        rewards=RewardsConfig(functions=({"function": "environment"},)),
        environments=EnvironmentsConfig(code_paths=(str(tmp_path),)),
    )
    (eval_set,) = run._read_sets(sections, character_tokenizer(), by, print)
    columns = [{"secret": 7, "size": "small"}, {"secret": 42, "size": "large"}]
    assert [p.columns for p in eval_set.prompts] == columns
    assert list(eval_set.by.values()) == [dict.fromkeys(by, size) for size in ("small", "large")]


def test_a_reward_whose_column_the_set_lacks_is_refused_before_anything_is_sampled(here, capsys):
    rewards = "rewards.functions=[{function: unit_tests, kwargs: {column: level}}]"
    assert main(["eval", "demo:tiny", "data.jsonl", *ARGUMENTS, "--by", "level", rewards]) != 0
    error = capsys.readouterr().err
    assert "reads column `level`, which data.jsonl:1 has, and the configuration does not pass on" in error
    assert "add it to `data.eval.0.columns`" in error
    assert here.worlds == []
