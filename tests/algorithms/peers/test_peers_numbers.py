"""Our maths against the numbers that other trainers' own code computed: README.md says which."""

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
IN_FLOAT32 = 1e-5  # what a run hands on as float32


@pytest.fixture(scope="module", autouse=True)
def alone():
    """Choices over an update are made over all ranks: here the only one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def error(found, case, numbers):
    """Return the largest relative error of ``found``, of whatever names it has."""
    mask = case.tensors()["mask"] if case.kind in ("weights", "advantages") else None
    largest = max(float(own.abs().max()) for own in numbers.values() if own.numel())
    return max(_error(found[name], numbers[name], mask, largest) for name in found)


def _error(found, expected, mask, largest):
    found = torch.as_tensor(found).double()
    if mask is not None and expected.dim() == 2:
        found, expected = (torch.where(mask, own.expand(mask.shape), 0.0) for own in (found, expected))
    assert found.shape == expected.shape
    # Sums cancel: beside its own size a number is held against a tenth of the largest of its array, and a
    # loss against a tenth of the largest gradient.
    scale = expected.abs() + 0.1 * (expected.abs().max() if expected.dim() else largest)
    return float(((found - expected).abs() / scale.clamp(min=1e-30)).max()) if expected.numel() else 0.0


def tolerance(case, own):
    if case.kind in ("advantages", "rewards"):
        return max(own.tolerance or 0.0, IN_FLOAT32)
    return own.tolerance or TOLERANCES[case.dtype]


@cache
def pairs(peer):
    """Return the cases of ``peer`` with their counterparts."""
    return [(case, COUNTERPARTS[peer].counterpart(case)) for case in recorded(peer)[0]]


def check(case, own):
    mine, numbers, limit = run(case, own.section, own.how), case.numbers(), tolerance(case, own)
    estimate = mine.pop("estimate", None)
    if own.differs is None:
        assert error(mine, case, numbers) <= limit
        if estimate is not None:  # before a run makes float32 of it
            assert error({case.kind: estimate}, case, numbers) <= (own.tolerance or TOLERANCES[case.dtype])
        return
    assert error(mine, case, numbers) > 10 * limit, "it differs no longer"
    assert error(own.differs.peers(), case, numbers) <= limit, own.differs.reason
    by_hand = own.differs.ours()
    assert (
        by_hand and error(by_hand, case, {k: torch.as_tensor(v).double() for k, v in mine.items()}) <= limit
    )


@pytest.mark.parametrize("peer", PEERS)
def test_every_number_is_ours_or_differs_for_the_reason_given(peer):
    failed = []
    for case, own in pairs(peer):
        if isinstance(own, NoCounterpart):
            continue
        try:
            check(case, own)
        except Exception as e:
            failed.append(f"{case.id} {case.call} {case.settings} of {case.input}: {e!r}")
    assert not failed, f"{len(failed)} cases:\n" + "\n".join(failed[:20])


def count(value):
    return sum(map(count, value)) if isinstance(value, list) else 1


def rows():
    """Return the tables of the README: of peers, of kinds of cases, of reasons."""
    found, kinds, reasons, without = [], {}, {}, {}
    totals = Counter()
    for peer in PEERS:
        own = Counter()
        for case, other in pairs(peer):
            none, reason = isinstance(other, NoCounterpart), None
            if none or other.differs:
                reason = other.reason if none else other.differs.reason
                (without if none else reasons).setdefault(reason, Counter())[peer] += 1
            kinds.setdefault(case.kind, Counter())[peer] += 1
            own += Counter(cases=1, numbers=sum(map(count, case.out.values())))
            own["none" if none else "differ" if reason else "agree"] += 1
        found.append(_row(peer, *(own[key] for key in COLUMNS)))
        totals += own
    found.append(_row("all", *(totals[key] for key in COLUMNS)))
    found += [_row(kind, *(own[peer] or "" for peer in PEERS)) for kind, own in kinds.items()]
    for table in (reasons, without):
        found += [_row(reason, sum(own.values()), ", ".join(own)) for reason, own in table.items()]
    return found, totals | {"reasons": len(reasons)}


COLUMNS = ("cases", "numbers", "agree", "differ", "none")


def _row(*cells):
    shown = [f"{cell:,}" if isinstance(cell, int) else cell for cell in cells]
    return "| " + " | ".join(shown) + " |"


def test_the_documents_count_the_cases_and_name_every_reason():
    found, totals = rows()
    text = (HERE / "README.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| peer")]
    named = [line for line in lines if not line.startswith(("| kind", "| reason", "| what", "| commit"))]
    assert named == found, "\n".join(found)
    for peer in PEERS:
        cases, head = recorded(peer)
        assert len(cases) == head["cases"] and all(own in text for own in head["commit"].split(", oat "))
    said = (ROOT / "grpo_dist/algorithms/README.md").read_text().replace("\n", " ")
    assert (
        f"of {totals['cases']:,} cases {totals['agree']:,} agree, {totals['differ']:,} differ on purpose, "
        f"for {totals['reasons']} reasons" in said
    )
