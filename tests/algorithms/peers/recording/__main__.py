"""Record the peers' numbers again: python -m tests.algorithms.peers.recording CHECKOUTS

CHECKOUTS has a folder for each peer, at the commits that the README names: verl, trl, openrlhf, roll,
understand_r1_zero and oat.
"""

import json
import sys
from pathlib import Path

from tests.algorithms.peers.recording import dr_grpo, inputs, openrlhf, roll, trl, verl
from tests.algorithms.peers.recording.record import Record

HERE = Path(__file__).parent.parent
FOLDERS = {"dr_grpo": "understand_r1_zero"}
PEERS = {"verl": verl, "trl": trl, "openrlhf": openrlhf, "roll": roll, "dr_grpo": dr_grpo}


def main(checkouts, only):
    inputs.write(HERE / "inputs.json")
    known = json.loads((HERE / "inputs.json").read_text())
    for name, module in PEERS.items():
        if not only or name in only:
            cases = Record(known)
            module.record(checkouts / FOLDERS.get(name, name), cases)
            cases.write(HERE / f"{name}.jsonl", name, module.COMMIT)
            print(f"{name}: {len(cases.cases)} cases")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
