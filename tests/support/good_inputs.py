"""Valid data and a valid configuration, which tests of refusals then damage."""

import json

GOOD = [{"problem": f"{i} + 1", "answer": str(i + 1)} for i in range(20)]
CONFIG = (
    "model: {path: 'demo:tiny'}\n"
    "data: {train: [{path: train.jsonl}], max_prompt_tokens: 32}\n"
    "batch: {prompts_per_step: 4, samples_per_prompt: 2}\n"
    "sampling: {max_new_tokens: 8}\n"
)
# Overrides that a preset needs besides its section.
PRESET_NEEDS = {
    "process": ["rewards.models=[{name: steps, path: /a/model, kind: classifier}]"],
    "turn": ["data.environment=calculator"],
}


def write(name, rows):
    """Write a line for each of ``rows``; a text is written unchanged."""
    with open(name, "w") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
