"""Compare the model and the tokenizer of a run with those of its initial weights, before anything is built."""

from __future__ import annotations

from vorox.core.config.yaml.writer import write_overrides
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.data.tokenizers.loading import train as train_tokenizer
from vorox.data.tokenizers.store import load_untrained
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.models.decoder.spec import FREE_TO_CHANGE, DecoderSpec, decoder_spec
from vorox.models.huggingface.spec import KIND
from vorox.training.origin.model_origin import FROM_WEIGHTS, NAME_OR_PATH, ModelOrigin, find_origin


def check_origin(config: RunConfig, *, tokenizer: Tokenizer | None = None) -> None:
    """Check that model and tokenizer of a configuration match its initial weights.

    Args:
        config: The run.
        tokenizer: Its tokenizer; ``None`` loads it, unless it must be trained.

    Raises:
        ConfigError: The models or the tokenizers differ, or there are no weights at that location.
        CheckpointError: The weights are damaged.
        DataError: A tokenizer cannot be read or downloaded.
    """
    origin = find_origin(config)
    if origin is None and config.loss.name == "dpo" and config.model.kind == "decoder":
        raise ConfigError(
            "DPO needs trained weights to start from, which are its reference", where=FROM_WEIGHTS,
            hint="add --from-weights with a run, a checkpoint or a transformers directory",
        )  # fmt: skip
    if origin is None or origin.directory is None:
        return
    is_native = config.model.kind != KIND
    if is_native:
        _check_model(config, origin, None)
    elif not config.model.pretrained:
        return
    if tokenizer is None and (loaded := load_untrained(config.tokenizer)) is not None:
        tokenizer = loaded.with_special_tokens(config.tokenizer.special_tokens)
    if tokenizer is not None:
        if is_native:
            _check_room(config, origin, tokenizer.vocab_size)
            _check_model(config, origin, tokenizer.vocab_size)
        check_ids(config, origin, tokenizer)
    elif config.tokenizer.kind == "bpe":
        check_ids(config, origin, train_tokenizer(config.tokenizer, ()))  # training text does not change its ids
        if is_native and config.model.vocab_size is None:
            _check_trained_size(config.tokenizer.vocab_size, origin)


def check_tokenizer(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer gives ids the same tokens as the tokenizer of the initial weights.

    Raises:
        ConfigError: The tokenizers differ.
        CheckpointError: The weights are damaged.
        DataError: Their tokenizer cannot be read.
    """
    origin = find_origin(config)
    if origin is not None and (config.model.kind != KIND or config.model.pretrained):
        check_ids(config, origin, tokenizer)


def native_spec(origin: ModelOrigin) -> DecoderSpec:
    """Return the model of weights for the native decoder.

    Raises:
        ConfigError: It does not compute them.
    """
    if origin.spec is not None:
        return origin.spec
    assert origin.refusal is not None
    raise ConfigError(
        origin.refusal.what, where=origin.location,
        hint="add " + write_overrides({"model.kind": KIND, NAME_OR_PATH: origin.name, FROM_WEIGHTS: None}),
    ) from origin.refusal  # fmt: skip


def require_equal_models(
    theirs: DecoderSpec, ours: DecoderSpec, location: str, *, ignored: set[str] | None = None
) -> None:
    """Check that weights are of the configured model.

    Raises:
        ConfigError: Some keys differ; the message lists all.
    """
    free = FREE_TO_CHANGE | (ignored or set[str]())
    stored, here = theirs.settings(), ours.settings()
    if theirs.vision is None:  # an image encoder may be added
        here = {key: value for key, value in here.items() if not key.startswith("vision.")}
        stored.pop("vision.num_layers")
    keys = [key for key in {**here, **stored} if key not in free and stored.get(key) != here.get(key)]
    if keys:
        listed = ", ".join(f"{key} = {stored.get(key)} (here {here.get(key)})" for key in keys)
        wanted = write_overrides({f"model.{key}": stored.get(key) for key in keys})
        raise ConfigError(
            f"Weights at {location} belong to a different model: {listed}", where=FROM_WEIGHTS, hint=f"set {wanted}"
        )


def _check_model(config: RunConfig, origin: ModelOrigin, tokenizer_vocab_size: int | None) -> None:
    theirs = native_spec(origin)
    ours = decoder_spec(
        config.model,
        tokenizer_vocab_size=tokenizer_vocab_size or 1,
        sequence_length_tokens=config.data.sequence_length_tokens,
    )
    unknown = {"vocab_size"} if config.model.vocab_size is None and tokenizer_vocab_size is None else set[str]()
    if theirs.positions == "rope" and config.model.max_positions_tokens is None:
        unknown.add("max_positions_tokens")  # with rotary positions, no parameter depends on it
    require_equal_models(theirs, ours, origin.location, ignored=unknown)


def _check_room(config: RunConfig, origin: ModelOrigin, tokenizer_vocab_size: int) -> None:
    """Refuse a tokenizer with more tokens than the weights have rows, which the decoder does not add."""
    rows = native_spec(origin).vocab_size
    if tokenizer_vocab_size <= rows:
        return
    added = config.tokenizer.special_tokens
    remedies = [f"remove tokenizer.special_tokens={list(added)}"] if added else ["use the tokenizer of the weights"]
    if origin.is_transformers and origin.directory is not None:
        rows_added = write_overrides({"model.kind": KIND, "model.vocab_size": tokenizer_vocab_size})
        remedies.insert(0, f"to add rows, train with transformers: add {rows_added}")
    raise ConfigError(
        f"The tokenizer has {tokenizer_vocab_size:,} tokens, the embedding at {origin.location} {rows:,} rows",
        where="tokenizer.special_tokens" if added else "tokenizer", hint="; or ".join(remedies),
    )  # fmt: skip


def check_ids(config: RunConfig, origin: ModelOrigin, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer gives ids the same tokens as that of an origin; see ``check_tokenizer``."""
    settings = origin.tokenizer
    is_same = all(getattr(config.tokenizer, key) == value for key, value in settings.items())
    is_adapter = config.adapter.kind != "none"
    if is_same and not (is_adapter and config.tokenizer.special_tokens):
        return
    theirs = origin.load_tokenizer()
    if theirs is not None and is_adapter:
        _refuse_new_tokens(config, origin, tokenizer, theirs)
    conflict = None if theirs is None else theirs.first_conflict(tokenizer)
    if conflict is not None:
        raise ConfigError(
            f"Weights at {origin.location} were trained with another tokenizer: id {conflict} differs",
            where="tokenizer",
            hint="remove kind and path from the section tokenizer, so that it is taken from the weights; or add "
            + write_overrides({f"tokenizer.{key}": value for key, value in settings.items()}),
        )


def _refuse_new_tokens(config: RunConfig, origin: ModelOrigin, tokenizer: Tokenizer, theirs: Tokenizer) -> None:
    """Refuse tokens that the base does not know under an adapter, which leaves their rows as they are."""
    new = tokenizer.tokens_beyond(theirs)
    if not new:
        return
    added = config.tokenizer.special_tokens
    full: dict[str, object] = {"adapter.kind": "none"}
    if origin.num_rows is not None and origin.num_rows < tokenizer.vocab_size:
        full |= {"model.kind": KIND, "model.vocab_size": tokenizer.vocab_size}
    known = [token for token in added if token not in new]
    fewer = {"tokenizer.special_tokens": known} if added else {f"tokenizer.{k}": v for k, v in origin.tokenizer.items()}
    named = ", ".join(new[:4]) + (f" and {len(new) - 4:,} more" if len(new) > 4 else "")
    raise ConfigError(
        f"adapter.kind={config.adapter.kind} trains no rows of the embedding, and the tokens {named} "
        f"are new to {origin.location}: they would keep rows that nothing has trained",
        where="tokenizer.special_tokens" if added else "tokenizer",
        hint=f"to train their rows with all weights, add {write_overrides(full)}; or use the tokens that the base "
        f"knows: {write_overrides(fewer)}",
    )  # fmt: skip


def _check_trained_size(largest: int, origin: ModelOrigin) -> None:
    """Refuse a tokenizer whose vocabulary would stay smaller than that of the weights."""
    if origin.spec is not None and largest < origin.spec.vocab_size:
        raise ConfigError(
            f"Weights at {origin.location} have a vocabulary of {origin.spec.vocab_size:,}, "
            f"tokenizer.vocab_size={largest:,} is smaller",
            where="tokenizer.vocab_size",
            hint="remove kind and path from the section tokenizer, so that it is taken from the weights",
        )
