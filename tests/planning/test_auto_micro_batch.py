"""train.micro_batch_sequences=auto: the plan's choice, made once, recorded, and without effect on the data."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import vorox
import vorox.run
from tiny_runs import Killed, at_step, configuration, events, kill, result, run, use_numpy_engine
from vorox.cli import app, main
from vorox.core.config import config_digest, load_config
from vorox.core.errors import ConfigError, DoesNotFitError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import decoder_spec
from vorox.planning.auto_micro_batch import combined, decide, facts_of
from vorox.planning.hardware import RESERVED_BYTES, named_hardware
from vorox.planning.memory_advice import Devices
from vorox.planning.memory_estimate import memory_per_device
from vorox.planning.resource_plan import plan_resources

AUTO = "train.micro_batch_sequences=auto"


def gpu(gib: float, count: int = 1) -> Devices:
    return Devices(count, int(gib * 2**30), is_cpu=False, has_bf16=True)


@pytest.mark.parametrize("parallel", ["parallel.fsdp_size=1", "parallel.fsdp_size=2", "parallel.data_parallel_size=3"])
@pytest.mark.parametrize("gib", [3, 5, 8, 13, 21, 34, 80, 400])
def test_the_choice_is_the_largest_divisor_that_the_plan_fits(gib: int, parallel: str) -> None:
    settings = ["data.sequence_length_tokens=1024", "train.global_batch_sequences=96", parallel]
    count = int(parallel[-1])
    config = load_config("gpt2-124m", [*settings, AUTO])
    spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=1024)
    fitting: list[int] = []
    for size in (size for size in range(1, 97) if 96 // count % size == 0):
        one = load_config("gpt2-124m", [*settings, f"train.micro_batch_sequences={size}"])
        if memory_per_device(spec, one).total_bytes <= 0.9 * gib * 2**30:
            fitting.append(size)
    if fitting:
        assert decide(config, spec, gpu(gib, count)).rows == max(fitting)
    else:
        with pytest.raises(DoesNotFitError, match="micro-batch of 1 row"):
            decide(config, spec, gpu(gib, count))


def test_ranks_agree_on_the_smallest_device() -> None:
    ranks = [facts_of(one) for one in (gpu(80, 3), gpu(24, 3), gpu(40, 3))]
    assert combined(ranks).memory_bytes == 24 * 2**30 - RESERVED_BYTES
    host = Devices(4, 10 * 2**30, is_cpu=True, has_bf16=False)
    places = [{"host": name, "devices": asdict(host)} for name in ("a", "a", "a", "b")]
    assert combined(places).memory_bytes == 10 * 2**30 // 3, "three ranks share the memory of host a"
    with pytest.raises(ConfigError, match="memory of the device of rank 1 is unknown"):
        combined([ranks[0], facts_of(None)])


def use_devices(monkeypatch: pytest.MonkeyPatch, config: RunConfig, rows: int) -> None:
    """Give the run devices that hold ``rows`` rows and no more."""
    spec = decoder_spec(config.model, tokenizer_vocab_size=257, sequence_length_tokens=16)
    train = config.train.model_copy(update={"micro_batch_sequences": rows})
    needed = memory_per_device(spec, config.model_copy(update={"train": train})).total_bytes
    devices = Devices(1, round(needed / 0.9) + 9 + RESERVED_BYTES, is_cpu=False, has_bf16=True)
    monkeypatch.setattr(vorox.run.backends, "training_devices", lambda config, dist: devices)


def test_a_resume_on_larger_devices_keeps_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    straight = configuration(tmp_path, ["train.micro_batch_sequences=2", "run.name=straight"])
    expected = result(run(straight))
    config = configuration(tmp_path, [AUTO])
    use_devices(monkeypatch, config, 2)
    with monkeypatch.context() as patches:
        at_step(patches, 7, kill)
        with pytest.raises(Killed):
            run(config)
    use_devices(monkeypatch, config, 4)  # a new run would take 4
    outcome = run(config)
    assert outcome.start_step == 4, "the same command finds the run"
    found = result(outcome)
    assert (found["chain"], found["fingerprint"]) == (expected["chain"], expected["fingerprint"])
    recorded = yaml.safe_load((outcome.run_directory / "config.yaml").read_text())["train"]
    assert (recorded["micro_batch_sequences"], recorded["auto_micro_batch_sequences"]) == ("auto", 2)
    attempts = json.loads((outcome.run_directory / "run.json").read_text())["attempts"]
    assert [attempt["notes"]["micro_batch_sequences"] for attempt in attempts] == [2, 2]
    said = events(outcome.run_directory, "micro_batch")
    assert said[0].startswith(
        "Micro-batch: 2 rows, the most that fit: 0.0 GiB estimated of 0.0 GiB usable on each device"
    )
    assert said[1] == "Micro-batch: 2 rows, as the run recorded (train.micro_batch_sequences=auto)"


def test_the_rows_of_a_step_do_not_depend_on_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    steps: list[list[np.ndarray]] = []
    for rows in (1, 2, 4):
        config = configuration(tmp_path, [AUTO, f"run.name=rows{rows}"])
        use_devices(monkeypatch, config, rows)
        directory = run(config).run_directory
        batches = list(vorox.open_run(directory).batches(1, 12))
        assert {batch.tokens_ABT.shape for batch in batches} == {(4 // rows, rows, 16)}
        steps.append([batch.tokens_ABT.reshape(4, 16) for batch in batches])
    for one, two, four in zip(*steps, strict=True):
        assert np.array_equal(one, two)
        assert np.array_equal(one, four)


def test_settings_of_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    config = configuration(tmp_path, [AUTO])
    use_devices(monkeypatch, config, 2)
    directory = run(config).run_directory
    with pytest.raises(ConfigError, match="auto_micro_batch_sequences=4, but the run recorded 2"):
        run(configuration(tmp_path, [AUTO, "train.auto_micro_batch_sequences=4"]))
    longer = load_config(directory / "config.yaml", ["train.micro_batch_sequences=4", "train.num_steps=14"])
    assert longer.train.auto_micro_batch_sequences is None, "a number replaces the decision"
    assert run(longer, resume_from=directory).progress.step == 14
    with pytest.raises(ConfigError, match=r"it needs train\.micro_batch_sequences=auto"):
        configuration(tmp_path, ["train.auto_micro_batch_sequences=4"])


def test_the_decision_is_not_part_of_the_run_id(tmp_path: Path) -> None:
    digests = {
        config_digest(configuration(tmp_path, [AUTO, *more])) for more in ([], ["train.auto_micro_batch_sequences=2"])
    }
    assert len(digests) == 1
    assert digests != {config_digest(configuration(tmp_path))}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["parallel.kind=deepspeed"], "does not count parallel.kind=deepspeed"),
        (["train.forward_backward=my_package:step"], "does not count train.forward_backward"),
        (["model.mlp=my_package:mlp"], "does not count model.mlp"),
        (["backend=jax", "runtime.num_threads=null"], "the compiler of backend=jax plans the memory"),
        (["tokenizer.kind=char"], "the vocabulary of the tokenizer is not known in advance"),
        (["model.kind=my_package:model"], "are not known without running it|my_package"),
    ],
)
def test_what_the_plan_cannot_tell_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], why: str
) -> None:
    use_numpy_engine(monkeypatch)
    use_devices(monkeypatch, configuration(tmp_path, [AUTO]), 2)
    with pytest.raises(ConfigError, match=why) as refused:
        run(configuration(tmp_path, [AUTO, *settings]))
    assert not (tmp_path / "runs").exists()
    assert "model.kind" in settings[0] or "set train.micro_batch_sequences=N" in str(refused.value.hint)


def test_a_device_of_unknown_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_numpy_engine(monkeypatch)
    monkeypatch.setattr(vorox.run.backends, "training_devices", lambda config, dist: None)
    with pytest.raises(ConfigError, match="memory of the device of rank 0 is unknown"):
        run(configuration(tmp_path, [AUTO]))


def test_the_plan_shows_the_choice() -> None:
    config = load_config("gpt2-124m", ["data.sequence_length_tokens=1024", AUTO])
    spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=1024)
    found = plan_resources(config, spec, named_hardware("rtx3080"))
    assert found.fits
    assert found.config.train.micro_batch_rows == 16
    small = plan_resources(config, spec, named_hardware("rtx3070"))
    assert small.config.train.micro_batch_rows == 8
    printed = CliRunner().invoke(app, ["plan", "gpt2-124m", AUTO, "--hardware", "rtx3080"])
    assert "in micro-batches of 16" in printed.stdout


def test_the_engine_knows_its_devices(tmp_path: Path) -> None:
    config = configuration(tmp_path, [AUTO, "backend=torch"])
    devices = vorox.run.backends.training_devices(config, DistributedContext(world_size=3))
    assert devices is not None
    assert (devices.count, devices.is_cpu) == (3, True)


@pytest.mark.slow
def test_a_real_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configuration(tmp_path)  # writes tiny.yaml
    command = ["train", str(tmp_path / "tiny.yaml"), AUTO, "backend=torch", "log.matmul_peak=false"]
    assert main([*command, "--dry-run"]) == 0
    assert "Micro-batch: 4 rows, the most that fit" in capfd.readouterr().out
    assert main(command) == 0
    assert "Micro-batch: 4 rows, the most that fit" in capfd.readouterr().out
    directory = next((tmp_path / "runs").glob("tiny-*"))
    assert main(["replay", str(directory), "--from", "0", "--to", "5"]) == 0
