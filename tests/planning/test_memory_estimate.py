"""The memory estimate against arithmetic done by hand and against what a real step holds."""

from __future__ import annotations

import re

import pytest

from vorox.core.config import load_config
from vorox.core.errors import DoesNotFitError
from vorox.models.decoder.spec import decoder_spec
from vorox.models.spec import ModelSpec
from vorox.planning.memory_advice import COPYING, SAMPLING, MemoryBudget, check_host_memory
from vorox.planning.memory_estimate import MemoryEstimate, memory_per_device


def estimate(*changes: str) -> tuple[ModelSpec, MemoryEstimate]:
    settings = [
        "model.preset=gpt2-124m", "data.sequence_length_tokens=1024", "train.micro_batch_sequences=8",
        "train.global_batch_sequences=8", "train.activation_checkpointing=none", "precision.dtype=bf16",
        "optimizer.name=adamw", "loss.chunk_tokens=1024",
    ]  # fmt: skip
    config = load_config("quickstart", [*settings, *changes])
    spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=1024)
    return spec, memory_per_device(spec, config)


def test_states_of_gpt2_take_sixteen_bytes_per_parameter() -> None:
    spec, memory = estimate()
    assert memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes == 16 * spec.num_parameters
    assert memory.total_bytes > 16 * spec.num_parameters


def test_muon_keeps_one_moment_of_matrices() -> None:
    spec, adamw = estimate()
    _, muon = estimate("optimizer.name=muon")
    assert adamw.optimizer_bytes - muon.optimizer_bytes == 4 * 12 * 12 * spec.hidden_size**2
    frozen = 'optimizer.groups=[{"match":"blocks.*","frozen":true}]'
    moments = [estimate(f"optimizer.name={name}", frozen)[1].optimizer_bytes for name in ("adamw", "muon")]
    assert moments[0] == moments[1] > 0, "frozen matrices have none"


def test_what_saves_memory_saves_it_in_the_estimate() -> None:
    _, whole = estimate()
    _, recomputed = estimate("train.activation_checkpointing=block")
    _, wide = estimate("precision.dtype=fp32")
    assert recomputed.activation_bytes < whole.activation_bytes / 4
    assert wide.activation_bytes == 2 * whole.activation_bytes
    assert whole.logits_bytes == pytest.approx(2 * 4 * 1024 * 50257)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_part_of_the_positions_has_the_activations_of_a_shorter_row(recompute: str) -> None:
    """Masks are those of whole rows. With FSDP, the state is sharded over all ranks."""
    settings = [
        "model.hidden_size=64", "data.document_mask=true", "train.micro_batch_sequences=2",
        f"train.activation_checkpointing={recompute}", "loss.chunk_tokens=4096", "eval.prompts=[]",
    ]  # fmt: skip

    def memory(length: int, *more: str) -> MemoryEstimate:
        config = load_config("quickstart", [*settings, f"data.sequence_length_tokens={length}", *more])
        spec = decoder_spec(config.model, tokenizer_vocab_size=4096, sequence_length_tokens=64)
        return memory_per_device(spec, config)

    whole, short = memory(64), memory(16)
    part = memory(64, "parallel.context_parallel_size=4")
    assert (part.activation_bytes, part.logits_bytes) == (short.activation_bytes, short.logits_bytes)
    assert (part.mask_bytes, part.optimizer_bytes) == (whole.mask_bytes, whole.optimizer_bytes)
    stages = ("parallel.pipeline_parallel_size=2", "train.global_batch_sequences=8")
    assert (
        memory(64, "parallel.context_parallel_size=4", *stages).activation_bytes == memory(16, *stages).activation_bytes
    )
    sharded = memory(64, "parallel.context_parallel_size=4", "parallel.fsdp_size=2")
    assert sharded.optimizer_bytes == whole.optimizer_bytes // 8


def test_a_state_in_host_memory_is_not_on_a_gpu_but_on_a_cpu() -> None:
    config = load_config("quickstart", ["parallel.fsdp_size=2", "parallel.fsdp_offload=true", "optimizer.name=adamw"])
    spec = decoder_spec(config.model, tokenizer_vocab_size=4096, sequence_length_tokens=64)
    cpu, gpu = (memory_per_device(spec, config, kind).parameter_bytes for kind in ("cpu", "cuda"))
    assert (cpu, gpu) == (2 * spec.num_parameters, 0)


def test_the_first_device_of_a_pipeline_keeps_a_micro_batch_for_every_device() -> None:
    """Four times a quarter of the blocks, besides a buffer of fp32 for what each micro-batch gets back."""
    spec, whole = estimate()
    _, first = estimate("parallel.pipeline_parallel_size=4", "train.global_batch_sequences=64")
    stream = 8 * 1024 * spec.hidden_size * 4
    assert first.logits_bytes == 0
    assert first.activation_bytes - whole.activation_bytes == 64 // 8 * stream


def test_sequence_parallelism_divides_what_checkpointing_saves() -> None:
    """Of 12 layers, all inputs and one recomputed block are kept."""
    spec, whole = estimate("train.activation_checkpointing=block")
    sizes = ["parallel.tensor_parallel_size=4", "parallel.sequence_parallel=true"]
    _, part = estimate("train.activation_checkpointing=block", *sizes)
    stream = 8 * 1024 * spec.hidden_size * 2
    assert whole.activation_bytes - part.activation_bytes == (12 + 2) * stream * 3 // 4


def test_partial_sums_of_gradients_are_counted() -> None:
    """Of four micro-batches, the first and then the sum of the first two are kept while the next one runs."""
    sizes = ["train.global_batch_sequences=16", "train.micro_batch_sequences=4"]
    plain, exact, ranks = (
        memory_per_device(
            decoder_spec(config.model, tokenizer_vocab_size=4096, sequence_length_tokens=64), config
        ).gradient_bytes
        for config in (
            load_config("quickstart", [*sizes, *more])
            for more in (
                [],
                ["runtime.determinism=bitwise-any-world"],
                ["runtime.determinism=bitwise-any-world", "parallel.data_parallel_size=4"],
            )
        )
    )
    assert exact == 3 * plain
    assert ranks == plain


@pytest.mark.parametrize(
    ("change", "num_products"),
    [("precision.dtype=fp32", 0), ("precision.dtype=bf16", 2), ("runtime.compile=true", 2)],
)
def test_fp32_gradients_on_a_cpu_are_added_in_place(change: str, num_products: int) -> None:
    """Elsewhere, the product of the head's gradient counts, and its place in the chunk before."""

    def workspace_bytes(vocab_size: int) -> int:
        settings = ["precision.dtype=fp32", "model.hidden_size=64", "optimizer.name=adamw", change]
        config = load_config("quickstart", settings)
        spec = decoder_spec(config.model, tokenizer_vocab_size=vocab_size, sequence_length_tokens=64)
        return memory_per_device(spec, config, "cpu").workspace_bytes

    assert workspace_bytes(9_000) - workspace_bytes(5_000) == num_products * 4 * 64 * 4_000


# Against the memory of a device


def budget(state_gib: int, rest_gib: int, available_gib: int | None) -> MemoryBudget:
    planned = MemoryEstimate(state_gib << 28, state_gib << 28, state_gib << 29, rest_gib << 30, 0)
    return MemoryBudget(planned, None if available_gib is None else available_gib << 30)


def test_state_that_cannot_fit_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        budget(100, 1, 80).check_state()
    assert caught.value.exit_code == 3
    assert "100.00 GiB" in caught.value.what
    assert "80.00 GiB" in caught.value.what
    assert "model.num_layers" in caught.value.hint
    assert "micro_batch" not in caught.value.hint
    for fits in (budget(70, 99, 80), budget(100, 1, None)):
        fits.check_state()


def test_a_device_needs_its_shard_of_the_state_only() -> None:
    """16 bytes for each parameter: with FSDP over two devices, 8 on each."""

    def sharded(available_bytes: int) -> MemoryBudget:
        config = load_config("quickstart", ["parallel.fsdp_size=2", "optimizer.name=adamw"])
        spec = decoder_spec(config.model, tokenizer_vocab_size=4096, sequence_length_tokens=256)
        return MemoryBudget.of(config, spec, available_bytes * spec.num_parameters, num_devices=2, device_kind="cuda")

    sharded(8).check_state()
    with pytest.raises(DoesNotFitError):
        sharded(7).check_state()


def test_the_remedy_is_of_what_is_too_large() -> None:
    assert "model.hidden_size" in budget(79, 1, 80).out_of_memory_error("training").hint
    for found in (budget(10, 99, 80), budget(10, 99, None)):
        assert "train.micro_batch_sequences" in found.out_of_memory_error("training").hint
        assert "data.sequence_length_tokens" in found.out_of_memory_error("training").hint


@pytest.mark.parametrize("available_gib", [None, 4])
@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_an_exhausted_device_names_three_settings_that_each_fit_with_their_cost(
    available_gib: int | None, device_kind: str
) -> None:
    """Each saves half of what grew, because the estimate may be too low."""
    given = ["model.preset=gpt2-124m", "data.sequence_length_tokens=1024", "train.global_batch_sequences=64",
             "train.micro_batch_sequences=64"]  # fmt: skip

    def needed_bytes(more: list[str]) -> int:
        config = load_config("quickstart", [*given, *more])
        spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=1024)
        return memory_per_device(spec, config).total_bytes_on(device_kind)

    config = load_config("quickstart", given)
    spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=1024)
    available = None if available_gib is None else available_gib << 30
    found = MemoryBudget.of(config, spec, available, num_devices=1, device_kind=device_kind).out_of_memory_error(
        "training"
    )
    assert "activations grow to" in found.what
    named = re.findall(r"((?:\S+=\S+ )+)\(([^)]+)\)", found.hint)
    assert len(named) == 3 if available is None else named
    single = [" " not in settings.strip() for settings, _ in named]
    assert single == sorted(single, reverse=True)
    planned = memory_per_device(spec, config)
    limit = planned.total_bytes_on(device_kind) - planned.activation_bytes / 2 if available is None else available
    for settings, cost in named:
        assert needed_bytes(settings.split()) <= limit, (settings, cost)
    assert ("precision.dtype=bf16" in found.hint) <= (device_kind == "cuda")


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_fewer_than_three_settings_only_where_no_more_fit(
    device_kind: str, num_devices: int, rows: int, recompute: str
) -> None:
    """With one row, recomputation and Muon, one device has nothing left but waiting saves or chunks, and the row."""
    given = ["model.preset=gpt2-124m", "train.global_batch_sequences=64", f"train.micro_batch_sequences={rows}",
             f"train.activation_checkpointing={recompute}", "data.sequence_length_tokens=1024"]  # fmt: skip
    for optimizer in ("adamw", "muon"):
        config = load_config("quickstart", [*given, f"optimizer.name={optimizer}"])
        spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=1024)
        budget = MemoryBudget.of(config, spec, None, num_devices=num_devices, device_kind=device_kind)
        hint = budget.out_of_memory_error("training").hint
        is_spent = (num_devices, rows, recompute, optimizer) == (1, 1, "block", "muon")
        assert hint.count("(") == (2 if is_spent else 3), hint
        assert hint.endswith("; no other change that saves memory fits") == is_spent


def test_a_setting_that_the_configuration_does_not_allow_is_not_advised() -> None:
    given = ["model.preset=gpt2-124m", "data.sequence_length_tokens=1024", "train.global_batch_sequences=8",
             "train.micro_batch_sequences=8", "optimizer.name=adamw"]  # fmt: skip
    in_backward = ["optimizer.in_backward=true", "optimizer.clip_norm=null", "train.max_nonfinite_steps=0"]

    def hint(more: list[str]) -> str:
        config = load_config("quickstart", [*given, *more])
        spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=1024)
        budget = MemoryBudget.of(config, spec, None, num_devices=1, device_kind="cuda")
        return budget.out_of_memory_error("training").hint

    assert "train.micro_batch_sequences=" in hint([])
    assert "train.micro_batch_sequences=" not in hint(in_backward), "it needs one micro-batch per step"
    assert "train.activation_checkpointing=block" in hint(in_backward)


def test_a_device_that_should_have_enough_may_be_shared_or_limited() -> None:
    """The numbers must not contradict the error."""
    assert "less what other programs take" in budget(10, 1, 80).out_of_memory_error("training").what
    for no_room in (budget(79, 2, 80), budget(10, 1, None)):
        assert "other programs" not in no_room.out_of_memory_error("training").what


def test_the_remedy_of_a_copy_and_of_samples_is_their_own() -> None:
    assert "checkpoint.asynchronous=false" in budget(10, 1, 80).out_of_memory_error(COPYING).hint
    assert "eval.sample_tokens" in budget(10, 1, 80).out_of_memory_error(SAMPLING).hint


def test_rows_of_documents_grow_linearly_where_no_mask_is_made() -> None:
    """Documents are slices on a CPU; a GPU has the variable-length kernel in half precision."""
    for device, precision in (("cpu", "fp32"), ("cpu", "bf16"), ("cuda", "bf16")):
        found = [attention_bytes(length, device, precision) for length in (256, 1024)]
        assert found == [0, 0], (device, precision)


@pytest.mark.parametrize(
    ("overrides", "device", "precision", "elements"),
    [
        ([], "cuda", "fp32", 1 + 12 * 4),  # booleans, and 12 layers convert them
        (["model.dropout_fraction=0.1"], "cpu", "bf16", 1 + 3 * 2),
        (["model.attention_kernel=reference"], "cuda", "bf16", 1 + 12 * (3 * 12 + 3) * 2),  # 12 heads
        (["train.activation_checkpointing=block"], "cuda", "fp32", 1 + 3 * 4),
    ],
)
def test_what_is_made_for_every_pair_of_positions(
    overrides: list[str], device: str, precision: str, elements: int
) -> None:
    for length in (256, 512):
        assert attention_bytes(length, device, precision, *overrides) == 8 * length**2 * elements


def attention_bytes(length: int, device: str, precision: str, *overrides: str) -> int:
    config = load_config("quickstart", [
        "model.preset=gpt2-124m", f"data.sequence_length_tokens={length}", "train.micro_batch_sequences=8",
        "train.global_batch_sequences=8", f"precision.dtype={precision}", "data.document_mask=true", *overrides,
    ])  # fmt: skip
    spec = decoder_spec(config.model, tokenizer_vocab_size=50257, sequence_length_tokens=length)
    return memory_per_device(spec, config, device).mask_bytes


@pytest.mark.parametrize(
    ("model", "num_layers"),
    [
        ([], (0, 4)),
        (["model.sliding_window_tokens=512"], (4, 4)),
        (["model.sliding_window_tokens=512", "model.layer_types=[sliding_attention, full_attention]"], (2, 4)),
        (["model.sliding_window_tokens=1024"], (0, 4)),
    ],
)
def test_a_window_shorter_than_the_row_has_a_mask(model: list[str], num_layers: tuple[int, int]) -> None:
    """A flash kernel for full attention has none; with document masks, each kind of layer has one."""
    for is_packed, expected in zip((False, True), num_layers, strict=True):
        overrides = [*model, "data.sequence_length_tokens=1024", f"data.document_mask={str(is_packed).lower()}"]
        config = load_config("quickstart", ["model.num_layers=4", *overrides])
        spec = decoder_spec(config.model, tokenizer_vocab_size=4096, sequence_length_tokens=1024)
        pairs = config.train.micro_batch_sequences * 1024**2
        kinds = 2 if is_packed and "layer_types" in str(model) else min(1, expected)
        assert memory_per_device(spec, config).mask_bytes == pairs * (kinds + 4 * expected), overrides
        assert memory_per_device(spec, config, "cpu").mask_bytes == 0, overrides


@pytest.mark.parametrize(
    ("overrides", "available_gib", "key"),
    [
        (["data.sequence_length_tokens=1000000"], 16, "data.sequence_length_tokens"),
        (["train.micro_batch_sequences=12", "train.global_batch_sequences=12"], 1, "train.micro_batch_sequences"),
    ],
)
def test_a_step_beyond_the_host_is_refused_with_a_setting_that_fits(
    overrides: list[str], available_gib: int, key: str
) -> None:
    def check(more: list[str]) -> None:
        config = load_config("quickstart", ["data.sequence_length_tokens=2048", *overrides, *more])
        spec = decoder_spec(config.model, tokenizer_vocab_size=4096, sequence_length_tokens=2048)
        check_host_memory(spec, config, available_gib << 30)

    with pytest.raises(DoesNotFitError) as caught:
        check([])
    assert caught.value.exit_code == 3
    named = [word for word in caught.value.hint.split() if "=" in word]
    assert key in {word.split("=")[0] for word in named}
    for word in named:
        check([word])


def test_a_model_beyond_the_host_is_refused_with_no_other_remedy() -> None:
    config = load_config("quickstart", [])
    spec = decoder_spec(config.model, tokenizer_vocab_size=4096, sequence_length_tokens=256)
    with pytest.raises(DoesNotFitError, match=r"model\.num_layers"):
        check_host_memory(spec, config, memory_per_device(spec, config).optimizer_bytes)


def test_devices_of_one_host_share_its_memory() -> None:
    """Each holds what one alone does, but for the copy for a checkpoint, which one replica makes."""
    settings = ["train.micro_batch_sequences=1", "train.global_batch_sequences=4"]
    config = load_config("quickstart", settings)
    spec = decoder_spec(config.model, tokenizer_vocab_size=4096, sequence_length_tokens=256)
    alone = memory_per_device(spec, config, "cpu")
    needed_bytes = 4 * alone.total_bytes + alone.snapshot_bytes
    check_host_memory(spec, config, needed_bytes, num_devices=4, num_local_devices=4)
    check_host_memory(spec, config, alone.total_bytes_on("cpu"), num_devices=4)
    with pytest.raises(DoesNotFitError, match="on each of 4 devices") as refused:
        check_host_memory(spec, config, needed_bytes - 1, num_devices=4, num_local_devices=4)
    assert "parallel.fsdp_size=4" in refused.value.hint
    sharded = load_config("quickstart", [*settings, "parallel.fsdp_size=4"])
    check_host_memory(spec, sharded, needed_bytes - 1, num_devices=4, num_local_devices=4)
