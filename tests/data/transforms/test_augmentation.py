"""Augmentation: documents rearranged or thinned out, by random numbers that depend on their location."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from vorox.core.schema.data import TRANSFORMS
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.tokenizers.loading import train
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.data.transforms import augmentation
from vorox.data.transforms.augmentation import fill_in_the_middle, local_model, token_dropout
from vorox.data.transforms.identity import generator_at
from vorox.data.transforms.registry import BUILT_IN, required_special_tokens

SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
TEXT = "def add(a, b):\n    return a + b  # être\n" * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TokenizerConfig(vocab_size=270), [TEXT * 20]).with_special_tokens(SENTINELS)


def draws(ordinal: int) -> np.random.Generator:
    return generator_at(7, "0/test", "version", ordinal, 0)


@pytest.mark.parametrize("level", ["character", "token"])
def test_the_pieces_of_a_document_make_the_document(tokenizer, level):
    prefix, suffix, middle = (tokenizer.special_id(token) for token in SENTINELS)
    forms = {"plain": 0, "psm": 0, "spm": 0}
    cuts = set()
    for ordinal in range(400):
        ids = tokenizer.encode(TEXT)
        found = fill_in_the_middle(ids, draws(ordinal), tokenizer=tokenizer, text=TEXT, rate=0.6, spm_rate=0.5,
                                   level=level).tolist()  # fmt: skip
        if prefix not in found:
            assert found == ids.tolist()
            forms["plain"] += 1
            continue
        assert found[0] == prefix
        assert (found.count(prefix), found.count(suffix), found.count(middle)) == (1, 1, 1)
        at_suffix, at_middle = found.index(suffix), found.index(middle)
        if at_suffix == 1 and ordinal:
            forms["spm"] += 1
            after, rest = found[2:at_middle], found[at_middle + 1 :]
            pieces = tokenizer.decode(rest) + tokenizer.decode(after)
        else:
            forms["psm"] += 1
            before, after, gap = found[1:at_suffix], found[at_suffix + 1 : at_middle], found[at_middle + 1 :]
            pieces = tokenizer.decode(before) + tokenizer.decode(gap) + tokenizer.decode(after)
            cuts.add(len(tokenizer.decode(before)))
        assert pieces == TEXT or level == "token"  # tokens may cut a character of several bytes
        if level == "token":
            assert sorted(found) == sorted([*ids.tolist(), prefix, suffix, middle])
    assert 120 < forms["plain"] < 200  # 160 expected, 40 is 4 standard deviations
    assert 80 < forms["psm"] < 160
    assert 80 < forms["spm"] < 160
    assert len(cuts) > 20


def test_rate_0_and_rate_1(tokenizer):
    ids = tokenizer.encode(TEXT)
    for ordinal in range(20):
        arguments = {"tokenizer": tokenizer, "text": TEXT}
        assert fill_in_the_middle(ids, draws(ordinal), **arguments, rate=0.0) is ids
        assert len(fill_in_the_middle(ids, draws(ordinal), **arguments, rate=1.0, level="token")) == len(ids) + 3


def test_an_empty_document_can_be_turned_too(tokenizer):
    empty = tokenizer.encode("")
    found = fill_in_the_middle(empty, draws(0), tokenizer=tokenizer, text="", rate=1.0, spm_rate=0.0)
    assert found.tolist() == [tokenizer.special_id(token) for token in SENTINELS]


def test_dropout_leaves_the_others_in_order_and_hits_its_fraction(tokenizer):
    ids = np.arange(20_000)
    left = token_dropout(ids, draws(0), tokenizer=tokenizer, fraction=0.25)
    assert np.all(np.diff(left) > 0)
    assert abs(len(left) - 15_000) < 6 * np.sqrt(20_000 * 0.25 * 0.75)
    replaced = token_dropout(ids, draws(0), tokenizer=tokenizer, fraction=0.25, replacement=SENTINELS[0])
    assert len(replaced) == len(ids)
    assert np.array_equal(replaced[replaced == ids], left[: len(left)])
    assert set(replaced[replaced != ids].tolist()) == {tokenizer.special_id(SENTINELS[0])}
    assert np.array_equal(token_dropout(ids, draws(0), tokenizer=tokenizer, fraction=0.0), ids)


def test_draws_depend_on_everything_that_names_the_place():
    first = generator_at(1, "0/a", "v", 3, 0).random(4).tolist()
    assert generator_at(1, "0/a", "v", 3, 0).random(4).tolist() == first
    others = [(2, "0/a", "v", 3, 0), (1, "1/a", "v", 3, 0), (1, "0/a", "w", 3, 0), (1, "0/a", "v", 4, 0),
              (1, "0/a", "v", 3, 1)]  # fmt: skip
    assert all(generator_at(*place).random(4).tolist() != first for place in others)


def test_draws_are_frozen():
    """Caches that were built with draws stay valid only while these do."""
    key = hashlib.blake2b(b'["transform/1",0,"0/token_dropout","abc",5,0]', digest_size=16).digest()
    by_hand = np.random.Generator(
        np.random.Philox(key=[int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")])
    )
    draws_here = generator_at(0, "0/token_dropout", "abc", 5, 0).integers(0, 1 << 62, 2).tolist()
    assert draws_here == by_hand.integers(0, 1 << 62, 2).tolist()
    assert draws_here[0] == 2086113061972204525


def test_sentinels_that_are_needed_are_named():
    names = {"prefix": "a", "suffix": "b", "middle": "c"}
    assert required_special_tokens("fill_in_the_middle", names) == ("a", "b", "c")
    assert required_special_tokens("token_dropout", {"replacement": None}) == ()
    assert required_special_tokens("token_dropout", {"replacement": "x"}) == ("x",)
    assert required_special_tokens("length", {}) == ()


def test_every_built_in_transform_has_a_row() -> None:
    assert tuple(BUILT_IN) == TRANSFORMS


@pytest.mark.slow
def test_a_model_of_this_machine_writes_another_version(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = train(TokenizerConfig(kind="byte"), [])
    tokenizer.save(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    arguments = {"path": str(tmp_path), "weights_version": "1", "prompt": "{text}!", "max_new_tokens": 5}
    augmentation._generate.cache_clear()
    found = local_model("hello", **arguments)
    assert found[0] == "hello"
    assert len(found) <= 2
    assert local_model("hello", **arguments) == found
    assert local_model("hello", **arguments, keep_original=False) == found[1:]
