"""The rows of `peers` that are about `algorithm`."""

from __future__ import annotations

from grpo_dist.config.peer_row import row

ALGORITHM_ROWS = (
    row(
        "algorithm.advantage",
        "verl: grpo, rloo, remax, opo, gdpo alike; reinforce_plus_plus: "
        "reinforce_pp; gpg, grpo_passk alike. OpenRLHF: group_norm: grpo; reinforce: reinforce_pp; "
        "reinforce_baseline: reinforce_pp_baseline. verl's optimal_token_baseline and "
        "tir_optimal_token_baseline: otb, which needs no calculate_sum_pi_squared. ROLL: grpo; reinforce: "
        "reinforce_pp. gae needs a critic, which there is none of",
        verl="algorithm.adv_estimator @actor.calculate_sum_pi_squared",
        trl="multi_objective_aggregation",
        openrlhf="algo.advantage.estimator advantage_estimator",
        roll="adv_estimator",
    ),
    row(
        "algorithm.advantage.std",
        "false: none. TRL's scale_rewards and ROLL's norm_std_type = batch: batch_raw",
        verl="algorithm.norm_adv_by_std_in_grpo",
        trl="scale_rewards",
        openrlhf="algo.advantage.no_std_norm no_advantage_std_norm",
        roll="norm_std_type",
    ),
    row(
        "algorithm.advantage.gamma",
        "of reinforce_pp alone, the only estimator without a critic that discounts there, too",
        verl="algorithm.advantage.gamma",
        openrlhf="algo.advantage.gamma gamma",
        roll="gamma",
    ),
    row(
        "algorithm.reward_norm",
        "null: none. ROLL's adv_estimator = grpo normalises by itself, as here advantage grpo does",
        openrlhf="reward.normalize_enable normalize_reward",
        roll="norm_mean_type use_reward_norm use_reward_scaling whiten_rewards",
    ),
    row(
        "algorithm.reward_clip",
        "one number c for [-c, c], before normalisation; OpenRLHF and ROLL clip after it",
        trl="reward_clip_range",
        openrlhf="reward.clip_range reward_clip_range",
    ),
    row(
        "algorithm.loss",
        "verl: vanilla: ppo_clip; geo_mean: gmpo; gpg: policy_gradient; others "
        "alike. TRL: importance_sampling_level = sequence: gspo; loss_type = cispo, sapo, vespo alike; "
        "luspo: gspo. OpenRLHF: ppo: ppo_clip. "
        "ROLL: importance_sampling = seq: gspo; ratio_type = segment: gspo_segment; pg_variant = cispo; "
        "topr: topr_token; kimi15: dro. verl: bypass_mode with loss_type = reinforce: reinforce_is",
        verl="@actor.policy_loss.loss_mode algorithm.rollout_correction.loss_type",
        trl="importance_sampling_level",
        openrlhf="actor.policy_loss_type policy_loss_type",
        roll="importance_sampling ratio_type pg_variant use_policy_loss_type",
    ),
    row(
        "algorithm.loss.clip_low algorithm.loss.clip_high",
        "one number for both",
        verl="@actor.clip_ratio",
        trl="epsilon",
        openrlhf="actor.eps_clip eps_clip actor.eps_clip_low_high eps_clip_low_high",
        roll="pg_clip",
    ),
    row(
        "algorithm.loss.clip_low",
        verl="@actor.clip_ratio_low",
        roll="pg_clip_low",
    ),
    row(
        "algorithm.loss.clip_high",
        "of cispo TRL's epsilon_high is the bound itself: subtract 1",
        verl="@actor.clip_ratio_high",
        trl="epsilon_high",
        roll="pg_clip_high use_pg_clip_range",
    ),
    row(
        "algorithm.loss.dual_clip",
        "off unless set; TRL's delta from 1 + clip_high on is the same, below it is clip_high = delta - 1 "
        "with dual_clip = 1 + epsilon_high; verl has 3.0 "
        "always. ROLL's dual_clip_loss: true is 1 + 2 * pg_clip",
        verl="@actor.clip_ratio_c",
        trl="delta",
        openrlhf="actor.dual_clip",
        roll="dual_clip_loss",
    ),
    row(
        "algorithm.loss.tau_positive",
        "of sapo",
        verl="@actor.tau_pos",
        trl="sapo_temperature_pos",
    ),
    row(
        "algorithm.loss.tau_negative",
        "of sapo",
        verl="@actor.tau_neg",
        trl="sapo_temperature_neg",
    ),
    row(
        "algorithm.loss.k_positive algorithm.loss.k_negative",
        "of vespo",
        trl="vespo_k_pos vespo_k_neg",
    ),
    row(
        "algorithm.loss.lambda_positive algorithm.loss.lambda_negative",
        "of vespo",
        trl="vespo_lambda_pos vespo_lambda_neg",
    ),
    row(
        "algorithm.loss.beta",
        "of dro; ROLL's kimi15 is dro",
        verl="@actor.policy_loss.dro_beta",
        roll="kimi15_tau",
    ),
    row("algorithm.length_weights", "ROLL's lengths are those of a micro-batch", roll="length_loss_weight"),
    row(
        "algorithm.loss.unified_mask",
        "of cispo",
        roll="cispo_use_unified_mask",
    ),
    row(
        "algorithm.aggregation",
        "verl and ROLL: the same names. TRL's loss_type: grpo: "
        "seq-mean-token-mean, as sapo; dapo, bnpo, cispo, vespo: token-mean; dr_grpo: "
        "seq-mean-token-sum-norm; luspo: seq-mean-token-sum. seq-mean-token-sum-norm divides by "
        "`sampling.max_new_tokens`, verl by loss_scale_factor",
        verl="@actor.loss_agg_mode @actor.loss_scale_factor",
        trl="loss_type",
        roll="loss_agg_mode",
    ),
    row(
        "algorithm.entropy.coef",
        verl="@actor.entropy_coeff",
        trl="entropy_coef",
        openrlhf="actor.entropy_coef entropy_loss_coef",
        roll="entropy_loss_coef",
    ),
    row("algorithm.advantage.whiten", roll="whiten_advantages"),
    row(
        "algorithm.reward_norm.shift algorithm.reward_norm.scale",
        "true is both steps there; reward_shift = true alone is scale = false",
        roll="reward_shift reward_scale",
    ),
    row("algorithm.top_entropy_share", trl="top_entropy_quantile"),
    row("algorithm.mask_truncated", trl="mask_truncated_completions", roll="max_len_mask"),
    row(
        "algorithm.kl.coef",
        "0: no KL term and no reference worker. TRL's beta, the others' coefficients alike",
        verl="@actor.kl_loss_coef @actor.use_kl_loss algorithm.kl_ctrl.kl_coef",
        trl="beta",
        openrlhf="algo.kl.init_coef init_kl_coef",
        roll="kl_loss_coef init_kl_coef use_kl_loss enable_reference",
    ),
    row(
        "algorithm.kl.estimator",
        "verl and ROLL: kl: k1; mse: k2; low_var_kl: k3; k3+ alike",
        verl="@actor.kl_loss_type algorithm.kl_penalty",
        openrlhf="algo.kl.estimator kl_estimator",
        roll="kl_penalty",
    ),
    row(
        "algorithm.kl.target",
        "nats a token",
        verl="algorithm.kl_ctrl.target_kl",
        openrlhf="algo.kl.target kl_target",
        roll="target_kl",
    ),
    row(
        "algorithm.kl.gain",
        "change of a step; the others have samples / horizon",
        verl="algorithm.kl_ctrl.horizon algorithm.kl_ctrl.type",
        openrlhf="algo.kl.horizon kl_horizon",
        roll="kl_horizon",
    ),
    row(
        "algorithm.kl.in_reward",
        "OpenRLHF's use_loss is the opposite: true there is false here",
        verl="algorithm.use_kl_in_reward",
        openrlhf="algo.kl.use_loss use_kl_loss",
        roll="add_token_level_kl",
    ),
    row(
        "algorithm.correction",
        "TRL: *_truncate: tis; *_mask: mis. verl: rollout_is: tis; "
        "two bounds: mis, which at level token is icepop. OpenRLHF: tis and icepop alike; seq-mask-tis: "
        "icepop at level geometric",
        trl="vllm_importance_sampling_correction vllm_importance_sampling_mode",
        openrlhf="algo.advantage.is_correction_enable algo.advantage.is_correction_type "
        "enable_vllm_is_correction vllm_is_correction_type",
        roll="train_infer_correction.is_weight.enabled",
    ),
    row(
        "algorithm.correction.reject",
        "a list of {rule, low, high}; verl's rules alike, with bounds of k1 that are of the inverse ratio. "
        "ROLL's ratio filters are k1, its difference filters tv",
        verl="algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold",
        roll="train_infer_correction.filters",
    ),
    row("algorithm.correction.normalize", verl="algorithm.rollout_correction.rollout_is_batch_normalize"),
    row("algorithm.off_policy_mask_threshold", trl="off_policy_mask_threshold"),
    row("algorithm.kl.bias_correction", trl="use_bias_correction_kl"),
    row(
        "algorithm.entropy.target",
        trl="use_adaptive_entropy entropy_target",
    ),
    row("algorithm.entropy.delta", trl="entropy_coef_delta"),
    row(
        "algorithm.entropy.low algorithm.entropy.high",
        trl="entropy_coef_min entropy_coef_max",
    ),
    row(
        "algorithm.loss.cov_share",
        verl="@actor.policy_loss.clip_cov_ratio @actor.policy_loss.kl_cov_ratio",
    ),
    row(
        "algorithm.loss.cov_low algorithm.loss.cov_high",
        "of clip_cov",
        verl="@actor.policy_loss.clip_cov_lb @actor.policy_loss.clip_cov_ub",
    ),
    row(
        "algorithm.loss.cov_kl_coef",
        "of kl_cov",
        verl="@actor.policy_loss.ppo_kl_coef",
    ),
    row(
        "algorithm.correction.level",
        "ROLL's segment alike",
        verl="algorithm.rollout_correction.rollout_is",
        roll="train_infer_correction.is_weight.weight_type",
    ),
    row(
        "algorithm.correction.high",
        verl="algorithm.rollout_correction.rollout_is_threshold @actor.tis_imp_ratio_cap",
        trl="vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        openrlhf="algo.advantage.is_correction_threshold vllm_is_truncated_threshold",
        roll="train_infer_correction.is_weight.upper_bound ratio_high",
    ),
    row("algorithm.correction.low", trl="vllm_importance_sampling_clip_min", roll="ratio_low"),
    row(
        "algorithm.correction",
        "bypass: old_logprobs = rollout, verl's bypass_mode, ROLL's force_disable_old_logprobs_recompute",
        verl="algorithm.rollout_correction.bypass_mode",
        roll="force_disable_old_logprobs_recompute enable_old_logprobs_recompute",
    ),
    row(
        "dynamic_sampling",
        "true, or its settings; verl's metric is `dynamic_sampling.metric`: acc is accuracy, the others null",
        verl="algorithm.filter_groups.enable algorithm.filter_groups.metric",
        openrlhf="algo.dynamic_filtering_enable dynamic_filtering algo.dynamic_filtering_range "
        "dynamic_filtering_reward_range",
        roll="query_filter_config is_use_additional_prompts use_additional_prompts",
    ),
    row(
        "dynamic_sampling.max_extra_prompts",
        "prompts; verl counts batches: (batches - 1) * batch.prompts_per_step",
        verl="algorithm.filter_groups.max_num_gen_batches",
        roll="max_additional_running_prompts",
    ),
    row("reference.refresh_every", "steps", trl="sync_ref_model ref_model_sync_steps"),
    row("reference.refresh_mix", "TRL's alpha, the weight of the policy", trl="ref_model_mixup_alpha"),
    row(
        "reference.num_workers",
        "ranks in all: GPUs of a node times nodes",
        openrlhf="ref.num_nodes ref.num_gpus_per_node ref_num_nodes ref_num_gpus_per_node",
    ),
    row(
        "",
        "there is no critic: advantages are relative to the group",
        verl="algorithm.lam trainer.critic_warmup critic",
        openrlhf="algo.advantage.lambd critic.value_clip critic.freezing_steps "
        "lambd critic critic_pretrain critic_learning_rate critic_num_nodes critic_num_gpus_per_node "
        "train.colocate_critic_reward colocate_critic_reward freezing_actor_steps save_value_network "
        "ds.value_head_prefix value_head_prefix value_clip",
        roll="lambd value_clip critic_warmup critic",
    ),
)
