"""Settings of Dr. GRPO's code, and ours."""

from tests.algorithms.peers.counterparts import of_losses
from tests.algorithms.peers.counterparts.base import Counterpart

MODES = {"drgrpo": "seq-mean-token-sum-norm", "grpo": "seq-mean-token-mean"}
STD = {"drgrpo": "none", "grpo": "group"}


def _loss(case, settings):
    """The loss function computes its advantages itself."""
    clip = settings.get("cliprange", 0.2)
    section = {
        "loss": "ppo_clip", "clip_low": clip, "clip_high": clip,
        "aggregation": MODES[settings["critic_type"]],
    }  # fmt: skip
    if settings.get("reinforce_update"):
        section = {"loss": "policy_gradient", "aggregation": section["aggregation"]}
    if "tis_c" in settings:
        section["correction"] = {"kind": "tis", "high": settings["tis_c"]}
    if "beta" in settings:
        section["kl"] = {"coef": settings["beta"], "estimator": "k3"}
    how = {"max_tokens": settings["generate_max_length"]}
    setup = Counterpart(section, how | {"estimated": {"std": STD[settings["critic_type"]], "eps": 1e-8}})
    return of_losses.value_of_logprob(case, setup) if "reinforce_update" in settings else setup


def _advantages(case, settings):
    std = STD[settings["critic_type"]]
    how = {"std": std, "eps": 1e-8}
    return Counterpart({"advantage": "grpo", **how}, {"estimate": how})


def _whiten(case, settings):
    return Counterpart()
