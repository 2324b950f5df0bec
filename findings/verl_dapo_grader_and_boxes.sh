#!/usr/bin/env bash
# verl 0.9.1, reward_score.math_dapo, the grader of its DAPO recipes. An answer in a box is compared letter by letter, in the last 300 characters.
# It takes boxes as well as "Answer: ...". One would guess that both forms are graded alike, and that the text behind does not matter.
# Seen: "Answer: \frac12" for the gold \frac{1}{2} and "Answer: (1,2)" for (1, 2) score 1, the same answers in \boxed score -1. A right answer
# followed by 325 more characters scores -1 in both forms. math_reward beside it gives 1 to all of them.
# A model that boxes its answers, or checks them at the end, is punished for right ones as for wrong ones; the mean reward hides it.
set -euo pipefail
packages=(torch==2.13.0 verl==0.9.1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
[ -z "${FINDINGS_LATEST:-}" ] || packages=("${packages[@]%%==*}")
"$work/venv/bin/pip" install --quiet --no-compile "${packages[@]}" || exit 2
cd "$work"
venv/bin/python - <<'PYTHON'
from verl.utils.reward_score import math_dapo, math_reward

pairs = [(r"\frac12", r"\frac{1}{2}"), ("(1,2)", "(1, 2)")]


def dapo(form, answer, gold, after=""):
    return math_dapo.compute_score("Some steps.\n" + form % answer + after, gold)["score"]


stated = [dapo("Answer: %s", answer, gold) for answer, gold in pairs]
boxed = [dapo(r"\boxed{%s}", answer, gold) for answer, gold in pairs]
other = [math_reward.compute_score(rf"Some steps. \boxed{{{answer}}}", gold) for answer, gold in pairs]
check = "\n" + "We check it. " * 25
late = [dapo(form, "5", "5", check) for form in ("Answer: %s", r"\boxed{%s}")]
print(f"stated {stated}, boxed {boxed}, boxed by math_reward {other}; before a check of {len(check)} characters {late}")
assert stated == [1.0, 1.0] and other == [1.0, 1.0]
assert boxed == [-1.0, -1.0] and late == [-1.0, -1.0], "both forms are graded alike, or the whole text"
assert math_reward.compute_score(r"\boxed{5}" + check, "5") == 1.0
PYTHON
