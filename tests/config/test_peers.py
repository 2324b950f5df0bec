"""Unknown keys that are settings of other frameworks are answered with ours."""

import re

import pytest

from grpo_dist.cli import main
from grpo_dist.config import AlgorithmConfig, Config
from grpo_dist.config.files import ConfigError, load_config
from grpo_dist.config.peers import answers, hint, lookup, trainers
from grpo_dist.tools.config_reference import keys, sections
from tests.support.documents import ROOT

BASE = "model: {path: demo:add3}\ndata: {train: [{path: demo:add3}]}\n"


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


FREE = ("rollout.engine.", "data.template_kwargs.", "rewards.functions.N.kwargs.")  # arguments of others


def test_every_key_of_ours_in_the_tables_exists():
    existing = {key.path for prefix, section in sections(Config) for key in keys(section, prefix)}
    rows = [row for trainer in trainers().values() for row in trainer.rows.values()]
    derived = {key for trainer in trainers().values() for key in trainer.derived}
    named = {key for row in rows for key in row.keys} | derived
    texts = [t for row in rows for t in (row.note, *row.values.values()) if isinstance(t, str)]
    quoted = {key for text in texts for key in re.findall(r"`([a-z_.N0]+)`", text) if "." in key}
    named |= {key.replace(".0.", ".N.") for key in quoted}
    earlier = answers()["earlier"]
    written = {key for now in earlier.values() for key in re.findall(r"`([a-z_.]+)[`:]", now) if "." in key}
    assert written <= existing and not existing & earlier.keys()
    assert len(named) > 120 and [key for key in named - existing if not key.startswith(FREE)] == []


def test_the_tables_name_the_counterpart_of_each_setting():
    assert len(trainers()) > 16
    for trainer in trainers().values():
        assert len(trainer.rows) > 20 and trainer.version and trainer.words, trainer.name
        for name, row in trainer.rows.items():
            assert row.keys or row.note, f"{trainer.name}: {name} without a counterpart needs a reason"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", ["`algorithm.loss.clip_high`?", "verl's"]),
        ("clip_ratio_high=0.28", ["did you mean `algorithm.loss.clip_high`?"]),
        ("algorithm.adv_estimator=grpo", ["did you mean `algorithm.advantage`?", "flash_reinforce alike"]),
        ("data.train_batch_size=8", ["did you mean `batch.prompts_per_step`?", "prompts"]),
        ("actor_rollout_ref={rollout: {n: 8}, actor: {ppo_epochs: 2}}", [
            "unknown key `actor_rollout_ref.rollout.n`; did you mean `batch.samples_per_prompt`?",
            "unknown key `actor_rollout_ref.actor.ppo_epochs`; did you mean `batch.epochs_per_batch`?",
        ]),
        ("num_generations=8", ["did you mean `batch.samples_per_prompt`?", "TRL's `num_generations`"]),
        ("temperature=0.9", ["did you mean `sampling.temperature`?", "of TRL, OpenRLHF"]),
        ("gradient_checkpointing=true", ["did you mean `model.gradient_checkpointing`?"]),
        ("ds3_gather_for_generation=true", ["has no counterpart", "bucket by bucket"]),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", ["did you mean `algorithm.correction.high`?"]),
        ("use_additional_prompts=true", ["did you mean `dynamic_sampling`?"]),
        ("is_num_return_sequences_expand=true", ["has no counterpart"]),
        *(
            (f"{name}=1", [f"did you mean `algorithm.{ours}`"])  # ROLL's keys, pasted at the top level
            for name, ours in {
                "reward_clip": "reward_clip", "reward_norm": "reward_norm",
                "reward_shift": "reward_norm.shift", "reward_scale": "reward_norm.shift",
                "whiten_advantages": "advantage.whiten",
                "advantage_clip": "advantage_clip", "add_token_level_kl": "kl.in_reward",
            }.items()
        ),
        *(
            (f"algorithm.{key}", ["an earlier version had it; write `algorithm.", now])
            for key, now in (
                ("policy_loss=sapo", "loss`"), ("clip_high=0.3", "loss.clip_high`"), ("pass_k=2", "k: "),
                ("std=batch", "advantage.std"), ("entropy_coef=0.1", "entropy.coef"), ("tau=1", "loss.tau"),
                ("adaptive_entropy={target: 1}", "kind: adaptive"), ("old_logprobs=rollout", "bypass"),
                ("process_coef=1", "process.coef"), ("add_token_level_kl=true", "kl.in_reward"),
            )
        ),
        ("scale_rewards=batch", ["did you mean `algorithm.advantage.std`?", "batch_raw"]),
        ("policy.learning_rate=1", ["did you mean `policy.optimizer.lr`?"]),
        ("n_samples_per_prompt=8", ["did you mean `batch.samples_per_prompt`?", "of OpenRLHF, slime"]),
        ("rollout.n_samples_per_prompt=8", ["did you mean `batch.samples_per_prompt`?"]),
        ("eval.temperature=0", ["did you mean `evaluation.temperature`?"]),
        ("rollout.temperature=1", ["did you mean `sampling.temperature`?"]),
        ("loss_agg_mode=token-mean", ["did you mean `algorithm.aggregation`?"]),
        ("dual_clip_loss=true", ["did you mean `algorithm.loss.dual_clip`?", "1 + 2 * pg_clip"]),
        ("ppo_epochs=1", ["did you mean `batch.epochs_per_batch`?"]),
        ("use_kl_loss=true", ["`algorithm.kl.coef`"]),
        ("actor_train={training_args: {learning_rate: 1e-6}}", ["did you mean `policy.optimizer.lr`?"]),
        ("top_p=0.9", ["did you mean `sampling.top_p`?"]),
        ("repetition_penalty=1.1", ["no counterpart", "know no penalties"]),
        ("prompt_max_len=512", ["did you mean `data.max_prompt_tokens`?", "OpenRLHF's"]),
        ("generate_max_len=512", ["did you mean `sampling.max_new_tokens`?", "OpenRLHF's"]),
        ("use_vllm=true", ["no counterpart", "vLLM always samples"]),
        ("disable_dropout=true", ["no counterpart", "without dropout"]),
        ("filter_groups=true", ["`dynamic_sampling`", "verl's `algorithm.filter_groups`"]),
        ("filter_groups={enable: true, max_num_gen_batches: 3}", [
            "unknown key `filter_groups.enable`; did you mean `dynamic_sampling`?",
            "unknown key `filter_groups.max_num_gen_batches`; "
            "did you mean `dynamic_sampling.max_extra_prompts`?",
        ]),
        ("algorithm.filter_groups.enable=true", ["did you mean `dynamic_sampling`?"]),
        ("critic.model.path=m", ["`critic.model.path`; `critic` of verl, OpenRLHF", "no counterpart"]),
        ("critic={optim: {lr: 1}, ppo_epochs: 2}", ["keys `critic.optim.lr`, `critic.ppo_epochs`; `critic`"]),
        ("critic_pretrain=m", ["no critic"]),
        ("rollout.name=sglang", ["unknown key `rollout.name`; engines are vLLM's, and there is no SGLang"]),
        ("actor_rollout_ref={rollout: {name: sglang}, actor: {strategy: megatron}}",
         ["`actor_rollout_ref.rollout.name`; engines are vLLM's", "strategy`; DeepSpeed's ZeRO trains"]),
        ("policy.backend=megatron", ["DeepSpeed's ZeRO trains", "set `policy.zero_stage`"]),
        ("rollout.backend=vllm:d4t2", ["did you mean `rollout.num_workers`"]),
        ("data.train=[{path: a, image_column: image}]", ["only text models are trained"]),
        ("data.image_key=images", ["only text models are trained"]),
        ("policy.lora={modules_to_save: [embed_tokens]}", ["have no adapters", "policy.lora=null"]),
        ("reward_model.rollout.gpu_memory_utilization=0.5", ["no counterpart", "`rewards.models`"]),
        ("ref.num_nodes=2", ["did you mean `reference.num_workers`?"]),
        ("rewards.functions=[{function: math, url: u}]", ["`rewards.functions.0.kwargs.url`"]),
        ("health.garbage_above=0.5", ["an earlier version had it; write `health.degenerate_above`"]),
        ("evaluation.max_prompts=8", ["an earlier version had it; write `data.eval.N.max_rows`"]),
        ("policy.logprob_chunk_mib=64", ["write nothing: it follows from the GPU's memory"]),
        ("health.max_rollbacks=5", ["write `health.action: {kind: rollback, max_rollbacks: 3}`"]),
        ("data.drop_solved=0.9", ["an earlier version had it; write `data.order: {drop_solved: 0.9}`"]),
        ("sampling.stop_strings=[a]", ["did you mean `sampling.stop`?"]),
        # A misspelt key of ours is still answered by its spelling.
        ("algorithm.clip_hihg=0.3", ["did you mean `algorithm.loss.clip_high`?"]),
        ("polcy.lr=1", ["did you mean `policy`?"]),
        # A key in a section of ours is not looked up in a trainer's section of the same name.
        ("data.train=[{path: a, splt: train}]", ["did you mean `data.train.0.split`?"]),
        ("data.train=[{path: a, foo_bar: 1}]", ["`data.train.0.foo_bar`; known here: path, split,"]),
        ("model.pth=a", ["did you mean `model.path`?"]),
        ("cluster.foo_bar=1", ["`cluster.foo_bar`; known here: address,"]),
    ],
)  # fmt: skip
def test_an_unknown_key_of_another_framework_is_answered_with_ours(base, override, words):
    with pytest.raises(ConfigError) as refusal:
        load_config(base, [override])
    message = str(refusal.value)
    assert "unknown key" in message and [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("filter_low", "did you mean `dynamic_sampling.mean_low`?"),
        ("stop_strings", "did you mean `sampling.stop`?"),
        ("group_size", "did you mean `batch.samples_per_prompt`?"),
        ("max_tokens", "did you mean `sampling.max_new_tokens`?"),
        ("vllm_gpu_ratio", "did you mean `rollout.gpu_memory_utilization`?"),
        ("no_such_word", None),
    ],
)
def test_a_key_that_only_looks_alike_is_no_answer(base, key, answer):
    with pytest.raises(ConfigError) as refusal:
        load_config(base, [f"{key}=1"])
    message = str(refusal.value).removeprefix(f"{base}: unknown key `{key}`")
    assert message == "" if answer is None else message.startswith(f"; {answer}")


def test_a_pasted_recipe_is_answered_by_its_trainer(base):
    """`batch_size`, `seq_len` and `max_steps` are ambiguous by themselves."""
    with pytest.raises(ConfigError) as refusal:
        load_config(base, ["orchestrator={batch_size: 512, group_size: 8, seq_len: 8192}", "max_steps=5"])
    assert str(refusal.value).splitlines()[1:] == [
        "  unknown key `orchestrator.batch_size`; did you mean `batch.prompts_per_step`? (prime-rl's "
        "`orchestrator.batch_size`; samples there: divide by group_size)",
        "  unknown key `orchestrator.group_size`; did you mean `batch.samples_per_prompt`? (prime-rl's "
        "`orchestrator.group_size`)",
        "  unknown key `orchestrator.seq_len`; did you mean `model.max_length`? (prime-rl's "
        "`orchestrator.seq_len`; prompt and completion together)",
        "  unknown key `max_steps`; did you mean `steps`? (prime-rl's `max_steps`)",
    ]


def test_unknown_keys_with_one_answer_share_a_line_and_a_message_has_at_most_40(base):
    with pytest.raises(ConfigError) as refusal:
        load_config(base, ["ds={packing_samples: true, x: 1}", "y=1"])
    assert str(refusal.value).splitlines() == [
        f"{base}: 2 things to correct:",
        "  unknown key `ds.packing_samples`; did you mean `model.packing`? (OpenRLHF's `ds.packing_samples`)",
        "  unknown keys `ds.x`, `y`",
    ]
    base.write_text(BASE.replace("model:", "seed: -1\nmodel:"))
    with pytest.raises(ConfigError) as refusal:
        load_config(base, [f"data.eval={[{'path': 'x', 'max_rows': 0}] * 60}"])
    lines = str(refusal.value).splitlines()
    assert len(lines) == 41 and lines[-1] == "  and 22 more"


@pytest.mark.parametrize(
    "name",
    ["path", "enable", "mode", "no_such_thing", "actor_rollout_ref.model.tiled_mlp.enabled", "batch_size"],
)  # fmt: skip
def test_a_word_with_many_meanings_has_no_answer(name):
    assert hint(name) is None


@pytest.mark.parametrize("name", ["model.path", "optim.lr", "ppo_mini_batch_size", "enable", "strategy"])
def test_a_setting_of_the_critic_is_never_answered_with_one_of_the_policy(name):
    matches = lookup(f"critic.{name}")
    assert {match.row.keys for match in matches} == {()}


def test_a_flag_of_another_framework_is_answered_with_our_key(base, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", str(base), "--n-samples-per-prompt", "8"])
    assert ended.value.code == 2
    assert "--n-samples-per-prompt: did you mean `batch.samples_per_prompt`?" in capsys.readouterr().err


def test_settings_that_the_maths_documents_for_peers_are_accepted():
    """ROLL's truncated weights in [0, 1] are cispo's with no room above 1."""
    loss = AlgorithmConfig(loss={"name": "cispo", "clip_low": 1.0, "clip_high": 0.0}).loss
    assert (loss.clip_low, loss.clip_high) == (1.0, 0.0)
    text = (ROOT / "grpo_dist/algorithms/README.md").read_text()
    assert "its `tis` is `cispo` with `clip_low: 1, clip_high: 0`" in text


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("batch.train_batch_size", ["`batch.prompts_per_step`", "`batch.updates_per_step`"]),  # verl, others
        ("policy.optimizer.warmup_ratio", ["`policy.optimizer.warmup_share`"]),  # also a section of NeMo-RL
        ("algorithm.beta", ["`algorithm.kl.coef`", "`algorithm.loss.beta`"]),
    ],
)
def test_an_ambiguous_name_is_answered_with_each_meaning(key, words):
    assert [word for word in words if word not in (hint(key) or "")] == []
