"""Settings of each policy loss. The sections of `algorithm.loss` have the same."""

# Keyword arguments of each loss of `policy_losses`; one that is not here takes none.
POLICY_LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "cispo": ("clip_low", "clip_high", "unified_mask"),
    "sapo": ("tau_positive", "tau_negative"),
    "dppo_tv": ("clip_low", "clip_high", "ratio_cap"),
    "dppo_kl": ("clip_low", "clip_high", "ratio_cap"),
    "gspo": ("clip_low", "clip_high"),
    "gspo_segment": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "dro": ("beta",),
    "kimi15": ("tau",),
    "reinforce_is": ("ratio_cap",),
    "vespo": ("k_positive", "lambda_positive", "k_negative", "lambda_negative"),
    "clip_cov": ("clip_low", "clip_high"),
    "kl_cov": ("cov_kl_coef",),
}
# Of the losses that treat some tokens of an update differently: settings of that choice.
SELECTION_SETTINGS: dict[str, tuple[str, ...]] = {
    "clip_cov": ("cov_share", "cov_low", "cov_high"),
    "kl_cov": ("cov_share",),
}
# Losses through whose terms a token gives gradient to others: they take the tokens that no rule removed.
MEANS_OF_KEPT = ("gmpo",)
