"""A fake job of `make gpu-check`, whose argument selects how it ends."""

import ctypes
import json
import subprocess
import sys
import time

from tests.gpu.findings import Findings

LEFT = "import time; time.sleep(600)"


def measure(task):
    if task.argument == "device":
        (task.directory / "machine.json").write_text(json.dumps({"gpu": "NVIDIA H100 80GB HBM3", "gpus": 1}))
    passing = Findings({"made/number": 2.0})
    passing.at_most("number", 2.0, 3.0, "made")
    yield "first", passing
    if task.argument == "wrong":
        failing = Findings()
        failing.at_least("number", 2.0, 3.0, "made")
        yield "second", failing
    if task.argument == "raises":
        raise ValueError("made for this test")
    if task.argument == "crashes":
        ctypes.string_at(0)
    if task.argument == "hangs":
        _wait_in_vain()
    if task.argument == "leaves":
        child = subprocess.Popen([sys.executable, "-c", LEFT], start_new_session=True)
        yield "second", Findings({"made/process": child.pid})
    if task.argument == "bench":
        yield "second", Findings(bench={"schema": 1, "name": "made"})


def _wait_in_vain():
    time.sleep(600)
