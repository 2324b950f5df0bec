"""A real job whose parts are killed, hung, cut off and starved at random moments: ``python -m tests.chaos``.

    room.py     a small disk and a /dev/shm of its own, so that one can fill and the other be counted
    job.py      the run: started, listened to, started again when it ends early
    find.py     its processes, and no others
    faults.py   what can happen to it
    events.py   what happened to it, and when it was over
    play.py     faults at moments drawn from a seed, one group after the other is over
    verdict.py  what must be true afterwards
    report.py   the table

Nothing of the product knows of it: what is done to a job comes from outside, as it would in a cluster.
"""
