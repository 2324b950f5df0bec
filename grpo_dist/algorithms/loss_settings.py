"""Settings of each policy loss. Imports no torch: the configuration refuses what a loss would ignore."""

# Keyword arguments of each loss of `policy_losses`; one that is not here takes none.
POLICY_LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    "ppo_clip": ("clip_low", "clip_high", "dual_clip"),
    "cispo": ("clip_low", "clip_high", "unified_mask"),
    "sapo": ("tau_positive", "tau_negative"),
    "dppo_tv": ("clip_low", "clip_high", "ratio_cap"),
    "dppo_kl": ("clip_low", "clip_high", "ratio_cap"),
    "gspo": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "dro": ("beta",),
    "kimi15": ("tau",),
    "vespo": ("k_positive", "lambda_positive", "k_negative", "lambda_negative"),
}
