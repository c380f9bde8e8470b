"""Find the tokenizer of the caches that ``data.cache.grow`` extends.

A tokenizer that is trained on the text changes when files are added, and the caches of another tokenizer are other
caches. So new files join the existing caches only with the tokenizer of those. The settings and today's sources go in;
the stored tokenizer whose caches hold the most of their files comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from vorox.core.errors import DataError
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig
from vorox.data.corpus.cache_location import find_location
from vorox.data.corpus.cache_opener import recipe_for
from vorox.data.images.layout import image_layout
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source
from vorox.data.tokenizers.store import stored_with_same_settings, with_chat_template
from vorox.data.tokenizers.tokenizer import Tokenizer


def growing_tokenizer(
    config: RunConfig,
    sources: Sequence[Source],
    weights: Sequence[Fraction],
    root: Path,
    *,
    force_rebuild: bool = False,
) -> tuple[Tokenizer | None, list[Note]]:
    """Return the stored tokenizer whose caches hold the most files of the sources; ``None`` if no cache grows.

    A note names it if it was trained on other files than today's; between equals, the one of today's files is taken.

    Args:
        config: The configuration.
        sources: The listed training sources with their holdout rules.
        weights: Their mixture weights.
        root: Root directory of the caches.
        force_rebuild: Whether every cache is rebuilt, so that none needs to be extended.

    Raises:
        DataError: The only caches were built from files that have changed or are missing.
    """
    if not config.data.cache.grow or config.tokenizer.kind != "bpe":  # a character vocabulary must cover all text
        return None, []
    found: list[tuple[int, bool, str, Tokenizer]] = []
    problem: DataError | None = None
    for tokenizer, is_exact in stored_with_same_settings(config.tokenizer, config.data, sources, weights, root):
        num_files = 0
        for source in sources:
            try:
                num_files += _num_cached_files(config, source, tokenizer, root)
            except DataError as error:
                problem = problem or error
        if num_files:
            found.append((num_files, is_exact, tokenizer.fingerprint, tokenizer))
    if not found:
        if problem is not None and not force_rebuild:
            raise problem
        return None, []
    num_files, is_exact, fingerprint, tokenizer = max(found, key=lambda one: one[:3])
    if is_exact:
        return tokenizer, []
    files = pluralize(sum(len(source.files) for source in sources), "file")
    text = f"keeps tokenizer {fingerprint[:16]}, trained on earlier files: its caches hold {num_files:,} of {files}"
    return tokenizer, [Note("tokenizer", f"data.cache.grow {text}")]


def _num_cached_files(config: RunConfig, source: Source, tokenizer: Tokenizer, root: Path) -> int:
    """Return the number of files in the training cache of a source and a tokenizer that new files would join."""
    if source.config.chat_fields:
        source = replace(source, chat_template=with_chat_template(tokenizer, config.tokenizer).chat_template)
    recipe = recipe_for(config.data, source, "train", tokenizer, images=image_layout(config.model))
    return find_location(root, source, "train", recipe, config.data, grow=True).num_files
