"""A collector whose workers are jobs of submitit.

The jobs are processes of this machine, unless SUBMITIT_CLUSTER names another executor of submitit ("slurm").
JOB_PYTHON is the command that they take for Python, if that is not the one of this program.
Usage: batch_jobs.py CLASS [cannot_start | killed]
"""

import functools
import os
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import submitit
from collector_parts import OPTIONS, Env, make_policy, require_stamps, weights_of

import collectors
from collectors.nodes import free_port
from weight_update import WorkerError


class FailsInJobs(Env):
    def __init__(self):
        if "SUBMITIT_EXECUTOR" in os.environ:
            raise ZeroDivisionError("this environment cannot be made")
        super().__init__()


def follow_an_update(collector):
    frames = iter(collector)
    next(frames)
    version = collector.update_policy_weights_(weights_of(3.0)).version
    while (data := next(frames))["policy_version"].min() < version:  # batches that were made before
        pass
    assert (data["action"] == 3.0).all()
    require_stamps(data)


def kill_a_job(collector):
    controller = psutil.Process(int(collector.jobs[1].job_id))
    for process in [controller, *controller.children(recursive=True)]:
        process.kill()
    for _ in collector:
        pass


def main(name, fault=""):
    warnings.simplefilter("ignore", UserWarning)  # PyTorch warns about what RPC does itself
    cluster = os.environ.get("SUBMITIT_CLUSTER", "local")
    python = os.environ.get("JOB_PYTHON")
    submitit.AutoExecutor = functools.partial(submitit.AutoExecutor, cluster=cluster, local_python=python)
    options = {"update_interval": 10**6} if name == "DistributedSyncCollector" else {}
    try:
        collector = getattr(collectors, name)(
            [Env, FailsInJobs if fault == "cannot_start" else Env],
            make_policy(),
            frames_per_batch=8,
            total_frames=-1,
            launcher="submitit",
            slurm_kwargs={"timeout_min": 5},
            tcp_port=free_port(),
            collector_kwargs=OPTIONS,
            **options,
        )
        if fault == "killed":
            kill_a_job(collector)
        follow_an_update(collector)
    except WorkerError as error:
        print(error)
        return
    collector.shutdown()
    print([job.result() for job in collector.jobs])  # raises what a job raised


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the jobs
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # submitit writes its files there
        main(*sys.argv[1:])
