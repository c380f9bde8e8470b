"""The harnesses of benchmarks whose figures are published: every contender runs, and every figure is measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import vorox
from vorox.experiments.tracking import read_metrics

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.torch
def test_step_products(tmp_path: Path) -> None:
    """Three products and six operations per position for each weight of a matrix; attention in both directions."""
    script = [sys.executable, BENCHMARKS / "step_products.py", "--sizes", "demo", "--seconds", "0", "--threads", "1"]
    done = subprocess.run(
        [*script, "--results", tmp_path], capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "step_products.json").read_text())["results"]
    layers, width, vocabulary, positions = 4, 128, 65, 12 * 64
    assert found["num_flops"] == 6 * positions * (layers * 12 * width**2 + vocabulary * width)
    assert found["num_calls"] == layers * (4 * 3 + 2) + 3
    assert len(found["step"]) == len(found["products"]) == 3
    assert all(0 < value < 60 for name in ("step", "products") for value in found[name])
    assert "| demo, 4 x 128, 12 rows of 64 | 1 | " in done.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_programs_and_steps_of_a_gpu(tmp_path: Path) -> None:
    """The harnesses on the CPU; a peer needs a GPU."""
    script = [sys.executable, BENCHMARKS / "gpu_programs.py", "--device", "cpu", "--sizes", "llama-tiny"]
    done = subprocess.run(
        [*script, "--settings", "runtime.compile=false", "--folder", tmp_path], capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["program"], found["steps"] >= 20) == ("vorox", True), done.stdout + done.stderr
    assert found["tokens_per_second"] * found["step_milliseconds"] == pytest.approx(2 * 64 * 1e3, rel=0.02)

    script = [sys.executable, BENCHMARKS / "gpu_step.py", "--device", "cpu", "--sizes", "gpt2-tiny", "--groups", "1"]
    done = subprocess.run(
        [*script, "--variants", "runtime.compile=false", "--kernels", "3"], capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameters"] == 50_304 * 64 + 64 * 64 + 2 * 12 * 64**2 + 2 * 13 * 64 + 2 * 64
    assert found["tokens_per_second"] * found["step_milliseconds"] == pytest.approx(2 * 64 * 1e3, rel=0.02)
    assert 0 < found["of_matmul_peak"] < 100


@pytest.mark.slow
@pytest.mark.torch
def test_operators_of_a_step() -> None:
    script = [sys.executable, BENCHMARKS / "step_products.py", "--operators", "--sizes", "demo", "--seconds", "2"]
    done = subprocess.run([*script, "--threads", "1"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {
        name: (int(calls), float(ms)) for name, calls, ms in re.findall(r"\| (.+) \| (\d+) \| (.+) \|", done.stdout)
    }
    attention = rows["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert attention[0] == 4, "one in each block; which library multiplies depends on the processor"
    assert 0 < attention[1] < rows["all operators"][1] < 60_000
    assert 0 < rows["step, lowest"][1] < 60_000


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(sys.platform == "win32", reason="it needs pseudo-terminals")
def test_display_cost(tmp_path: Path) -> None:
    sizes = ["--rounds", "1", "--steps", "23", "--warmup-steps", "2", "--hidden-size", "32"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "display_cost.py", *sizes, "--results", tmp_path], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Verdict: display and tracker, with the dashboard open, take ") == 1
    trials = json.loads((tmp_path / "display_cost.json").read_text())["trials"]
    assert list(trials) == ["silent", "plain lines", "live display", "live display and dashboard"]
    for name, (found,) in trials.items():
        assert found["steps"] == 20
        assert found["step_seconds"] > found["record_seconds"] > found["tracker_seconds"] > 0
        if name == "silent":
            assert found["display_calls"] == found["display_seconds"] == 0
        else:
            assert found["display_calls"] >= 2, "steps 10 and 20"
            assert found["record_seconds"] > found["display_seconds"] + found["tracker_seconds"] > 0
            assert found["cpu_seconds"] > 0
            assert found["monitor_seconds"] > found["record_seconds"]
            assert found["display_cpu_seconds"] > 0
            assert found["tracker_cpu_seconds"] > 0
    (shown,) = trials["live display and dashboard"]
    assert shown["events"] >= 1
    assert shown["pages"] >= 1
    assert shown["dashboard_cpu_per_second"] > 0
    assert "| live display and dashboard | " in done.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_false_alarms(tmp_path: Path) -> None:
    sizes = ["--minutes", "0.25", "--timeout", "2", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "false_alarms.py", *sizes], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "false_alarms.json").read_text())
    assert (found["exit_code"], found["false_alarms"]) == (75, 0)
    assert found["responses"]["sent"] > 0


@pytest.mark.slow
@pytest.mark.torch
def test_continued_pretraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few small steps judge no curve, only where its numbers come from."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("VOROX_CACHE", str(tmp_path / "cache"))
    general = tmp_path / "general"
    general.mkdir()
    for number, source in enumerate(sorted(Path(json.__file__).parent.glob("*.py")) * 3):
        (general / f"{number}.txt").write_text(f"# {number}\n{source.read_text(encoding='utf-8')}", encoding="utf-8")
    small = [
        "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=64",
        "data.sequence_length_tokens=64", "eval.num_sequences=16", "runtime.num_threads=1",
        "runtime.device=cpu", "train.num_steps=6",
    ]  # fmt: skip
    harness = [sys.executable, BENCHMARKS / "continued_pretraining.py", "--folder", tmp_path / "work"]
    steps = ["--steps", "6", "--replay", "0", "1/2", "--general", general, "--results", tmp_path]
    done = subprocess.run(
        [*harness, *steps, "--set", *small, "eval.prompts=[]"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "continued_pretraining.json").read_text())["bits_per_byte"]
    assert list(found) == ["0", "1/2"]
    for name, replay in (("replay-0", "0"), ("replay-0.5", "1/2")):
        (run,) = (tmp_path / "work" / "runs").glob(f"{name}-*")
        metrics = read_metrics(run)
        for source in ("reference", "stdlib"):
            curve = found[replay][source]
            assert list(curve) == ["0", "1", "2", "3", "4", "5", "6"]
            assert curve["6"] == metrics[6][f"eval/sources/{source}/bits_per_byte"]
            assert curve["0"] == found["0"][source]["0"], "both start from the base"
        rows = Counter(row.source for step in range(1, 7) for row in vorox.open_run(run).where(step))
        assert rows["reference"] > 0
        assert (rows["stdlib"] > 0) == (replay != "0")
    after = {replay: found[replay]["stdlib"]["6"] for replay in found}
    assert f"{after['0']:.3f}" in done.stdout
    assert f"{after['1/2']:.3f}" in done.stdout
    assert b"general rows" in (tmp_path / "continued_pretraining.svg").read_bytes()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.hf
def test_transformers_loop(tmp_path: Path) -> None:
    """The harness compares the losses of both contenders before it measures anything."""
    pytest.importorskip("accelerate")
    sizes = ["--size", "tiny", "--steps", "4", "--rounds", "1", "--threads", "1", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "transformers_loop.py", *sizes], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.search(r"Losses of three steps: vorox (\[.*?\]), transformers.Trainer (\[.*?\])", done.stdout)
    assert losses is not None
    ours, theirs = (json.loads(found) for found in losses.groups())
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert len(set(ours)) == len(ours) == 3
    trials = json.loads((tmp_path / "transformers_loop_cpu.json").read_text())["trials"]
    assert list(trials) == ["vorox", "transformers.Trainer"]
    for (found,) in trials.values():
        assert found["first_step_seconds"] > found["step_seconds"] > 0
        assert found["step_cpu_seconds"] > 0
        assert found["peak_bytes"] > 50 << 20
        assert found["tokens_per_second"] == pytest.approx(4 * 32 / found["step_seconds"])
    assert "| first step after, s | " in done.stdout


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("backend", "cases"),
    [
        pytest.param("torch", ["gpt2, T 256, no copy", "llama, T 1,024, block"], id="torch"),
        pytest.param("jax", ["gpt2, T 256, no copy"], id="jax", marks=pytest.mark.jax),
    ],
)
def test_planned_memory_is_that_of_a_real_run(backend: str, cases: list[str]) -> None:
    """Within 10%, as at 124M parameters, with a model that is large beside the libraries.

    A run saves twice, so a copy of the state that does not find its place again counts here. JAX plans with the
    compiled step.
    """
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "plan_memory.py", "--rounds", "1", "--scale", "small",
         "--backend", backend, "--only", *cases],
        capture_output=True, text=True, check=False,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith(("| gpt2", "| llama"))
    ]
    assert [row[0] for row in rows] == cases
    for name, planned, measured, ratio in rows:
        assert 0.9 < float(ratio) < 1.1, (name, planned, measured)


@pytest.mark.slow
def test_template_rate() -> None:
    script = [sys.executable, BENCHMARKS / "template_rate.py", "--conversations", "60", "--rounds", "1"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    found = [float(number) for number in re.findall(r"in-process: ([\d.]+)", done.stdout)]
    assert len(found) == 2
    assert all(0 < ratio < 100 for ratio in found), done.stdout
