"""The resource plan against figures by hand; what it says that fits, fits."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from vorox.cli import app, main
from vorox.cli.planning.plan import memory_lines
from vorox.cli.terminal import humanize
from vorox.core.config import load_config
from vorox.models.decoder.spec import decoder_spec
from vorox.models.spec import ModelSpec
from vorox.planning.hardware import Hardware, named_hardware
from vorox.planning.resource_plan import plan_resources

NUM_PARAMETERS = 124_439_808  # GPT-2 124M with 1,024 positions


def gpt2(*overrides: str) -> tuple:
    config = load_config("gpt2-124m", ["data.sequence_length_tokens=1024", *overrides])
    spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=1024)
    return config, spec


def test_gpt2_by_hand() -> None:
    config, spec = gpt2("precision.dtype=bf16", "train.num_tokens=10000000000")
    assert spec.num_parameters == NUM_PARAMETERS
    found = plan_resources(config, spec, named_hardware("a100-80"), mfu_fraction=0.5)
    memory = found.memory
    assert memory.parameter_bytes == memory.gradient_bytes == 4 * NUM_PARAMETERS
    assert memory.optimizer_bytes == 8 * NUM_PARAMETERS
    num_arrays = 3 * (12 * 16 + 4)  # weights and two moments: 16 in each block, two embeddings, a norm
    assert found.checkpoint_bytes == 12 * NUM_PARAMETERS + 256 * num_arrays + (16 << 10)
    matrices = 12 * 12 * 768**2 + 50257 * 768
    assert memory.copy_bytes == 2 * matrices
    flops = 6 * matrices + 12 * 12 * 768 * 1024
    assert found.flops_per_token == flops
    assert found.tokens_per_second == pytest.approx(312e12 * 0.5 / flops)
    assert found.training_seconds == pytest.approx(1e10 * flops / 312e12 / 0.5)


def test_replicas_multiply_the_speed_and_shards_divide_the_state() -> None:
    config, spec = gpt2("precision.dtype=bf16")
    one = plan_resources(config, spec, named_hardware("h100x1"))
    four = plan_resources(config, spec, named_hardware("h100x4"))
    sharded, spec = gpt2("precision.dtype=bf16", "parallel.fsdp_size=4")
    shards = plan_resources(sharded, spec, named_hardware("h100x4"))
    assert four.config.parallel.data_parallel_size == 4
    assert four.tokens_per_second == pytest.approx(4 * (one.tokens_per_second or 0))
    assert four.memory.parameter_bytes == one.memory.parameter_bytes
    for part in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(shards.memory, part) == getattr(one.memory, part) // 4
    kept, _ = gpt2("precision.dtype=bf16", "parallel.fsdp_size=4", "parallel.reshard_after_forward=false")
    blocks = 12 * (12 * 768**2 + 13 * 768)
    zero_2 = plan_resources(kept, spec, named_hardware("h100x4"))
    assert zero_2.memory.copy_bytes - shards.memory.copy_bytes == 2 * (blocks - 2 * blocks // 12)


def test_a_dry_run_states_the_memory_of_the_plan() -> None:
    """Also where the state is sharded, and weights are copied into a lower precision."""
    config, spec = gpt2("precision.dtype=bf16", "parallel.fsdp_size=4", "parallel.data_parallel_size=1")
    planned = plan_resources(config, spec, named_hardware("h100x4"))
    (line,) = memory_lines(config, spec, "cuda")
    stated = [f"about {humanize.size(planned.memory_bytes)}:"]
    stated += [f"{name} {humanize.size(value)}" for name, value in planned.memory.parts_on("cuda").items()]
    assert "copies in lower precision" in line
    assert all(text in line for text in stated), line
    assert len(line.split(", ")) == len(stated) - 1


def test_what_is_said_to_fit_fits() -> None:
    chooser = random.Random(1)
    seen = 0
    for _ in range(150):
        config, spec = gpt2(
            f"model.num_layers={chooser.choice([12, 36, 48])}",
            f"model.hidden_size={chooser.choice([768, 1536, 3072])}",
            f"train.micro_batch_sequences={chooser.choice([1, 8, 32])}",
            f"precision.dtype={chooser.choice(['fp32', 'bf16'])}",
        )
        hardware = named_hardware(chooser.choice(["rtx3070x1", "rtx4090x1", "a100-80x4", "h200x8"]))
        found = plan_resources(config, spec, hardware)
        if found.largest_micro_batch_sequences:
            fitting = [f"train.micro_batch_sequences={found.largest_micro_batch_sequences}"]
            assert _again(config, spec, hardware, fitting).fits
        assert bool(found.alternatives) <= (not found.fits)
        for alternative in found.alternatives:
            seen += 1
            changed = _again(config, spec, hardware, alternative.settings)
            assert changed.fits, alternative
            assert changed.memory_bytes == alternative.memory_bytes
    assert seen > 50


def _again(config, spec: ModelSpec, hardware: Hardware, settings):
    for setting in settings:
        key, _, value = setting.partition("=")
        section, name = key.split(".")
        changed = getattr(config, section).model_copy(update={name: int(value) if value.isdecimal() else value})
        config = config.model_copy(update={section: changed})
    return plan_resources(config, spec, hardware)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.global_batch_sequences=8"], "train.global_batch_sequences"),
        (["train.global_batch_sequences=8", "train.micro_batch_sequences=auto"], "train.global_batch_sequences"),
        (
            ["train.global_batch_sequences=64", "train.batch_stages=[{start_step: 2, global_batch_sequences: 8}]"],
            "train.batch_stages.0.global_batch_sequences",
        ),
    ],
)
def test_fewer_rows_than_devices_are_refused_as_in_training(
    overrides: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The values that the message names fit."""
    arguments = ["plan", "gpt2-124m", "train.micro_batch_sequences=1", *overrides]
    assert main([*arguments, "--hardware", "h100x64"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{key}=8 is less than the 64 devices" in said
    assert f"{key}=64 or parallel.data_parallel_size=8 would fit" in said
    if len(overrides) == 1:
        assert main([*arguments, "train.global_batch_sequences=64", "--hardware", "h100x64"]) == 0
        assert main([*arguments, "parallel.data_parallel_size=8", "--hardware", "h100x64"]) == 0


def test_the_best_save_interval_is_the_best() -> None:
    config, spec = gpt2("checkpoint.asynchronous=false")
    found = plan_resources(config, spec, named_hardware("h200x8"))
    fraction, interval = found.effective_fraction(1000)
    between = 16_384 * 54 * 24 / 419 * 3600 / 1000

    def share(every: float) -> float:
        return 1 - found.save_seconds() / every - (every / 2 + 300) / between

    assert fraction == pytest.approx(share(interval))
    assert all(share(interval * factor) < fraction for factor in (0.5, 0.9, 1.1, 2.0))
    assert found.effective_fraction(10)[0] > fraction > found.effective_fraction(100_000)[0]


def test_the_command_refuses_what_does_not_fit_and_its_hint_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2-124m", "model.num_layers=36", "--hardware", "a100-40x4", "train.micro_batch_sequences=64"]
    assert main([*words, "precision.dtype=fp32"]) == 3
    said = capsys.readouterr()
    assert "DOES NOT FIT" in said.out
    hint = next(line for line in said.err.splitlines() if line.strip().startswith("do "))
    settings = hint.split(" set ")[1].split()
    assert main([*words[:-1], *[one for one in settings if "micro" in one], "precision.dtype=fp32", *settings]) == 0
    assert main(["plan", "gpt2-124m", "--hardware", "a100-80x4", "parallel.fsdp_size=8"]) == 3
    assert main(["plan", "gpt2-124m", "--hardware", "a100-80x4", "parallel.tensor_parallel_size=12"]) == 3
    assert "lower parallel.tensor_parallel_size, or name other hardware" in capsys.readouterr().err
    assert main(["plan", "gpt2-124m", "--hardware", "h300"]) == 2
    capsys.readouterr()
    divided = ["plan", "gpt2-124m", "--hardware", "h200x8"]
    assert main([*divided, "backend=torch", "parallel.tensor_parallel_size=8"]) == 2
    assert "model.num_heads = 12 is not divisible by tensor_parallel_size = 8" in capsys.readouterr().err
    only_jax = ["model.qk_norm=full_width", "parallel.tensor_parallel_size=2"]
    assert [main([*divided, f"backend={backend}", *only_jax]) for backend in ("torch", "jax")] == [2, 0]
    assert main(["plan"]) == 2
    assert main(["plan", "quickstart"]) == 0
    found = json.loads(CliRunner().invoke(app, ["plan", "gpt2-124m", "--hardware", "h200x8", "--json"]).output)
    assert found["fits"]
    assert found["hardware"]["num_devices"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["backend=torch"], "backend=torch does not compile a whole step", marks=pytest.mark.torch),
        (["backend=jax", "--hardware", "h100"], "devices of this machine"),
    ],
    ids=["torch", "other hardware"],
)
def test_a_plan_that_cannot_be_compiled_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "gpt2-124m", "--compile", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.jax
def test_a_compiled_plan_has_the_figure_of_the_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["model.num_layers=1", "model.hidden_size=64", "model.num_heads=2", "tokenizer.kind=byte"]
    words = ["plan", "gpt2-124m", *settings, "model.intermediate_size=128", "data.sequence_length_tokens=32"]
    words += ["train.global_batch_sequences=4", "train.micro_batch_sequences=2", "backend=jax", "runtime.device=cpu"]
    assert main([*words, "--compile", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["activation_bytes"] == memory["gradient_bytes"] == 0 < memory["workspace_bytes"]
