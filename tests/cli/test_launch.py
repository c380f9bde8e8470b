"""vorox launch: the files are valid for their schedulers, and do what they promise where programs can execute them."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from eventually import PATIENCE_SECONDS, wait_until
from tiny_runs import configuration
from vorox.cli import main
from vorox.cli.launch import ray_driver
from vorox.core.config import config_digest, load_config
from vorox.core.ranks.ray_cluster import start_ray
from vorox.experiments.artifacts import list_runs
from vorox.records.replay_chain import read_chain

NEEDS_BASH = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")

SRUN = """#!/bin/bash
# As srun: a task on each machine, numbered by SLURM_NODEID; exits with the highest code of the tasks.
while [[ $1 == --* ]]; do echo "$1" >>srun-options; shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & tasks+=($!); done
printf '%s\\n' "${tasks[@]}" >tasks
if [ -n "${SIGNAL_AFTER:-}" ]; then  # as --signal=TERM@SECONDS; the ranks wait in step 9
  (
    until compgen -G "$SIGNAL_AFTER" >/dev/null; do sleep 0.1; done
    kill -TERM "${tasks[@]}"
    rm "$TESTS_HOLD"
  ) &
  signaler=$!
fi
highest=0
for task in "${tasks[@]}"; do wait "$task"; code=$?; ((code > highest)) && highest=$code; done
kill $signaler 2>/dev/null  # the job may end without that checkpoint
exit $highest
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf '127.0.0.1\\nsecond\\n'; else echo "$*" >>requeued; fi
"""
SCANCEL = """#!/bin/bash
[ "$1" = --signal=TERM ] && kill -TERM $(cat tasks)
"""
VOROX = """#!/bin/bash
echo "$VOROX_NODE_INDEX of $VOROX_NODE_COUNT at $VOROX_COORDINATOR: $*" >>started
if [ -n "${CODE:-}" ]; then exit "$CODE"; fi
trap 'sleep 0.3; touch saved; exit 75' TERM  # the save
touch "training-$VOROX_NODE_INDEX"
while true; do sleep 0.05; done
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    configuration(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["launch", *words]) == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err


class Cluster:
    """A folder with programs that act as SLURM's, and a batch script."""

    def __init__(self, directory: Path, script: str, port: int = 12345, **programs: str) -> None:
        self.directory = directory
        self.script = directory / "job.sh"
        self.script.write_text(script)
        found = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, **programs}
        for name, text in found.items():
            (directory / "bin").mkdir(exist_ok=True)
            (directory / "bin" / name).write_text(text)
            (directory / "bin" / name).chmod(0o755)
        given = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "VOROX"))}
        self.environment = given | {
            "PATH": f"{directory / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "two", "SLURM_JOB_ID": str(port - 10000),
            "SLURM_CPUS_PER_TASK": "1",
        }  # fmt: skip

    def start(self, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.script)], cwd=self.directory, env={**self.environment, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, **variables: str) -> tuple[int, bool]:
        """The exit code, and whether the job was requeued."""
        before = self.requeues()
        process = self.start(**variables)
        said, _ = process.communicate(timeout=600)
        assert process.returncode in {0, 1, 2, 3, 4, 5, 6, 7, 75, 130, 137}, said
        return process.returncode, self.requeues() > before

    def requeues(self) -> int:
        file = self.directory / "requeued"
        return len(file.read_text().splitlines()) if file.exists() else 0


@NEEDS_BASH
def test_a_slurm_script_requeues_by_exit_code(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("slurm", "tiny.yaml", "--nodes", "2", "--max-restarts", "2", "--secret", "KEY", "run.name=it's one")
    text = written(capsys, *words, "--partition", "long queue")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    options = dict(
        line[8:].split("=", 1) for line in text.splitlines() if line.startswith("#SBATCH --") and "=" in line
    )
    assert (options["--nodes"], options["--ntasks-per-node"], options["--cpus-per-task"]) == ("2", "1", "8")
    assert options["--signal"].startswith("TERM@"), "without B:, so that the ranks get it"
    assert "--gpus-per-node" not in options, "the run is on the CPU"
    assert "#SBATCH --requeue" in text.splitlines()
    cluster = Cluster(place, text, vorox=VOROX)
    process = cluster.start()
    said, _ = process.communicate()
    assert process.returncode not in (0, 75)
    assert "KEY: export it before sbatch" in said
    assert not (place / "started").exists()
    endings = {code: cluster.run(CODE=str(code), KEY="x") for code in (0, 75, 75, 75, 75, 2, 3, 4, 7, 130)}
    assert endings == {code: (code, code == 75) for code in endings}
    assert [cluster.run(CODE=code, KEY="x") for code in ("1", "137", "5")] == [(1, True), (137, True), (5, False)]
    started = sorted(set((place / "started").read_text().splitlines()))
    (notice,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", text, re.MULTILINE)
    settings = f"parallel.start_timeout_seconds=1800 run.name=it's one checkpoint.notice_seconds={notice}"
    command = f"train tiny.yaml {settings}"
    assert started == [f"{node} of 2 at 127.0.0.1:12345: {command}" for node in (0, 1)]
    assert {"--kill-on-bad-exit=0", "--wait=0"} <= set((place / "srun-options").read_text().split())


@NEEDS_BASH
def test_a_signal_to_the_batch_shell_alone_waits_for_the_save(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(place, written(capsys, "slurm", "tiny.yaml", "--nodes", "2"), vorox=VOROX)
    process = cluster.start()
    for name in ("training-0", "training-1", "tasks"):
        wait_until((place / name).exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75
    assert (place / "saved").exists()
    assert cluster.requeues() == 1


@NEEDS_BASH
@pytest.mark.slow
@pytest.mark.torch
def test_a_slurm_job_of_two_machines_saves_requeues_and_finishes(
    place: Path, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    settings = ("train.num_steps=40", "checkpoint.every_steps=5", "eval.every_steps=40")
    text = written(capsys, "slurm", "tiny.yaml", "--nodes", "2", "--shared", str(place / "shared"), *settings)
    cluster = Cluster(place, text, port=free_port)
    hold = place / "hold"
    hold.touch()
    first = cluster.run(
        SIGNAL_AFTER=str(place / "shared/runs/*/checkpoints/step-00000005"), TESTS_HOLD=str(hold),
        TESTS_SETTINGS="backend=torch", PYTHONPATH=str(Path(__file__).parents[1] / "ranks" / "held"),
    )  # fmt: skip
    assert first == (75, True)
    assert cluster.run() == (0, False)
    (run,) = list_runs(place / "shared" / "runs")
    record = json.loads((run.directory / "run.json").read_text())
    assert [attempt["outcome"] for attempt in record["attempts"]] == ["stopped", "finished"]
    assert run.step == 40
    assert (run.directory / "log-00001.txt").exists(), "a second rank"
    assert list(read_chain(run.directory)) == list(range(1, 41))
    measured = written(capsys, "slurm", "tiny.yaml", "--nodes", "2", "--shared", str(place / "shared"), *settings)
    assert "# measured: a save takes" in measured


@pytest.fixture
def free_port() -> Iterator[int]:
    import socket

    for port in range(20000, 29000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                yield port
                return


def test_a_kubernetes_manifest_has_the_fields_of_batch_v1(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Expectations from the reference of Job (batch/v1), Service and Pod, and from its page on failure policies."""
    words = (
        "kubernetes",
        "tiny.yaml",
        "--nodes",
        "3",
        "--devices",
        "2",
        "--image",
        "registry/vorox:1",
        "--volume",
        "runs",
    )
    settings = ("runtime.device=cuda", "run.name=My Run_1", "--secret", "HF_TOKEN", "--notice", "90s")
    configmap, service, job = yaml.safe_load_all(written(capsys, *words, *settings))
    name = "my-run-1"
    assert [part["kind"] for part in (configmap, service, job)] == ["ConfigMap", "Service", "Job"]
    assert [part["apiVersion"] for part in (configmap, service, job)] == ["v1", "v1", "batch/v1"]
    assert {part["metadata"]["name"] for part in (configmap, service, job)} == {name}
    assert service["spec"] == {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"batch.kubernetes.io/job-name": name},
    }  # fmt: skip
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["backoffLimit"] == 9, "a crash ends all three pods"
    never, saved, disrupted = spec["podFailurePolicy"]["rules"]
    codes = {"containerName": "vorox", "operator": "In"}
    assert never == {"action": "FailJob", "onExitCodes": codes | {"values": [2, 3, 4, 7, 130]}}
    assert saved == {"action": "Ignore", "onExitCodes": codes | {"values": [75]}}
    disruption = {"type": "DisruptionTarget", "status": "True"}
    assert disrupted == {"action": "Ignore", "onPodConditions": [disruption]}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy needs it"
    assert (pod["subdomain"], pod["terminationGracePeriodSeconds"]) == (name, 90)
    (container,) = pod["containers"]
    assert container["command"] == ["vorox", "train", "/etc/vorox/config.yaml", "--nproc", "2"]
    assert container["resources"] == {"requests": {"cpu": "16"}, "limits": {"nvidia.com/gpu": "2"}}
    environment = {entry["name"]: entry.get("value") or entry["valueFrom"] for entry in container["env"]}
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert environment == {
        "VOROX_COORDINATOR": f"{name}-0.{name}:29500", "VOROX_NODE_COUNT": "3",
        "VOROX_NODE_INDEX": {"fieldRef": {"fieldPath": annotation}},
        "HF_TOKEN": {"secretKeyRef": {"name": "vorox-secrets", "key": "HF_TOKEN"}},
    }  # fmt: skip
    mounts, volumes = ({one["name"] for one in where} for where in (container["volumeMounts"], pod["volumes"]))
    assert mounts == volumes
    inside = place / "inside.yaml"
    inside.write_text(configmap["data"]["config.yaml"])
    found = load_config(inside)
    overrides = ["runtime.device=cuda", "run.name=My Run_1"]
    assert config_digest(found) == config_digest(load_config("tiny.yaml", overrides)), "the same run"
    assert (found.run.directory, found.data.cache.directory) == ("/shared/runs", "/shared/cache")


def test_a_skypilot_task_has_the_keys_of_its_reference(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("skypilot", "tiny.yaml", "--volume", "runs", "--nodes", "2", "--devices", "8", "--secret", "HF_TOKEN")
    text = written(capsys, *words, "runtime.device=cuda", "--accelerator", "A100", "--setup", "pip install x\necho y")
    task = yaml.safe_load(text)
    assert set(task) == {"name", "workdir", "num_nodes", "resources", "volumes", "secrets", "setup", "run"}
    assert task["resources"] == {
        "accelerators": "A100:8", "cpus": "64+", "use_spot": False,
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75]},
    }  # fmt: skip
    assert (task["num_nodes"], task["volumes"], task["secrets"]) == (2, {"/shared": "runs"}, {"HF_TOKEN": None})
    assert task["setup"] == "pip install x\necho y\n"
    if shutil.which("bash"):
        (place / "vorox").write_text(VOROX)
        (place / "vorox").chmod(0o755)
        sky = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
        environment = {"PATH": f"{place}:{os.environ['PATH']}", "CODE": "75", **sky}
        assert subprocess.run(["bash", "-c", task["run"]], cwd=place, env=environment).returncode == 75
        assert (place / "started").read_text().startswith("1 of 2 at 10.0.0.7:29500: train tiny.yaml ")


@pytest.mark.parametrize(
    "kind", [("slurm",), ("ray",), ("kubernetes", "--image", "i", "--volume", "v"), ("skypilot", "--volume", "v")]
)
@pytest.mark.parametrize(
    "url", ["https://mattermost.example.org/hooks/SECRETSECRETSECRET", "https://chat.example.org/SECRETSECRETSECRET"]
)
def test_the_address_of_a_webhook_is_written_into_no_job(
    kind: tuple[str, ...], url: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *kind, "tiny.yaml", f"log.webhook={url}")
    assert "would be written into the job file" in said
    assert "SECRETSECRETSECRET" not in said


def test_jobs_are_refused_before_they_are_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "3 devices" in refused(capsys, "slurm", "tiny.yaml", "--nodes", "3", "parallel.fsdp_size=2")
    assert "--shared" in refused(capsys, "ray", "tiny.yaml", "run.directory=runs")
    assert "not its value" in refused(capsys, "slurm", "tiny.yaml", "--secret", "HF_TOKEN=hf_abc")
    said = refused(capsys, "slurm", "tiny.yaml", "log.metadata_dsn_variable=postgres://me:hunter22@host/db")
    assert "password" in said
    assert "hunter22" not in said
    assert "-o FILE" in refused(capsys, "slurm", "tiny.yaml", "-o", str(place / "none" / "job.sh"))
    assert "did you mean --nodes" in refused(capsys, "slurm", "tiny.yaml", "--node=2")


class Codes:
    """Replaces the starts on a cluster: each ends with the next exit code."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def __call__(self, *_arguments: Any) -> int:
        return self.codes.pop(0)


def test_a_ray_driver_restarts_by_exit_code(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    text = written(capsys, "ray", "tiny.yaml", "--devices", "2", "--secret", "KEY", "--max-restarts", "1")
    driver, (notice,) = ast.parse(text), re.findall(r"RAY_JOB_STOP_WAIT_TIME_S=(\d+)", text)
    calls = [node for node in ast.walk(driver) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    (call,) = calls
    given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    assert ast.literal_eval(call.args[0]) == [
        "train", "tiny.yaml", f"checkpoint.notice_seconds={notice}", "--nproc", "2",
    ]  # fmt: skip
    assert given == {"num_nodes": 1, "gpus_per_node": 0, "cpus_per_node": 16, "max_restarts": 1, "secrets": ["KEY"]}
    before = signal.getsignal(signal.SIGTERM)
    try:
        for codes, last in (((75, 75, 1, 75, 0), 0), ((1, 5), 5), ((6, 4), 4), ((2,), 2), ((75, 130), 130)):
            starts = Codes(*codes)
            monkeypatch.setattr(ray_driver, "_start", starts)
            assert ray_driver.train_on_ray(["train"], **given) == last
            assert not starts.codes
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:os.fork")  # by Ray, to start its processes
def test_a_ray_cluster_trains_two_ranks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    before = signal.getsignal(signal.SIGTERM)
    start_ray(ray, num_cpus=2, include_dashboard=False, log_to_driver=False)
    settings: dict[str, Any] = {"num_nodes": 1, "gpus_per_node": 0, "cpus_per_node": 2, "max_restarts": 0}
    try:
        command = ["train", str(place / "tiny.yaml"), "--nproc", "2"]
        assert ray_driver.train_on_ray(command, **settings, secrets=["NOT_SET_HERE"]) == 2
        assert ray_driver.train_on_ray([*command, "no.such_key=1"], **settings) == 2
        assert ray_driver.train_on_ray(command, **settings) == 0
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)
    (run,) = list_runs(place / "runs")
    assert (run.state, run.step) == ("finished", 12)
