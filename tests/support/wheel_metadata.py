"""Writes the requirements of the GPU build's wheels to `tests/repository/wheels_gpu.json`.

    pip install --dry-run --ignore-installed --no-deps --report report.json torch==2.13.0 vllm==0.32.0 \
        cuda-toolkit==13.0.3.0
    python -m tests.support.wheel_metadata report.json

Run it on Linux, with the plain package index, whose torch is the CUDA build. torch's CUDA libraries come from
cuda-toolkit.
"""

import json
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "repository/wheels_gpu.json"


def main(report: str) -> None:
    wheels = [item["metadata"] for item in json.loads(Path(report).read_text())["install"]]
    metadata = {w["name"]: {"version": w["version"], "requires": sorted(w["requires_dist"])} for w in wheels}
    FILE.write_text(json.dumps(dict(sorted(metadata.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
