"""Runs on shared clusters: submit, status, logs and stop.

    arguments, commands        the command lines and the commands
    job                        the job, and its record in the run directory
    checks                     checks before submission
    ray_jobs, slurm_jobs, kuberay   one target each: render, submit, state, logs, stop
    code                       the files that a Ray job carries
    nodes                      waits on a cluster until all nodes have joined

The templates are the files in `launch/`, which also work by hand.
"""
