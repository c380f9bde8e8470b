"""Everything that the loop needs, opened for one process and closed after it.

In: an open run directory, what the run is made from, and the state that it stands in. Out: the parts of the loop. The
main process writes; the others of a run take the same steps and keep what they say to themselves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import Any

from vorox.core.config import config_digest, flat_values
from vorox.core.counted import counted
from vorox.core.disk_errors import explained_machine_errors
from vorox.core.distributed_context import DistributedContext
from vorox.core.errors import VoroxError
from vorox.core.log import RunLog
from vorox.core.records import Progress
from vorox.core.redaction import redact_value
from vorox.core.run_context import RunContext
from vorox.data.loader import BatchStream
from vorox.data.plan import Plan
from vorox.data.storage.waiting import told_of_waits
from vorox.experiments.tracking import Tracker
from vorox.models import flops, memory
from vorox.models.huggingface import huggingface_files
from vorox.models.spec import ModelSpec
from vorox.runtime.ceiling import measure_ceiling, training_shapes
from vorox.runtime.device_peaks import peak_flops_per_second
from vorox.runtime.throughput import Limits, Throughput, Work
from vorox.training import feed, resume, sampling, user_functions
from vorox.training.agreement import Agreement
from vorox.training.beginning import tell_plan
from vorox.training.chain import ReplayChain
from vorox.training.checkpointer import Checkpointer
from vorox.training.checkpointing import RunState
from vorox.training.disk_room import check_checkpoint_room
from vorox.training.display import Display
from vorox.training.evaluate import Evaluations
from vorox.training.forensics import Forensics
from vorox.training.ledger import Ledger
from vorox.training.mirror import Mirrored
from vorox.training.observer import Observer, Queue
from vorox.training.provenance import Provenance, open_provenance
from vorox.training.run import Run
from vorox.training.saving import validations_without_save
from vorox.training.schedule import Horizon, Schedule
from vorox.training.setting import Setting
from vorox.training.stop import StopRequest

DETERMINISM = {
    "D0": "nothing is promised",
    "D1": "the same batches, not the same bits",
    "D2": "the same bits on this machine",
}

_MAX_MEASURED_POSITIONS = 1 << 15
"""Longer products run at the same rate and would hold up the first step."""
_LONG_STEP_SECONDS = 30
"""A step that cannot be faster is announced, because nothing is shown before the first one is done."""


@contextlib.contextmanager
def open_log(run: RunContext, display: Display, distributed: DistributedContext) -> Generator[RunLog]:
    """The log of this attempt, which also takes what libraries say and the error that ends the run.

    While it is open, the display shows what data is waited for.
    """
    log = RunLog(run.directory, distributed=distributed, attempt=run.attempt, echo=display.message)
    try:
        with log.capture(), told_of_waits(lambda wait: display.waiting(None if wait is None else str(wait))):
            yield log
    except BaseException as error:
        log.exception(error)
        raise
    finally:
        log.close()


@contextlib.contextmanager
def open_session(
    setting: Setting,
    run: RunContext,
    state: RunState,
    plan: Plan,
    display: Display,
    stop: StopRequest,
    mirror: Mirrored,
) -> Generator[tuple[Run, Progress]]:
    """The parts of the loop, and where it starts."""
    config, corpus, engine = setting.config, setting.corpus, setting.engine
    progress, total_steps, dist = state.progress, state.horizon.total_steps, setting.distributed
    if dist.is_main:
        check_checkpoint_room(run.directory, config, setting.spec, total_steps, progress.step)
    validation = feed.validation_set(config, corpus)
    if validation is not None and dist.process_count > 1 and (risk := validations_without_save(config)):
        setting.log.event("validation_without_save", risk, level="warning")
    byte_lengths = corpus.tokenizer.token_byte_lengths() if corpus.tokenizer.lossless else None
    evaluations = Evaluations(
        run.directory, config.eval, total_steps, progress, batches=validation,
        token_byte_lengths=byte_lengths, writes=dist.is_main,
        custom=user_functions.open_evaluations(engine, corpus.tokenizer, config, setting.spec, setting.log),
    )  # fmt: skip
    checkpointer = _checkpointer(setting, run, state, evaluations, mirror)
    if dist.is_main:
        corpus.tokenizer.save(run.layout.tokenizer)
    facts = resume.environment(engine)
    setting.log.event(
        "engine",
        f"{setting.spec.num_parameters:,} parameters on {facts.get('device', engine.name)}, "
        f"{counted(total_steps, 'step')}; determinism {facts['determinism']}: {DETERMINISM[str(facts['determinism'])]}",
        environment=facts,
    )
    tracker = Tracker.open(
        run.directory, config.log, attempt=run.attempt, resume_step=progress.step, distributed=dist, log=setting.log,
        settings=redact_value(flat_values(config)),
    )  # fmt: skip
    with (
        contextlib.closing(tracker),
        mirror.following(run.directory, progress.step, evaluations.losses, setting.log),
        open_provenance(run, config.log, progress, plan, feed.plan_readers(plan, corpus), setting.log) as provenance,
        feed.training_batches(
            config, corpus, plan, engine.data_shard, progress.cursor, total_steps=total_steps,
            stop=lambda: bool(stop.requested), tell=tell_plan(setting.log), decides=dist.is_main,
        ) as batches,
    ):  # fmt: skip
        observer = _observer(setting, tracker, display, state.horizon, batches, checkpointer, provenance, mirror)
        chain = ReplayChain(run.directory, progress, writes=dist.is_main)
        alone = engine if dist.process_count == 1 else None
        forensics = Forensics(run.directory, alone, setting.log, writes=dist.is_main)
        ledger = Ledger(
            chain,
            max_nonfinite_steps=config.train.max_nonfinite_steps,
            nonfinite_in_a_row=state.nonfinite_in_a_row,
            on_start=observer.started,
            on_step=observer.step,
            on_nonfinite=lambda step, values, in_a_row, is_last: forensics.record(
                step, values, in_a_row, is_last=is_last
            ),
        )
        schedule = Schedule.of(config.schedule, config.optimizer, state.horizon)
        agreement = Agreement(dist, engine.data_shard, stop, checkpointer.due, chain)
        parts = Run(engine, batches, schedule, ledger, checkpointer, evaluations, observer, agreement)
        try:
            with explained_machine_errors(run.directory), checkpointer:
                yield parts, evaluations.best(progress)
        except VoroxError as error:
            error.saved = error.saved or checkpointer.safe()
            raise


def _checkpointer(
    setting: Setting, run: RunContext, state: RunState, evaluations: Evaluations, mirror: Mirrored
) -> Checkpointer:
    tokenizer, step = setting.corpus.tokenizer, state.progress.step
    return Checkpointer(
        run.directory,
        setting.config.checkpoint,
        state.horizon,
        describe=_description(setting),
        companions={
            **huggingface_files(setting.spec, end_of_text_id=tokenizer.end_of_text_id),
            **tokenizer.files(setting.spec.max_positions_tokens),
        },
        eval_losses=evaluations.losses,
        saved_step=step if run.layout.checkpoint(step).exists() else None,
        log=setting.log,
        on_committed=mirror.committed,
        on_removed=mirror.removed,
        distributed=setting.distributed,
    )


def _description(setting: Setting) -> dict[str, Any]:
    """What every manifest says about the run."""
    return {
        "backend": setting.config.backend,
        "spec": setting.spec.to_json(),
        "config_digest": config_digest(setting.config),
        "settings": resume.settings_for_manifest(setting.config),
        "tokenizer": setting.corpus.tokenizer.fingerprint,
        "environment": resume.environment(setting.engine),
        user_functions.MANIFEST_KEY: user_functions.identities(setting.config),
    }


def _observer(
    setting: Setting,
    tracker: Tracker,
    display: Display,
    length: Horizon,
    batches: BatchStream,
    checkpointer: Checkpointer,
    provenance: Provenance,
    mirror: Mirrored,
) -> Observer:
    config, tokenizer = setting.config, setting.corpus.tokenizer
    settings = sampling.SamplingSettings(
        max_new_tokens=config.eval.sample_tokens,
        temperature=config.eval.sample_temperature,
        top_k=config.eval.sample_top_k,
        seed=config.run.seed,
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id,
        max_positions_tokens=setting.spec.max_positions_tokens,
    )
    for prompt, ids in zip(config.eval.prompts, sampling.encode_prompts(tokenizer, config.eval.prompts), strict=True):
        sampling.check_prompt(ids, settings, where=f"eval.prompts: {prompt!r}")
    device_kind = str(setting.engine.environment().get("device_kind", ""))
    return Observer(
        log=setting.log,
        tracker=tracker,
        display=display,
        throughput=Throughput(_limits(setting)),
        work=functools.cache(functools.partial(_work, setting.spec, setting.config.data.document_mask)),
        provenance=provenance,
        horizon=length,
        every_steps=config.log.every_steps,
        rows_per_epoch=max(
            1, round(feed.dataset_size(config, setting.corpus).rows * config.train.epoch_dataset_fraction)
        ),
        vocab_size=setting.spec.vocab_size,
        engine=setting.engine,
        queue=Queue(
            wait_seconds=lambda: batches.wait_seconds,
            depth=lambda: batches.queue_depth,
            capacity=config.data.loader.prefetch_batches if config.data.loader.num_threads else 0,
            building=setting.corpus.streams.metrics if setting.corpus.streams is not None else dict[str, float],
        ),
        complete=lambda engine: sampling.complete(engine, tokenizer, config.eval.prompts, settings),
        seconds_since_save=checkpointer.seconds_since_save,
        planned_memory_bytes=float(memory.planned_memory(setting.spec, config).total_bytes_on(device_kind)),
        mirror=mirror.metrics,
        measure_ceiling=(lambda: _matmul_ceiling(setting)) if _measures_ceiling(setting) else None,
    )


def _work(spec: ModelSpec, document_mask: bool, num_tokens: int, row_tokens: int) -> Work:
    """Return the arithmetic of a step of ``num_tokens`` positions in rows of ``row_tokens``."""
    # Where documents are kept apart, most of the attention may be skipped; the matrices never.
    least = 6.0 * flops.num_matmul_weights(spec) if document_mask else flops.causal_flops_per_token(spec, row_tokens)
    return Work(num_tokens, num_tokens * flops.flops_per_token(spec, row_tokens), num_tokens * least)


def _limits(setting: Setting) -> Limits:
    """Return what the speed is held against, over all devices: the data sheet and the measured matmul rate."""
    config, facts = setting.config, setting.engine.environment()
    dtype = config.precision.dtype
    arithmetic = "tf32" if dtype == "fp32" and config.precision.matmul == "tf32" else dtype
    peak = peak_flops_per_second(str(facts.get("device", "")), arithmetic)
    ceiling = _matmul_ceiling(setting) if _measures_ceiling(setting) else None
    if ceiling is not None:
        row_tokens = config.data.sequence_length_tokens
        num_tokens = config.train.global_batch_sequences * row_tokens
        work = _work(setting.spec, config.data.document_mask, num_tokens, row_tokens)
        seconds = work.least_flops / ceiling
        if seconds > _LONG_STEP_SECONDS:
            setting.log.info(f"A step of {counted(num_tokens, 'token')} takes at least {seconds:,.0f} s at this rate")
    return Limits(
        peak_flops_per_second=None if peak is None else peak * config.parallel.num_devices,
        ceiling_flops_per_second=ceiling,
    )


def _measures_ceiling(setting: Setting) -> bool:
    return setting.config.log.matmul_ceiling and setting.distributed.is_main


def _matmul_ceiling(setting: Setting) -> float:
    """Measure, in a moment before step 1, the matmul rate of all devices of the run on the matrices of this model."""
    config, spec = setting.config, setting.spec
    weights = [row.shape for row in spec.parameters if row.kind == "matrix"] + [(spec.vocab_size, spec.hidden_size)]
    positions = min(config.train.micro_batch_sequences * config.data.sequence_length_tokens, _MAX_MEASURED_POSITIONS)
    shapes = training_shapes([(shape[0], shape[1]) for shape in weights], positions)
    measured = measure_ceiling(shapes, setting.engine.matmul_seconds, warmup_seconds=0.0, repeats=3)
    setting.log.info(f"Matrix products of this model run at {measured.flops_per_second / 1e9:,.0f} GFLOP/s here")
    # One device was measured. The devices of one process on the CPU share its cores.
    on_cpu = setting.engine.environment().get("device_kind") == "cpu"
    return measured.flops_per_second * (setting.distributed.process_count if on_cpu else config.parallel.num_devices)
