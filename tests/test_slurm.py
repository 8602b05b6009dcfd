"""Sweeps under a real SLURM of one node with two GPUs that are none, started here from Debian's packages."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

from speechformer.runs.folder import read_json, read_result
from speechformer.sweeps.folder import jobs_of

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=PATH) is None]
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]

# More CPUs than there are, so that only the GPUs limit how many jobs run at once.
SLURM_CONF = """\
ClusterName=toy
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MinJobAge=86400
KillWait=2
GresTypes=gpu
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 Gres=gpu:2
PartitionName=toy Nodes=node0 Default=YES
"""
# SLURM names the visible GPUs by the digits of their files, which must be devices: links to /dev/null.
GRES_CONF = "AutoDetect=off\nNodeName=node0 Name=gpu Flags=nvidia_gpu_env File={folder}/gpu[0-1]\n"
CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"  # loaded, as one must be in SLURM 22.05, and not used
# submitit asks `sacct` how jobs stand, and without SLURM's database that fails: `scontrol` answers in its place.
SACCT = r"""
import re, subprocess, sys
print("JobID|State|NodeList")
for job in [value for flag, value in zip(sys.argv, sys.argv[1:]) if flag == "-j"]:
    shown = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True).stdout
    for field in (dict(re.findall(r"(\S+?)=(\S*)", line)) for line in shown.splitlines()):
        task = field.get("ArrayTaskId", "")
        name = f"{field['ArrayJobId']}_{task if task.isdigit() else f'[{task}]'}" if task else field["JobId"]
        print(name, field["JobState"], field.get("NodeList", ""), sep="|")
"""

RUN = [*TINY, "task=lm"]
SHORT = ["trainer.max_steps=20", "eval_interval=10"]
LAUNCHER = ["gpus_per_node=1", "cpus_per_task=1", "timeout_min=5"]
SWEEP = ["-m", "hydra/launcher=submitit_slurm", *(f"hydra.launcher.{part}" for part in LAUNCHER)]


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.2)
    return value


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment of a process that submits to our SLURM. Its folder is short, for the sockets in it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")))
        folder.chmod(0o755)  # munged insists
        for number in range(2):
            (folder / f"gpu{number}").symlink_to("/dev/null")
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            ports = one.getsockname()[1], other.getsockname()[1]
        user, host = folder.owner(), socket.gethostname().split(".")[0]
        for name, text in (("slurm", SLURM_CONF), ("gres", GRES_CONF), ("cgroup", CGROUP_CONF)):
            (folder / f"{name}.conf").write_text(text.format(folder=folder, user=user, host=host, ports=ports))
        (folder / "sacct").write_text(f"#!{sys.executable}{SACCT}")
        (folder / "sacct").chmod(0o755)
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(os.urandom(128))
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{folder}:{PATH}"}

        def start(*command: str) -> None:
            daemon = subprocess.Popen(command, env=environment, start_new_session=True)
            stack.callback(daemon.wait, 30)
            stack.callback(daemon.terminate)

        def ask(*command: str) -> str:
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.strip()

        key, place = f"--key-file={folder}/key", f"{folder}/munge."
        start("munged", "-F", key, *(f"--{kind}={place}{kind}" for kind in ("socket", "pid-file", "seed-file")))
        wait_until((folder / "munge.socket").exists)
        start("slurmctld", "-D")
        start("slurmd", "-D")
        stack.callback(wait_until, lambda: not ask("squeue", "-h"))
        stack.callback(ask, "scancel", "--partition=toy")
        wait_until(lambda: ask("sinfo", "-h", "-o", "%T") == "idle")
        yield environment


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "speechformer.train", *overrides, *RUN, "hydra.sweep.dir=sweep"]


def test_jobs_side_by_side_have_a_gpu_each_and_compute_what_they_would_alone(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    sweep = command(*SWEEP, *SHORT, "seed=0,1,2,3")
    done = subprocess.run(sweep, cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sweep" / "report" / "report.html").exists()
    jobs = jobs_of(tmp_path / "sweep")
    assert [job.state.status for job in jobs] == ["finished"] * 4
    results: list[Any] = [job.state.result for job in jobs]
    machines = [result["machine"] for result in results]
    assert len({machine["slurm_job"] for machine in machines} - {None}) == 4
    assert [machine["threads"] for machine in machines] == [1] * 4
    assert {machine["visible_gpus"] for machine in machines} == {"0", "1"}
    for one, other in itertools.permutations(range(4), 2):
        begun = jobs[other].state.owner["since"] - jobs[one].state.owner["since"]
        if 0 <= begun < results[one]["seconds"]:  # the one was still running
            assert machines[one]["visible_gpus"] != machines[other]["visible_gpus"]

    subprocess.run(command(*SHORT, "seed=3", "threads=1", "hydra.run.dir=alone"), cwd=tmp_path, check=True)
    alone = read_result(tmp_path / "alone")
    assert alone["machine"]["slurm_job"] is None
    assert alone["metrics"] == results[3]["metrics"] != results[2]["metrics"]


def test_srun_starts_one_run_on_two_machines(slurm: dict[str, str], tmp_path: Path) -> None:
    """Oracle: the run on one. Two tasks on the one node are the machines; its address is not that of its name."""
    several = ["machine=fsdp", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=2", "dropout=0"]
    srun = ["srun", "--ntasks-per-node=2", *command(*SHORT, *several, "hydra.run.dir=two")]
    environment = {**slurm, "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(srun, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Parameters: ") == 1  # the first speaks
    subprocess.run(command(*SHORT, "dropout=0", "hydra.run.dir=one"), cwd=tmp_path, check=True)
    one, two = (read_result(tmp_path / name) for name in ("one", "two"))
    assert two["machine"]["slurm_job"] is not None
    assert two["curve"][-1] == pytest.approx(one["curve"][-1], rel=1e-4)


def test_a_job_that_is_killed_is_named_and_one_that_still_queues_is_waited_for(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    """Both are held in the queue. The first is released and killed, and again when it runs alone; then the second."""
    stderr = tmp_path / "stderr.txt"

    def queue() -> list[str]:
        squeue = ["squeue", "--noheader", "--array", "--format=%i"]
        return sorted(subprocess.run(squeue, env=slurm, check=True, capture_output=True, text=True).stdout.split())

    def pid() -> int | None:
        """The process of the job that trains."""
        owners = [read_json(path) or {} for path in tmp_path.glob("sweep/*/run.json")]
        return next((owner["pid"] for owner in owners if "pid" in owner), None)

    held = ["+hydra.launcher.additional_parameters.hold=true", "trainer.max_steps=100000,20", "eval_interval=10000"]
    with open(stderr, "w") as log:
        sweep = subprocess.Popen(command(*SWEEP, *held), cwd=tmp_path, env=slurm, stderr=log)
    try:
        wait_until(lambda: len(queue()) == 2 or sweep.poll() is not None)
        first, second = queue()
        subprocess.run(["scontrol", "release", first], env=slurm, check=True)
        os.kill(wait_until(pid), signal.SIGKILL)
        wait_until(lambda: "A worker of the sweep was killed" in stderr.read_text())
        dead, third = pid(), wait_until(lambda: [job for job in queue() if job not in (first, second)])[0]
        subprocess.run(["scontrol", "release", third], env=slurm, check=True)
        os.kill(wait_until(lambda: pid() != dead and pid()), signal.SIGKILL)
        wait_until(lambda: len(queue()) == 2)  # the second has waited, and is there again
        for job in queue():
            subprocess.run(["scontrol", "release", job], env=slurm, check=True)
        assert sweep.wait(60) == 1
    finally:
        sweep.kill()
    killed, other = jobs_of(tmp_path / "sweep")
    assert read_result(killed.folder)["status"] == "killed"
    assert other.state.status == "finished"
    assert (tmp_path / "sweep" / "report" / "report.html").exists()
    named, advice = stderr.read_text().splitlines()[-2:]
    assert named.startswith("Killed: trainer.max_steps=100000: Its process was killed")
    assert killed.folder.name in named
    assert advice.startswith("Run the same command again to run only what is missing")
