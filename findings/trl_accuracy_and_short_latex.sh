#!/usr/bin/env bash
# TRL 1.16.0, math-verify 0.9.0. accuracy_reward gives 0 to an answer that is the gold letter by letter, if it is written \frac12 or \sqrt3.
# TeX reads \frac12 as \frac{1}{2}, and so does math-verify by default. The reward reads the completion without that repair, the gold with it.
# Seen: \boxed{\frac12} scores 0.0 for \frac12, for \frac{1}{2} and for 0.5; \boxed{\frac{1}{2}} scores 1.0 for all three; \sqrt3 likewise.
# A final box after an earlier one with another value is 0.0 too: "first \boxed{3}, so \boxed{5}" for 5.
# Right answers in a notation that models often write count as wrong, for every sample of a group where the policy prefers it.
set -euo pipefail
packages=(torch==2.13.0 transformers==5.19.0 trl==1.16.0 math-verify==0.9.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
from trl.rewards import accuracy_reward


def score(text, gold):
    return accuracy_reward([[{"role": "assistant", "content": text}]], [f"${gold}$"])[0]


golds = [r"\frac12", r"\frac{1}{2}", "0.5"]
short, braced = [score(r"\boxed{\frac12}", gold) for gold in golds], [score(r"\boxed{\frac{1}{2}}", gold) for gold in golds]
root = score(r"\boxed{2\sqrt3}", r"2\sqrt3"), score(r"\boxed{2\sqrt{3}}", r"2\sqrt3")
revised = score(r"first \boxed{3}, so \boxed{5}", "5")
print(f"short {short}, braced {braced}, roots {root}, revised {revised}")
assert braced == [1.0] * 3 and root[1] == 1.0
assert short == [0.0] * 3 and root[0] == 0.0 and revised == 0.0, "short LaTeX or the last box is graded"
PYTHON
