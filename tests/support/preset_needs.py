"""Overrides that a preset needs besides its own section."""

PRESET_NEEDS = {
    "process": ["rewards.models=[{name: steps, path: /a/model, kind: process}]"],
    "turn": ["data.environment=calculator"],
}
