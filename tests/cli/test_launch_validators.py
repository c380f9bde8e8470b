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


class SlurmController:
    """SLURM's own controller of two machines that it could rent, each with four GPUs, without authentication."""

    def __init__(self, directory: Path) -> None:
        self.environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        controller = str(program("slurmctld"))
        plugins = Path(controller).resolve().parents[1] / "lib/x86_64-linux-gnu/slurm-wlm"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        lines = [
            "ClusterName=test", f"SlurmctldHost={socket.gethostname()}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
            "AuthType=auth/none", "CredType=cred/none", f"SlurmctldPort={port}", "MpiDefault=none",
            f"StateSaveLocation={directory}", f"SlurmctldPidFile={directory}/ctld.pid", "ProctrackType=proctrack/pgid",
            "TaskPlugin=task/none", "SchedulerType=sched/builtin", "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU", "JobRequeue=1", *([f"PluginDir={plugins}"] if plugins.is_dir() else []),
            "GresTypes=gpu", "SuspendProgram=/bin/true", "ResumeProgram=/bin/true", "SuspendTime=600",
            "NodeName=n[1-2] CPUs=16 RealMemory=100 Gres=gpu:4 State=CLOUD",
            "PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP",
        ]  # fmt: skip
        (directory / "slurm.conf").write_text("\n".join(lines) + "\n")
        with (directory / "slurmctld.out").open("wb") as out:
            self._process = subprocess.Popen(
                [controller, "-D", "-f", self.environment["SLURM_CONF"]], env={**os.environ, **self.environment},
                stdout=out, stderr=out, cwd=directory,
            )  # fmt: skip

    def run(self, name: str, *words: str) -> tuple[int, str]:
        return run(str(program(name)), *words, seconds=60, **self.environment)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmController]:
    if os.geteuid() != 0:
        pytest.skip("SLURM's controller without authentication needs root")
    controller = SlurmController(tmp_path_factory.mktemp("slurm"))
    try:
        wait_until(lambda: controller.run("sinfo", "--noheader", "--format=%R")[1].strip() == "main")
        yield controller
    finally:
        controller.close()


@needs("slurmctld", "sbatch", "sinfo")
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_controller_of_slurm_would_start_a_job(place: Path, slurm: SlurmController, device: str) -> None:
    """A dry run of sbatch: every option is one of SLURM's, and the request fits two nodes with four GPUs each."""
    words = ("slurm", "tiny.yaml", "--nodes", "2", "--devices", "4", "--cpus", "1", "--shared", str(place / "shared"))
    script = write("job.sh", *words, "--time", "30", "--partition", "main", f"runtime.device={device}")
    code, said = slurm.run("sbatch", "--test-only", str(script))
    assert code == 0, said
    assert "on nodes n[1-2]" in said
    text = script.read_text()
    wrong = {"--nodes=2": "--nodes=3", "--requeue": "--requeu-it", "--signal=TERM@": "--signal=WHAT@"}
    if device == "cuda":
        wrong["--gpus-per-node=4"] = "--gpus-per-node=5"
    for right, fault in wrong.items():
        assert right in text
        script.write_text(text.replace(right, fault))
        assert slurm.run("sbatch", "--test-only", str(script))[0] != 0, fault


VALIDATE = """
import sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
task.update_secrets({"HF_TOKEN": "value"})
(resources,) = task.resources
print(task.num_nodes, resources.accelerators, resources.use_spot, resources.job_recovery, task.volumes)
"""


@needs("sky", "unshare")
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_skypilot_reads_a_task_as_it_was_meant(place: Path, device: str) -> None:
    """Its own parser and schema, without a network."""
    words = ("skypilot", "tiny.yaml", "--nodes", "2", "--devices", "8", "--volume", "runs", "--spot")
    more = ("--accelerator", "H100", "--secret", "HF_TOKEN", "--setup", "true", f"runtime.device={device}")
    task = write("task.yaml", *words, *more)
    python = str(Path(str(program("sky"))).with_name("python"))

    def read(file: Path) -> tuple[int, str]:
        command = (str(program("unshare")), "--net", "--map-root-user", python, "-c", VALIDATE, str(file))
        given = {"HOME": str(place), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "HF_TOKEN": "value"}
        return run(*command, seconds=PATIENCE_SECONDS, **given)

    code, said = read(task)
    assert code == 0, said
    expected = "{'H100': 8}" if device == "cuda" else "None"
    assert said.splitlines()[-1].startswith(f"2 {expected} True "), said
    text = task.read_text()
    wrong = {"num_nodes: 2": "num_nodes: two", "use_spot: true": "use_spots: true", "volumes:": "volume:"}
    wrong["max_restarts_on_errors: 3"] = "max_restarts_on_errors: many"
    for right, fault in wrong.items():
        assert right in text
        task.write_text(text.replace(right, fault))
        code, said = read(task)
        assert code != 0, f"{fault} passed: {said}"
