"""Our maths against the numbers that other trainers' code computed; see README.md."""

from collections import Counter
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.algorithms.peers.cases import HERE, PEERS, recorded
from tests.algorithms.peers.compute import run
from tests.algorithms.peers.counterparts import dr_grpo, openrlhf, roll, trl, verl
from tests.algorithms.peers.counterparts.base import NoCounterpart
from tests.support.documents import ROOT

COUNTERPARTS = {"verl": verl, "trl": trl, "openrlhf": openrlhf, "roll": roll, "dr_grpo": dr_grpo}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-7}  # peers add 1e-8 to counts of tokens
IN_FLOAT32 = 1e-5  # values that a run casts to float32


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Token selection over an update reduces over all ranks: here one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def error(actual, case, numbers):
    """Return the largest relative error over all names in ``actual``."""
    mask = case.tensors()["mask"] if case.kind in ("weights", "advantages") else None
    largest = max(float(values.abs().max()) for values in numbers.values() if values.numel())
    return max(_error(actual[name], numbers[name], mask, largest) for name in actual)


def _error(actual, expected, mask, largest):
    actual = torch.as_tensor(actual).double()
    if mask is not None and expected.dim() == 2:
        actual, expected = (torch.where(mask, v.expand(mask.shape), 0.0) for v in (actual, expected))
    assert actual.shape == expected.shape
    # Sums cancel: the error is relative to the number plus a tenth of the largest of its array; for a loss, a
    # tenth of the largest gradient.
    scale = expected.abs() + 0.1 * (expected.abs().max() if expected.dim() else largest)
    return float(((actual - expected).abs() / scale.clamp(min=1e-30)).max()) if expected.numel() else 0.0


def tolerance(case, setup):
    if case.kind in ("advantages", "rewards"):
        return max(setup.tolerance or 0.0, IN_FLOAT32)
    return setup.tolerance or TOLERANCES[case.dtype]


@cache
def pairs(peer):
    """Return the cases of ``peer`` with their counterparts."""
    settings = COUNTERPARTS[peer]
    return [(case, getattr(settings, f"_{case.kind}")(case, case.settings)) for case in recorded(peer)[0]]


def check(case, setup):
    mine, numbers, limit = run(case, setup.section, setup.how), case.numbers(), tolerance(case, setup)
    estimate = mine.pop("estimate", None)
    if setup.differs is None:
        assert error(mine, case, numbers) <= limit
        if estimate is not None:  # before the cast to float32
            assert error({case.kind: estimate}, case, numbers) <= (setup.tolerance or TOLERANCES[case.dtype])
        return
    assert error(mine, case, numbers) > 10 * limit, "it no longer differs"
    assert error(setup.differs.peers(), case, numbers) <= limit, setup.differs.reason
    by_hand, values = setup.differs.ours(), {k: torch.as_tensor(v).double() for k, v in mine.items()}
    assert by_hand and error(by_hand, case, values) <= limit


@pytest.mark.parametrize("peer", PEERS)
def test_every_number_is_ours_or_differs_for_the_reason_given(peer):
    failed = []
    for case, setup in pairs(peer):
        if isinstance(setup, NoCounterpart):
            continue
        try:
            check(case, setup)
        except Exception as e:
            failed.append(f"{case.id} {case.call} {case.settings} of {case.input}: {e!r}")
    assert not failed, f"{len(failed)} cases:\n" + "\n".join(failed[:20])


def count(value):
    return sum(map(count, value)) if isinstance(value, list) else 1


def rows():
    """Return the tables of the README: peers, kinds of cases, reasons."""
    lines, kinds, reasons, without = [], {}, {}, {}
    totals = Counter()
    for peer in PEERS:
        counts = Counter()
        for case, setup in pairs(peer):
            none, reason = isinstance(setup, NoCounterpart), None
            if none or setup.differs:
                reason = setup.reason if none else setup.differs.reason
                (without if none else reasons).setdefault(reason, Counter())[peer] += 1
            kinds.setdefault(case.kind, Counter())[peer] += 1
            counts += Counter(cases=1, numbers=sum(map(count, case.out.values())))
            counts["none" if none else "differ" if reason else "agree"] += 1
        lines.append(_row(peer, *(counts[key] for key in COLUMNS)))
        totals += counts
    lines.append(_row("all", *(totals[key] for key in COLUMNS)))
    lines += [_row(kind, *(by_peer[peer] or "" for peer in PEERS)) for kind, by_peer in kinds.items()]
    for table in (reasons, without):
        lines += [_row(text, sum(by_peer.values()), ", ".join(by_peer)) for text, by_peer in table.items()]
    return lines, totals | {"reasons": len(reasons)}


COLUMNS = ("cases", "numbers", "agree", "differ", "none")


def _row(*cells):
    texts = [f"{cell:,}" if isinstance(cell, int) else cell for cell in cells]
    return "| " + " | ".join(texts) + " |"


def test_the_documents_count_the_cases_and_name_every_reason():
    expected, totals = rows()
    text = (HERE / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| peer")]
    actual = [line for line in lines if not line.startswith(("| kind", "| reason", "| what", "| commit"))]
    assert actual == expected, "\n".join(expected)
    for peer in PEERS:
        cases, head = recorded(peer)
        assert len(cases) == head["cases"] and all(c in text for c in head["commit"].split(", oat "))
    guide = (ROOT / "grpo_dist/algorithms/README.md").read_text().replace("\n", " ")
    assert (
        f"of {totals['cases']:,} cases {totals['agree']:,} agree, {totals['differ']:,} differ on purpose, "
        f"for {totals['reasons']} reasons" in guide
    )
