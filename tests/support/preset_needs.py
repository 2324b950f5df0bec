"""Overrides that a preset needs in addition to its own section."""

PRESET_NEEDS = {
    "process": ["rewards.models=[{name: steps, path: /a/model, kind: process}]"],
    "turn": ["data.environment=calculator"],
}
