"""Pipelines with fake stages: which stages run, are skipped, resume, or are refused."""

import fcntl
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from actors.connection import Fit
from grpo_dist.cli import main
from grpo_dist.errors import UserError
from grpo_dist.tools.recipe import run as recipe
from grpo_dist.tools.recipe.config import load_pipeline
from grpo_dist.tools.recipe.record import read_record
from grpo_dist.tools.recipe.run import StageResult
from tests.support.tiers import slow_after

BASE = {
    "model": {"path": "demo:tiny"},
    "data": {"train": [{"path": "train.jsonl"}],
             "eval": [{"path": "demo:add3", "split": "test", "max_rows": 4}]},
    "batch": {"prompts_per_step": 2, "samples_per_prompt": 2},
    "sft": {"model": "demo:tiny", "data": "demo:add3", "steps": 7},
}  # fmt: skip
HELD = [{"path": "held.jsonl"}]
STAGES = [
    {"name": "cold", "kind": "sft", "config": "base.yaml"},
    {"name": "reason", "kind": "grpo", "config": "base.yaml", "overrides": {"model.path": "${stage:cold}"}},
    {"name": "reject", "kind": "sample", "config": "base.yaml",
     "overrides": {"model.path": "${stage:reason}"}},
    {"name": "again", "kind": "sft", "config": "base.yaml",
     "overrides": {"sft.model": "${stage:cold}", "sft.data": "${stage:reject}/sft.jsonl"}},
]  # fmt: skip
NAMES = [stage["name"] for stage in STAGES]


class World:
    """Fakes stages: writes their outputs, and logs which ran."""

    def __init__(self):
        self.ran: list[str] = []
        self.before: dict[str, dict] = {}
        self.fail_in: str | None = None
        self.fail_with: type[BaseException] = KeyboardInterrupt

    def run(self, stage, before, say):
        self.ran.append(stage.name)
        self.before[stage.name] = before
        if stage.kind == "sample":
            (stage.directory / "samples").mkdir(exist_ok=True)
            (stage.directory / "sft.jsonl").write_text(f"{len(self.ran)}\n")
            if stage.name == self.fail_in:
                raise self.fail_with
            return StageResult(counts={"kept": 3, "samples": 8})
        else:
            (stage.directory / "metrics.jsonl").write_text("")
        if stage.name == self.fail_in:
            raise KeyboardInterrupt
        stage.result.mkdir(exist_ok=True)
        (stage.result / "config.json").write_text("{}")
        (stage.result / "model.safetensors").write_text("")
        accuracy = len(self.ran) / 10
        measures = {"eval/add3/pass@1": accuracy, "eval/add3/pass@1_stderr": 0.01}
        return StageResult(before, measures)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    Path("moved").mkdir()
    for path in ("train.jsonl", "moved/train.jsonl", HELD[0]["path"]):
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write()
    fake = World()
    monkeypatch.setattr(recipe, "RUNS", dict.fromkeys(("sft", "grpo", "sample"), fake.run))
    return fake


def write(base=(), stages=STAGES, **changes):
    Path("base.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(BASE | dict(base))))
    Path("p.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create({"name": "p", "stages": stages} | changes)))


def run(*overrides, **options):
    messages: list[str] = []
    records = recipe.run_pipeline(load_pipeline("p.yaml", overrides), messages.append, **options)
    return records, messages


def refusal(*overrides, **options):
    with pytest.raises(UserError) as error:
        run(*overrides, **options)
    return str(error.value)


def apply_overrides(index, **changes):
    return [
        stage | {"overrides": stage.get("overrides", {}) | changes} if i == index else stage
        for i, stage in enumerate(STAGES)
    ]


@pytest.mark.slow
def test_stages_run_in_order_once_and_are_then_skipped(world):
    records, _ = run()
    assert world.ran == NAMES == list(records)
    again, messages = run()
    assert world.ran == NAMES and again == records
    assert [line for line in messages if "already done" in line] == [
        f"stage {i} of 4: {s['name']} ({s['kind']}): already done" for i, s in enumerate(STAGES, 1)
    ]


@pytest.mark.slow
def test_an_interrupted_stage_resumes_and_its_time_adds_up(world):
    world.fail_in = "reject"
    with pytest.raises(KeyboardInterrupt):
        run()
    record = read_record(Path("runs/p/03_reject"))
    assert record.state == "started" and record.seconds > 0 and record.id == ""
    world.fail_in = None
    records, _ = run()
    assert world.ran == ["cold", "reason", "reject", "reject", "again"]
    assert records["reject"].seconds > record.seconds
    assert Path("runs/p/03_reject/sft.jsonl").read_text() == "4\n"


@pytest.mark.slow
def test_changed_settings_of_a_stage_are_refused_with_what_changed_and_what_to_do(world):
    run()
    write(stages=apply_overrides(1, steps=60, **{"policy.optimizer.lr": 0.5}))
    message = refusal()
    assert "stage `reason` is complete (runs/p/02_reason) with other settings" in message
    assert "`steps` was 100 and is 60" in message and "`policy.optimizer.lr` was 1e-06 and is 0.5" in message
    assert "--from reason" in message
    assert world.ran == NAMES


@pytest.mark.slow
def test_settings_that_do_not_decide_the_result_may_change(world):
    run()
    write(base={"policy": {"optimizer": {"lr": 1e-5}}, "tracking": {"console": False}}, stages=STAGES)
    assert "stage `reason`" in refusal()  # not `cold`, which has no policy
    write(base={"tracking": {"console": False}, "cluster": {"num_cpus": 2}, "checkpoint": {"keep": 5}})
    run()
    assert world.ran == NAMES


@pytest.mark.slow
def test_a_supervised_stage_is_determined_by_what_its_ranks_train_and_not_by_the_optimiser_of_grpo(world):
    write(stages=STAGES[:1])
    run()
    free = {"policy.optimizer.lr": 0.5, "policy.zero_stage": 3}
    free |= {"sft.validate_every": 3, "algorithm.loss.clip_low": 0.1}
    write(stages=[STAGES[0] | {"overrides": free}])
    run()
    for change, words in (
        ({"policy.lora": {"rank": 4}}, "`policy.lora"),
        ({"policy.lora": {}}, "`policy.lora"),
        ({"policy.optimizer.eps": 1e-6}, "`policy.optimizer.eps` was 1e-08 and is 1e-06"),
        ({"model.dtype": "bfloat16"}, "`model.dtype` was auto and is bfloat16"),
        ({"sft.validation_share": 0.5}, "`sft.validation_share` was 0.0 and is 0.5"),
    ):
        write(stages=[STAGES[0] | {"overrides": change}])
        assert words in refusal()
    assert world.ran == ["cold"]


@pytest.mark.slow
def test_a_complete_stage_of_an_earlier_version_stays_complete_where_new_settings_have_their_defaults(world):
    run()
    for name, added in (("01_cold", ("policy", "model")), ("02_reason", ("rollout.quantization",))):
        path = Path("runs/p", name, "stage.json")
        record = json.loads(path.read_text())
        for key in added:
            section, _, inner = key.partition(".")
            (record["settings"][section] if inner else record["settings"]).pop(inner or section)
        path.write_text(json.dumps(record))
    run()
    assert world.ran == NAMES
    write(stages=apply_overrides(1, **{"rollout.quantization": "fp8"}))
    assert "`rollout.quantization` was None and is fp8" in refusal()


@pytest.mark.slow
def test_changed_settings_of_a_started_stage_are_refused_unless_it_has_written_nothing(world):
    world.fail_in = "reason"
    with pytest.raises(KeyboardInterrupt):
        run()
    write(stages=apply_overrides(1, seed=60))
    assert "stage `reason` is started" in refusal()
    Path("runs/p/02_reason/metrics.jsonl").unlink()
    world.fail_in = None
    run()
    assert world.ran == ["cold", "reason", "reason", "reject", "again"]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "free", "decisive"), [
    (1, {"health.kl_above": 20.0, "health.action": "warn", "steps": 60, "evaluation.every": 7}, "seed"),
    (1, {"profile.steps": [40], "health.min_signal_groups": 2}, "rewards.timeout_s"),
    (1, {"data.train": [{"path": "moved/train.jsonl"}], "data.eval": HELD, "data.overlap": "warn"}, "seed"),
    (0, {"health.kl_above": 20.0, "sft.validate_every": 3}, "sft.steps"),
])  # fmt: skip
def test_a_started_stage_may_change_what_its_run_may_change(world, stage, free, decisive):
    """The message of `health.kl_above` asks for this."""
    name = world.fail_in = NAMES[stage]
    with pytest.raises(KeyboardInterrupt):
        run()
    write(stages=apply_overrides(stage, **free | {decisive: 2}))
    assert f"stage `{name}` is started" in (message := refusal()) and f"`{decisive}` was" in message
    assert not any(f"`{key}`" in message for key in free)
    world.fail_in = None
    write(stages=apply_overrides(stage, **free))
    records, _ = run()
    assert list(records) == NAMES
    write()
    of_results = {"steps", "health.min_signal_groups", "data.eval"}
    if of_results & free.keys():  # other free settings change no result
        assert f"stage `{name}` is complete" in refusal()
    else:
        run()


@pytest.mark.slow
def test_workers_and_chunk_sizes_may_change_in_started_and_finished_stages(world):
    world.fail_in = "reason"
    with pytest.raises(KeyboardInterrupt):
        run()
    before = [json.loads(path.read_text()) for path in sorted(Path("runs/p").glob("*/stage.json"))]
    for path, record in zip(sorted(Path("runs/p").glob("*/stage.json")), before, strict=True):
        assert "num_workers" not in record["settings"].get("policy", {})
        record["settings"].setdefault("rollout", {})["num_workers"] = 1  # as an earlier version wrote it
        path.write_text(json.dumps(record))
    world.fail_in = None
    layout = {"policy.num_workers": 2, "rollout.num_workers": 2, "batch.micro_batch_tokens": 512}
    write(stages=[stage | {"overrides": stage.get("overrides", {}) | layout} for stage in STAGES])
    run()
    assert world.ran == ["cold", "reason", "reason", "reject", "again"]
    assert world.before["reason"]["eval/add3/pass@1"] == 0.1  # from a stage with other engines


@pytest.mark.slow
@pytest.mark.parametrize("fails_with", [KeyboardInterrupt, UserError])
def test_selection_settings_may_change_until_samples_are_selected(world, fails_with):
    """The samples stay also if none met the old selection."""
    world.fail_in, world.fail_with = "reject", fails_with
    with pytest.raises(fails_with):
        run()
    world.fail_in = None
    write(stages=apply_overrides(2, **{"rejection.temperature": 0.5}))
    assert "stage `reject` is started" in refusal() and "`rejection.temperature`" in refusal()
    choice = {"min_reward": 0.5, "keep_per_prompt": 2, "max_pass_rate": 0.9}
    write(stages=apply_overrides(2, **{f"rejection.{key}": value for key, value in choice.items()}))
    records, _ = run()
    assert world.ran == ["cold", "reason", "reject", "reject", "again"]
    assert records["reject"].settings["rejection"]["min_reward"] == 0.5
    write()
    message = refusal()
    assert "stage `reject` is complete" in message
    assert "`rejection.min_reward` was 0.5 and is 1.0" in message


@pytest.mark.slow
def test_the_users_reward_functions_and_reward_models_are_inputs(world, monkeypatch):
    monkeypatch.setattr("grpo_dist.runs.prepare.check_model", lambda model: None)
    Path("code/pack").mkdir(parents=True)
    for name in ("code/mine.py", "code/pack/__init__.py", "code/pack/inner.py"):
        Path(name).write_text("def fine(completion, answer):\n    return 1.0\n")
    Path("scorer").mkdir()
    Path("scorer/weights").write_text("1")
    functions = [{"name": name, "function": f"{name}:fine"} for name in ("mine", "pack.inner")]
    models = [{"name": "scorer", "path": "scorer"}]
    rewards = {"functions": functions, "models": models}
    write(stages=apply_overrides(2, rewards=rewards, code_paths=["code"]))
    run()
    for name in ("code/mine.py", "code/pack/inner.py", "scorer/weights"):
        text, path = Path(name).read_text(), Path(name)
        path.write_text(text + "\n# and more\n")
        changed = "scorer" if name.startswith("scorer") else f"own code {name.removeprefix('code/')}"
        message = refusal()
        assert "stage `reject` is complete" in message and f"{changed} has changed" in message
        path.write_text(text)
        if changed == "scorer":
            break
    assert world.ran == NAMES


@pytest.mark.slow
def test_changed_files_are_changed_inputs(world):
    run()
    text = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text(text.replace('"1"', '"2"'))
    message = refusal()
    assert "stage `reason`" in message and "train.jsonl has changed" in message
    Path("train.jsonl").write_text(text)
    run()
    assert world.ran == NAMES


@pytest.mark.slow
def test_a_stage_whose_input_stage_is_gone_does_not_count_as_done(world):
    run()
    Path("runs/p/01_cold").rename("elsewhere")
    message = refusal()
    assert "stage `reason`" in message and "stage `cold` was redone or is no longer complete" in message
    assert world.ran == NAMES


@pytest.mark.slow
def test_a_complete_stage_without_its_result_is_refused(world):
    run()
    Path("runs/p/03_reject/sft.jsonl").unlink()
    message = refusal()
    assert "stage `reject` is complete, but runs/p/03_reject/sft.jsonl is missing" in message


@pytest.mark.slow
def test_a_complete_stage_without_its_weights_is_refused(world):
    run()
    Path("runs/p/01_cold/model/model.safetensors").unlink()
    assert "runs/p/01_cold/model/*.safetensors is missing" in refusal()


@pytest.mark.slow
def test_from_repeats_a_stage_and_all_later_ones_and_keeps_backups(world):
    run()
    write(stages=apply_overrides(2, **{"rejection.samples_per_prompt": 3}))
    records, messages = run(again_from="reject")
    assert world.ran == [*NAMES, "reject", "again"]
    assert Path("runs/p/03_reject.old-1/sft.jsonl").read_text() == "3\n"
    assert Path("runs/p/03_reject/sft.jsonl").read_text() == "5\n"
    assert Path("runs/p/04_again.old-1/model/config.json").is_file()
    assert any("runs/p/03_reject.old-1" in line for line in messages)
    assert records["again"].inputs["stage:reject"] == records["reject"].id
    run(again_from="again")
    directories = sorted(p.name for p in Path("runs/p").glob("04*"))
    assert directories == ["04_again", "04_again.old-1", "04_again.old-2"]


def test_from_a_stage_that_does_not_exist_is_refused(world):
    words = "--from nobody: no such stage; expected one of cold, reason, reject, again"
    assert words in refusal(again_from="nobody")


@pytest.mark.slow
def test_a_foreign_directory_is_refused_and_backed_up_on_request(world):
    Path("runs/p/01_cold").mkdir(parents=True)
    Path("runs/p/01_cold/theirs").write_text("x")
    assert "runs/p/01_cold exists, but is not of this pipeline" in refusal()
    run(again_from="cold")
    assert Path("runs/p/01_cold.old-1/theirs").read_text() == "x"


@pytest.mark.slow
def test_a_damaged_record_is_refused_by_name(world):
    run()
    Path("runs/p/02_reason/stage.json").write_text('{"stage": "reason"}')
    assert "runs/p/02_reason/stage.json: not the record of a stage" in refusal()


@pytest.mark.slow
def test_two_processes_cannot_run_one_pipeline(world, monkeypatch):
    inner = []

    def second(stage, before, say):
        inner.append(refusal())
        return world.run(stage, before, say)

    monkeypatch.setitem(recipe.RUNS, "sample", second)
    run()
    assert "runs/p: another process is at this pipeline" in inner[0]


@pytest.mark.slow
def test_finished_stages_are_read_under_the_lock(world, monkeypatch):
    """Another process may have started or finished a stage before this one got the lock."""
    run()
    is_locked = []
    complete = recipe.complete_stages

    def read(*arguments):
        with open("runs/p/.lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked.append(False)
            except BlockingIOError:
                is_locked.append(True)
        return complete(*arguments)

    monkeypatch.setattr(recipe, "complete_stages", read)
    run()
    run(check_only=True)
    assert is_locked == [True, False]


UNUSABLE = [  # one for each stage, then the others
    (1, {"data.train": [{"path": "none.jsonl"}]}, ["stage `reason`", "none.jsonl: no such file"]),
    (0, {"policy.num_workers": 512, "batch.samples_per_prompt": 256},
     ["stage `cold`", "`policy.num_workers`", "cluster"]),
    (2, {"rewards.functions": [{"function": "maths"}]}, ["stage `reject`", "'maths'"]),
    (3, {"sft.max_length": 1023},
     ["stage `again`", "= 1023", "stage `reject` may make rows of 1024", "raise sft.max_length to 1024"]),
    (0, {"policy.lora": {"target_modules": ["none"]}}, ["stage `cold`", "policy.lora.target_modules"]),
    (0, {"profile.steps": [8]}, ["stage `cold`", "supervised training", "`profile.steps`", "`steps` = 7"]),
    (0, {"sft.validation_share": 0.99, "sft.data": [{"path": "demo:add3", "examples": 3}]},
     ["stage `cold`", "sft.validation_share = 0.99 holds out 3 of 3"]),
    (1, {"batch.prompts_per_step": 64}, ["stage `reason`", "4 prompts", "`batch.prompts_per_step` = 64"]),
    (1, {"sampling.max_new_tokens": 4096}, ["stage `reason`", "takes at most 1024 positions"]),
    (1, {"policy.num_workers": 512, "batch.samples_per_prompt": 256},
     ["stage `reason`", "`policy.num_workers`", "cluster"]),
    (1, {"rewards.models": [{"name": "q", "path": "none"}]}, ["stage `reason`", "path = none"]),
    (2, {"rewards.models": [{"name": "q", "path": "none"}]}, ["stage `reject`", "path = none"]),
    (3, {"rewards.models": [{"name": "q", "path": "none"}]}, ["stage `again`", "path = none"]),
    (3, {"sft.max_length": 1025}, ["stage `again`", "= 1025", "takes at most 1024 positions"]),
    (2, {"data.max_prompt_tokens": 3}, ["stage `reject`", "data.max_prompt_tokens = 3"]),
    (3, {"sft.data": ["${stage:reject}/sft.jsonl", "none.jsonl"]}, ["stage `again`", "none.jsonl"]),
    (3, {"sft.model": "none"}, ["stage `again`", "sft.model = none"]),
    (3, {"sft.data": "train.jsonl"}, ["stage `again`", "train.jsonl:1", "`prompt` is missing"]),
    (3, {"data.eval": [{"path": "none.jsonl"}]}, ["stage `again`", "none.jsonl: no such file"]),
]  # fmt: skip


@pytest.mark.parametrize(("index", "changes", "words"), slow_after(UNUSABLE, 1))
def test_an_unusable_later_stage_is_refused_before_the_first_one_starts(world, index, changes, words):
    write(stages=apply_overrides(index, **changes))
    message = refusal()
    assert all(word in message for word in words), message
    assert world.ran == [] and not Path("runs").exists()


@pytest.mark.parametrize(("index", "gpus", "changes", "words"), [
    (1, 8, {"policy.zero_stage": 0}, "`policy.zero_stage` = 0 with bfloat16"),
    *slow_after([
        (1, 8, {"rollout.quantization": "fp8"}, None),
        (0, 0, {"weight_sync.backend": "nccl"}, "nccl needs GPUs"),
        *((i, 8, {"weight_sync.backend": "nccl"}, None) for i in (0, 1, 2)),
        *((i, 8, {"model.attention": "flash_attention_2"}, None) for i in (0, 1)),
        (0, 8, {"policy.zero_stage": 0}, "`policy.zero_stage` = 0 with bfloat16"),
        *((i, 0, {"weight_sync.backend": "nccl"}, "nccl needs GPUs") for i in (1, 2)),
        (1, 0, {"policy.zero_stage": 0}, None),
    ], 0),
])  # fmt: skip
def test_stages_are_checked_for_the_device_of_the_cluster(world, monkeypatch, index, gpus, changes, words):
    """The driver may be on a head without GPUs, as it is here."""
    monkeypatch.setattr("actors.connection.fit", lambda config, *, training=True: Fit("", gpus))
    write(stages=apply_overrides(index, **changes))
    if words is None:
        run(check_only=True)
    else:
        assert words in refusal(check_only=True)


@pytest.mark.slow
def test_check_lists_the_stages_to_run_and_starts_nothing(world):
    _, messages = run(check_only=True)
    assert messages[0] == "runs/p/01_cold  sft  to do" and not Path("runs").exists()
    run()
    assert run(check_only=True)[1][-1] == "runs/p/04_again  sft  done"
    assert run(check_only=True, again_from="again")[1][-1] == "runs/p/04_again  sft  to redo"
    assert world.ran == NAMES and not Path("runs/p/04_again.old-1").exists()


def test_the_command_line_refuses_with_one_message_and_code_2(world, capsys):
    assert main(["pipeline", "p.yaml", "--from", "nobody", "seed=1"]) == 2
    assert capsys.readouterr().err.startswith("error: --from nobody: no such stage")
    assert main(["pipeline", "none.yaml"]) == 2
    assert "none.yaml: no such configuration file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["pipeline", "p.yaml", "--form", "cold"])
    assert "unrecognized arguments: --form cold" in capsys.readouterr().err
    assert world.ran == []


@pytest.mark.slow
def test_a_killed_stage_resumes(world):
    """SIGKILL leaves the record that was written at the start."""
    run()
    path = Path("runs/p/02_reason/stage.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "started", "id": ""}))
    for later in ("03_reject", "04_again"):
        Path("runs/p", later).rename(later)
    run()
    assert world.ran == [*NAMES, "reason", "reject", "again"]
