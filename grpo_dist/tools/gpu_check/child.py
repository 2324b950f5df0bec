"""The process of one job: ``python -m grpo_dist.tools.gpu_check.child DIRECTORY NAME``.

It reads NAME.task and writes NAME.found, one JSON object a line of the check, as soon as that is known.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
from pathlib import Path

from grpo_dist.runtime.stacks import listen
from grpo_dist.tools.gpu_check.lines import CheckTask


def main() -> None:
    faulthandler.enable()  # a crash in C leaves a stack, too
    listen()
    directory, name = Path(sys.argv[1]), sys.argv[2]
    asked = json.loads((directory / f"{name}.task").read_text())
    job = importlib.import_module(asked["module"])
    task = CheckTask(asked["argument"], asked["rehearsal"], directory, asked["known"])
    with (directory / f"{name}.found").open("w") as file:
        for line, found in job.measure(task):
            file.write(json.dumps({"line": line, **found.plain()}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
