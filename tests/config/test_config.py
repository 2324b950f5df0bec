"""The configuration refuses unusable settings in one message with key and remedy."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_dist.config.files import ConfigError, dump_config, is_override, load_config, load_recorded
from grpo_dist.runs.identity import changes
from grpo_dist.tools.submit.code import resolved as sent
from tests.support.good_inputs import PRESET_NEEDS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BASE = """
model: {path: demo:add3}
data: {train: [{path: demo:add3}]}
steps: 5
name: "x-${steps}"
"""


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def test_overrides_win_and_interpolation_follows_them(base):
    config = load_config(base, ["steps=7", "data.train.0.max_rows=9", "policy.optimizer.lr=1e-5"])
    assert (config.steps, config.name, config.data.train[0].max_rows) == (7, "x-7", 9)
    assert config.policy.optimizer.lr == 1e-5


def test_defaults_are_merged_first_and_the_file_wins(base, tmp_path):
    child = tmp_path / "child.yaml"
    child.write_text("defaults: [base.yaml]\nsteps: 9\nbatch: {prompts_per_step: 4}\n")
    config = load_config(child)
    assert (config.steps, config.name, config.batch.prompts_per_step) == (9, "x-9", 4)


def test_a_file_anywhere_builds_on_the_presets_of_this_project(base, tmp_path):
    """A preset next to the file comes first."""
    base.write_text("defaults: [algorithms/gspo.yaml]\n" + base.read_text())
    assert load_config(base).algorithm == load_config("configs/demo.yaml", ["+algorithm=gspo"]).algorithm
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms/gspo.yaml").write_text("algorithm: {loss: {clip_low: 0.125}}\n")
    assert load_config(base).algorithm.loss.clip_low == 0.125
    base.write_text("defaults: [algorithms/none.yaml]\n")
    with pytest.raises(ConfigError, match=f"{tmp_path}/algorithms/none.yaml: no such configuration file"):
        load_config(base)


def test_a_pipeline_is_answered_with_the_command_that_takes_it():
    with pytest.raises(ConfigError) as refusal:
        load_config(CONFIGS / "pipelines/r1_demo.yaml")
    message = str(refusal.value)
    assert "r1_demo.yaml: a pipeline; expected the configuration of one run" in message
    assert "`grpo-dist pipeline " in message and "--check" in message and "--after" in message


def test_a_recorded_configuration_is_refused_until_its_secrets_are_set_again(base, tmp_path, monkeypatch):
    base.write_text(
        BASE
        + """
rewards: {functions: [{function: "my:f", kwargs: {verdict_token: "YES", star: "***"}}]}
tracking: {sinks: [{function: "my:sink", kwargs: {url: "https://me:pw12@host/"}}]}
"""
    )
    recorded = tmp_path / "recorded.yaml"
    recorded.write_text(dump_config(load_config(base)))
    token, url = "rewards.functions.0.kwargs.verdict_token", "tracking.sinks.0.kwargs.url"
    with pytest.raises(ConfigError, match=rf"\*\*\* in `{token}`, `{url}` stands for a secret"):
        load_config(recorded)
    assert load_recorded(recorded).rewards.functions[0].kwargs == {"verdict_token": "***", "star": "***"}
    monkeypatch.setenv("VERDICT", "NO")
    config = load_config(recorded, [f"{token}=${{oc.env:VERDICT}}", f"{url}=null"])
    assert config.rewards.functions[0].kwargs == {"verdict_token": "NO", "star": "***"}


def test_resolved_configuration_loads_to_the_same_tree(base, tmp_path):
    config = load_config(base, ["algorithm.kl.coef=0.01"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


LITERAL = (
    r"\${#x} is the length", r"write \${ and a name", r"\${x:-1} is a default", r"\${name} is a variable",
    r"\${oc.env:HOME}", r"a \\\${x}", r"$\{x\}$ in \\ a set", "\\\\",
)  # fmt: skip


@pytest.mark.parametrize("text", LITERAL)
def test_text_with_an_escaped_interpolation_survives_being_written_and_read(base, tmp_path, text):
    tree = OmegaConf.load(base)
    OmegaConf.update(tree, "data.instruction", text)
    OmegaConf.save(tree, base)
    config, again = load_config(base), tmp_path / "again.yaml"
    assert config.data.instruction == text.replace(r"\\\${", r"\@").replace(r"\${", "${").replace("@", "${")
    again.write_text(dump_config(config))
    assert load_config(again) == config
    again.write_text(sent(config, grows=True))
    assert load_config(again) == config
    assert changes(dump_config(config), config) == []


def test_a_checkpoint_with_an_unescaped_text_has_the_same_configuration(base):
    """Earlier versions wrote `${` unescaped."""
    config = load_config(base, [r"data.instruction='write \${x}'"])
    unescaped = dump_config(config).replace(r"\${", "${")
    assert unescaped != dump_config(config) and changes(unescaped, config) == []


@pytest.mark.parametrize("preset", sorted(p.stem for p in (CONFIGS / "algorithms").glob("*.yaml")))
def test_every_preset_fits_the_demo_and_survives_being_written_and_read(tmp_path, preset):
    more = PRESET_NEEDS.get(preset, [])
    config = load_config(CONFIGS / "demo.yaml", [*more, f"+algorithm={preset}", "rollout.threads=2"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config
    assert config.rollout.threads == 2


def test_a_preset_replaces_the_algorithm_and_merges_the_rest(base):
    base.write_text(base.read_text() + "algorithm: {loss: {dual_clip: 3}}\n")
    config = load_config(base, ["+algorithm=sapo", "algorithm.loss.tau_negative=1.5"])
    assert (config.algorithm.loss.name, config.algorithm.loss.tau_negative) == ("sapo", 1.5)
    assert config.steps == 5
    assert load_config(base, ["+algorithm=gspo"]).batch.updates_per_step == 4


def test_a_long_override_is_not_taken_for_the_name_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seed=1").write_text("")
    assert (
        is_override("data.instruction=" + 300 * "a") and is_override("seed=2") and not is_override("seed=1")
    )


def test_interpolations_follow_the_overrides_behind_a_preset(base):
    overrides = ["+algorithm=dapo", "name=two", "output_dir=runs/${name}"]
    for order in (overrides, overrides[::-1]):
        assert load_config(base, order).output_dir == "runs/two"
    base.write_text(base.read_text() + "output_dir: runs/${name}\nseed: 7\n")
    assert load_config(base, ["+algorithm=dapo", "steps=9"]).output_dir == "runs/x-9"
    base.write_text(base.read_text().replace("x-${steps}", "clip-${algorithm.loss.clip_high}"))
    assert load_config(base, ["+algorithm=dapo"]).name == "clip-0.28"  # from the preset


def test_a_user_preset_is_found_next_to_the_configuration(base):
    presets = base.parent / "algorithms"
    presets.mkdir()
    (presets / "mine.yaml").write_text("algorithm: {advantage: rloo}\n")
    assert load_config(base, ["+algorithm=mine"]).algorithm.advantage.name == "rloo"


BOX = "Put the answer within \\boxed{}."
SOURCE = {"path": "demo:add3"}


@pytest.mark.parametrize(
    ("data", "rewards", "required"),
    [
        ({}, {}, False),
        ({"instruction": BOX}, {}, True),
        ({"system_prompt": BOX}, {"num_workers": 2}, True),
        ({"instruction": BOX}, {"require_box": False}, False),
        ({"instruction": "${data.system_prompt}", "system_prompt": BOX}, {}, True),
        ({"instruction": "Show your work."}, {}, False),
        ({"instruction": "Show your work."}, {"require_box": True}, True),
        ({"train": [SOURCE | {"problem_template": "{problem} " + BOX}]}, {}, True),
        ({"train": [SOURCE | {"problem_template": "{problem} " + BOX}, SOURCE]}, {}, False),
        ({"train": [SOURCE | {"problem_template": "{problem} " + BOX}], "eval": [SOURCE]}, {}, True),
        ({"eval": [SOURCE | {"problem_template": "{problem} " + BOX}]}, {}, False),
        ({"template": "{problem} " + BOX}, {}, True),
        ({"train": [SOURCE | {"instruction": ""}], "instruction": BOX}, {}, False),
    ],
)
def test_where_the_prompt_asks_for_a_box_only_a_box_is_an_answer(tmp_path, data, rewards, required):
    file = tmp_path / "run.yaml"
    data = {"train": [SOURCE]} | data
    OmegaConf.save({"model": {"path": "demo:tiny"}, "data": data, "rewards": rewards}, file)
    config = load_config(file)
    assert config.rewards.require_box is required
    file.write_text(dump_config(config))
    assert f"require_box: {str(required).lower()}" in file.read_text() and load_config(file) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+algorithm=dap", ["NAME one of cispo, ", "did you mean +algorithm=dapo?"]),
        ("+algorithms=dapo", ["expected +algorithm=NAME"]),
        ("data.template_kwargs={tokenize: true}", ["template_kwargs.tokenize = True", "remove it"]),
        ("data.template_kwargs={continue_final_message: true}", ["the run sets it; remove it"]),
        ("data.template_kwargs={chat_template: x}", ["template_kwargs.chat_template = x", "remove it"]),
        ("algorithm.loss.tau_positive=2",
         ["`algorithm.loss.tau_positive` is no setting of loss ppo_clip", "sapo has it"]),
        ("algorithm.kl.in_reward=true", ["`algorithm.kl`: `coef` = 0 disables"]),
        ("algorithm.loss=grpo", ["`algorithm.loss` = 'grpo'", "'ppo_clip'"]),
        ("algorithm.advantage={name: pass_at_k, k: 8}", ["`algorithm.advantage.k` = 8", "below"]),
        ("algorithm.process.coef=0.5", ["`algorithm.process` needs scores", "add one of them"]),
        ("algorithm.advantage=process", ["`rewards` has no rewards of steps", "no environment", "add one"]),
        ("algorithm.advantage=turn", ["= turn needs the rewards of turns", "set `data.environment`"]),
        ("rewards.functions=[{function: environment}]", ["none of its samples would be scored"]),
        ("environments.mask_outcomes=[turns]", ["has no effect without an environment"]),
        ("sampling.stop=['']", ["sampling.stop.0", "at least 1 character"]),
        ("environments.outcome_rewards={turns: -1}", ["has no effect without an environment"]),
        ("algorithm={advantage: remax, reward_norm: group}", ["`algorithm.reward_norm` = group", "greedy"]),
        ("algorithm={advantage: gdpo, reward_clip: 2}",
         ["`algorithm.reward_clip` = 2.0", "each reward separately"]),
        ("dynamic_sampling.oversample=2", ["no setting of dynamic_sampling false", "true has it"]),
        ("batch.order.oversample=1.5", ["`batch.order.oversample` is no setting", "completion has it"]),
        ("batch.order=completion", ["`max_staleness` = 0: slow groups", "set `max_staleness` to 1"]),
        ("reference.refresh_mix=0.5", ["has no effect without reference.refresh_every"]),
        ("algorithm={loss: policy_gradient, correction: bypass}",
         ["= policy_gradient, `algorithm.correction` = bypass: the loss has no ratio"]),
        ("reference.refresh_every=5", ["`algorithm.kl.coef` = 0: without a KL term"]),
        ("algorithm.kl={coef: 0.1, estimator: k3+, in_reward: true}", ["remove the +"]),
        ("polcy.lr=1", ["unknown key `polcy`", "did you mean `policy`?"]),
        ("policy.optimizer.learning_rate=1", ["unknown key `policy.optimizer.learning_rate`"]),
        ("lr=1", ["unknown key `lr`", "did you mean `policy.optimizer.lr`?"]),
        ("data.train.1.path=x", ["`data.train`: 0 to 0", "set the list as a whole: data.train=[...]"]),
        ("data.train.x.path=y", ["indices of `data.train`: 0 to 0"]),
        ("data.max_rows=8", ["did you mean `data.train.max_rows`", " or `data.eval.max_rows`?"]),
        ("data.train.0.question_column=q", ["did you mean `data.train.0.problem_column`?"]),
        ("defaults=[other.yaml]", ["names base files in a file", "set the values themselves"]),
        ("policy.optimizer.lr=-1", ["`policy.optimizer.lr` = -1", "greater than 0"]),
        ("steps=abc", ["`steps` = 'abc'", "integer"]),
        ("policy.num_workers=3", ["`policy.num_workers` = 3", "128", "use 2 or 4"]),
        ("batch.updates_per_step=3",
         ["`batch.prompts_per_step` = 16", "`batch.updates_per_step` = 3", "use 2 or 4"]),
        ("evaluation.k=[1,4]", ["evaluation", "samples_per_prompt = 1"]),
        ("model.max_length=512", ["`model.max_length` = 512", "no token", "`data.max_prompt_tokens` = 512"]),
        ("checkpoint.patience=2", ["`checkpoint.patience`", "`checkpoint.keep_best`"]),
        ("policy.optimizer={warmup_steps: 2, warmup_share: 0.1}", ["both give the length of the warm-up"]),
        ("algorithm.correction.low=3", ["algorithm.correction", "low = 3.0", "high = 2.0"]),
        ("steps", ["key=value"]),
        ("name=../evil", ["`name`"]),
        ("model.path=sft", ["needs an `sft` section"]),
        ("model={path: sft, adapter: lora}",
         ["`model.adapter` = lora, `model.path` = sft: an adapter is of a model that exists"]),
    ],
)  # fmt: skip
def test_bad_value_is_refused_with_key_value_and_remedy(base, override, words):
    with pytest.raises(ConfigError) as refusal:
        load_config(base, [override])
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_dotted_key_of_a_file_is_refused_with_the_nested_form(base):
    base.write_text(base.read_text() + "policy.optimizer.lr: 1.0e-6\n")
    with pytest.raises(ConfigError, match=r"a file nests it: `policy: \{optimizer: \{lr: ...\}\}`"):
        load_config(base)


def test_missing_and_malformed_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: no such configuration file"):
        load_config(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not valid YAML"):
        load_config(bad)
    bad.write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config(bad)


def test_cyclic_defaults_are_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("defaults: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("defaults: [a.yaml]\n")
    with pytest.raises(ConfigError, match="cycle"):
        load_config(tmp_path / "a.yaml")
