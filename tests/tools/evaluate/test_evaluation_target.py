"""Models and data that `grpo-dist eval` accepts."""

import json
import re
import shlex
from pathlib import Path

import pytest

from grpo_dist.cli import command_parser
from grpo_dist.data.readers import read, read_all
from grpo_dist.errors import UserError
from grpo_dist.tools.evaluate.target import BENCHMARKS, INSTRUCTION, breakdown, configuration

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
model: {path: "demo:tiny", revision: main}
data:
  train: [{path: "demo:add3"}]
  eval: [{path: "demo:add3", split: test}]
  instruction: Add.
  max_prompt_tokens: 64
sampling: {max_new_tokens: 32}
evaluation: {samples_per_prompt: 2}
"""


@pytest.fixture
def run(tmp_path) -> Path:
    directory = tmp_path / "runs/mine"
    (directory / "model").mkdir(parents=True)
    (directory / "config.yaml").write_text(CONFIG)
    (directory / "model/config.json").write_text("{}")
    return directory


def test_a_run_is_evaluated_with_its_own_settings_and_the_model_it_exported(run):
    config = configuration(str(run), [], ["seed=3"])
    assert config.model.path == str(run / "model") and config.model.revision is None
    assert config.data.instruction == "Add." and config.seed == 3
    assert [s.path for s in config.data.eval] == ["demo:add3"]


@pytest.mark.parametrize("step", ["", "@latest", "@2"])
def test_the_weights_of_a_run_are_not_merged_with_its_adapter_again(run, step):
    (run / "config.yaml").write_text(CONFIG.replace("revision: main", "revision: main, adapter: tuned"))
    assert configuration(f"{run}{step}", [], []).model.adapter is None
    assert configuration(f"{run}{step}", [], ["model.adapter=other"]).model.adapter == "other"


@pytest.mark.parametrize("target", ["{run}", "{run}@2", "{run}/config.yaml"])
def test_secrets_that_the_evaluation_of_a_run_reads_are_to_be_set_again(run, target):
    with (run / "config.yaml").open("a") as file:
        file.write("tracking: {sinks: [{function: 'my:sink', kwargs: {api_key: '***'}}]}\n")
        file.write("rewards: {functions: [{function: 'my:f', kwargs: {verdict_token: '***'}}]}\n")
    target, key = target.format(run=run), "rewards.functions.0.kwargs.verdict_token"
    with pytest.raises(UserError, match=rf"\*\*\* in `{key}` stands for a secret"):
        configuration(target, [], [])
    config = configuration(target, [], [f"{key}=right"])
    assert config.rewards.functions[0].kwargs == {"verdict_token": "right"}


def test_rewards_of_replaced_sets_are_left_out(run):
    """Not those of other sources, and a name that was of no source is refused as before."""
    text = """
model: {path: "demo:tiny"}
data:
  train: [{path: "demo:add3", name: both}, {path: "demo:add3", name: trained}]
  eval: [{path: "demo:add3", name: held}, {path: "demo:add3", name: both}, {path: "demo:add4"}]
rewards: {by_source: {held: {functions: [exact]}, both: {functions: [exact]}, trained: {functions: [exact]}}}
"""
    (run / "config.yaml").write_text(text)
    assert [*configuration(str(run), [], []).rewards.by_source] == ["held", "both", "trained"]
    assert [*configuration(str(run), ["demo:add4"], []).rewards.by_source] == ["both", "trained"]
    (run / "config.yaml").write_text(text.replace("{held: {", "{add4: {"))
    assert [*configuration(str(run), ["demo:add4"], []).rewards.by_source] == ["add4", "both", "trained"]
    (run / "config.yaml").write_text(text.replace("{held: {", "{typo: {"))
    with pytest.raises(UserError, match=r"`rewards\.by_source` has typo, but no source"):
        configuration(str(run), ["demo:add4"], [])


def test_a_pipeline_is_not_evaluated():
    with pytest.raises(UserError, match=r"r1_demo.yaml: a pipeline; expected the configuration of one run"):
        configuration(str(ROOT / "configs/pipelines/r1_demo.yaml"), [], [])


def test_other_data_for_a_run_is_checked_whole(run):
    config = configuration(str(run), ["demo:add4", "x.jsonl"], ["data.eval.1.problem_column=question"])
    assert [(s.path, s.split, s.problem_column) for s in config.data.eval] == [
        ("demo:add4", "test", "problem"), ("x.jsonl", "test", "question")
    ]  # fmt: skip
    assert config.evaluation.samples_per_prompt == 2
    assert [s.path for s in config.data.train] == ["demo:add3"]


def test_a_run_without_an_exported_model_is_refused(run):
    (run / "model/config.json").unlink()
    with pytest.raises(UserError, match=r"mine: a run directory without an exported model"):
        configuration(str(run), ["x.jsonl"], [])


def test_a_bare_model_gets_the_boxed_instruction_and_needs_data(tmp_path):
    config = configuration("Qwen/Qwen2.5-0.5B-Instruct", ["x.jsonl"], ["sampling.max_new_tokens=8"])
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct" and config.data.instruction == INSTRUCTION
    assert config.sampling.max_new_tokens == 8
    with pytest.raises(UserError, match=r"demo:tiny: no data.*gsm8k, math500"):
        configuration("demo:tiny", [], [])
    with pytest.raises(UserError, match=r"unknown key `evaluation\.smaples`"):
        configuration("demo:tiny", ["x.jsonl"], ["evaluation.smaples=3"])


def test_benchmarks_are_found_in_the_directory_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_DATA", str(tmp_path))
    (tmp_path / "aime24.jsonl").write_text(json.dumps({"problem": "1+1", "answer": 2}) + "\n")
    (source,) = configuration("demo:tiny", ["aime24"], []).data.eval
    assert (source.name, source.path) == ("aime24", str(tmp_path / "aime24.jsonl"))
    with pytest.raises(UserError, match=r"gsm8k: no file .*gsm8k_test\.jsonl"):
        configuration("demo:tiny", ["gsm8k"], [])


def test_the_published_answers_of_gsm8k_are_read(tmp_path, shared_data):
    """The data's `solution` column is the publishers' `answer`."""
    rows = [json.loads(line) for line in (shared_data / "gsm8k_test.jsonl").read_text().splitlines()]
    published = [{"question": row["problem"], "answer": row["solution"]} for row in rows]
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in published))
    hub = {key: value for key, value in BENCHMARKS["gsm8k"].hub.items() if key not in ("path", "subset")}
    (source,) = configuration(
        "demo:tiny", [str(path)], [f"data.eval.0.{k}='{v}'" for k, v in hub.items()]
    ).data.eval
    assert [row.answer.replace(",", "") for row in read(source)] == [row["answer"] for row in rows]


@pytest.mark.parametrize(
    ("name", "rows"), [("gsm8k", 1319), ("math500", 500), ("aime24", 30), ("aime25", 30), ("amc23", 40)]
)
def test_every_benchmark_of_the_data_directory_is_read_whole(shared_data, monkeypatch, name, rows):
    monkeypatch.setenv("GRPO_DATA", str(shared_data))
    (source,) = configuration("demo:tiny", [name], []).data.eval
    assert len(read(source)) == rows
    assert ("level" in breakdown(source)) and ("subject" in breakdown(source)) == (name == "math500")


def readme_commands(command):
    """Return the commands of the READMEs that have concrete arguments."""
    readmes = (ROOT / "grpo_dist/evaluation/README.md", ROOT / "grpo_dist/tools/evaluate/README.md")
    lines = [line for path in readmes for line in path.read_text().splitlines()]
    return [x for x in lines if x.startswith(f"grpo-dist {command} ") and not re.search(r" \[|\bA B\b", x)]


@pytest.mark.parametrize("line", readme_commands("eval"))
def test_evaluation_commands_of_the_readme_work_as_written(line, monkeypatch):
    monkeypatch.delenv("GRPO_DATA", raising=False)
    args, rest = command_parser().parse_known_args(shlex.split(line)[1:])
    data = [word for word in args.overrides if "=" not in word]
    config = configuration(args.config, data, [w for w in args.overrides if "=" in w])
    assert not rest and len(config.data.eval) == len(data) > 0
    assert config.evaluation.samples_per_prompt > 1


@pytest.mark.parametrize("line", readme_commands("score"))
def test_scoring_commands_of_the_readme_parse(line):
    args, rest = command_parser().parse_known_args(shlex.split(line)[1:])
    assert args.config.endswith(".jsonl") and all("=" in word for word in rest)


COLUMNS = """
model: {path: "demo:tiny"}
data:
  train: [{path: "demo:add3"}]
  eval:
    - {path: x, problem_column: question, answer_column: solution, answer_pattern: "#### (.+)",
       columns: [level]}
"""


def make_source(run, tmp_path, row, *overrides):
    file = tmp_path / "new.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (source,) = configuration(str(run), [str(file)], overrides).data.eval
    return source


def test_other_data_for_a_run_is_read_with_the_runs_columns(run, tmp_path):
    (run / "config.yaml").write_text(COLUMNS)
    row = {"question": "1+1", "solution": "so #### 2", "level": 3}
    source = make_source(run, tmp_path, row)
    assert [(r.problem, r.answer, r.columns) for r in read(source)] == [("1+1", "2", {"level": 3})]
    assert make_source(run, tmp_path, row, "data.eval.0.answer_pattern='so (.+)'").answer_pattern == "so (.+)"


def test_other_data_for_a_run_is_read_with_its_nested_columns(run, tmp_path):
    text = COLUMNS.replace("question", "extra_info.question").replace("solution", "reward_model.ground_truth")
    (run / "config.yaml").write_text(text.replace("[level]", "[extra_info.level]"))
    row = {"reward_model": {"ground_truth": "so #### 2"}, "extra_info": {"question": "1+1", "level": 3}}
    (parsed,) = read(make_source(run, tmp_path, row))
    assert (parsed.problem, parsed.answer, parsed.columns) == ("1+1", "2", {"extra_info.level": 3})


def test_other_data_for_a_run_is_read_with_every_column_that_makes_its_prompts(run, tmp_path):
    columns = "problem_template: 'Make {target}.', system_column: role, history_column: before"
    (run / "config.yaml").write_text(COLUMNS.replace("problem_column: question", columns))
    row = {"target": 7, "role": "Be brief.", "before": [["1+1", "2"]], "solution": "#### 3+4", "level": 3}
    (parsed,) = read(make_source(run, tmp_path, row))
    assert (parsed.problem, len(parsed.messages)) == ("Make 7.", 4)


def test_keys_that_other_data_may_lack_are_named_and_left_out_where_they_cannot_apply(run, tmp_path, capsys):
    template = "problem_template: 'Make {target}.', template: '{problem} ({level})', environment: python, "
    text = COLUMNS.replace("problem_column: question", f"{template}environment_kwargs: {{most: 3}}")
    text = text.replace('  train: [{path: "demo:add3"}]\n', "").replace("eval:", "train:")
    (run / "config.yaml").write_text(text)
    (source,) = configuration(str(run), ["math500"], []).data.eval
    assert source.template is None and source.problem_template is None
    assert not capsys.readouterr().out
    configuration(str(run), ["math500", "x.jsonl"], [])
    assert "; data.eval.1.problem_template=null reads it without" in capsys.readouterr().out
    row = {"question": "1+1", "solution": "#### 2", "level": 3}
    overrides = ["data.eval.0.problem_column=question", "data.eval.0.environment=none"]
    source = make_source(run, tmp_path, row, *overrides)
    assert source.problem_template is None and source.environment_kwargs == {} and source.template
    assert "with `problem_template` of the other data; data.eval.0.problem_template=null" in (
        capsys.readouterr().out
    )


TRAINED = """
model: {path: "demo:tiny"}
data:
  instruction: Add.
  train:
    - {path: "demo:add3", instruction: "", environment: python, environment_kwargs: {most: 3}}
    - {path: "demo:add4", instruction: "", environment: python, environment_kwargs: {most: 3}}
"""


@pytest.mark.parametrize("data", ["gsm8k", "demo:add4", "x.jsonl"])
def test_other_data_for_a_run_is_asked_as_all_its_training_sources_are(run, data, capsys, monkeypatch):
    monkeypatch.delenv("GRPO_DATA", raising=False)
    (run / "config.yaml").write_text(TRAINED)
    (source,) = configuration(str(run), [data], []).data.eval
    assert (source.instruction, source.environment, source.environment_kwargs) == ("", "python", {"most": 3})
    (source,) = configuration(str(run), [data], ["data.eval.0.instruction=Now."]).data.eval
    assert source.instruction == "Now."
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "settings", "named"),
    [
        ('instruction: "", environment: python, environment_kwargs: {most: 3}}\n    - {path: "demo:add4", ',
         'environment: python, environment_kwargs: {most: 3}}\n    - {path: "demo:add4", ',
         (None, "python", {"most": 3}), "instruction"),
        ("most: 3}}\n    -", "most: 4}}\n    -", ("", None, {}), "environment, environment_kwargs"),
    ],
    ids=["prompt", "environment"],
)  # fmt: skip
def test_settings_in_which_training_sources_differ_are_named(run, capsys, old, new, settings, named):
    (run / "config.yaml").write_text(TRAINED.replace(old, new))
    (source,) = configuration(str(run), ["x.jsonl"], []).data.eval
    assert (source.instruction, source.environment, source.environment_kwargs) == settings
    assert f"mine: sources of `data.train` differ in {named}, which" in capsys.readouterr().out


def test_a_missing_column_is_refused_with_the_key_to_set(run, tmp_path):
    source = make_source(run, tmp_path, {"task": "1+1", "answer": "2"})
    with pytest.raises(
        ValueError, match=r"no column `problem`.*task, answer.*here `data\.eval\.0\.problem_column`"
    ):
        read_all([source], "data.eval")


@pytest.mark.slow
def test_a_pattern_with_runaway_backtracking_does_not_hang(run, tmp_path, monkeypatch):
    (run / "config.yaml").write_text(COLUMNS.replace("#### (.+)", "(a|aa)+$"))
    source = make_source(run, tmp_path, {"question": "1+1", "solution": "a" * 60 + "!", "level": 3})
    monkeypatch.setattr("grpo_dist.data.readers.PATTERN_S", 1.0)
    with pytest.raises(ValueError, match="does not finish within 1 s"):
        read(source)
