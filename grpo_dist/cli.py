"""The command line: ``grpo-dist train|sft|eval|check CONFIG [key=value ...]``. Heavy imports live inside the
commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from grpo_dist import __version__
from grpo_dist.errors import UserError

USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: done. 2: the input cannot be used (one message says why). 1: the run failed."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return USER_ERROR
    return _guarded(args.command, args.config, args.overrides)


def _guarded(command: Callable[[str, list[str]], None], config: str, overrides: list[str]) -> int:
    try:
        command(config, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(
            "interrupted; the last checkpoint stands, and the same command goes on from it", file=sys.stderr
        )
        return 130
    return 0


def _train(path: str, overrides: list[str]) -> None:
    from grpo_dist.config_files import load_config

    config = load_config(path, overrides)
    from grpo_dist.train import train

    train(config)


def _sft(path: str, overrides: list[str]) -> None:
    from grpo_dist.config_files import ConfigError, load_config

    config = load_config(path, overrides)
    if config.sft is None:
        raise ConfigError(f"{path}: no `sft` section; add one, e.g. as in configs/demo.yaml")
    from grpo_dist.errors import refusals
    from grpo_dist.sft import run_sft

    with refusals():
        print(run_sft(config.sft, _say))


def _eval(path: str, overrides: list[str]) -> None:
    from grpo_dist.config_files import load_config

    config = load_config(path, overrides)
    from grpo_dist.train import evaluate_model

    evaluate_model(config)


def _check(path: str, overrides: list[str]) -> None:
    from grpo_dist.config_files import dump_config, load_config

    config = load_config(path, overrides)
    from grpo_dist.errors import refusals
    from grpo_dist.prepare import prepare

    with refusals():
        prepared = prepare(config, _say, train_first=False)
    print(dump_config(config))
    print(batch_arithmetic(config, len(prepared.prompts)))


# Config is imported lazily
def batch_arithmetic(config, num_prompts: int) -> str:  # type: ignore[no-untyped-def]
    """One sentence that says what the batch settings multiply to."""
    b = config.batch
    samples = b.prompts_per_step * b.samples_per_prompt
    epochs = config.steps * b.prompts_per_step / num_prompts
    return (
        f"{b.prompts_per_step} prompts x {b.samples_per_prompt} samples = {samples} samples a step, in "
        f"{b.updates_per_step} optimiser update(s) of {samples // b.updates_per_step} samples over "
        f"{config.policy.num_workers} rank(s); {config.steps} steps = {epochs:.2f} "
        f"epochs of {num_prompts} prompts"
    )


def _say(message: str) -> None:
    print(message, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo-dist",
        description="Train language models with GRPO on verifiable problems, on Ray, vLLM and DeepSpeed.",
    )
    parser.add_argument("--version", action="version", version=f"grpo-dist {__version__}")
    commands = parser.add_subparsers(title="commands")
    for name, command, text in (
        ("train", _train, "train a model; goes on from the newest checkpoint of the run, if there is one"),
        (
            "sft",
            _sft,
            "the supervised cold start of the configuration's `sft` section; prints the model's directory",
        ),
        ("eval", _eval, "evaluate `model.path` on the configuration's evaluation sets"),
        (
            "check",
            _check,
            "read everything, refuse what is wrong, print the resolved configuration; start nothing",
        ),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("config", help="YAML file, e.g. configs/demo.yaml")
        sub.add_argument(
            "overrides", nargs="*", metavar="key=value", help="e.g. steps=50 policy.optimizer.lr=1e-5"
        )
        sub.set_defaults(command=command)
    parser.set_defaults(command=None)
    return parser


if __name__ == "__main__":
    sys.exit(main())
