"""Settings of verl, TRL, OpenRLHF and ROLL, with the keys of this project that have the same effect.

Names are from the sources of verl 0.10.0.dev, TRL 1.10.0.dev, OpenRLHF 0.11.0 and ROLL 0.3.0, with names of
older releases of TRL and OpenRLHF. `N` is a position in a list. A name that is a section of the other
framework, such as verl's `critic`, stands for all settings in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

FRAMEWORKS = ("verl", "TRL", "OpenRLHF", "ROLL")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting. ``ours``: the keys that together have its effect; empty: none. ``names``: by framework.
    ``note``: the conversion, or the alternative.
    """

    ours: tuple[str, ...]
    note: str = ""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)


def row(
    ours: str, note: str = "", *, verl: str = "", trl: str = "", openrlhf: str = "", roll: str = ""
) -> Row:
    """Build a row from names separated by spaces; ``@`` abbreviates ``actor_rollout_ref.``."""
    texts = dict(zip(FRAMEWORKS, (verl, trl, openrlhf, roll), strict=True))
    names = {name: tuple(text.replace("@", "actor_rollout_ref.").split()) for name, text in texts.items()}
    return Row(tuple(ours.split()), note, {name: settings for name, settings in names.items() if settings})


PEER_TABLE = (
    # Batch
    row("batch.prompts_per_step", "verl, OpenRLHF, ROLL: prompts, as here. TRL: samples, divide by "
        "num_generations", verl="data.train_batch_size data.gen_batch_size", trl="generation_batch_size",
        openrlhf="rollout.batch_size rollout_batch_size rollout.vllm_generate_batch_size",
        roll="rollout_batch_size"),
    row("batch.samples_per_prompt", verl="@rollout.n", trl="num_generations",
        openrlhf="rollout.n_samples_per_prompt n_samples_per_prompt",
        roll="num_return_sequences_in_group generating_args.num_return_sequences"),
    row("batch.updates_per_step", "a number of updates: verl: train_batch_size / ppo_mini_batch_size (both "
        "prompts). OpenRLHF: rollout.batch_size * n_samples_per_prompt / train.batch_size. TRL: "
        "steps_per_generation / gradient_accumulation_steps. ROLL: samples of a step / "
        "(per_device_train_batch_size * gradient_accumulation_steps * ranks)",
        verl="@actor.ppo_mini_batch_size", trl="steps_per_generation gradient_accumulation_steps",
        openrlhf="train.batch_size train_batch_size", roll="training_args.gradient_accumulation_steps"),
    row("batch.epochs_per_batch", verl="@actor.ppo_epochs", trl="num_iterations",
        openrlhf="train.max_epochs max_epochs", roll="ppo_epochs"),
    row("batch.shuffle_epochs", "verl shuffles rows, here groups stay whole", verl="@actor.shuffle"),
    row("batch.micro_batch_tokens", "tokens of one forward on a rank; where the other counts sequences, "
        "multiply by the longest sequence",
        verl="@actor.ppo_micro_batch_size_per_gpu @actor.ppo_micro_batch_size "
        "@actor.ppo_max_token_len_per_gpu @actor.use_dynamic_bsz "
        "@rollout.log_prob_micro_batch_size_per_gpu @rollout.log_prob_micro_batch_size "
        "@rollout.log_prob_max_token_len_per_gpu @rollout.log_prob_use_dynamic_bsz",
        trl="per_device_train_batch_size", openrlhf="train.micro_batch_size micro_train_batch_size "
        "rollout.micro_batch_size micro_rollout_batch_size train.max_tokens_per_gpu "
        "train.dynamic_batch_enable rollout.max_tokens_per_gpu use_dynamic_batch "
        "rollout_max_tokens_per_gpu train_max_tokens_per_gpu",
        roll="training_args.per_device_train_batch_size infer_batch_size use_dynamic_batching_in_train "
        "max_tokens_per_microbatch_in_train"),
    row("reference.micro_batch_tokens", "tokens of one forward of the reference",
        verl="@ref.log_prob_micro_batch_size_per_gpu @ref.log_prob_max_token_len_per_gpu "
        "@ref.log_prob_micro_batch_size @ref.log_prob_use_dynamic_bsz",
        roll="max_tokens_per_microbatch_in_infer"),
    row("steps", "training steps. TRL's max_steps counts optimiser updates: divide by "
        "batch.updates_per_step * batch.epochs_per_batch", verl="trainer.total_training_steps",
        trl="max_steps", roll="max_steps"),
    row("epochs", verl="trainer.total_epochs", trl="num_train_epochs",
        openrlhf="train.num_episodes num_episodes", roll="training_args.num_train_epochs"),
    row("max_staleness", "0: synchronous; 1: one step off policy",
        verl="trainer.v1.trainer_mode trainer.v1.sampler.max_off_policy_threshold",
        openrlhf="train.async_enable async_train train.async_queue_size", roll="async_generation_ratio"),
    row("seed", verl="data.seed @rollout.seed", trl="data_seed",
        openrlhf="train.seed train.full_determinism_enable full_determinism", roll="training_args.seed"),
    # Lengths and sampling
    row("data.max_prompt_tokens", verl="data.max_prompt_length @rollout.prompt_length",
        trl="max_prompt_length", openrlhf="prompt_max_len", roll="prompt_length"),
    row("sampling.max_new_tokens", verl="data.max_response_length @rollout.response_length",
        trl="max_completion_length", openrlhf="rollout.max_new_tokens generate_max_len",
        roll="response_length generating_args.max_new_tokens"),
    row("model.max_length", "prompt and completion together", verl="@rollout.max_model_len",
        trl="vllm_max_model_length", openrlhf="data.max_len max_len", roll="sequence_length"),
    row("sampling.temperature", verl="@rollout.temperature", trl="temperature",
        openrlhf="rollout.temperature", roll="generating_args.temperature"),
    row("", "an engine gets each sample as a request of its own", roll="is_num_return_sequences_expand"),
    row("", "training samples from the whole distribution, by `sampling.temperature` alone: cut off, the "
        "engine's log-probs would not be those of the policy. Evaluations have `evaluation.top_p` and "
        "`evaluation.top_k`", verl="@rollout.top_p @rollout.top_k @rollout.do_sample", trl="top_p top_k "
        "min_p repetition_penalty generation_kwargs", openrlhf="rollout.top_p",
        roll="generating_args.top_p generating_args.top_k generating_args.repetition_penalty"),
    # The algorithm
    row("algorithm.advantage", "verl: grpo, rloo, remax, opo, gdpo alike; reinforce_plus_plus: "
        "reinforce_pp; gpg, grpo_passk alike. OpenRLHF: group_norm: grpo; reinforce: reinforce_pp; "
        "reinforce_baseline: reinforce_pp_baseline. verl's optimal_token_baseline and "
        "tir_optimal_token_baseline: otb, which needs no calculate_sum_pi_squared. ROLL: grpo; reinforce: "
        "reinforce_pp. gae needs a critic, which there is none of", verl="algorithm.adv_estimator "
        "@actor.calculate_sum_pi_squared", trl="multi_objective_aggregation",
        openrlhf="algo.advantage.estimator advantage_estimator", roll="adv_estimator"),
    row("algorithm.advantage.std", "false: none. TRL's scale_rewards and ROLL's norm_std_type = batch: "
        "batch_raw", verl="algorithm.norm_adv_by_std_in_grpo", trl="scale_rewards",
        openrlhf="algo.advantage.no_std_norm no_advantage_std_norm", roll="norm_std_type"),
    row("algorithm.advantage.gamma", "of reinforce_pp alone, the only estimator without a critic that "
        "discounts there, too", verl="algorithm.advantage.gamma", openrlhf="algo.advantage.gamma gamma",
        roll="gamma"),
    row("algorithm.reward_norm", "null: none. ROLL's adv_estimator = grpo normalises by itself, as here "
        "advantage grpo does", openrlhf="reward.normalize_enable normalize_reward", roll="norm_mean_type "
        "use_reward_norm use_reward_scaling whiten_rewards"),
    row("algorithm.reward_clip", "one number c for [-c, c], before normalisation; OpenRLHF and ROLL clip "
        "after it", trl="reward_clip_range", openrlhf="reward.clip_range reward_clip_range"),
    row("algorithm.loss", "verl: vanilla: ppo_clip; geo_mean: gmpo; gpg: policy_gradient; others alike. "
        "TRL: importance_sampling_level = sequence: gspo; loss_type = cispo, sapo, vespo alike; luspo: "
        "gspo. OpenRLHF: ppo: ppo_clip. ROLL: importance_sampling = seq: gspo; ratio_type = segment: "
        "gspo_segment; pg_variant = cispo; topr: topr_token; kimi15: dro. verl: bypass_mode with loss_type "
        "= reinforce: reinforce_is", verl="@actor.policy_loss.loss_mode "
        "algorithm.rollout_correction.loss_type", trl="importance_sampling_level",
        openrlhf="actor.policy_loss_type policy_loss_type", roll="importance_sampling ratio_type "
        "pg_variant use_policy_loss_type"),
    row("algorithm.loss.clip_low algorithm.loss.clip_high", "one number for both", verl="@actor.clip_ratio",
        trl="epsilon", openrlhf="actor.eps_clip eps_clip actor.eps_clip_low_high eps_clip_low_high",
        roll="pg_clip"),
    row("algorithm.loss.clip_low", verl="@actor.clip_ratio_low", roll="pg_clip_low"),
    row("algorithm.loss.clip_high", "of cispo TRL's epsilon_high is the bound itself: subtract 1",
        verl="@actor.clip_ratio_high", trl="epsilon_high", roll="pg_clip_high use_pg_clip_range"),
    row("algorithm.loss.dual_clip", "off unless set; TRL's delta from 1 + clip_high on is the same, below "
        "it is clip_high = delta - 1 with dual_clip = 1 + epsilon_high; verl has 3.0 always. ROLL's "
        "dual_clip_loss: true is 1 + 2 * pg_clip", verl="@actor.clip_ratio_c", trl="delta",
        openrlhf="actor.dual_clip", roll="dual_clip_loss"),
    row("algorithm.loss.tau_positive", "of sapo", verl="@actor.tau_pos", trl="sapo_temperature_pos"),
    row("algorithm.loss.tau_negative", "of sapo", verl="@actor.tau_neg", trl="sapo_temperature_neg"),
    row("algorithm.loss.k_positive algorithm.loss.k_negative", "of vespo", trl="vespo_k_pos vespo_k_neg"),
    row("algorithm.loss.lambda_positive algorithm.loss.lambda_negative", "of vespo", trl="vespo_lambda_pos "
        "vespo_lambda_neg"),
    row("algorithm.loss.beta", "of dro; ROLL's kimi15 is dro", verl="@actor.policy_loss.dro_beta",
        roll="kimi15_tau"),
    row("algorithm.length_weights", "ROLL's lengths are those of a micro-batch", roll="length_loss_weight"),
    row("algorithm.loss.unified_mask", "of cispo", roll="cispo_use_unified_mask"),
    row("algorithm.aggregation", "verl and ROLL: the same names. TRL's loss_type: grpo: "
        "seq-mean-token-mean, as sapo; dapo, bnpo, cispo, vespo: token-mean; dr_grpo: "
        "seq-mean-token-sum-norm; luspo: seq-mean-token-sum. seq-mean-token-sum-norm divides by "
        "`sampling.max_new_tokens`, verl by loss_scale_factor", verl="@actor.loss_agg_mode "
        "@actor.loss_scale_factor", trl="loss_type", roll="loss_agg_mode"),
    row("algorithm.entropy.coef", verl="@actor.entropy_coeff", trl="entropy_coef",
        openrlhf="actor.entropy_coef entropy_loss_coef", roll="entropy_loss_coef"),
    row("algorithm.advantage.whiten", roll="whiten_advantages"),
    row("algorithm.reward_norm.shift algorithm.reward_norm.scale", "true is both steps there; reward_shift "
        "= true alone is scale = false", roll="reward_shift reward_scale"),
    row("algorithm.top_entropy_share", trl="top_entropy_quantile"),
    row("algorithm.mask_truncated", trl="mask_truncated_completions", roll="max_len_mask"),
    row("algorithm.kl.coef", "0: no KL term and no reference worker. TRL's beta, the others' coefficients "
        "alike", verl="@actor.kl_loss_coef @actor.use_kl_loss algorithm.kl_ctrl.kl_coef", trl="beta",
        openrlhf="algo.kl.init_coef init_kl_coef", roll="kl_loss_coef init_kl_coef use_kl_loss "
        "enable_reference"),
    row("algorithm.kl.estimator", "verl and ROLL: kl: k1; mse: k2; low_var_kl: k3; k3+ alike",
        verl="@actor.kl_loss_type algorithm.kl_penalty", openrlhf="algo.kl.estimator kl_estimator",
        roll="kl_penalty"),
    row("algorithm.kl.target", "nats a token", verl="algorithm.kl_ctrl.target_kl", openrlhf=""
        "algo.kl.target kl_target", roll="target_kl"),
    row("algorithm.kl.gain", "change of a step; the others have samples / horizon",
        verl="algorithm.kl_ctrl.horizon algorithm.kl_ctrl.type", openrlhf="algo.kl.horizon kl_horizon",
        roll="kl_horizon"),
    row("algorithm.kl.in_reward", "OpenRLHF's use_loss is the opposite: true there is false here",
        verl="algorithm.use_kl_in_reward", openrlhf="algo.kl.use_loss use_kl_loss",
        roll="add_token_level_kl"),
    row("algorithm.correction", "TRL: *_truncate: tis; *_mask: mis. verl: rollout_is: tis; two bounds: "
        "mis, which at level token is icepop. OpenRLHF: tis and icepop alike; seq-mask-tis: icepop at "
        "level geometric", trl="vllm_importance_sampling_correction vllm_importance_sampling_mode",
        openrlhf="algo.advantage.is_correction_enable algo.advantage.is_correction_type "
        "enable_vllm_is_correction vllm_is_correction_type", roll="train_infer_correction.is_weight.enabled"),
    row("algorithm.correction.reject", "a list of {rule, low, high}; verl's rules alike, with bounds of k1 "
        "that are of the inverse ratio. ROLL's ratio filters are k1, its difference filters tv",
        verl="algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold",
        roll="train_infer_correction.filters"),
    row("algorithm.correction.normalize", verl="algorithm.rollout_correction.rollout_is_batch_normalize"),
    row("algorithm.off_policy_mask_threshold", trl="off_policy_mask_threshold"),
    row("algorithm.kl.bias_correction", trl="use_bias_correction_kl"),
    row("algorithm.entropy.target", trl="use_adaptive_entropy entropy_target"),
    row("algorithm.entropy.delta", trl="entropy_coef_delta"),
    row("algorithm.entropy.low algorithm.entropy.high", trl="entropy_coef_min entropy_coef_max"),
    row("algorithm.loss.cov_share", verl="@actor.policy_loss.clip_cov_ratio @actor.policy_loss.kl_cov_ratio"),
    row("algorithm.loss.cov_low algorithm.loss.cov_high", "of clip_cov",
        verl="@actor.policy_loss.clip_cov_lb @actor.policy_loss.clip_cov_ub"),
    row("algorithm.loss.cov_kl_coef", "of kl_cov", verl="@actor.policy_loss.ppo_kl_coef"),
    row("algorithm.correction.level", "ROLL's segment alike", verl="algorithm.rollout_correction.rollout_is",
        roll="train_infer_correction.is_weight.weight_type"),
    row("algorithm.correction.high", verl="algorithm.rollout_correction.rollout_is_threshold "
        "@actor.tis_imp_ratio_cap", trl="vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        openrlhf="algo.advantage.is_correction_threshold vllm_is_truncated_threshold",
        roll="train_infer_correction.is_weight.upper_bound ratio_high"),
    row("algorithm.correction.low", trl="vllm_importance_sampling_clip_min", roll="ratio_low"),
    row("algorithm.correction", "bypass: old_logprobs = rollout, verl's bypass_mode, ROLL's "
        "force_disable_old_logprobs_recompute", verl="algorithm.rollout_correction.bypass_mode",
        roll="force_disable_old_logprobs_recompute enable_old_logprobs_recompute"),
    row("dynamic_sampling", "true, or its settings; verl's metric is `dynamic_sampling.metric`: acc is "
        "accuracy, the others null", verl="algorithm.filter_groups.enable algorithm.filter_groups.metric",
        openrlhf="algo.dynamic_filtering_enable dynamic_filtering algo.dynamic_filtering_range "
        "dynamic_filtering_reward_range", roll="query_filter_config is_use_additional_prompts "
        "use_additional_prompts"),
    row("dynamic_sampling.max_extra_prompts", "prompts; verl counts batches: (batches - 1) * "
        "batch.prompts_per_step", verl="algorithm.filter_groups.max_num_gen_batches",
        roll="max_additional_running_prompts"),
    row("reference.refresh_every", "steps", trl="sync_ref_model ref_model_sync_steps"),
    row("reference.refresh_mix", "TRL's alpha, the weight of the policy", trl="ref_model_mixup_alpha"),
    row("reference.num_workers", "ranks in all: GPUs of a node times nodes", openrlhf="ref.num_nodes "
        "ref.num_gpus_per_node ref_num_nodes ref_num_gpus_per_node"),
    row("", "there is no critic: advantages are relative to the group", verl="algorithm.lam "
        "trainer.critic_warmup critic", openrlhf="algo.advantage.lambd critic.value_clip "
        "critic.freezing_steps lambd critic critic_pretrain critic_learning_rate critic_num_nodes "
        "critic_num_gpus_per_node train.colocate_critic_reward colocate_critic_reward freezing_actor_steps "
        "save_value_network ds.value_head_prefix value_head_prefix value_clip", roll="lambd value_clip "
        "critic_warmup critic"),
    # Model and adapters
    row("model.path", verl="@model.path", trl="model_name_or_path",
        openrlhf="actor.model_name_or_path pretrain", roll="pretrain model_args.model_name_or_path"),
    row("model.revision", trl="model_revision"),
    row("model.adapter", verl="@model.lora_adapter_path"),
    row("model.dtype", verl="@rollout.dtype @actor.fsdp_config.model_dtype @actor.fsdp_config.dtype",
        trl="bf16 fp16 torch_dtype model_init_kwargs", openrlhf="ds.param_dtype param_dtype",
        roll="model_args.dtype training_args.bf16"),
    row("model.attention", trl="attn_implementation", openrlhf="ds.attn_implementation",
        roll="model_args.attn_implementation"),
    row("model.kernels", "true: liger", verl="@model.use_liger", trl="use_liger_kernel",
        openrlhf="ds.use_liger_kernel"),
    row("model.packing", verl="@model.use_remove_padding", openrlhf="ds.packing_samples packing_samples",
        roll="use_sequence_packing"),
    row("model.gradient_checkpointing", "ROLL's disable_gradient_checkpointing is the opposite",
        verl="@model.enable_gradient_checkpointing", trl="gradient_checkpointing",
        openrlhf="actor.gradient_checkpointing_enable",
        roll="model_args.disable_gradient_checkpointing"),
    row("", "weights are always sent to the engines; ZeRO-3 gathers them bucket by bucket",
        trl="ds3_gather_for_generation"),
    row("model.trust_remote_code", verl="@model.trust_remote_code data.trust_remote_code"),
    row("policy.lora.rank", "set `policy.lora` to train adapters", verl="@model.lora_rank @model.lora.rank",
        trl="lora_r use_peft", openrlhf="ds.lora.rank lora_rank", roll="model_args.lora_rank"),
    row("policy.lora.alpha", verl="@model.lora_alpha", trl="lora_alpha", openrlhf="ds.lora.alpha lora_alpha",
        roll="model_args.lora_alpha"),
    row("policy.lora.target_modules", verl="@model.target_modules", trl="lora_target_modules",
        openrlhf="ds.lora.target_modules target_modules", roll="model_args.lora_target"),
    row("", "the model trains without dropout, router losses and quantised weights",
        trl="disable_dropout lora_dropout load_in_8bit load_in_4bit router_aux_loss_coef",
        openrlhf="ds.lora.dropout lora_dropout ds.load_in_4bit load_in_4bit actor.aux_loss_coef "
        "aux_loss_coef", roll="model_args.lora_dropout model_args.moe_aux_loss_coef"),
    # Policy
    row("policy.num_workers", "ranks in all: GPUs of a node times nodes",
        verl="trainer.n_gpus_per_node trainer.nnodes", openrlhf="actor.num_gpus_per_node actor.num_nodes "
        "actor_num_gpus_per_node actor_num_nodes", roll="actor_train.device_mapping actor_train.world_size "
        "num_gpus_per_node num_nodes"),
    row("policy.zero_stage", "verl's fsdp is about stage 3", verl="@actor.strategy",
        openrlhf="ds.zero_stage", roll="actor_train.strategy_args.strategy_name"),
    row("policy.deepspeed", "settings of DeepSpeed itself", trl="deepspeed",
        openrlhf="ds.zpg ds.overlap_comm ds.grad_accum_dtype ds.tensor_parallel_size "
        "ds_tensor_parallel_size"),
    row("policy.offload.optimizer", "true: cpu", verl="@actor.fsdp_config.optimizer_offload",
        openrlhf="ds.adam_offload adam_offload", roll="is_offload_optimizer_states_in_train_step"),
    row("policy.offload.parameters", "true: cpu", verl="@actor.fsdp_config.param_offload",
        openrlhf="ref.offload ref_reward_offload"),
    row("policy.sequence_parallel", verl="@actor.ulysses_sequence_parallel_size",
        openrlhf="ds.ring_attn_size ring_attn_size", roll="model_args.ulysses_size"),
    row("policy.compile", verl="@actor.use_torch_compile", trl="torch_compile", openrlhf="ds.deepcompile"),
    row("policy.logprob_chunk_mib", "MiB of logits; the others count rows or have a switch",
        verl="@actor.entropy_from_logits_with_chunking @actor.entropy_from_logits_chunk_size "
        "@actor.use_fused_kernels", trl="use_liger_loss"),
    row("policy.optimizer.lr", verl="@actor.optim.lr", trl="learning_rate",
        openrlhf="actor.adam.lr actor_learning_rate", roll="training_args.learning_rate"),
    row("policy.optimizer.betas", "a list of two", verl="@actor.optim.betas", trl="adam_beta1 adam_beta2",
        openrlhf="actor.adam.betas adam_betas", roll="training_args.adam_beta1 training_args.adam_beta2"),
    row("policy.optimizer.eps", trl="adam_epsilon", openrlhf="actor.adam.eps"),
    row("policy.optimizer.weight_decay", verl="@actor.optim.weight_decay", trl="weight_decay",
        openrlhf="actor.adam.weight_decay", roll="training_args.weight_decay l2"),
    row("policy.optimizer.max_grad_norm", verl="@actor.grad_clip @actor.optim.clip_grad",
        openrlhf="actor.max_norm max_norm", roll="max_grad_norm"),
    row("policy.optimizer.schedule", verl="@actor.optim.lr_scheduler_type @actor.optim.warmup_style",
        trl="lr_scheduler_type", openrlhf="actor.lr_scheduler lr_scheduler",
        roll="training_args.lr_scheduler_type"),
    row("policy.optimizer.warmup_steps", "updates", verl="@actor.optim.lr_warmup_steps",
        roll="training_args.warmup_steps"),
    row("policy.optimizer.warmup_share", verl="@actor.optim.lr_warmup_steps_ratio", trl="warmup_ratio",
        openrlhf="actor.lr_warmup_ratio lr_warmup_ratio", roll="training_args.warmup_ratio"),
    row("policy.optimizer.min_lr_ratio", verl="@actor.optim.min_lr_ratio", trl="lr_scheduler_kwargs",
        openrlhf="actor.min_lr_ratio"),
    # Rollout
    row("rollout.num_workers", "engines", verl="@rollout.data_parallel_size",
        openrlhf="vllm.num_engines vllm_num_engines",
        roll="actor_infer.device_mapping actor_infer.world_size"),
    row("rollout.tensor_parallel_size", verl="@rollout.tensor_model_parallel_size",
        trl="vllm_tensor_parallel_size", openrlhf="vllm.tensor_parallel_size vllm_tensor_parallel_size",
        roll="actor_infer.strategy_args.strategy_config.tensor_parallel_size"),
    row("rollout.gpu_memory_utilization", verl="@rollout.gpu_memory_utilization",
        trl="vllm_gpu_memory_utilization",
        openrlhf="vllm.gpu_memory_utilization vllm_gpu_memory_utilization",
        roll="actor_infer.strategy_args.strategy_config.gpu_memory_utilization"),
    row("rollout.quantization", "fp8", verl="@rollout.quantization"),
    row("rollout.enforce_eager", verl="@rollout.enforce_eager", openrlhf="vllm.enforce_eager"),
    row("rollout.max_num_seqs", verl="@rollout.max_num_seqs", roll="max_running_requests"),
    row("rollout.engine", "further vLLM arguments, by vLLM's names",
        verl="@rollout.engine_kwargs @rollout.max_num_batched_tokens @rollout.enable_chunked_prefill "
        "@rollout.enable_prefix_caching @rollout.disable_log_stats @rollout.pipeline_model_parallel_size",
        trl="vllm_model_impl", openrlhf="vllm.enable_prefix_caching enable_prefix_caching",
        roll="actor_infer.strategy_args.strategy_config"),
    row("cluster.placement", "colocated: engines sleep while the policy trains",
        verl="@rollout.free_cache_engine @hybrid_engine", trl="vllm_mode vllm_enable_sleep_mode",
        openrlhf="train.colocate_all colocate_all_models train.colocate_actor_ref vllm.enable_sleep "
        "vllm_enable_sleep ds.enable_sleep", roll="is_offload_states"),
    row("weight_sync.backend", verl="@rollout.checkpoint_engine.backend", trl="vllm_group_port",
        openrlhf="vllm.sync_backend vllm_sync_backend", roll="transfer_backend"),
    row("weight_sync.bucket_mb", "MB", verl="@rollout.checkpoint_engine.update_weights_bucket_megabytes",
        roll="model_update_buffer_size_mb"),
    row("weight_sync.mode", "true: keep", openrlhf="train.partial_rollout_enable partial_rollout"),
    row("", "vLLM always samples, in actors that the run starts: see `rollout.num_workers`",
        verl="@rollout.name @rollout.mode", trl="use_vllm use_transformers_paged "
        "use_transformers_continuous_batching cache_implementation vllm_server_base_url vllm_server_host "
        "vllm_server_port"),
    # Data, environments and rewards
    row("data.environment", "a class of yours; its tools are functions",
        verl="@rollout.multi_turn @rollout.agent",
        openrlhf="train.agent_func_path agent_func_path"),
    row("environments.max_turns", "tool calls and the answer behind them", trl="max_tool_calling_iterations"),
    row("data.train.N.path", verl="data.train_files", trl="dataset_name",
        openrlhf="data.prompt_dataset prompt_data", roll="data_args.file_name"),
    row("data.train.N.split", trl="dataset_train_split", openrlhf="data.prompt_split prompt_split"),
    row("data.train.N.name", roll="data_args.tag tag_included"),
    row("data.train.N.subset", trl="dataset_config"),
    row("data.train.N.problem_column", verl="data.prompt_key", openrlhf="data.input_key input_key",
        roll="data_args.prompt data_args.messages"),
    row("data.train.N.answer_column", openrlhf="data.label_key label_key", roll="data_args.response"),
    row("data.train.N.max_rows", verl="data.train_max_samples", openrlhf="data.max_samples max_samples"),
    row("data.eval.N.path", verl="data.val_files", openrlhf="eval.dataset eval_dataset",
        roll="data_args.eval_file_name"),
    row("data.eval.N.split", trl="dataset_test_split", openrlhf="eval.split eval_split"),
    row("data.eval.N.max_rows", verl="data.val_max_samples"),
    row("data.overlong", "what to do with prompts that are too long",
        verl="data.filter_overlong_prompts data.truncation"),
    row("data.order", "epochs are always shuffled, by `seed`", verl="data.shuffle", trl="shuffle_dataset"),
    row("model.chat_template", "a file, or its text", verl="@model.custom_chat_template"),
    row("data.chat_template", openrlhf="data.apply_chat_template apply_chat_template",
        roll="global_template data_args.template"),
    row("data.template_kwargs", verl="data.apply_chat_template_kwargs", trl="chat_template_kwargs"),
    row("data.template", "{} is {problem}", openrlhf="data.input_template input_template"),
    row("rewards.functions", "built-in rewards by name, your own as module:function",
        verl="reward.reward_manager.name reward_model.reward_manager", trl="reward_funcs"),
    row("rewards.functions.N.function", "`module:function`, from a directory of `code_paths`",
        verl="reward.custom_reward_function.path reward.custom_reward_function.name "
        "custom_reward_function.path custom_reward_function.name",
        openrlhf="reward.remote_url remote_rm_url", roll="worker_cls"),
    row("rewards.functions.N.weight", "one for each reward", trl="reward_weights"),
    row("rewards.overlong_buffer", "`tokens` and `penalty`; off by default",
        verl="reward.reward_kwargs.overlong_buffer_cfg reward_model.overlong_buffer",
        openrlhf="reward.overlong_buffer_len reward.overlong_penalty_factor overlong_buffer_len "
        "overlong_penalty_factor", roll="response_length_penalty_coef"),
    row("rewards.models.N.path", verl="reward.reward_model.model_path reward_model.model.path",
        trl="reward_model_name_or_path", openrlhf="reward.model_name_or_path reward_pretrain",
        roll="reward_pretrain"),
    row("rewards.models", "a list; each model has its own workers: path, num_workers, micro_batch_tokens",
        verl="reward_model reward.reward_model", openrlhf="reward.num_nodes reward.num_gpus_per_node "
        "reward.offload reward_num_nodes reward_num_gpus_per_node"),
    row("rewards.num_workers", verl="reward.num_workers reward_model.num_workers"),
    # Evaluation, checkpoints, records
    row("evaluation.every", "steps", verl="trainer.test_freq", trl="eval_steps", openrlhf="eval.steps",
        roll="eval_steps"),
    row("evaluation.before", verl="trainer.val_before_train", trl="eval_on_start"),
    row("evaluation.samples_per_prompt", verl="@rollout.val_kwargs.n", trl="num_generations_eval",
        openrlhf="eval.n_samples_per_prompt eval_n_samples_per_prompt",
        roll="val_n_sample validation.generating_args.num_return_sequences"),
    row("evaluation.temperature", "0: greedy",
        verl="@rollout.val_kwargs.temperature @rollout.val_kwargs.do_sample",
        openrlhf="eval.temperature eval_temperature",
        roll="val_greedy validation.generating_args.temperature"),
    row("evaluation.top_p", verl="@rollout.val_kwargs.top_p", roll="validation.generating_args.top_p"),
    row("evaluation.top_k", verl="@rollout.val_kwargs.top_k", roll="validation.generating_args.top_k"),
    row("evaluation.max_new_tokens", roll="validation.generating_args.max_new_tokens"),
    row("checkpoint.every", "steps", verl="trainer.save_freq", trl="save_steps", openrlhf="ckpt.save_steps",
        roll="save_steps"),
    row("checkpoint.keep", verl="trainer.max_actor_ckpt_to_keep", trl="save_total_limit",
        openrlhf="ckpt.max_num max_ckpt_num", roll="max_ckpt_to_keep"),
    row("checkpoint.resume", verl="trainer.resume_mode trainer.resume_from_path",
        trl="resume_from_checkpoint", openrlhf="ckpt.load_enable load_checkpoint",
        roll="resume_from_checkpoint"),
    row("checkpoint.background", verl="@actor.checkpoint.async_save", roll="checkpoint_config"),
    row("checkpoint.export", openrlhf="ckpt.save_hf save_hf_ckpt", roll="training_args.save_hf_model"),
    row("output_dir", verl="trainer.default_local_dir", openrlhf="ckpt.output_dir ckpt.path save_path "
        "ckpt_path", roll="logging_dir base_dir"),
    row("name", verl="trainer.experiment_name", trl="run_name",
        openrlhf="logger.wandb.run_name wandb_run_name", roll="exp_name"),
    row("tracking.wandb", "the project; also `tracking.tensorboard`, `tracking.sinks`",
        verl="trainer.logger trainer.project_name", trl="report_to", openrlhf="logger.wandb.key use_wandb "
        "logger.wandb.project wandb_project", roll="track_with tracker_kwargs.project"),
    row("", "set the environment variable WANDB_ENTITY", openrlhf="logger.wandb.org wandb_org"),
    row("tracking.tensorboard", openrlhf="logger.tensorboard_dir use_tensorboard",
        roll="tracker_kwargs.log_dir"),
    row("tracking.samples", "every sample of every step is kept",
        verl="trainer.log_val_generations trainer.rollout_data_dir", trl="log_completions",
        roll="rollout_dump_dir report_length_and_rewards"),
    row("", "every step is recorded", trl="logging_steps", openrlhf="logger.logging_steps logging_steps",
        roll="logging_steps"),
    row("profile.steps", verl="global_profiler.steps @actor.profiler",
        roll="profiler_timeline profiler_memory"),
    row("cluster.timeouts.sample_s", "a deadline for each stage: `cluster.timeouts`", verl="@nccl_timeout",
        trl="vllm_server_timeout", roll="rpc_timeout"),
    row("cluster.num_cpus", verl="ray_kwargs.ray_init.num_cpus"),
)  # fmt: skip

# Keys of earlier versions, without indices, and what to write now.
EARLIER_KEYS = {
    "algorithm.adaptive_entropy": "`algorithm.entropy: {kind: adaptive, target: ...}`",
    **{
        f"algorithm.adaptive_entropy.{key}": f"`algorithm.entropy: {{kind: adaptive, {key}: ...}}`"
        for key in ("target", "delta", "low", "high")
    },
    "algorithm.add_token_level_kl": "`algorithm.kl.in_reward`",
    "algorithm.advantage_eps": "`algorithm.advantage.eps`; of rewards `algorithm.reward_norm.eps`",
    "algorithm.entropy_coef": "`algorithm.entropy.coef`",
    "algorithm.gamma": "`algorithm.advantage: {name: reinforce_pp, gamma: ...}`",
    "algorithm.kwargs": "`kwargs` beside the name: `algorithm.loss: {name: my_module:f, kwargs: {...}}`",
    "algorithm.old_logprobs": "`algorithm.correction: bypass` for rollout, nothing for trainer",
    "algorithm.outcome_coef": "`algorithm.process.outcome_coef`",
    "algorithm.pass_k": "`algorithm.advantage: {name: pass_at_k, k: ...}`",
    "algorithm.policy_loss": "`algorithm.loss`",
    "algorithm.process_coef": "`algorithm.process.coef`",
    "algorithm.reward_scale": "`algorithm.reward_norm.shift: false` for true; both steps are the default",
    "algorithm.reward_shift": "`algorithm.reward_norm.scale: false` for true; both steps are the default",
    "algorithm.std": "`algorithm.advantage.std`",
    "algorithm.turn_discount": "`algorithm.advantage: {name: turn, discount: ...}`",
    "algorithm.whiten_advantages": "`algorithm.advantage.whiten`",
    **{
        f"algorithm.{key}": f"`algorithm.loss.{key}`"
        for key in (
            "clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative", "ratio_cap", "unified_mask",
            "beta", "tau", "k_positive", "lambda_positive", "k_negative", "lambda_negative", "cov_share",
            "cov_low", "cov_high", "cov_kl_coef",
        )
    },
    "batch.oversample": "`batch.order: {name: completion, oversample: 1.25}`",
    "batch.min_samples": "nothing: a group needs half of `batch.samples_per_prompt`",
    "cluster.restarts.window_s": "nothing: restarts of the last hour count",
    "cluster.timeouts.room_s": "`cluster.timeouts.placement_timeout_s`",
    "data.drop_solved": "`data.order: {drop_solved: 0.9}`",
    "data.length_window": "`data.order: {name: length, window: 8}`",
    "data.order_kwargs": "`data.order: {name: my_module:f, kwargs: {...}}`",
    "data.pools.by": "`data.pools: source`, or a column",
    "data.pools.half_life": "`data.order: {name: pools, half_life: ...}`",
    "demonstrations.examples": "`examples` of a source: `demonstrations.data: [{path: ..., examples: 100}]`",
    "demonstrations.noise": "`noise` of a source: `demonstrations.data: [{path: ..., noise: 0.1}]`",
    "distillation.divergence": "`distillation.kl: {name: top_k, divergence: ...}`",
    "distillation.estimator": "`distillation.kl: {name: sampled, estimator: ...}`",
    "distillation.kl_as": "`distillation.kl: advantage`, or for loss sampled or `{name: top_k, k: 16}`",
    "distillation.top_k": "`distillation.kl: {name: top_k, k: 16}`",
    "distillation.teachers.threads": "nothing: a worker has one thread",
    "environments.sandbox.backend": "`environments.sandbox.url` for a service, nothing for processes",
    "evaluation.threads": "nothing: such an engine has one thread",
    "health.garbage_above": "`health.degenerate_above`",
    "health.length_above": "`health.truncated_above`",
    "profile.memory": "nothing",
    "profile.shapes": "nothing: shapes are always recorded",
    "profile.stacks": "nothing",
    "rewards.models.format": "the format as kind: `rewards.models: [{kind: qwen, ...}]`",
    "sft.examples": "`examples` of a source: `sft.data: [{path: ..., examples: 100}]`",
    "sft.noise": "`noise` of a source: `sft.data: [{path: ..., noise: 0.1}]`",
}  # fmt: skip
# What is looked for where it is not, without indices, and what to write.
_SERVED = "a model behind an address is `rewards.functions: [{function: remote, kwargs: {url: ...}}]`"
GUESSES = {
    "rewards.url": _SERVED, "rewards.models.url": _SERVED, "rewards.models.base_url": _SERVED,
    **{f"data.{name}.url": f"a file, directory or hub id is `data.{name}.0.path`"
       for name in ("train", "eval")},
}  # fmt: skip
_MOST_MEANINGS = 2
# A last word that many settings share identifies none of them.
_GENERIC = (
    "backend",
    "enable",
    "enabled",
    "filters",
    "mode",
    "name",
    "num_workers",
    "path",
    "save_path",
    "type",
)


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """A setting ``name`` of ``framework``, which has a ``row`` of the table."""

    framework: str
    name: str
    row: Row


def hint(key: str, *, ends: bool = True) -> str | None:
    """Return what to set instead of ``key``, an unknown dotted key, or None if no framework has it. ``ends``:
    see `lookup`.

        num_generations -> did you mean `batch.samples_per_prompt`? (TRL's `num_generations`)
    """
    if now := answer(key):
        return now
    by_row: dict[tuple[str, ...], list[PeerSetting]] = {}
    for setting in lookup(key, ends=ends):
        by_row.setdefault(setting.row.ours, []).append(setting)
    return " ".join(map(_describe, by_row.values())) or None


def answer(key: str) -> str | None:
    """Return what to write instead of ``key``, which an earlier version had, or which is often guessed."""
    name = ".".join(part for part in key.split(".") if not part.isdigit())
    now = EARLIER_KEYS.get(name)
    return GUESSES.get(name) if now is None else f"an earlier version had it; write {now}"


def lookup(key: str, *, ends: bool = True) -> list[PeerSetting]:
    """Return the settings named ``key``, else the section of a table row that contains it; with ``ends`` also
    those with the longest common end, or in a section named ``key``. Return none for a word with more than
    two meanings, such as `path`.

        critic.model.path -> verl's `critic`; filter_groups -> what is in verl's `algorithm.filter_groups`
    """
    words = key.lstrip("-+").replace("-", "_").split(".")
    for end in range(len(words), 0, -1):
        if settings := _index()[0].get(".".join(words[:end])):
            return settings
    for start in range(len(words)) if ends else ():
        rest = ".".join(words[start:])
        if rest not in _GENERIC and (settings := _few(_index()[0], rest) or _few(_index()[1], rest)):
            return settings
    return _few(_index()[2], ".".join(words)) if ends else []


def is_section(key: str) -> bool:
    """Return whether ``key`` names a section of another framework."""
    return key in _index()[2]


def _describe(settings: list[PeerSetting]) -> str:
    """Describe a row, with the settings that named it."""
    match = settings[0].row
    names = ", ".join(f"{setting.framework}'s `{setting.name}`" for setting in settings)
    if not match.ours:
        return f"{names} has no counterpart: {match.note}"
    keys = " and ".join(f"`{key}`" for key in match.ours)
    return f"did you mean {keys}? ({names}{f'; {match.note}' if match.note else ''})"


def _few(names: Mapping[str, list[PeerSetting]], wanted: str) -> list[PeerSetting]:
    settings = names.get(wanted, [])
    return settings if len({setting.row.ours for setting in settings}) <= _MOST_MEANINGS else []


@cache
def _index() -> tuple[Mapping[str, list[PeerSetting]], ...]:
    """Map to settings: full names; their dotted ends (train_batch_size of `data.train_batch_size`); and their
    sections (rollout, actor_rollout_ref.rollout).
    """
    whole, ends, sections = (dict[str, list[PeerSetting]]() for _ in range(3))
    for setting in (
        PeerSetting(framework, name, each)
        for each in PEER_TABLE
        for framework, names in each.names.items()
        for name in names
    ):
        words = setting.name.split(".")
        spans = [(start, end) for end in range(1, len(words) + 1) for start in range(end)]
        whole.setdefault(setting.name, []).append(setting)
        _add(ends, setting, (".".join(words[a:b]) for a, b in spans if b == len(words)))
        _add(sections, setting, (".".join(words[a:b]) for a, b in spans if b < len(words)))
    return whole, ends, sections


def _add(index: dict[str, list[PeerSetting]], setting: PeerSetting, names: Iterable[str]) -> None:
    for name in names:
        index.setdefault(name, []).append(setting)
