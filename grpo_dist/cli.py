"""The command line: ``grpo-dist train|sft|sample|check|bench|plan|submit CONFIG [key=value ...]``,
``grpo-dist eval MODEL DATA``, ``grpo-dist score COMPLETIONS``, ``grpo-dist pipeline FILE``, ``grpo-dist
status|logs|stop RUN``, ``grpo-dist report RUN [RUN ...]``, ``grpo-dist export RUN`` and ``grpo-dist import
RECIPE``. Heavy imports are inside the commands.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.errors import RERUN, RunEnded, UserError, find_cause
from grpo_dist.runtime import __version__
from grpo_dist.runtime.processes import libraries_loaded, pause_garbage_collection
from grpo_dist.runtime.stage_log import print_line, stages_logged, unread_output_dropped
from grpo_dist.tools.arguments import add_command, add_inputs, parse
from grpo_dist.tools.evaluate.command import add_commands as add_evaluation
from grpo_dist.tools.export.arguments import add_export
from grpo_dist.tools.recipe_import.command import add_import
from grpo_dist.tools.report.command import add_report
from grpo_dist.tools.submit.arguments import add_commands as add_submission

if TYPE_CHECKING:
    from grpo_dist.tools.recipe.config import Kind, ResolvedPipeline

USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done. 1: the run failed. 2: the input cannot be used; one message has the reason. 3: a `health` check
    stopped the run. 75: it stopped on request; the same command resumes it. 128 + n: signal n ended it.
    """
    with unread_output_dropped():
        parser = command_parser()
        args = parse(parser, arguments)
        if args.command is None:
            parser.print_help()
            return USER_ERROR
        positional = ("command", "config", "overrides")
        options = {name: value for name, value in vars(args).items() if name not in positional}
        _accept_interrupts()
        try:
            args.command(args.config, args.overrides, **options)
        except (UserError, RunEnded, KeyboardInterrupt) as end:
            return report_end(end)
        return 0
    return 1  # a reader such as `head` closed stdout


def report_end(end: UserError | RunEnded | KeyboardInterrupt) -> int:
    """Print why a command ended, without secrets, and return its exit code."""
    from grpo_dist.config.secrets import masked  # imports pydantic

    code, text = 130, f"interrupted; {RERUN}"
    if isinstance(end, UserError):
        code, text = USER_ERROR, f"error: {masked(str(find_cause(end)))}"
    elif isinstance(end, RunEnded):
        code, text = end.exit_code, masked(str(end))
    with suppress(OSError):  # nobody reads stderr; and a name in it need not be text
        print(text.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
    return code


def _accept_interrupts() -> None:
    """Restore SIGINT: a shell without job control makes background commands ignore it, and `kill -INT` would
    have no effect.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _train(path: str, overrides: list[str]) -> None:
    from grpo_dist.runs.preemption import ended_by_sigterm

    with ended_by_sigterm():  # the imports take seconds
        from grpo_dist.config.files import load_config

        config = load_config(path, overrides)
        with stages_logged(enabled=config.tracking.console):
            with libraries_loaded():
                from grpo_dist.runs.session import train

            train(config)


def _stage_alone(
    path: str, overrides: list[str], kind: Kind, again_from: str | None, check_only: bool
) -> None:
    """Run a pipeline with a single stage of ``kind``."""
    from grpo_dist.config.files import load_config
    from grpo_dist.tools.recipe.config import PipelineFile, StageFile, resolve

    config = load_config(path, overrides)
    stage = StageFile(name=kind, kind=kind, config=str(Path(path).resolve()))
    name = f"{config.name}_{'samples' if kind == 'sample' else kind}"
    file = PipelineFile(name=name, output_dir=config.output_dir, stages=(stage,))
    settings = [f"{kind}.{text}" for text in overrides if not text.startswith(("name=", "output_dir="))]
    _run_stages(resolve(file, Path(path), settings), again_from, check_only)


def _run_stages(pipeline: ResolvedPipeline, again_from: str | None, check_only: bool) -> None:
    with stages_logged():
        with libraries_loaded():
            from grpo_dist.tools.recipe.run import run_pipeline

        run_pipeline(pipeline, print_line, again_from=again_from, check_only=check_only)


def _pipeline(path: str, overrides: list[str], again_from: str | None, check_only: bool) -> None:
    from grpo_dist.tools.recipe.config import load_pipeline

    _run_stages(load_pipeline(path, overrides), again_from, check_only)


def _bench(path: str | None, overrides: list[str], compare: list[str] | None) -> None:
    if (path is None) == (compare is None) or (compare and overrides):
        raise UserError("bench: give either a configuration to measure, or --compare A.json B.json alone")
    if compare:
        from grpo_dist.tools.bench.table import compare as compare_results

        compare_results(Path(compare[0]), Path(compare[1]))
        return
    from grpo_dist.config.files import load_config

    config = load_config(str(path), overrides)
    with stages_logged():
        with libraries_loaded():
            from grpo_dist.tools.bench.run import bench

        bench(config)


def _plan(
    path: str,
    overrides: list[str],
    *,
    cluster: str,
    price: float | None,
    tail: bool,
    bench: str | None,
    **assumed: Any,
) -> None:
    from grpo_dist.config.files import load_config

    config = load_config(path, overrides)
    from grpo_dist.tools.plan.command import plan
    from grpo_dist.tools.plan.options import Assumptions

    assumptions = Assumptions(bench=Path(bench) if bench else None, **assumed)
    with pause_garbage_collection(freeze=False):
        plan(config, cluster, assumptions, price=price, tail=tail)


def _check(path: str, overrides: list[str], *, cluster: str | None, show_config: bool) -> None:
    from grpo_dist.config.files import dump_config, load_config

    config = load_config(path, overrides)
    if show_config:
        print(dump_config(config))
    results = []
    with pause_garbage_collection(freeze=False):
        from grpo_dist.tools.check import problems, run_checks, summary

        for result in run_checks(config, cluster=cluster):
            results.append(result)
            if result.problem:
                print(result, file=sys.stderr, flush=True)
            else:
                print_line(str(result))
    if wrong := problems(results):
        raise wrong
    print_line(summary(results))


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo-dist",
        description="Train language models with GRPO on verifiable problems, on Ray, vLLM and DeepSpeed.",
    )
    parser.add_argument("--version", action="version", version=f"grpo-dist {__version__}")
    commands = parser.add_subparsers(title="commands")
    text = "train a model; resumes from the newest checkpoint of the run, if there is one"
    sub = add_command(commands, "train", text, _train)
    add_inputs(sub, "YAML file, e.g. configs/demo.yaml", "e.g. steps=50 policy.optimizer.lr=1e-5")
    _add_check(commands)
    _add_bench(commands)
    _add_plan(commands)
    _add_recipes(commands)
    add_evaluation(commands)
    add_report(commands)
    add_export(commands)
    add_submission(commands)
    add_import(commands)
    parser.set_defaults(command=None)
    return parser


def _add_check(commands: Any) -> None:
    text = "check all input and report what a run needs and every problem; start nothing"
    sub = add_command(commands, "check", text, _check)
    add_inputs(sub, "YAML file, e.g. configs/demo.yaml", "e.g. steps=50")
    sub.add_argument(
        "--cluster", help="the run's cluster as NODESxGPUSxKIND, e.g. 8x8xH100; default: this machine"
    )
    sub.add_argument(
        "--config",
        dest="show_config",
        action="store_true",
        help="first print the resolved configuration with every default",
    )


def _add_bench(commands: Any) -> None:
    text = "measure the throughput of the whole loop and how close each stage is to the machine's limit"
    sub = add_command(commands, "bench", text, _bench)
    add_inputs(
        sub,
        "YAML file, e.g. configs/bench/cpu_13m.yaml",
        "e.g. bench.steps=10 bench.lengths.kind=natural",
        nargs="?",
    )
    sub.add_argument(
        "--compare", nargs=2, metavar=("A.json", "B.json"), help="print the ratios of two results instead"
    )


def _add_plan(commands: Any) -> None:
    text = "predict memory, step time, cost and the best split of GPUs on a cluster, by simulating the loop"
    sub = add_command(commands, "plan", text, _plan)
    add_inputs(sub, "YAML file, e.g. configs/gsm8k_qwen2.5_1.5b.yaml", "e.g. bench.lengths.kind=fixed")
    sub.add_argument(
        "--cluster", default="", help="needed: NODESxGPUSxKIND, e.g. 8x8xH100; 1x0xCPU with --bench"
    )
    sub.add_argument("--bench", metavar="FILE", help="take times from this bench.json of the same hardware")
    sub.add_argument("--price", type=float, help="dollars per GPU-hour")
    sub.add_argument("--prompt-tokens", type=int, help="mean tokens of a prompt")
    sub.add_argument("--shared-tokens", type=int, help="tokens that all prompts begin with")
    sub.add_argument("--turns", type=int, help="turns of an episode, where prompts have environments")
    sub.add_argument("--tool-seconds", type=float, help="mean time of an environment's answer")
    sub.add_argument(
        "--accepted",
        type=float,
        metavar="N",
        help="mean accepted tokens per draft (rollout.speculation)",
    )
    sub.add_argument(
        "--tail",
        action="store_true",
        help="compare long-tail mitigations instead: carry-over, order by length, asynchronous",
    )


def _add_recipes(commands: Any) -> None:
    """Add the commands that run stages, each stage in its own directory."""
    for name, command, options, text, file, override in (
        (
            "sft",
            _stage_alone,
            {"kind": "sft"},
            "supervised training of `sft.model` on `sft.data`, on the policy's ranks, as the sft stage of a "
            "pipeline",
            "YAML file with an `sft` section, e.g. configs/demo.yaml",
            "e.g. sft.epochs=2 policy.num_workers=4",
        ),
        (
            "sample",
            _stage_alone,
            {"kind": "sample"},
            "rejection sampling: sample `model.path` on `data.train` and write the correct completions as "
            "demonstrations for `sft.data`, as set in the `rejection` section",
            "YAML file, e.g. configs/demo.yaml",
            "e.g. model.path=runs/demo/model rejection.samples_per_prompt=16",
        ),
        (
            "pipeline",
            _pipeline,
            {},
            "run a recipe of several stages (sft, grpo, sample), each on the results of earlier ones; skips "
            "finished stages and resumes an interrupted one",
            "YAML file, e.g. configs/pipelines/r1_demo.yaml",
            "seed=..., name=..., output_dir=... of the pipeline, or STAGE.key=value, e.g. reasoning.steps=50",
        ),
    ):
        sub = add_command(commands, name, text, command, **options)
        add_inputs(sub, file, override)
        sub.add_argument(
            "--from",
            dest="again_from",
            metavar="STAGE",
            help="repeat this stage and all later ones; their old results are renamed, not deleted",
        )
        sub.add_argument(
            "--check", dest="check_only", action="store_true", help="report problems; start nothing"
        )


if __name__ == "__main__":
    sys.exit(main())
