"""`check` reports every problem at once, each with a remedy, and starts nothing."""

import json
import shutil
import sys
from collections import namedtuple
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.connection import Fit
from grpo_dist.cli import main
from grpo_dist.config.files import dump_config, load_config
from grpo_dist.rewards.unit_tests import UnitTests
from grpo_dist.runs import cold_start
from grpo_dist.runs.checkpoint import CheckpointState, write_manifest
from grpo_dist.runs.identity import data_digest, fingerprint
from grpo_dist.runs.models import load_tokenizer, resolve_model, sft_model
from grpo_dist.runs.start import load_inputs
from grpo_dist.runtime.model_files import cached
from grpo_dist.tools import check
from grpo_dist.tools.check import CHECKS, CheckResult, problems, run_checks
from tests.support.good_inputs import GOOD, write
from tests.support.tiers import slow_after

ELSEWHERE = "on this machine, which may not be a node of the run: "
Usage = namedtuple("Usage", ["total", "used", "free"])


def results(*overrides, cluster=None):
    items = {}
    for f in run_checks(load_config("config.yaml", overrides), cluster=cluster):
        items[f.name] = replace(f, detail=f"{items[f.name].detail}; {f.detail}") if f.name in items else f
    return items


def wrong(checks):
    return {name: result.detail for name, result in checks.items() if result.problem}


def test_a_valid_run_passes_and_nothing_is_started(here, capsys):
    assert main(["check", "config.yaml", "algorithm.kl.coef=0.1"]) == 0
    output = capsys.readouterr().out
    lines = [line.partition(":")[0] for line in output.splitlines() if line.startswith(("ok  ", "FIX "))]
    assert [line[4:] for line in lines] == [
        n for n in CHECKS if n not in ("cold start", "environments", "own code")
    ]
    assert all(line.startswith("ok  ") for line in lines)
    assert output.splitlines()[-1] == "13 checks passed"
    assert "4 prompts x 2 samples = 8 samples a step" in output
    assert "name: run" not in output  # the resolved configuration is printed only on request
    assert "a right and a wrong answer get math 1 and 0" in output
    assert "whose answer is '1':" in output and "| <|user|>" in output  # through the chat template
    for role in ("policy: ", "rollout: ", "reference: "):
        assert f"\n    {role}" in output
    assert not (here / "runs").exists()


def test_all_problems_are_reported_at_once(here, capsys, monkeypatch):
    monkeypatch.setattr(check.shutil, "disk_usage", lambda path: Usage(2**26, 0, 2**26))
    assert main(["check", "config.yaml", "data.train.0.path=missing.jsonl", "rollout.num_workers=99"]) == 2
    output, error = capsys.readouterr()
    names = "data, placement, memory, disk, shared memory"
    assert f"\nerror: 5 things to fix, marked FIX above: {names}\n" in error and "FIX" not in output
    assert (output + error).count("missing.jsonl: no such file") == 1
    for words in (
        "placement: `rollout.num_workers` = 99 but the cluster has", "memory: all together ",
        "disk: 0.1 GiB free in", "lower `checkpoint.keep`", "shared memory: 0.1 of 0.1 GiB free in /dev/shm",
        "--shm-size=8g",
    ):  # fmt: skip
        assert (output + error).count(words) == 1
    assert "\n--  reward: not checked: the data cannot be read" in output and "\nok  trackers" in output
    assert "\n--  prompts: not checked: the data cannot be read" in output


def test_a_missing_model_missing_data_and_a_misspelt_reward_are_three_problems(here, capsys):
    bad = ["model.path=/no/such/model", "rewards.functions=[{function: maths}, {function: formats}]"]
    files = ["data.train=[{path: gone.jsonl}, {path: lost.jsonl}]", "data.eval=[{path: away.jsonl}]"]
    assert main(["check", "config.yaml", *bad, *files]) == 2
    output, error = capsys.readouterr()
    assert "\nerror: 6 things to fix, marked FIX above: " in error
    for words in ("gone.jsonl", "lost.jsonl", "away.jsonl", "'maths'", "'formats'"):
        assert error.count(words) == 1
    assert error.count("/no/such/model") == 1
    for name in ("memory", "disk"):
        assert f"\n--  {name}: not checked: the model cannot be read" in output


def test_a_step_after_the_last_of_all_epochs_is_a_problem(here):
    config = load_config("config.yaml", ["epochs=2", "profile.steps=[11]"])
    first = next(run_checks(config, cluster=None))
    assert first.problem and "`profile.steps` = [11], `steps` = 10: the run ends before" in first.detail


def test_golds_that_are_no_mathematics_are_named_by_file_and_row(here):
    write("train.jsonl", [*GOOD, {"problem": "Which way?", "answer": "north-west!!"}])
    words = "1 of 21 gold answers are not parsable mathematics and are matched as text, e.g. train.jsonl:21: "
    assert words + "'north-west!!'" in results()["prompts"].detail


def test_passes_over_the_prompts_that_are_left_are_named(here):
    """`epochs` counts rows before they have tokens."""
    write("train.jsonl", [*GOOD, *(row | {"problem": "1 + " * 40 + row["problem"]} for row in GOOD[:10])])
    found = results("epochs=1", "data.overlong=drop")
    assert "`epochs` = 1 of 30 rows, 4 a step: 7 steps" in found["settings"].detail
    words = "10 rows are dropped, which `epochs` counts: `steps` = 7 are 1.4 passes over the other 20; for "
    assert words + "one pass set `steps` = 5" in found["prompts"].detail


@pytest.mark.slow
def test_a_run_that_would_resume_is_checked_too(here):
    assert results()["resume"].detail == "a new run, in runs/run"
    config = load_config("config.yaml")
    checkpoint, other = Path("runs/run/checkpoints/step_000003"), ["policy.zero_stage=1"]
    checkpoint.mkdir(parents=True)
    prompts = load_inputs(config, print).prompts
    state = CheckpointState(3, fingerprint(config), data_digest(prompts))
    (checkpoint / "state.json").write_text(json.dumps(asdict(state)))
    (checkpoint / "config.yaml").write_text(dump_config(config))
    write_manifest(checkpoint)
    resumes = f"resumes from step 3 of {config.steps}, {checkpoint}"
    assert results()["resume"].detail == resumes
    item = results(*other)["resume"]
    assert not item.problem and f"{resumes}, with another layout (`policy.zero_stage` = 1 was" in item.detail
    newer = shutil.copytree(checkpoint, "runs/run/checkpoints/step_000004")
    (Path(newer) / "config.yaml").write_text("damaged later\n")
    item = results()["resume"]
    assert not item.problem and item.detail.startswith(resumes)
    assert f"warning: damaged checkpoint, not used: {newer}: config.yaml has 14 bytes" in item.detail
    (checkpoint / "state.json").write_text("{}")
    assert "all checkpoints of this run are damaged" in wrong(results())["resume"]
    (checkpoint / "state.json").write_text(json.dumps(asdict(state)))
    shutil.rmtree(newer)
    assert "`seed` = 7 was 0" in wrong(results("seed=7"))["resume"]
    assert "`steps` = 2: runs/run has done 3 already" in wrong(results("steps=2"))["resume"]
    write("train.jsonl", GOOD[1:])
    assert "other training prompts" in wrong(results())["resume"]
    write("train.jsonl", GOOD)
    Path("runs/run/DONE").write_text("3\n")
    assert "the run is complete (3 steps)" in wrong(results("steps=3"))["resume"]
    assert results("checkpoint.resume=never")["resume"].detail == "a new run, in runs/run-2"
    shutil.rmtree(checkpoint)
    assert "has no checkpoint to continue from: it would begin again" in wrong(results())["resume"]


def test_the_error_at_the_end_names_the_checks():
    fine, one = CheckResult("disk", "fine"), CheckResult("resume", "none", problem=True)
    assert problems([fine]) is None
    assert str(problems([fine, one])) == "1 thing to fix, marked FIX above: resume"
    assert str(problems([one, one])) == "2 things to fix, marked FIX above: resume"


@pytest.mark.slow
def test_a_remote_cluster_is_checked_by_its_data_sheet(here):
    large = ["model.path=Qwen/Qwen2.5-7B-Instruct", "model.dtype=bfloat16"]
    small = results(*large, cluster="1x2xRTX3090")
    assert "policy: a worker needs" in small["memory"].detail and small["memory"].problem
    assert "RTX3090" in small["memory"].detail and "`policy.zero_stage`" in small["memory"].detail
    ranks = ["policy.num_workers=8", "policy.zero_stage=3", "batch.samples_per_prompt=8"]
    others = ["rollout.num_workers=8", "model.gradient_checkpointing=true", "batch.micro_batch_tokens=8192"]
    roomy = results(*large, *ranks, *others, cluster="2x8xH100")
    assert not roomy["memory"].problem and not roomy["placement"].problem
    assert "rollout 8 x 1 GPU(s)" in roomy["placement"].detail
    missing = results(*large, "cluster.placement=separate", "policy.num_workers=4", cluster="1x2xH100")
    assert "5 GPUs are needed" in missing["placement"].detail


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA A800-SXM4-80GB"])  # in a table of `plan`, in none
def test_only_gpus_visible_to_this_process_count(monkeypatch, name):
    """The driver lists all GPUs of a shared machine, also GPUs of other users."""
    driver = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 8,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda card: name,
        "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=46 * 2**30),
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**driver))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    here = check.this_machine()
    assert (str(here), here.card.memory) == (f"1x2x{name}", 46 * 2**30)
    assert here.host == check.psutil.virtual_memory().total // 2 * 2


@pytest.mark.slow
def test_a_reward_that_raises_and_one_that_prefers_wrong_answers_are_found(here):
    (here / "mine.py").write_text("def broken(completion, answer):\n    return 1 / 0\n")
    items = results("rewards.functions=[{function: math}, {function: 'mine:broken'}]", f"code_paths=[{here}]")
    text = wrong(items)["reward"]
    assert f"not scored: reward mine:broken: ZeroDivisionError: division by zero ({here}/mine.py:2 in" in text
    write("train.jsonl", [{"problem": f"{i} + 1", "answer": "-987654321"} for i in range(20)])
    assert "the right answer must score higher" in wrong(results())["reward"]


@pytest.mark.slow
@pytest.mark.machine
def test_a_reward_whose_right_answers_are_not_known_is_not_reported_as_wrong(here, monkeypatch):
    """Weights that prefer a wrong answer are still found."""
    monkeypatch.setattr(UnitTests, "check", lambda self, *, max_new_tokens: None)  # tested elsewhere
    write("train.jsonl", [row | {"tests": ["assert f(2) == 4"]} for row in GOOD])
    data = "data.train=[{path: train.jsonl, columns: [tests]}]"
    code = "{function: unit_tests, kwargs: {sandbox: {call_s: 100, episode_s: 100}}}"
    checks = results(data, f"rewards.functions=[{code}, {{function: format, weight: 0.1}}]")
    assert checks["reward"].skipped and not wrong(checks)
    assert checks["reward"].detail.startswith("no right answer to `unit_tests` is known before a run")
    checks = results(data, f"rewards.functions=[{code}, {{function: math, weight: -1.0}}]")
    assert "the right answer must score higher" in wrong(checks)["reward"]


@pytest.mark.slow
def test_every_source_with_wrong_rewards_is_reported_with_those_only_evaluated(here):
    (here / "mine.py").write_text("def mine(completion, answer):\n    return 'half'\n")
    write("other.jsonl", GOOD)
    write("held.jsonl", [{"problem": f"{i} - 1", "answer": str(i - 1)} for i in range(20, 25)])
    wrong_one = "{functions: [{function: 'mine:mine'}]}"
    checks = results(
        "data.train=[{path: train.jsonl}, {path: other.jsonl}]",
        "data.eval=[{path: held.jsonl}]",
        f"rewards.by_source={{train: {wrong_one}, held: {wrong_one}}}",
        f"code_paths=[{here}]",
    )
    problem = wrong(checks)["reward"]
    assert "source train: " in problem and "source held: " in problem and "source other" not in problem


def test_a_run_scored_only_by_reward_models_is_not_reported_as_ok(here, monkeypatch):
    monkeypatch.setattr("grpo_dist.runs.prepare.check_model", lambda model: None)
    reward = results("rewards.functions=[]", "rewards.models=[{name: judge, path: x/y}]")["reward"]
    assert reward.skipped and "reward models are not asked" in reward.detail
    by_source = "rewards.by_source={train: {functions: [], models: [judge]}}"
    reward = results("rewards.models=[{name: judge, path: x/y}]", by_source)["reward"]
    assert reward.skipped and "source train: reward models are not asked" in reward.detail


@pytest.mark.slow
def test_settings_that_every_gpu_rank_refuses_are_refused_without_gpus(here, monkeypatch):
    assert not wrong(results("policy.zero_stage=0"))
    problem = wrong(results("policy.zero_stage=0", cluster="1x8xH100"))["settings"]
    assert "`policy.zero_stage` = 0 with bfloat16" in problem
    monkeypatch.setattr("actors.connection.fit", lambda config: Fit("as the cluster says", 8))
    remote = results("policy.zero_stage=0", "weight_sync.backend=nccl", "cluster.address=head:6379")
    assert "`policy.zero_stage` = 0 with bfloat16" in wrong(remote)["settings"]
    assert "nccl" not in wrong(remote)["settings"]  # the cluster has it, this machine does not


@pytest.mark.parametrize(("overrides", "words"), slow_after([
    (["policy.deepspeed.zero_optimization={bucket: 3}"], "zero_optimization.bucket` = 3: DeepSpeed"),
    (["policy.deepspeed.zero_optimization={reduce_bucket_size: big}"],
     "zero_optimization.reduce_bucket_size` = 'big': DeepSpeed refuses it"),
    (["policy.deepspeed.zero_optimization={reduce_bucket_size: true}"],
     "zero_optimization.reduce_bucket_size` = true is not a number"),
    (["policy.deepspeed.zero_optimization={api_key: SESAME}"],
     "zero_optimization.api_key` = ***: DeepSpeed refuses it"),
    (["policy.deepspeed.gradient_allreduce_op=sum"], "would scale gradients"),
    (["policy.deepspeed.data_types={grad_accum_dtype: bf16}"], "is set by model.dtype"),
    (["model.attention=flash_attention_2"], "flash_attention_2 on cpu"),
], 3))  # fmt: skip
def test_settings_that_ranks_refuse_are_refused_before_the_start(here, overrides, words):
    assert words in wrong(results(*overrides))["settings"]


@pytest.mark.slow
def test_a_model_whose_heads_cannot_be_divided_is_refused_before_loading(here):
    overrides = ["policy.sequence_parallel=5", "policy.num_workers=5", "batch.prompts_per_step=5"]
    failures = wrong(results(*overrides, "rollout.tensor_parallel_size=5", cluster="1x8xH100"))
    assert "policy.sequence_parallel = 5: the model has" in failures["model"]


@pytest.mark.slow
def test_a_model_without_experts_has_no_routes_to_replay(here):
    failures = wrong(results("policy.router_replay=true"))
    assert "policy.router_replay: qwen2 has no experts; it replays mixtral" in failures["model"]


@pytest.mark.slow
def test_a_model_that_mixes_tokens_outside_of_attention_needs_gpus(here):
    shape = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 32}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    more = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512, "pad_token_id": 0}
    (here / "lfm2.json").write_text(json.dumps(shape | sizes | more))
    override = "model.path=random:lfm2.json"
    assert "it has layers of type conv, which vLLM's CPU build does not" in wrong(results(override))["model"]
    assert "conv" not in wrong(results(override, cluster="1x8xH100")).get("model", "")


@pytest.mark.slow
def test_the_cold_start_is_read_and_counted(here, monkeypatch):
    sft = "sft={model: 'demo:tiny', data: [{path: 'demo:add3', examples: 50}, {path: pairs.jsonl}]}"
    assert "pairs.jsonl" in wrong(results("model.path=sft", sft))["cold start"]
    write("pairs.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    checks = results("model.path=sft", sft)
    assert not wrong(checks) and "51 demonstrations of up to" in checks["cold start"].detail
    assert "\n    cold start, before all others: " in checks["memory"].detail
    assert "\n    as an sft stage of a pipeline: policy: " in checks["memory"].detail
    # If the model is trained already, no rows are read: their lengths no longer matter.
    settings = load_config("config.yaml", ["model.path=sft", sft]).sft
    model_dir = sft_model(settings, None, print)
    tokenizer = load_tokenizer(model_dir, False)
    cached("sft", cold_start.identify_result(settings, model_dir, tokenizer, None), lambda _: None)
    again = results("model.path=sft", sft)
    assert again["cold start"].detail.startswith("its model is there: ")
    assert "cold start, before all others" not in again["memory"].detail


@pytest.mark.slow
def test_an_interrupted_download_is_found_by_its_index(here):
    model = results()["model"].detail.partition("\n")[0]
    copy = here / "model"
    copy.mkdir()
    for file in Path(model).iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    problem = wrong(results("model.path=./model"))["model"]
    assert "1 of 2 weight files are missing, e.g. model-00002-of-00002.safetensors" in problem


@pytest.mark.slow
def test_a_package_of_another_version_is_named_with_the_one_needed(here, monkeypatch):
    real = metadata.version

    def version(name):
        if name == "wandb":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "deepspeed" else real(name)

    monkeypatch.setattr(check.metadata, "version", version)
    problem = wrong(results())["versions"]
    assert "deepspeed is 0.1, needed is <0.20,>=0.19" in problem and "wandb>=0.31 is not installed" in problem


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA A800-SXM4-80GB"])
def test_offloaded_states_must_fit_into_host_memory_of_this_machine(here, monkeypatch, name):
    """`plan` assumes 144 GiB for an A100, and knows no A800."""
    gib = 2**30
    monkeypatch.setattr(check, "usable_gpus", lambda: 1)
    monkeypatch.setattr(check, "list_gpus", lambda: [(name, 80 * gib)])
    overrides = ["model.path=Qwen/Qwen2.5-7B-Instruct", "policy.offload.optimizer=cpu", "policy.zero_stage=2",
           "model.dtype=bfloat16", "model.gradient_checkpointing=true"]  # fmt: skip
    # States, the copy that a checkpoint is written from, and weights and gradients while the engine samples.
    needed = (16 + 14 + 6) * 7_615_616_512 / gib
    for has, fits in ((256, True), (64, False)):
        memory = namedtuple("Memory", ["total"])(has * gib)
        monkeypatch.setattr(check.psutil, "virtual_memory", lambda memory=memory: memory)
        outcome = results(*overrides)["memory"]
        assert outcome.problem is not fits
        if fits:
            assert f"in host memory {needed:.1f} of this machine's {has}.0 GiB" in outcome.detail
        else:
            words = f"keep {needed:.0f} GiB there, and a node of 1x1x{name} has {has} GiB; "
            assert words in outcome.detail and "take back some of `policy.offload`" in outcome.detail


def test_disk_space_counts_the_best_checkpoint_and_a_refreshed_reference(here, monkeypatch):
    monkeypatch.setattr(check.shutil, "disk_usage", lambda path: Usage(2**50, 0, 2**50))
    large = ["model.path=Qwen/Qwen2.5-7B-Instruct", "model.dtype=bfloat16", "checkpoint.keep=2"]
    best = [
        "checkpoint.keep_best=eval/held/pass@1",
        "data.eval=[{path: train.jsonl, name: held}]",
        "evaluation.every=5",
    ]
    refreshed = ["algorithm.kl.coef=0.1", "reference.refresh_every=5"]
    for overrides, checkpoints, each in (
        ([], 2, 14), (best, 3, 14), (refreshed, 2, 14 + 2),
        ([*refreshed, "reference.refresh_mix=0.5"], 2, 14 + 4),
    ):  # fmt: skip
        text = check.check_disk(check.PlacedStart(load_config("config.yaml", large + overrides), print))
        size, total = (n * 7_615_616_512 / 2**30 for n in (each, (checkpoints + 1) * each + 4))
        assert f"({checkpoints} checkpoints of {size:.2f} GiB and one being written" in text
        assert f"{total + 1:.1f} GiB at most are needed" in text


def test_a_reward_model_must_fit_too(here, tmp_path):
    large = {
        "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(large))
    override = f"rewards.models=[{{name: judge, path: {tmp_path}}}]"
    problem = wrong(results(override, cluster="1x3xH100"))["memory"]
    assert "reward model judge: a worker needs " in problem and "use a smaller model" in problem


@pytest.mark.slow
def test_checks_of_this_machine_are_labelled_if_the_run_goes_elsewhere(here, monkeypatch):
    local, remote = results(), results(cluster="1x1xH100")
    for name in ("disk", "shared memory"):
        assert remote[name].detail.startswith(ELSEWHERE)
        assert not local[name].detail.startswith("on this machine")
    monkeypatch.setattr(check.shutil, "disk_usage", lambda path: Usage(2**26, 0, 2**26))
    assert {"disk", "shared memory"} <= wrong(results()).keys()
    full_disk = results(cluster="1x1xH100")
    assert not {"disk", "shared memory"} & wrong(full_disk).keys()  # a note: nodes have other disks
    assert str(full_disk["disk"]).startswith(f"??  disk: {ELSEWHERE}0.1 GiB free in")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), [
    ("tokenizer.json", '{"version": "1.0"}'),
    ("tokenizer.json", "[]"),
    ("tokenizer_config.json", "[]"),
    ("config.json", "[]"),
    ("config.json", "{bad"),
    ("config.json", '{"model_type": "qwen2", "hidden_size": "x"}'),
])  # fmt: skip
def test_a_damaged_model_file_is_one_problem(here, file, text):
    config = load_config("config.yaml")
    source = resolve_model(config.model, config.sft, config.seed, lambda _: None, train_first=False)
    model = shutil.copytree(source, here / "own-model")
    (model / file).write_text(text)
    checks = results(f"model.path={model}")
    assert set(wrong(checks)) == {"prompts" if "tokenizer" in file else "model"}
    assert str(model.name) in next(iter(wrong(checks).values()))
    assert not checks["trackers"].problem  # later checks still ran
