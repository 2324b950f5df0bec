"""Runs a real job and kills, stops, cuts off and starves its parts at random moments: ``python -m
tests.chaos``.

    sandbox.py  a small disk and a private /dev/shm, so that one can fill and the other be counted
    job.py      the run: started, logged, and started again when it ends early
    find.py     its processes, and no others
    faults.py   faults that can strike it
    nodes.py    a cluster of several nodes for it
    events.py   faults that struck, and when the job recovered
    play.py     strikes groups of faults, one after the other, at moments drawn from a seed
    verdict.py  conditions that must hold afterwards
    report.py   the table

Nothing in the package knows about it: faults come from outside, as in a cluster.
"""
