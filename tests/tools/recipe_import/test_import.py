"""`grpo-dist import`: recipes of other trainers, in their published form, become valid configurations."""

from operator import attrgetter
from types import SimpleNamespace

import pytest

from grpo_dist.cli import main
from grpo_dist.config.files import load_config
from grpo_dist.tools.recipe_import.expressions import Uncomputable, evaluate
from grpo_dist.tools.recipe_import.shell import read_commands

VERL = r"""#!/usr/bin/env bash
set -xeuo pipefail
# Our own recipe in verl's form.
MODEL=${MODEL:-"org/base-7B"}
DATA_HOME=${DATA_HOME:-"${HOME}/data"}
answer=$((1024 * 8)); prompt_bsz=128
DEVICE=${DEVICE:-$(python3 -c 'import x' && echo npu || echo gpu)}
EXTRA=()
case "$DEVICE" in
    gpu) gpus=8; EXTRA+=(actor_rollout_ref.rollout.enforce_eager=True) ;;
    npu) gpus=16 ;;
esac
if [ "${FAST:-0}" = 1 ]; then answer=64; elif [ $gpus -ge 8 ]; then nodes=2; else nodes=1; fi
ARGS=(
    algorithm.adv_estimator=grpo   # the estimator
    algorithm.use_kl_in_reward=False
)
ray job submit --no-wait --runtime-env="env.yaml" -- python3 -m verl.trainer.main_ppo "${ARGS[@]}" \
    data.train_files="['$DATA_HOME/a.parquet', '$DATA_HOME/b.parquet']" \
    data.val_files="${DATA_HOME}/test.parquet" \
    data.train_batch_size=${prompt_bsz} \
    data.max_response_length=${answer} \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.ppo_mini_batch_size=$((prompt_bsz / 4)) \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.max_num_gen_batches=3 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name=ours \
    trainer.experiment_name="ours 7b_$(date +%m%d)" \
    trainer.n_gpus_per_node=${gpus} \
    trainer.nnodes="${nodes}" \
    trainer.test_freq=-1 \
    trainer.no_such_key=1 \
    "${EXTRA[@]}" "$@"
"""
OPENRLHF = """deepspeed --module openrlhf.cli.train_ppo_ray \\
   --pretrain org/model --prompt_data org/data --input_key question --label_key gold \\
   --rollout_batch_size 64 --n_samples_per_prompt 8 --train_batch_size 128 \\
   --advantage_estimator reinforce_baseline --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k2 \\
   --eps_clip_low_high 0.2 0.27 --colocate_all_models --vllm_num_engines 8 \\
   --vllm_gpu_memory_utilization 0.6 \\
   --actor_num_gpus_per_node 8 --packing_samples --generate_max_len 1024 --actor_learning_rate 5e-7 --bf16
"""
TRL_YAML = """# open-r1's form
model_name_or_path: org/model
dataset_name: org/data
dataset_prompt_column: problem
system_prompt: "Think.\\nThen answer."
num_generations: 16
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
max_completion_length: 512
max_steps: 50
learning_rate: 2.0e-05
lr_scheduler_type: cosine
report_to: [wandb]
reward_funcs: [accuracy, format, tag_count]
reward_weights: [1.0, 0.5, 0.25]
push_to_hub: true
"""
TRL_PYTHON = '''"""Our own script."""
from trl import GRPOConfig, GRPOTrainer
STEPS = 20
raise SystemExit("this file is read, not run")
dataset = load_dataset("org/data", "main", split="train")
args = GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=8, max_steps=STEPS,
                  epsilon=0.2, loss_type="dr_grpo", scale_rewards=False, beta=0.01, seed=chosen())
trainer = GRPOTrainer(model="org/model", args=args, reward_funcs=accuracy_reward, train_dataset=dataset,
                      peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"]))
'''
ROLL = """exp_name: ours
rollout_batch_size: 32
num_return_sequences_in_group: 8
response_length: 512
adv_estimator: reinforce
pretrain: org/model
max_steps: 10
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 16, warmup_steps: 5}
  data_args: {file_name: [data/a.jsonl], messages: messages}
  device_mapping: list(range(0,4))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", temperature: 0.9, top_p: 0.99, repetition_penalty: 1.1}
  device_mapping: list(range(4,8))
"""  # noqa: E501
FORMS = {
    "run.sh": VERL,
    "ppo.sh": OPENRLHF,
    "config.yaml": TRL_YAML,
    "train.py": TRL_PYTHON,
    "roll.yaml": ROLL,
    "swift.sh": """NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model org/model --dataset org/data
        --reward_funcs accuracy format --tuner_type lora --lora_rank 16 --per_device_train_batch_size 8
        --num_generations 8 --deepspeed zero3 --beta 0.0 --vllm_mode colocate --use_vllm true""".replace(
        "\n", " "
    ),
    "slime.sh": """MODEL_ARGS=(--hf-checkpoint /models/m)
python3 train.py ${MODEL_ARGS[@]} --prompt-data /d.jsonl --label-key label --rollout-batch-size 32 \\
  --n-samples-per-prompt 8 --global-batch-size 128 --num-rollout 100 --rm-type deepscaler --eps-clip 0.2 \\
  --eps-clip-high 0.28 --advantage-estimator grpo --actor-num-gpus-per-node 8 --colocate --use-tis""",
    "skyrl.sh": """uv run --extra vllm -m skyrl.train.entrypoints.main_base data.train_data="['a.parquet']" \\
  trainer.policy.model.path=org/model trainer.train_batch_size=64 trainer.policy_mini_batch_size=16 \\
  trainer.algorithm.policy_loss_type=gspo generator.n_samples_per_prompt=8 \\
  trainer.placement.colocate_all=true \\
  generator.sampling_params.max_generate_length=512 trainer.logger=console""",
    "nemo.yaml": """# the shape of grpo_math
grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 8, max_num_steps: 100, val_period: 10}
policy:
  model_name: org/model
  train_global_batch_size: 64
  max_total_sequence_length: 1024
  generation: {max_new_tokens: "${policy.max_total_sequence_length}", temperature: 1.0, top_p: 1.0}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28}
cluster: {gpus_per_node: 8, num_nodes: 1}
""",
    "areal.yaml": """experiment_name: ours
gconfig: {n_samples: 4, max_new_tokens: 256, temperature: 1.0}
rollout: {backend: "vllm:d4t2", max_head_offpolicyness: 2}
actor: {backend: "fsdp:d8", path: org/model, eps_clip: 0.2, kl_ctl: 0.0, ppo_n_minibatches: 2}
train_dataset: {path: org/data, batch_size: 64, max_length: 512}
""",
    "prime.toml": """max_steps = 100
[model]
name = "org/model"
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[orchestrator]
batch_size = 128
group_size = 8
[[orchestrator.train.source]]
name = "sums"
[orchestrator.train.source.env.taskset]
id = "sums-env"
[orchestrator.train.source.env.agent.harness]
id = "null"
""",
    "tinker.sh": "python -m tinker_cookbook.recipes.math_rl.train env=gsm8k model_name=org/model "
    "group_size=8 groups_per_batch=16 learning_rate=2e-5 max_tokens=256",
    "open_instruct.sh": "python open_instruct/grpo_fast.py --exp_name ours --num_unique_prompts_rollout 16 "
    "--num_samples_per_prompt_rollout 8 --total_episodes 12800 --model_name_or_path org/model "
    "--dataset_mixer_list org/data 1.0 --dataset_mixer_list_splits train --response_length 512 "
    "--num_learners_per_node 4 4 --kl_estimator 2",
    "easy.yaml": """data: {train_files: org/data@train, rollout_batch_size: 128, max_response_length: 512}
algorithm: {adv_estimator: grpo, kl_coef: 0.01, use_kl_loss: true, kl_penalty: low_var_kl}
worker:
  actor: {global_batch_size: 32, model: {model_path: org/model}, offload: {offload_params: true}}
  rollout: {n: 5, temperature: 1.0, tensor_parallel_size: 2}
trainer: {max_steps: 20, n_gpus_per_node: 8, nnodes: 1, experiment_name: ours, logger: [file]}
""",
    "oat.sh": "python train_zero_math.py --critic_type drgrpo --gpus 8 --collocate --pretrain org/model "
    "--prompt_data ./data --input_key problem --output_key answer --num_samples 8 --rollout_batch_size 128 "
    "--train_batch_size 128 --generate_max_length 3000 --beta 0 --oracle math --zero-stage 2",
    "zero.yaml": """model: {pretrained_model_path: org/model, dtype: bfloat16}
data: {path: org/countdown, test_size: 128}
training: {batch_size: 256, num_questions_per_batch: 32, max_gen_len: 1024, betas: [0.9, 0.999]}
""",
    "x.yaml": """# X-R1's form
model_name_or_path: org/model
dataset_name: org/data
num_processes: 3
num_generations: 6
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
max_completion_length: 128
""",
}


@pytest.fixture
def import_recipe(tmp_path, capsys):
    def run(name, text=None):
        """Import ``text``, or the form called ``name``; return the configuration, stdout and stderr."""
        source, target = tmp_path / name, tmp_path / f"{name}.ours.yaml"
        source.write_text(text or FORMS[name])
        assert main(["import", str(source)]) == 0
        out, err = capsys.readouterr()
        target.write_text(out)
        return SimpleNamespace(config=load_config(target), out=out, err=err)

    return run


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_recognised_and_becomes_a_valid_configuration(import_recipe, name):
    result = import_recipe(name)
    others = {"slime.sh": "/models/m", "run.sh": "org/base-7B"}
    assert result.config.model.path == others.get(name, "org/model")
    first = result.err.splitlines()[0]
    unknown = int(first.split(" unknown")[0].rpartition(" ")[2])
    assert unknown == (name == "run.sh"), result.err


def test_a_recipe_of_verl_with_its_conversions_and_unwritten_defaults(import_recipe):
    result = import_recipe("run.sh")
    assert [source.path for source in result.config.data.train] == ["~/data/a.parquet", "~/data/b.parquet"]
    sources = (*result.config.data.train, *result.config.data.eval)
    assert {source.problem_column for source in sources} == {"prompt"}
    assert (result.config.batch.prompts_per_step, result.config.batch.updates_per_step) == (128, 4)
    assert (result.config.policy.num_workers, result.config.rollout.num_workers) == (16, 4)
    assert result.config.sampling.max_new_tokens == 8192 and result.config.name == "ours-7b"
    assert (result.config.algorithm.kl.coef, result.config.algorithm.kl.estimator.name) == (0.001, "k3")
    assert result.config.dynamic_sampling.max_extra_prompts == 256 and result.config.rollout.enforce_eager
    assert result.config.evaluation.every == 0 and result.config.tracking.wandb == "ours"
    # Not written there, and with other defaults here.
    for line in (
        "    betas: [0.9, 0.999]  # verl's default", "    weight_decay: 0.01  # verl's default",
        "    dual_clip: 3.0  # verl's default", "  temperature: 0  # verl's default",
        "  correction: none  # as in verl", "  gradient_checkpointing: true  # verl's default",
    ):  # fmt: skip
        assert line in result.out.splitlines(), line
    assert "# algorithm.use_kl_in_reward=false: off, or as it is here" in result.out
    assert " 0 not carried over, 1 unknown" in result.err
    assert "trainer.no_such_key=1: no table has it" in result.err


def test_every_setting_of_a_recipe_is_in_the_file_once_in_its_section(import_recipe):
    result = import_recipe("config.yaml")
    for line in FORMS["config.yaml"].splitlines()[1:]:
        assert result.out.count(f" {line.split(':')[0]}=") == 1, line


def test_a_recipe_of_open_r1(import_recipe):
    result = import_recipe("config.yaml")
    rewards = [(reward.function, reward.weight) for reward in result.config.rewards.functions]
    assert rewards == [("math", 1.0), ("format", 0.5), ("my_rewards:tag_count", 0.25)]
    assert result.config.data.system_prompt == "Think.\nThen answer." and result.config.steps == 50
    assert result.config.batch.prompts_per_step == 16 * 8 * 4 // 16
    assert result.config.policy.optimizer.betas == (0.9, 0.999)
    assert "# push_to_hub=true: `grpo-dist export RUN --push USER/REPO` pushes to the hub" in result.out


def test_a_python_script_is_read_and_not_run(import_recipe):
    result = import_recipe("train.py")
    assert (result.config.data.train[0].path, result.config.data.train[0].subset) == ("org/data", "main")
    assert result.config.steps == 20 and result.config.algorithm.aggregation.name == "seq-mean-token-sum-norm"
    assert result.config.algorithm.advantage.std == "none" and result.config.algorithm.kl.coef == 0.01
    assert (result.config.policy.lora.rank, result.config.policy.lora.target_modules) == (8, ("q_proj",))
    assert "chosen()" in result.err  # a value that only running it would give


def test_an_environment_of_prime_rl_is_named_by_its_tasks_and_not_by_its_harness(import_recipe):
    assert import_recipe("prime.toml").config.data.train[0].environment == "verifiers:sums-env"


def test_flags_of_openrlhf(import_recipe):
    result = import_recipe("ppo.sh")
    assert (result.config.batch.prompts_per_step, result.config.batch.updates_per_step) == (64, 4)
    assert (result.config.algorithm.loss.clip_low, result.config.algorithm.loss.clip_high) == (0.2, 0.27)
    algorithm = result.config.algorithm
    assert not algorithm.kl.in_reward and algorithm.advantage.name == "reinforce_pp_baseline"
    assert result.config.policy.optimizer.schedule == "cosine" and algorithm.correction.kind == "none"


LEVEL = "--algo.advantage.is_correction_level"
VERL_SCRIPT = "python -m verl.trainer.main_ppo data.train_batch_size=64 data.train_files=d.parquet "
TRL_SCRIPT = "accelerate launch train.py --dataset_name d --beta 0 --num_generations 8 --loss_type grpo "
SWIFT_SCRIPT = "swift rlhf --rlhf_type grpo --model m --num_generations 8 "
AREAL = "gconfig: {n_samples: 4}\ntrain_dataset: {path: d, batch_size: 8}\nactor: {path: m, %s}\n"
NEMO = (
    "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4}\n"
    "policy: {train_global_batch_size: 16, %s}\n"
)


@pytest.mark.parametrize(("name", "text", "expected"), [
    # verl's schedule advances once a step, after all mini-batches: 10 steps of 4 updates, each twice.
    ("a.sh", VERL_SCRIPT + "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor."
     "ppo_epochs=2 actor_rollout_ref.actor.optim.lr_warmup_steps=10",
     {"policy.optimizer.warmup_steps": 80, "epochs": 30}),
    ("a.sh", VERL_SCRIPT + "data.gen_batch_size=192 algorithm.filter_groups.enable=True "
     "algorithm.filter_groups.max_num_gen_batches=10", {"dynamic_sampling.max_extra_prompts": 1920 - 64}),
    # verl's budget is per GPU, and 4 GPUs share a sequence.
    ("a.sh", VERL_SCRIPT + "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 actor_rollout_ref."
     "actor.ppo_max_token_len_per_gpu=1000", {"batch.micro_batch_tokens": 4000}),
    # Scores are -1 and 1 there, 0 and 1 here, beside a penalty of the same size.
    ("a.sh", VERL_SCRIPT + "reward_model.reward_manager=dapo",
     {"rewards.functions.0.function": "math", "rewards.functions.0.weight": 2}),
    ("a.sh", "python -m openrlhf.cli.train_ppo_ray --pretrain m --use_wandb {wandb_token} "
     "--normalize_reward", {"epochs": 1, "tracking.wandb": "openrlhf_train_ppo",
                            "algorithm.reward_norm.name": "none"}),
    *(
        ("a.sh", "python -m openrlhf.cli.train_ppo_ray --pretrain m " + flags,
         {f"algorithm.correction.{key}": value for key, value in correction.items()} | others)
        for flags, correction, others in (
            ("--rollout.batch_size 8 --train.batch_size 8 --algo.advantage.estimator flash_reinforce "
             f"{LEVEL} seq --algo.advantage.is_correction_gating binary_kl "
             "--algo.advantage.is_correction_threshold 5e-3 --actor.loss_agg_mode seq-mean-token-mean",
             {"kind": "tis", "level": "token", "low": 0, "high": 1e13, "reject.0.high": 0.005,
              "reject.0.rule": "seq_mean_binary_kl"},
             {"algorithm.advantage.name": "flash_reinforce", "batch.samples_per_prompt": 1,
              "algorithm.aggregation.name": "seq-mean-token-mean", "batch.updates_per_step": 1}),
            ("--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.2 0.8", {"kind": "none"},
             {"dynamic_sampling.mean_low": 0.2, "dynamic_sampling.mean_high": 0.8}),
            (f"{LEVEL} off --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.0 1.0",
             {"kind": "none"}, {"dynamic_sampling.mean_low": None}),
            (f"{LEVEL} token", {"kind": "icepop", "level": "token", "low": 0.5, "high": 5}, {}),
            (f"{LEVEL} token --algo.advantage.is_correction_mode clip "
             "--algo.advantage.is_correction_threshold 2", {"kind": "tis", "low": 0, "high": 2}, {}),
            (f"{LEVEL} seq --algo.advantage.is_correction_threshold 0.9 1.1",
             {"kind": "icepop", "level": "geometric", "low": 0.9, "high": 1.1}, {}),
            ("--enable_vllm_is_correction --vllm_is_correction_type seq-mask-tis",
             {"kind": "icepop", "level": "geometric", "low": 0.5, "high": 5}, {}),
            ("--enable_vllm_is_correction", {"kind": "tis", "level": "token", "high": 5}, {}),
        )
    ),
    ("a.sh", "python -m verl.trainer.main_ppo algorithm.adv_estimator=flash_reinforce "
     "actor_rollout_ref.rollout.n=1 actor_rollout_ref.actor.policy_loss.loss_mode=flash_reinforce",
     {"algorithm.advantage.name": "flash_reinforce", "algorithm.loss.name": "policy_gradient",
      "algorithm.correction.kind": "tis", "algorithm.correction.high": 1e13,
      "algorithm.correction.reject.0.rule": "seq_mean_binary_kl",
      "algorithm.correction.reject.0.high": 0.001}),
    ("a.sh", "python train.py --hf-checkpoint m --prompt-data a --rollout-batch-size 8 --use-tis "
     "--n-samples-per-prompt 1 --advantage-estimator flash_reinforce --tis-binary-kl-threshold 5e-3 "
     "--custom-tis-function-path slime.backends.megatron_utils.loss.binary_kl_trust_region_function",
     {"algorithm.advantage.name": "flash_reinforce", "algorithm.correction.high": 1e13,
      "algorithm.correction.reject.0.rule": "seq_mean_binary_kl",
      "algorithm.correction.reject.0.high": 0.005}),
    ("a.toml", "[orchestrator]\nbatch_size = 8\ngroup_size = 4\n[[orchestrator.train.source]]\n"
     "name = 'a'\n"
     "algo = {type = 'max_rl'}\nenv = {taskset = {id = 'a'}}\n[[orchestrator.train.source]]\nname = 'b'\n"
     "env = {taskset = {id = 'b'}}\n",
     {"algorithm.advantage.name": "dr_grpo", "data.train.0.algorithm.advantage.name": "maxrl",
      "data.train.1.algorithm": None}),
    ("a.yaml", ROLL + "rewards: {math: {query_filter_config: {type: mean_filter, filter_args: "
     "{threshold_up: 0.9, threshold_down: 0.1}}}}\nuse_additional_prompts: true\n",
     {"dynamic_sampling.mean_low": 0.1, "dynamic_sampling.mean_high": 0.9}),
    ("a.sh", TRL_SCRIPT + "--use_vllm true --num_processes 4 --vllm_tensor_parallel_size 2",
     {"algorithm.correction.kind": "mis", "algorithm.correction.level": "sequence",
      "algorithm.correction.high": 3, "sampling.max_new_tokens": 512, "epochs": 3}),
    ("a.sh", TRL_SCRIPT + "--use_vllm true --vllm_importance_sampling_correction false",
     {"algorithm.correction.kind": "none", "cluster.placement": "colocated"}),
    # 100 updates are 25 steps of two updates, each on the samples twice.
    ("a.sh", TRL_SCRIPT + "--save_steps 100 --eval_steps 8 --num_iterations 2 --steps_per_generation 8 "
     "--gradient_accumulation_steps 4", {"checkpoint.every": 25, "evaluation.every": 2}),
    ("a.sh", SWIFT_SCRIPT + "--dataset org/data#500 org/other --max_length 2048 --system prompt.txt",
     {"data.train.0.path": "org/data", "data.train.0.max_rows": 500, "data.train.1.path": "org/other",
      "data.train.1.max_rows": None, "data.max_prompt_tokens": 2048, "data.system_prompt": None}),
    ("a.sh", SWIFT_SCRIPT + "--dataset d --reward_funcs accuracy soft_overlong --soft_cache_length 64 "
     "--use_vllm true --vllm_mode colocate --vllm_tensor_parallel_size 2 --NPROC_PER_NODE 8",
     {"rewards.functions.1.kwargs": {"buffer_tokens": 64}, "rewards.functions.0.kwargs": {},
      "rollout.num_workers": 4}),
    # NeMo RL's schedule advances once a step, too.
    ("a.yaml", NEMO % "scheduler: [{name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 13}}, "
     "{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0}}]",
     {"policy.optimizer.warmup_steps": 26, "algorithm.advantage.name": "rloo_normalized"}),
    ("a.yaml", "loss_fn: {reference_policy_kl_penalty: 0}\ngrpo: {num_prompts_per_step: 8, "
     "normalize_rewards: false}\n", {"algorithm.advantage.name": "rloo"}),
    # Search-R1's mini-batches count samples, and its fork of verl writes no checkpoint by default.
    ("a.sh", VERL_SCRIPT + "actor_rollout_ref.rollout.n_agent=4 actor_rollout_ref.actor."
     "ppo_mini_batch_size=32", {"batch.samples_per_prompt": 4, "batch.updates_per_step": 8,
                                "checkpoint.every": 0}),
    # Two bounds mean IcePop; the bounds of k1 apply to the inverse ratio; 0.5_5 is no number.
    ("a.sh", VERL_SCRIPT + "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction."
     "rollout_is_threshold=0.5_5 algorithm.rollout_correction.rollout_rs=\\'token_k1,seq_max_k2\\' "
     "algorithm.rollout_correction.rollout_rs_threshold=\\'0.5_4,2.5\\'",
     {"algorithm.correction.kind": "icepop", "algorithm.correction.low": 0.5,
      "algorithm.correction.high": 5.0, "algorithm.correction.reject.0": {
          "rule": "token_k1", "low": 0.25, "high": 2.0}, "algorithm.correction.reject.1.high": 2.5}),
    ("a.sh", VERL_SCRIPT + "algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction."
     "rollout_is=token", {"algorithm.correction.kind": "bypass"}),
    ("a.sh", VERL_SCRIPT + "+data.apply_chat_template_kwargs.enable_thinking=False "
     "trainer.project_name=p trainer.logger=[swanlab,trackio]",
     {"data.template_kwargs": {"enable_thinking": False}, "tracking.swanlab": "p",
      "tracking.trackio": "p", "tracking.wandb": None}),
    ("a.sh", TRL_SCRIPT + "--warmup_steps 0.1 --save_total_limit 3 --optim paged_adamw_8bit --use_peft "
     "--lora_target_modules q_proj, v_proj --report_to trackio",
     {"policy.lora.target_modules": ("q_proj", "v_proj"), "policy.optimizer.warmup_share": 0.1,
      "checkpoint.keep": 3, "tracking.trackio": "huggingface", "policy.optimizer.name": "adamw_8bit"}),
    ("a.sh", SWIFT_SCRIPT + "--dataset d --advantage_estimator rloo --response_prefix '<think>' "
     "--min_p 0.1",
     {"algorithm.kl.in_reward": True, "algorithm.kl.coef": 0.04, "sampling.temperature": 0.9,
      "data.prefill": "<think>", "data.overlong": "drop", "sampling.min_p": 0.1}),
    # AReaL masks weights at 5, and its default KL is 0.1.
    ("a.yaml", AREAL % "kl_ctl: 0.0, use_decoupled_loss: true, rejection_sampling: {level: sequence, "
     "action: mask, upper: 5.0}, reward_norm: {mean_level: group, mean_leave1out: true, std_level: null}",
     {"algorithm.correction.kind": "mis", "algorithm.correction.level": "geometric",
      "algorithm.correction.high": 5, "algorithm.advantage.name": "rloo", "algorithm.kl.coef": 0}),
    ("a.yaml", AREAL % "use_sapo_loss: true, sapo_tau_neg: 1.1, reward_norm: {mean_level: group, "
     "std_level: null}", {"algorithm.loss.name": "sapo", "algorithm.loss.tau_negative": 1.1,
                          "algorithm.kl.coef": 0.1, "algorithm.kl.in_reward": True,
                          "algorithm.correction.kind": "bypass", "algorithm.advantage.name": "dr_grpo"}),
    # Megatron's optimiser has another section; a prompt may fill its row.
    ("a.yaml", NEMO % "max_total_sequence_length: 1024, optimizer: null, megatron_cfg: {enabled: true, "
     "optimizer: {lr: 5.0e-6, min_lr: 5.0e-7, adam_beta1: 0.9, adam_beta2: 0.98}, scheduler: "
     "{lr_decay_style: constant, lr_warmup_iters: 13}}" + "data: {max_input_seq_length: 1024}\n",
     {"policy.optimizer.lr": 5e-6, "policy.optimizer.betas": (0.9, 0.98), "policy.optimizer.warmup_steps":
      26, "data.max_prompt_tokens": 512, "data.overlong": "drop", "model.max_length": 1024}),
    ("a.toml", "[model]\nname='m'\n[orchestrator]\nbatch_size=64\ngroup_size=8\n[trainer.loss]\n"
     "dppo_mask_high=0.3\n", {"max_staleness": 8, "algorithm.loss.name": "dppo_tv",
                              "algorithm.loss.clip_high": 0.3, "algorithm.advantage.name": "dr_grpo",
                              "algorithm.correction.kind": "bypass"}),
    # ROLL's reinforce with rewards normalised by group is grpo.
    ("a.yaml", "rollout_batch_size: 8\nnum_return_sequences_in_group: 4\nadv_estimator: reinforce\n"
     "norm_mean_type: group\nnorm_std_type: batch\npretrain: m\n",
     {"algorithm.advantage.name": "grpo", "algorithm.advantage.std": "batch_raw"}),
    ("a.yaml", "rollout_batch_size: 8\nnum_return_sequences_in_group: 4\nadv_estimator: reinforce\n"
     "norm_mean_type: batch\npretrain: m\n",
     {"algorithm.advantage.name": "reinforce_pp", "algorithm.advantage.whiten": False,
      "algorithm.reward_norm.name": "batch"}),
    ("a.sh", VERL_SCRIPT + "reward.reward_model.enable=True reward.reward_model.model_path=org/RM-8B",
     {"rewards.models.0.path": "org/RM-8B", "rewards.models.0.name": "RM-8B", "rewards.functions": ()}),
    # verl's asynchronous trainer counts mini-batches as batches; its engines have separate GPUs.
    ("a.sh", "python -m verl.experimental.fully_async_policy.fully_async_main data.train_files=d "
     "data.train_batch_size=0 actor_rollout_ref.actor.ppo_mini_batch_size=32 async_training."
     "require_batches=4 async_training.trigger_parameter_sync_step=2 async_training.staleness_threshold="
     "0.5 async_training.partial_rollout=True rollout.nnodes=1 rollout.n_gpus_per_node=4 rollout."
     "total_rollout_steps=12800 actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
     "trainer.n_gpus_per_node=4",
     {"batch.prompts_per_step": 128, "batch.updates_per_step": 4, "max_staleness": 2, "steps": 100,
      "weight_sync.mode": "keep", "rollout.num_workers": 2, "policy.num_workers": 4,
      "cluster.placement": "separate"}),
    ("a.sh", "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --model m --dataset d --num_generations 8 "
     "--global_batch_size 16 --steps_per_generation 4 --lr 5e-6 --min_lr 1e-6 --train_iters 40",
     {"batch.prompts_per_step": 8, "policy.optimizer.lr": 5e-6, "policy.optimizer.min_lr_ratio": 0.2,
      "steps": 10}),
    # A command in quotes, and a launcher's switch before the program.
    ("a.sh", 'srun -N 1 bash -c "cd /x && python3 -m openrlhf.cli.train_ppo_ray --pretrain m --rollout_'
     'batch_size 64 --n_samples_per_prompt 2 --train_batch_size 64 --init_kl_coef 0"\n',
     {"batch.prompts_per_step": 64, "batch.updates_per_step": 2}),
    ("a.sh", "uv run --active open_instruct/grpo_fast.py --num_unique_prompts_rollout 3 "
     "--total_episodes 100 --num_samples_per_prompt_rollout 4 --stop_strings '</answer>' "
     "--model_name_or_path m",
     {"steps": 8, "sampling.stop": ("</answer>",)}),
])  # fmt: skip
def test_units_and_unwritten_defaults_are_those_of_the_trainer(import_recipe, name, text, expected):
    config = import_recipe(name, text).config.model_dump()
    for key, value in expected.items():
        node = config
        for part in key.split("."):
            node = node[int(part) if part.isdigit() else part]
        assert node == value, key


VERL_LOSS = VERL_SCRIPT + "actor_rollout_ref.actor.policy_loss.loss_mode="
BYPASS = (
    VERL_SCRIPT + "algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction.loss_type="
    "reinforce algorithm.rollout_correction.rollout_is="
)
OPENRLHF_SCRIPT = "python -m openrlhf.cli.train_ppo_ray --pretrain m "
ROLL_LOSS = "rollout_batch_size: 8\nnum_return_sequences_in_group: 4\nadv_estimator: grpo\npretrain: m\n"
SLIME = "python3 train.py --hf-checkpoint m --prompt-data d --rollout-batch-size 8 --advantage-estimator "
SKYRL = "uv run -m skyrl.train.entrypoints.main_base trainer.policy.model.path=m trainer.algorithm."
EASY_R1 = "worker: {actor: {model: {model_path: m}, loss_type: %s}}\nalgorithm: {adv_estimator: grpo%s}\n"
OAT = "python train_zero_math.py --pretrain m --prompt_data d --num_samples 8 --critic_type grpo "
TINKER = "python -m tinker_cookbook.recipes.math_rl.train env=gsm8k model_name=m "
PRIME = "[orchestrator]\nbatch_size = 8\ngroup_size = 4\n[model]\nname = 'm'\n"
OPEN_INSTRUCT = "python open_instruct/grpo_fast.py --model_name_or_path m --loss_fn "
SEQUENCES = "seq-mean-token-mean"


@pytest.mark.parametrize(("name", "text", "loss", "numbers", "aggregation"), [
    # verl has 0.2 for every loss, and reads loss_agg_mode for most.
    ("a.sh", VERL_LOSS + "gspo actor_rollout_ref.actor.loss_agg_mode=token-mean", "gspo", (0.2, 0.2),
     SEQUENCES),
    ("a.sh", VERL_LOSS + "gspo actor_rollout_ref.actor.clip_ratio_low=1e-3", "gspo", (1e-3, 0.2), SEQUENCES),
    ("a.sh", VERL_LOSS + "geo_mean", "gmpo", (0.2, 0.2), SEQUENCES),
    ("a.sh", VERL_LOSS + "sapo", "sapo", {"tau_negative": 1.05}, SEQUENCES),
    ("a.sh", VERL_LOSS + "cispo", "cispo", (0.2, 0.2), "token-mean"),
    ("a.sh", VERL_LOSS + "kl_cov actor_rollout_ref.actor.ppo_mini_batch_size=16", "kl_cov",
     {"cov_kl_coef": 0.1}, "token-mean"),
    ("a.sh", VERL_LOSS + "dppo_kl", "dppo_kl", {"clip_low": 0.2, "ratio_cap": 3}, "token-mean"),
    # It reads clip_ratio only where the others are null.
    ("a.sh", VERL_SCRIPT + "actor_rollout_ref.actor.clip_ratio=0.3", "ppo_clip", (0.2, 0.2), "token-mean"),
    ("a.sh", VERL_SCRIPT + "actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_high="
     "null", "ppo_clip", (0.2, 0.3), "token-mean"),
    ("a.sh", BYPASS + "null", "policy_gradient", {}, "token-mean"),
    ("a.sh", BYPASS + "token", "cispo", (1, 1), "token-mean"),
    ("a.sh", BYPASS + "sequence algorithm.rollout_correction.rollout_is_threshold=5", "reinforce_is",
     {"ratio_cap": 5}, "token-mean"),
    ("a.sh", OPENRLHF_SCRIPT + "--policy_loss_type gspo", "gspo", (0.2, 0.2), SEQUENCES),
    ("a.sh", TRL_SCRIPT + "--importance_sampling_level sequence", "gspo", (0.2, 0.2), SEQUENCES),
    # TRL's cispo has no lower bound, and epsilon_high is the upper one itself.
    ("a.sh", TRL_SCRIPT.replace("grpo ", "cispo ") + "--epsilon_high 5 --epsilon 0.2", "cispo", (1, 4),
     "token-mean"),
    ("a.sh", SWIFT_SCRIPT + "--dataset d --importance_sampling_level sequence", "gspo", (0.2, 0.2),
     SEQUENCES),
    ("a.yaml", ROLL_LOSS + "importance_sampling: seq\n", "gspo", (0.2, 0.2), SEQUENCES),
    ("a.yaml", ROLL_LOSS + "use_pg_clip_range: true\npg_clip: 0.1\npg_clip_high: 0.28\n", "ppo_clip",
     (0.2, 0.28), SEQUENCES),
    ("a.yaml", ROLL_LOSS + "pg_clip: 0.3\nactor_train: {pg_variant: cispo}\n", "cispo", (0.1, 0.1),
     SEQUENCES),
    ("a.yaml", ROLL_LOSS + "pg_variant: tis\n", "cispo", (1, 0), SEQUENCES),
    ("a.sh", SLIME + "gspo --eps-clip-high 3e-3", "gspo", (0.2, 3e-3), SEQUENCES),
    ("a.sh", SLIME + "cispo", "cispo", (0.2, 0.2), SEQUENCES),
    ("a.sh", SKYRL + "policy_loss_type=gspo", "gspo", (0.2, 0.2), "token-mean"),
    ("a.sh", SKYRL + "policy_loss_type=cispo trainer.algorithm.eps_clip_high=0.28", "cispo", (1, 4),
     "token-mean"),
    ("a.yaml", AREAL % "importance_sampling_level: sequence", "gspo", (0.2, 0.2), "token-mean"),
    ("a.yaml", NEMO % "model_name: m" + "loss_fn: {use_cispo: true, ratio_clip_max: 4}\n", "cispo", (0.2, 4),
     "token-mean"),
    ("a.yaml", EASY_R1 % ("gspo", ""), "gspo", (0.2, 0.3), "token-mean"),
    ("a.sh", OPEN_INSTRUCT + "cispo --clip_lower 0.2", "cispo", (1, 0.272), "token-mean"),
    ("a.sh", TINKER + "loss_fn=cispo", "cispo", (1, 3), "token-sum"),
    ("a.toml", PRIME, "dppo_tv", {"clip_low": 0.2, "ratio_cap": 1e13}, "token-mean"),
    ("a.sh", OAT, "ppo_clip", (0.2, 0.2), SEQUENCES),
])  # fmt: skip
def test_bounds_and_aggregation_of_each_loss_are_those_of_the_trainer(
    import_recipe, name, text, loss, numbers, aggregation
):
    algorithm = import_recipe(name, text).config.algorithm
    assert (algorithm.loss.name, algorithm.aggregation.name) == (loss, aggregation)
    if isinstance(numbers, tuple):
        numbers = dict(zip(("clip_low", "clip_high"), numbers, strict=True))
    assert {key: getattr(algorithm.loss, key) for key in numbers} == numbers


IN_REWARD = VERL_SCRIPT + "algorithm.use_kl_in_reward=True "


@pytest.mark.parametrize(("name", "text", "coef", "estimator", "in_reward", "adaptive"), [
    ("a.sh", IN_REWARD, 1e-3, "k1", True, None),
    ("a.sh", IN_REWARD + "algorithm.kl_ctrl.kl_coef=0.005 algorithm.kl_penalty=k3", 5e-3, "k3", True, None),
    # verl, OpenRLHF, ROLL, SkyRL, EasyR1: samples of a step / 10000.
    ("a.sh", IN_REWARD + "algorithm.kl_ctrl.type=adaptive", 1e-3, "k1", True, (0.1, 0.0064)),
    ("a.sh", OPENRLHF_SCRIPT + "--kl_target 0.2", 0.01, "k1", True, (0.2, 0.1024)),
    ("a.yaml", ROLL_LOSS + "add_token_level_kl: true\ntarget_kl: 0.1\n", 0.2, "k1", True, (0.1, 0.0032)),
    ("a.yaml", ROLL_LOSS + "use_kl_loss: true\nkl_loss_coef: 0.1\ntarget_kl: 0.1\n", 0.1, "k3", False, None),
    ("a.sh", SKYRL + "use_kl_in_reward=true trainer.algorithm.use_kl_loss=false trainer.algorithm.kl_ctrl."
     "type=adaptive", 1e-3, "k3", True, (0.1, 0.512)),
    ("a.yaml", EASY_R1 % ("default", ""), 1e-3, "k1", True, None),
    ("a.yaml", EASY_R1 % ("default", ", kl_type: adaptive"), 1e-3, "k1", True, (0.1, 0.0512)),
    ("a.yaml", EASY_R1 % ("default", ", disable_kl: true"), 0, "k3", False, None),
    ("a.sh", SLIME + "reinforce_plus_plus --kl-coef 0.01", 0.01, "k1", True, None),
    ("a.sh", SLIME + "grpo --kl-coef 0.01", 0, "k3", False, None),  # read there by reinforce_plus_plus only
    ("a.sh", SWIFT_SCRIPT + "--dataset d --kl_in_reward true", 0.04, "k1", True, None),
    ("a.yaml", NEMO % "model_name: m", 0.01, "k3", False, None),
    ("a.yaml", TRL_YAML, 0.04, "k3", False, None),  # open-r1's TRL is 0.18
    ("a.sh", OAT, 0.1, "k3", False, None),
    ("a.sh", OAT + "--kl_penalty_coef 0.02 --beta 0", 0.02, "k1", True, None),
    ("a.sh", TINKER + "kl_penalty_coef=0.1", 0.1, "k1", True, None),
])  # fmt: skip
def test_a_kl_term_has_the_numbers_of_the_trainer(
    import_recipe, name, text, coef, estimator, in_reward, adaptive
):
    kl = import_recipe(name, text).config.algorithm.kl
    assert (kl.coef, kl.estimator.name, kl.in_reward) == (coef, estimator, in_reward)
    assert (kl.target, kl.gain) == (adaptive or (None, 0.1))


@pytest.mark.parametrize(("script", "files", "expected"), [
    ("python3 -m verl.trainer.main config=examples/config.yaml worker.rollout.n=4\n",
     {"../examples/config.yaml": FORMS["easy.yaml"]},
     {"batch.samples_per_prompt": 4, "batch.prompts_per_step": 128, "sampling.temperature": 1.0}),
    ("accelerate launch --config_file=zero3.yaml grpo.py --config configs/a.yaml --num_generations 8\n",
     {"zero3.yaml": "num_processes: 4\nmixed_precision: bf16\n", "configs/a.yaml": TRL_YAML},
     {"policy.num_workers": 4, "batch.samples_per_prompt": 8, "sampling.max_new_tokens": 512}),
    ('uv run examples/run_grpo.py --config "$(pwd)/base.yaml" grpo.max_num_steps=7\n',
     {"base.yaml": FORMS["nemo.yaml"]}, {"steps": 7, "batch.prompts_per_step": 16}),
])  # fmt: skip
def test_the_file_that_a_command_changes_is_read_below_it(tmp_path, capsys, script, files, expected):
    folder = tmp_path / "scripts"
    trainer = "easyr1" if "verl" in script else "trl" if "accelerate" in script else "nemo_rl"
    for name, text in {"a.sh": script, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).resolve().write_text(text)
    for is_there in (True, False):
        assert main(["import", str(folder / "a.sh"), "--from", trainer]) == 0
        out, err = capsys.readouterr()
        (tmp_path / "ours.yaml").write_text(out)
        assert (": not there; what it sets is left out" in err) != is_there
        if is_there:
            config = load_config(tmp_path / "ours.yaml")
            assert {key: attrgetter(key)(config) for key in expected} == expected
        for name in files:
            (folder / name).unlink(missing_ok=True)


PARSED = """
import os
from dataclasses import dataclass, field
@dataclass
class Arguments:
    model_name: str = "org/model"
    length: int = field(default=256, metadata={"help": "x"})
    seed: int = field(default_factory=int)
parser.add_argument("--learning-rate", type=float, default=3e-6)
parser.add_argument("--beta", type=float)
args, own = parser.parse_args(), parse(Arguments)
longest = 2048
settings = dict(num_generations=4)
more = {"per_device_train_batch_size": 8, "epsilon": 0.3}
sampling = SamplingParams(min_p=0.1, max_tokens=5, top_p=0.9)
after = SamplingParams(top_p=0.5)
model = FastLanguageModel.get_peft_model(base, r=32, lora_alpha=64)
config = GRPOConfig(
    learning_rate=args.learning_rate, beta=args.beta, max_prompt_length=own.length,
    max_completion_length=longest - own.length, run_name=f"{own.model_name}-{longest}",
    max_steps=int(os.environ.get("STEPS", 12)), num_generations=4, vllm_sampling_params=sampling,
    output_dir=os.environ.get("OUT", "there"), **more)
base = FastLanguageModel.from_pretrained(model_name=own.model_name, gpu_memory_utilization=0.6)
trainer = GRPOTrainer(model=base, args=config, reward_funcs=[check_numbers, make_reward(0.5)])
"""


def test_a_script_with_parsers_is_read_with_their_defaults(import_recipe):
    result = import_recipe("train.py", PARSED)
    config, err = result.config, result.err
    assert (config.policy.optimizer.lr, config.data.max_prompt_tokens) == (3e-6, 256)
    assert (config.sampling.max_new_tokens, config.name) == (1792, "org-model-2048")
    assert (config.sampling.min_p, config.sampling.top_p) == (0.1, 0.9)  # not the values of the later call
    assert (config.policy.lora.rank, config.policy.lora.alpha, config.output_dir) == (32, 64, "there")
    assert config.algorithm.loss.clip_low == 0.3 and config.model.path == "org/model"
    named = [reward.function for reward in config.rewards.functions]
    assert named == ["my_rewards:check_numbers", "my_rewards:make_reward"]
    assert "rewards to write, or to name otherwise: my_rewards:check_numbers" in err
    assert "beta=args.beta" in err  # without a default its value is unknown


def test_a_number_that_the_recipe_leaves_to_its_launcher_is_named(import_recipe):
    out = import_recipe("a.sh", TRL_SCRIPT + "--per_device_train_batch_size 16").out
    line = next(line for line in out.splitlines() if "prompts_per_step" in line)
    assert "prompts_per_step: 2 " in line and "num_processes=1" in line


def test_a_file_that_a_recipe_builds_on_and_is_not_there_is_named(import_recipe):
    result = import_recipe("a.yaml", "defaults: grpo_math_1B.yaml\n" + NEMO % "model_name: m")
    assert "grpo_math_1B.yaml: not there" in result.err


def test_what_cannot_be_carried_over_is_said_with_its_reason(import_recipe):
    result = import_recipe("roll.yaml")
    assert result.config.batch.updates_per_step == 2 and result.config.rollout.num_workers == 4
    assert result.config.sampling.top_p == 0.99
    assert "actor_infer.generating_args.repetition_penalty=1.1" in result.err


def test_a_setting_of_another_loss_is_taken_out(import_recipe):
    """SkyRL has bounds for every loss; a default that gspo refuses is not written."""
    result = import_recipe("skyrl.sh")
    assert result.config.algorithm.loss.name == "gspo" and result.config.batch.updates_per_step == 4


@pytest.mark.parametrize(("name", "text", "words"), [
    ("a.yaml", "- 1\n", ["a.yaml: not .yaml", "mapping of keys"]),
    ("a.sh", "echo hello\n", ["no settings found", "GRPOConfig"]),
    ("a.py", "def f(:\n", ["a.py: not .py"]),
    ("a.toml", "= 1", ["a.toml: not .toml"]),
    ("a.yaml", "color: red\n", ["not recognised as a recipe of verl, TRL", "--from"]),
    ("a.yaml", "a: &a [*a]\n", ["a.yaml: not .yaml"]),
])  # fmt: skip
def test_what_is_no_recipe_is_refused(tmp_path, capsys, name, text, words):
    (tmp_path / name).write_text(text)
    assert main(["import", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and [word for word in words if word not in error] == []


def test_the_trainer_can_be_named(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("temperature: 0.5\n")
    assert main(["import", str(tmp_path / "a.yaml"), "--from", "ms-swift"]) == 0
    assert capsys.readouterr().out.startswith("# a.yaml of ms-swift (settings of 4.6.0.dev0)")
    assert main(["import", str(tmp_path / "a.yaml"), "--from", "nobody"]) == 2
    assert "expected one of verl, TRL" in capsys.readouterr().err


def test_no_secret_of_the_environment_gets_into_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TOKEN", "s3cret")
    (tmp_path / "a.yaml").write_text('exp_name: "${oc.env:TOKEN}"\nrollout_batch_size: 8\npretrain: m\n')
    script = "python -m verl.trainer.main_ppo trainer.experiment_name=$TOKEN data.train_batch_size=8\n"
    (tmp_path / "a.sh").write_text(script)
    for name, trainer in (("a.yaml", "roll"), ("a.sh", "verl")):
        assert main(["import", str(tmp_path / name), "--from", trainer]) == 0
        assert "s3cret" not in "".join(capsys.readouterr())
    key = "0123456789abcdef" * 2 + "01234567"
    (tmp_path / "a.sh").write_text(f"python -m openrlhf.cli.train_ppo_ray --pretrain m --use_wandb {key}\n")
    assert main(["import", str(tmp_path / "a.sh")]) == 0
    assert key not in "".join(capsys.readouterr())


@pytest.mark.parametrize(("script", "words"), [
    ("A=1\nrun --x $A ${B:-2} \"${C:-a b}\" '$A'", ["run", "--x", "1", "2", "a b", "$A"]),
    ('X=(a "b c")\nX+=(d)\nrun "${X[@]}" ${X[1]} ${#X[@]}', ["run", "a", "b c", "d", "b", "c", "3"]),
    ("run a \\\n  # not a comment inside\n b", ["run", "a"]),
    ("run a#b # c", ["run", "a#b"]),
    ("N=8\nrun $((N * 2 / 3)) $(( (N + 1) ** 2 ))", ["run", "5", "81"]),
    ("if [ -z \"$A\" ]; then A=x; fi; run $A", ["run", "x"]),
    ("if [[ $(uname) == Linux ]]; then A=x; else A=y; fi\nrun $A", ["run", "y"]),
    ("for s in 3 4; do run $s; done", ["run", "3"]),
    ("while true; do run a; done; run b", ["run", "b"]),
    ("cat <<EOF\nrun no\nEOF\nrun yes > log 2>&1 &", ["run", "yes"]),
    ("P=/a/b.c.d\nrun ${P##*/} ${P%.*} ${P/b/x}", ["run", "b.c.d", "/a/b.c", "/a/x.c.d"]),
    ('D="$(cd "$(dirname "$0")/.." && pwd)"\nrun $D/x', ["run", "../x"]),
    ("run $(rm -rf /) `id` $(pwd)/x", ["run", "$(rm -rf /)", "$(id)", "./x"]),
    ("run a\n --b 1 \\\n --c", ["run", "a", "--b", "1", "--c"]),  # its author forgot a backslash
    ('run "unclosed', ["run", "unclosed"]),
    ("case a in b) run 1 ;; a|c) run 2 ;; *) run 3 ;; esac", ["run", "2"]),
])  # fmt: skip
def test_a_shell_script_is_read_as_the_shell_would(script, words):
    commands = [list(command.words) for command in read_commands(script) if command.words[0] == "run"]
    assert commands[-1] == words


def test_a_script_that_calls_another_is_read_with_its_variables_and_arguments(tmp_path, import_recipe):
    (tmp_path / "base.sh").write_text('python -m verl.trainer.main_ppo data.train_files=$DATA "$@"\n')
    call = 'bash "$(dirname $0)/base.sh" data.train_batch_size=8'
    out = import_recipe("a.sh", f"export DATA=d.parquet\n{call}\n").out
    assert "- path: d.parquet" in out and "prompts_per_step: 8" in out


def test_a_section_that_overrides_a_base_section_replaces_it(tmp_path, import_recipe):
    (tmp_path / "base.yaml").write_text(NEMO % "model_name: m" + "data: {train: {dataset_name: gsm8k}}\n")
    section = "data: {_override_: true, train: [{dataset_name: a}], shuffle: true}\n"
    result = import_recipe("a.yaml", f"defaults: base.yaml\n{section}")
    assert "gsm8k" not in result.out and "sources are `data.train`" in result.err
    assert "model_name=m" in result.out


def test_a_script_reads_files_of_its_own_folder_alone(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a.sh").write_text("A=1\n")
    (tmp_path / "b.sh").write_text("A=2\n")
    for path, value in (("a.sh", "1"), ("../b.sh", "")):
        (command,) = read_commands(f'source {path}\nrun "$A"', tmp_path / "own")
        assert command.words == ("run", value)


@pytest.mark.parametrize(
    "expression",
    ["1 / 0", "{a} * 2", "open('x')", "().__class__", "9 ** 99999", "(" * 500, "'a' * 10**9", "x", "max()"],
)
def test_an_expression_without_a_value_is_refused(expression):
    with pytest.raises(Uncomputable):
        evaluate(expression, {"a": None})
