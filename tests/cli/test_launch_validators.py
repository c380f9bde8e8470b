"""vorox launch: the job files pass the schedulers' own programs and schemas, where this machine has them.

Each validator also refuses a file with a deliberate fault, so that a program that checks nothing would be found.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventually import wait_until
from tiny_runs import configuration
from vorox.cli import main

KUBERNETES_VERSION = "1.31"
PATIENCE_SECONDS = 120


def program(name: str) -> str | None:
    """Find a program on the path, or beside this interpreter."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def needs(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if program(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not installed")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    configuration(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, *words: str) -> Path:
    assert main(["launch", *words, "-o", name]) == 0
    return Path(name)


def run(*command: str, seconds: float = 60, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment}, check=False
    )
    return done.returncode, done.stdout + done.stderr


@needs("kubernetes-validate")
@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cuda", "cpu"])
def test_kubernetes_manifests_match_the_schemas_of_its_api(place: Path, devices: str) -> None:
    words = ("kubernetes", "tiny.yaml", "--nodes", "2", "--devices", "4", "--image", "registry/vorox:1")
    more = ("--volume", "runs", "--secret", "HF_TOKEN", f"runtime.device={devices}")
    manifest = write("job.yaml", *words, *more)
    validate = [str(program("kubernetes-validate")), "--strict", "-k", KUBERNETES_VERSION]
    code, said = run(*validate, str(manifest))
    assert code == 0, said
    text = manifest.read_text()
    for right, wrong in (("completionMode: Indexed", "completionMod: Indexed"), ("backoffLimit: 6", "backoffLimit: x")):
        assert right in text
        manifest.write_text(text.replace(right, wrong))
        code, said = run(*validate, str(manifest))
        assert code != 0, f"{wrong} passed: {said}"


@needs("ray")
@pytest.mark.slow
def test_ray_accepts_the_command_that_submits_a_driver(place: Path) -> None:
    words = ("ray", "tiny.yaml", "--nodes", "2", "--devices", "1", "--shared", str(place), "runtime.device=cpu")
    driver = write("train_on_ray.py", *words)
    compile(driver.read_text(), str(driver), "exec")
    (line,) = [line for line in driver.read_text().splitlines() if "ray job submit" in line]
    options = [word for word in line.partition("ray job submit")[2].split() if word.startswith("--") and word != "--"]
    code, said = run(str(program("ray")), "job", "submit", "--help", seconds=PATIENCE_SECONDS)
    if "No such command" in said or "ray[default]" in said:
        pytest.skip("ray without the extra default has no jobs")
    assert code == 0, said
    assert options
    for option in options:
        assert option in said


class SlurmCluster:
    """SLURM's own controller and two nodes on this machine, without authentication, under a folder."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.processes = directory, list[subprocess.Popen[bytes]]()
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        plugins = Path(str(program("slurmctld"))).resolve().parents[1] / "lib/x86_64-linux-gnu/slurm-wlm"
        host, ports = socket.gethostname(), free_ports(3)
        lines = [
            "ClusterName=test", f"SlurmctldHost={host}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
            "AuthType=auth/none", "CredType=cred/none", f"SlurmctldPort={ports[0]}", "MpiDefault=none",
            f"StateSaveLocation={directory}", f"SlurmctldPidFile={directory}/ctld.pid",
            f"SlurmdPidFile={directory}/d-%n.pid", f"SlurmdSpoolDir={directory}/spool-%n",
            "ProctrackType=proctrack/pgid", "TaskPlugin=task/none", "SchedulerType=sched/builtin",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_CPU", "SlurmdParameters=config_overrides",
            "ReturnToService=2", "JobRequeue=1", *([f"PluginDir={plugins}"] if plugins.is_dir() else []),
            *(
                f"NodeName=n{index} CPUs=16 RealMemory=100 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[index]}"
                for index in (1, 2)
            ),
            "PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP",
        ]  # fmt: skip
        (directory / "slurm.conf").write_text("\n".join(lines) + "\n")
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for index in (1, 2):
            (directory / f"spool-n{index}").mkdir()
        self._start("slurmctld", "-D")
        for index in (1, 2):
            self._start("slurmd", "-D", "-N", f"n{index}")

    def _start(self, name: str, *options: str) -> None:
        command = [str(program(name)), *options, "-f", self.environment["SLURM_CONF"]]
        with (self.directory / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                command, env={**os.environ, **self.environment}, stdout=out, stderr=out, cwd=self.directory
            )
        self.processes.append(process)

    def run(self, name: str, *words: str) -> tuple[int, str]:
        return run(str(program(name)), *words, seconds=60, **self.environment)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(timeout=30)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons without authentication need root")
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        wait_until(lambda: cluster.run("sinfo", "--noheader", "--format=%t %D")[1].strip() == "idle 2", seconds=30)
        yield cluster
    finally:
        cluster.close()


@needs("slurmctld", "slurmd", "sbatch", "sinfo")
@pytest.mark.slow
def test_the_controller_of_slurm_would_start_a_job(place: Path, slurm: SlurmCluster) -> None:
    """A dry run of sbatch: every option is one of SLURM's, and the request fits a cluster of two nodes."""
    words = ("slurm", "tiny.yaml", "--nodes", "2", "--cpus", "1", "--shared", str(place / "shared"), "--time", "30")
    script = write("job.sh", *words, "--partition", "main", "runtime.device=cpu")
    code, said = slurm.run("sbatch", "--test-only", str(script))
    assert code == 0, said
    assert "on nodes n[1-2]" in said
    text = script.read_text()
    for right, wrong in (
        ("--nodes=2", "--nodes=3"),
        ("--requeue", "--requeu-it"),
        ("--signal=TERM@", "--signal=WHAT@"),
    ):
        assert right in text
        script.write_text(text.replace(right, wrong))
        assert slurm.run("sbatch", "--test-only", str(script))[0] != 0, wrong
