"""Runs on clusters that are shared with others: submitted, asked about, followed and ended.

    arguments, commands        the command line, and what it does
    job                        what is submitted, and the record of it in the run directory
    checks                     what is refused before anything is submitted
    ray_jobs, slurm_jobs, kuberay   one target each: render, submit, state, logs, stop
    code                       what a Ray job carries
    nodes                      waits on a cluster until all nodes have joined

The templates are the files in `launch/`, which can be used by hand, too.
"""
