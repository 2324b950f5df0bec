"""Unusable input: one message with where, what and what to do; exit code 2; nothing is started."""

import pytest
from huggingface_hub.utils import filter_repo_objects

from grpo_dist.cli import main
from grpo_dist.config.files import load_config
from grpo_dist.errors import Unhealthy
from grpo_dist.runs.models import download
from grpo_dist.runs.start_checks import model_problems
from grpo_dist.runtime.files import alone
from grpo_dist.tools.report.command import write_report
from grpo_dist.tools.report.source import ReportLimits
from tests.support.good_inputs import GOOD, write
from tests.support.reports import pieces
from tests.support.tiers import slow_after


def refusal(capsys, *overrides, command="train"):
    """Return the single line on stderr; assert exit code 2."""
    assert main([command, "config.yaml", *overrides]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, error
    return lines[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=/no/such/model"], ["model.path = /no/such/model", "no such directory"]),
        (["model.path=demo:huge"], ["demo:huge", "demo:tiny"]),
        (["data.train.0.path=missing.jsonl"], ["missing.jsonl", "no such file"]),
        (["data.train.0.answer_column=anser"], ["train.jsonl:1", "`anser`", "did you mean `answer`"]),
        (
            ["data.max_prompt_tokens=4"],
            ["train.jsonl:1", "tokens", "data.max_prompt_tokens = 4", "data.overlong=drop"],
        ),
        (["batch.prompts_per_step=64"], ["20 prompts", "`batch.prompts_per_step` = 64", "at most 20"]),
        (["sampling.max_new_tokens=4096"], ["takes at most 1024 positions", "lower one"]),
        (
            ["policy.lora.target_modules=[q_proj,w_proj]"],
            ["`policy.lora.target_modules` = w_proj", "no such layer", "down_proj, gate_proj"],
        ),
        (
            ["policy.lora.target_modules=[lm_head]"],
            ["`policy.lora.target_modules` = lm_head", "LM head have no adapters", "q_proj"],
        ),
        (["policy.lora.target_modules=linear"], ["policy.lora.target_modules", "all-linear"]),
        (
            ["policy.offload={parameters: nvme, nvme_path: /no/such/disk}", "policy.zero_stage=3"],
            ["`policy.offload.nvme_path` = /no/such/disk", "expected a directory"],
        ),
        (
            ["policy.deepspeed.zero_optimization.offload_optimizer.device=nvme"],
            ["offload_optimizer.device` = nvme", "is set by policy.offload.optimizer; remove it"],
        ),
        (["rewards.functions=[{function: 'no_such_module:f'}]"], ["no_such_module", "code_paths"]),
        (["rewards.functions=[{function: maths}]"], ["'maths'", "`module:function`"]),
        (
            ["rewards.functions=[{function: overlong, kwargs: {buffer_tokens: 9}}]"],
            ["rewards.functions overlong", "kwargs.buffer_tokens = 9", "`sampling.max_new_tokens` = 8"],
        ),
        (
            ["rewards.functions=[{function: unit_tests, kwargs: {column: checks}}]"],
            ["reward unit_tests reads column `checks`", "add it to `data.train.0.columns`"],
        ),
        (
            ["rewards.models=[{name: quality, path: /no/such/model}]"],
            ["rewards.models quality", "/no/such/model", "no such directory"],
        ),
        (["optimiser.lr=1"], ["unknown key `optimiser`"]),
        (["weight_sync.backend=nccl"], ["weight_sync.backend = nccl", "auto or gloo"]),
        (["weight_sync.backend=ipc"], ["weight_sync.backend = ipc", "auto or gloo"]),
        (["model.dtype=bfloat16", "policy.zero_stage=0"], ["`policy.zero_stage` = 0", "policy.zero_stage=1"]),
        (["policy.deepspeed={train_batch_size: 8}"], ["policy.deepspeed.train_batch_size", "remove it"]),
    ],
)
def test_unusable_settings_are_refused(here, capsys, overrides, words):
    message = refusal(capsys, *overrides)
    assert all(word in message for word in words), message
    assert not (here / "runs").exists()


REWARDS = """
def raises(completion, answer):
    return {}[answer]

def text(completion):
    return "0.5"

def trl(prompts, completions, ground_truth):
    return [1.0] * len(completions)

def of_topic(completion, topic):
    return float(topic in completion)
"""


@pytest.mark.parametrize(
    ("function", "words"),
    slow_after(
        [
            ("raises", ["KeyError: '1' (", "mine.py:3 in raises)"]),
            ("text", ["mine:text returned the text '0.5'; expected a finite number"]),
            ("of_topic", ["mine:of_topic reads column `topic`, but train.jsonl:1 has only answer, problem"]),
            (
                "trl",
                ["mine:trl reads column `prompts`", "What other trainers call `prompts` is `problem` here"],
            ),
        ],
        1,
    ),
)
def test_rewards_are_tried_before_anything_is_started(here, capsys, function, words):
    (here / "mine.py").write_text(REWARDS)
    function = f"rewards.functions=[{{function: 'mine:{function}'}}]"
    assert main(["train", "config.yaml", function, "code_paths=[.]"]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert not (here / "runs").exists()


def test_a_run_that_can_score_nothing_ends_without_a_model_and_with_the_reason(here, capsys, monkeypatch):
    """Its first step raises `Unhealthy` (tests/health)."""
    why = "step 1: the first step in which no sample could be scored: reward mine: KeyError (mine.py:3 in f)"

    async def session(run, point):
        raise Unhealthy(why)

    monkeypatch.setattr("grpo_dist.runs.session._session", session)
    assert main(["train", "config.yaml", "tracking.tensorboard=false"]) == 3
    assert why in capsys.readouterr().err
    run = here / "runs/run"
    assert why in (run / "events.jsonl").read_text()
    assert not (run / "DONE").exists() and not (run / "model").exists()
    page = write_report([str(run)], None, ReportLimits(), lambda message: None)
    assert any(why in message for _, _, message in pieces(page)[1]["0/events/0"])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"problem": "1+1", ', ["train.jsonl:21", "not valid JSON"]),
        ('["1+1", "2"]', ["train.jsonl:21", "a JSON list; expected one JSON object per line"]),
        ({"problem": "1+1"}, ["train.jsonl:21", "no column `answer`"]),
        ({"problem": "1+1", "answer": ""}, ["train.jsonl:21", "`answer` is empty"]),
        ({"problem": "1+1", "answer": None}, ["train.jsonl:21", "`answer` is empty"]),
        ({"problem": " ", "answer": "2"}, ["train.jsonl:21", "`problem` is empty"]),
    ],
)
def test_unusable_rows_are_named(here, capsys, row, words):
    write("train.jsonl", [*GOOD, row])
    message = refusal(capsys)
    assert all(word in message for word in words), message


def test_empty_data_are_refused(here, capsys):
    write("train.jsonl", [])
    assert "train.jsonl: no rows" in refusal(capsys)


def test_a_source_too_small_for_the_prompts_of_its_steps_is_refused(here, capsys):
    """Of 4 prompts per step, each source has 2."""
    write("few.jsonl", [{"problem": "1 + 7", "answer": "8"}])
    sources = "data.train=[{path: train.jsonl, weight: 1}, {path: few.jsonl, weight: 1}]"
    error = refusal(capsys, sources, "dynamic_sampling.enabled=true")
    assert "source few has 1 prompts" in error and "50% of the 4 " in error


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no config.json"),
        ({"config.json": "{}"}, "it has no weights"),
        ({"config.json": "{", "model.safetensors": ""}, "config.json"),
    ],
)
def test_a_model_directory_without_a_whole_model_is_refused(here, capsys, files, words):
    (here / "model").mkdir()
    for name, text in files.items():
        (here / "model" / name).write_text(text)
    assert words in refusal(capsys, "model.path=./model")


def test_a_run_directory_that_cannot_be_created_is_refused(here, capsys):
    (here / "occupied").write_text("a file")
    assert "occupied" in refusal(capsys, "output_dir=occupied")


def test_a_run_that_another_process_trains_is_refused(here, capsys, monkeypatch):
    """Both would write the same files and remove each other's partial files."""
    monkeypatch.setattr("grpo_dist.runs.run_directory.LOCK_PATIENCE_S", 0.2)
    run_dir = here / "runs" / "run"
    run_dir.mkdir(parents=True)
    with alone(run_dir, "here"):
        message = refusal(capsys, "name=run")
    assert "runs/run: another process is training this run; wait for it, or choose another `name`" in message
    assert [path.name for path in run_dir.iterdir()] == [".lock"]


def test_a_complete_run_without_checkpoints_is_not_begun_again(here, capsys):
    run = here / "runs/run"
    run.mkdir(parents=True)
    (run / "DONE").write_text("10\n")
    (run / "metrics.jsonl").write_text('{"step": 10, "reward/mean": 0.9}\n')
    error = refusal(capsys)
    assert "runs/run: the run is complete (10 steps)" in error and "runs/run/checkpoints" in error
    assert "another `name`" in error and "checkpoint.resume=never" in error
    assert (run / "metrics.jsonl").read_text() == '{"step": 10, "reward/mean": 0.9}\n'


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda model: (model.mkdir(), (model / "card.md").write_text("mine")), "its card.md"),
        (lambda model: model.symlink_to("/tmp"), "it is a link"),
        (lambda model: model.symlink_to("nothing"), "it is a link"),
    ],
)
def test_what_the_trained_model_would_replace_is_refused_before_the_run(here, capsys, command, make, reason):
    (here / "runs/run").mkdir(parents=True)
    make(here / "runs/run/model")
    assert main([command, "config.yaml"]) == 2
    output = "".join(capsys.readouterr())
    assert "runs/run/model is no earlier export" in output and reason in output and "move it away" in output
    assert "export=false" in output and not (here / "runs/run/metrics.jsonl").exists()


def test_an_installation_older_than_its_code_is_refused(here, capsys, monkeypatch):
    """After the entry point was renamed, each engine started, and failed on its first weights."""
    monkeypatch.setattr("grpo_dist.runs.start_checks.entry_points", lambda group: ())
    error = refusal(capsys)
    assert "vllm.general_plugins" in error and "run `make setup`" in error
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_check_does_not_train(here, capsys):
    sft = "sft={model: 'demo:tiny', data: 'demo:add3', steps: 100000}"
    assert main(["check", "config.yaml", "model.path=sft", sft]) == 0
    assert "supervised:" not in capsys.readouterr().out


def test_more_workers_than_the_cluster_has_are_refused_before_a_cold_start(here, capsys):
    """The refused cold start would take an hour."""
    sft = "sft={model: 'demo:tiny', data: 'demo:add3', steps: 100000}"
    message = refusal(capsys, "model.path=sft", sft, "cluster.num_cpus=2", "rollout.num_workers=3")
    assert "`rollout.num_workers` = 3 but the cluster has 2 CPUs" in message and "at most 2" in message
    assert not (here / "runs").exists()


def test_training_problems_in_the_evaluation_set_are_refused_on_request(here, capsys):
    write("held_out.jsonl", GOOD[:3])
    overrides = ("data.eval=[{path: held_out.jsonl}]", "data.overlap=refuse")
    message = refusal(capsys, *overrides)
    assert "3 of 3 problems are also in the training set" in message and "data.overlap=warn" in message


def test_sft_without_a_section_and_eval_without_a_set_are_refused(here, capsys):
    assert "needs an `sft` section" in refusal(capsys, command="sft")
    assert "data.eval is empty" in refusal(capsys, command="eval")


def test_a_model_of_a_hub_that_a_data_set_could_not_reach_has_the_same_reason(monkeypatch):
    monkeypatch.setattr("grpo_dist.runs.models.find_hub_failure", lambda: "http://hub cannot be reached: x")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"me/model: .*hub cannot be reached: x, and the model is not in"):
        download("me/model", None, "model.path")


def test_the_second_copy_of_the_weights_of_a_mistral_model_is_not_downloaded(monkeypatch, tmp_path):
    def snapshot(name, *, revision, ignore_patterns):
        files = ["model.safetensors", "consolidated.safetensors", "consolidated.safetensors.index.json"]
        assert list(filter_repo_objects(files, ignore_patterns=ignore_patterns)) == ["model.safetensors"]
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert download("me/model", None, "model.path") == tmp_path


def test_a_model_is_looked_at_where_the_cache_cannot_be_written(here, monkeypatch):
    """As on a login node whose cache belongs to another user. A valid model passes."""
    config, looked = load_config("config.yaml", []), []

    def architecture_problems(*_):
        looked.append(True)
        return iter(problems)

    for name in ("position_limit", "check_length"):
        monkeypatch.setattr(f"grpo_dist.runs.start_checks.{name}", lambda *_, **__: None)
    monkeypatch.setattr("grpo_dist.runs.start_checks.vllm_problems", lambda *_: iter(()))
    monkeypatch.setattr("grpo_dist.runs.start_checks._architecture_problems", architecture_problems)
    (here / "cache").write_text("no directory")
    monkeypatch.setenv("GRPO_DIST_CACHE", str(here / "cache"))
    for problems in (["too wide"], []):
        assert list(model_problems(config, "cpu", here)) == problems
    assert len(looked) == 2
