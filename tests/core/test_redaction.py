"""Secrets go, whatever stands around them; what is no secret stays."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vorox
from processor_cost import cost
from vorox.core.redaction import MARK, redact, redact_arguments, redact_value

CANARY = "hunter2CANARY"
LEAKS = [
    f"postgresql://alice:{CANARY}@db.example.org:5432/meta",
    f"could not connect to postgresql://alice:{CANARY}@db/meta?sslmode=require (timeout)",
    f"postgres://alice:p@ss/{CANARY}@db/meta",
    f"https://alice:{CANARY}@github.example.org/repo.git",
    f"https://{CANARY}@github.example.org/repo.git",
    f"s3://key:{CANARY}@bucket/path",
    f"hf_{CANARY}abcdefghijklmnop",
    f"token hf_{CANARY}",
    f"AKIA{'ABCDEFGH'}{'12345678'} {CANARY}".replace(f" {CANARY}", ""),
    f"sk-{CANARY}",
    f"sk-proj-{CANARY}_x",
    f"ghp_{CANARY}abcdef",
    f"Authorization: Bearer {CANARY}",
    f"{{'Authorization': 'Basic {CANARY}='}}",
    f"authorization: {CANARY}",
    f"curl -H 'bearer {CANARY}'",
    f"password={CANARY}",
    f"PASSWORD = '{CANARY} with blanks'",
    f'{{"db_password": "{CANARY}"}}',
    f'{{\\"db_password\\": \\"{CANARY} and more\\"}}',
    f"Settings(api_key='{CANARY}', step=5)",
    f"aws_secret_access_key: {CANARY}",
    f"AWS_ACCESS_KEY_ID={CANARY}",
    f"my_token={CANARY}",
    f"HF_TOKEN: {CANARY}",
    f"accessToken={CANARY}",
    f"PGPASSWORD={CANARY}",
    f"Server=x;Uid=y;Pwd={CANARY};",
    f"key={CANARY}",
    f"AccountKey={CANARY}==;EndpointSuffix=core",
    f"https://bucket.s3.amazonaws.com/x?X-Amz-Credential={CANARY}&X-Amz-Signature={CANARY}&X=1",
    f"https://account.blob.core.windows.net/x?sv=1&sig={CANARY}",
    f"vorox train --hf-token {CANARY} --steps 5",
    f"--db.password {CANARY}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{CANARY}\nabc\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{CANARY} cut off",
    f'    if password == "{CANARY}":',
    f"client_secret => {CANARY}",
    f"log.webhook=https://chat.example.org/x/{CANARY}",
    f"--log.webhook=ftp://chat.example.org/{CANARY}",
    f'"webhook": "https://chat.example.org/{CANARY}"',
    f"posting to https://chat.example.org:8065/hooks/{CANARY}abcdefgh failed",
    f"https://x.webhook.office.com/webhookb2/{CANARY}",
    f"SMTP_PASS={CANARY}",
    f"pass={CANARY}",
    f"user=alice pass = '{CANARY} with blanks'",
    f"https://db.example.org/x?user=alice&pass={CANARY}&step=5",
    f"smtp_pass={CANARY}",
    f"--db.pass={CANARY}",
    f"vorox train --db-pass {CANARY}",
    f'{{"pass": "{CANARY}"}}',
    f"{{'dbPass': '{CANARY}'}}",
    f"Server=x;pw={CANARY};",
    f"alice:{CANARY}@db.example.org:5432/meta",
    f"psql alice:{CANARY}@db/meta failed",
    f"--database=alice:p@{CANARY}!@10.0.0.5",
    f"al.ice-1:{CANARY}@localhost",
    f"GITHUB_PAT: {CANARY}",
    f"java -Dpassword={CANARY} -jar x",
    f"\x1b[0mpassword={CANARY}\x1b[1m",
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIi{CANARY}.abc",
]
HARMLESS = [
    "Step   770/26,235 ( 2.9%) | Loss: 5.583 | 106,212 tok/s | ETA: 04:23h",
    "train.num_tokens=1e9 data.sequence_length_tokens=256 num_tokens: 81,920",
    "tokens 403.7M / 1.00B | epoch 0.41 | lr 5.3e-04",
    "tokenizer=byte, tokenizer: /data/tokenizer.json, tokenization: fast",
    "end_of_text_token=<|endoftext|>",
    "there is no key optimizer.lrr; unknown key: optimizer.lrr",
    "https://host.example.org:443/path?x=1",
    "https://example.org/repo@v1.0",
    "Source 'web' grew: used from pass 2 on; forward pass: bf16, backward_pass=recomputed, pass=2, pass = True",
    "num_passes=3 passes=whole bypass=on pass: whole; one_pass=segments",
    "write to bob@example.org, mailto:bob@example.org/x, Email:bob@example.org and From:a.b@example.org:25",
    "Tim:tim@example.org wrote at 12:30@5, git@github.com:org/repo.git, vorox:1.2@sha256:12345678",
    "/data/a:b@c/d.txt C:/data/x@y/z hf://datasets/org/name@main/train.jsonl user@host:/path web:0.7,code:0.3@0",
    "see hf_export and hf_transformers, task-12345678",
    "token id 5000 >= vocabulary 4096 in the secret garden of passwords",
    "num_kv_heads=4 blocks.0.attention.key.weight (256, 256) key_norm",
    "plan digest 7d865e959b2466918c9863afca942d0fb89d7c9ac0c99bafc3749504ded97730",
    "max_positions_tokens: null, row_tokens=257",
]


@pytest.mark.parametrize("text", LEAKS)
def test_secrets_go(text: str) -> None:
    clean = redact(text)
    assert CANARY not in clean
    assert "ABCDEFGH12345678" not in clean
    assert MARK in clean
    assert redact(clean) == clean, "redacting twice is redacting once"


@pytest.mark.parametrize("text", LEAKS)
@pytest.mark.parametrize("frame", ["{}", "error: ({}) at step 5", "x={}", '["{}"]', "a\n{}\nb"])
def test_secrets_go_in_any_frame(text: str, frame: str) -> None:
    assert CANARY not in redact(frame.replace("{}", text))


def _advice() -> list[str]:
    """Every ``hint`` that the source code gives, with VALUE for what is filled in."""

    def text_of(node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(text_of(part) for part in node.values)
        return "VALUE" if isinstance(node, ast.FormattedValue) else ""

    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(vorox.__file__).parent.rglob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [text_of(word.value) for call in calls for word in call.keywords if word.arg == "hint"]


def test_our_own_advice_stays() -> None:
    advice = _advice()
    assert "write settings as section.key=VALUE" in advice
    assert [text for text in advice if redact(text) != text] == []


@pytest.mark.parametrize("text", HARMLESS)
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


def test_what_surrounds_a_secret_stays() -> None:
    assert redact("alice:b@db:5432/meta is down, pass=x, lr=0.1") == f"{MARK}@db:5432/meta is down, pass={MARK}, lr=0.1"
    assert redact("step 5: postgresql://a:b@db:5432/meta is down, lr=0.1") == (
        f"step 5: postgresql://{MARK}@db:5432/meta is down, lr=0.1"
    )
    assert redact('{"api_key": "abc", "step": 5}') == f'{{"api_key": "{MARK}", "step": 5}}'
    assert redact("f(token=abc123, step=5)") == f"f(token={MARK}, step=5)"


def test_values_of_sensitive_environment_variables_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plainlookingvalue")
    monkeypatch.setenv("MY_NUM_TOKENS", "12345678")
    assert redact("sent plainlookingvalue, 12345678 tokens") == f"sent {MARK}, 12345678 tokens"


@pytest.mark.parametrize("path", ["{home}/token.json", "~/token.json"])
def test_a_file_that_an_environment_variable_names_is_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token.json").touch()
    named = path.format(home=tmp_path)
    monkeypatch.setenv("MY_SERVICE_TOKEN", named)
    assert redact(f"cannot read {named}") == f"cannot read {named}"
    (tmp_path / "token.json").unlink()
    assert redact(f"cannot read {named}") == f"cannot read {MARK}"


@pytest.mark.parametrize("first", ["A_SECRET", "Z_SECRET"])
def test_a_secret_that_another_begins_with_leaves_nothing_of_the_longer_one(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    second = "Z_SECRET" if first == "A_SECRET" else "A_SECRET"
    monkeypatch.setenv(first, "plainlooking")
    monkeypatch.setenv(second, "plainlookingvalue")
    assert redact("sent plainlookingvalue and plainlooking") == f"sent {MARK} and {MARK}"


@pytest.mark.parametrize(
    "prefix",
    [
        *("hf_", "api_org_", "sk-", "github_pat_", "ya29.", "glpat-", "npm_", "pypi-", "dop_v1_", "rk_live_"),
        *("sk_live_", "sk_test_", "gho_", "ghp_", "ghr_", "ghs_", "ghu_"),
        *("xoxa-", "xoxb-", "xoxe-", "xoxp-", "xoxr-", "xoxs-"),
    ],
)
def test_a_token_is_known_by_its_prefix_alone(prefix: str) -> None:
    assert redact(f"it was {prefix}{CANARY}{CANARY}, then") == f"it was {MARK}, then"


@pytest.mark.parametrize("prefix", ["AKIA", "ASIA", "ABIA", "ACCA", "AROA", "AIDA"])
def test_access_keys_of_amazon_are_known_by_their_prefix(prefix: str) -> None:
    assert redact(f"it was {prefix}ABCDEFGH1234, then") == f"it was {MARK}, then"
    assert redact(f"it was {prefix}ABCDEFGH123, then") == f"it was {prefix}ABCDEFGH123, then"


def test_keys_of_google_are_known_by_their_prefix() -> None:
    assert redact(f"it was AIza{'aB3_-' * 6}, then") == f"it was {MARK}, then"


def test_structures() -> None:
    value = {
        "num_tokens": 5,
        "password": 12345,
        "nested": [{"api_key": CANARY}, f"https://u:{CANARY}@h/x"],
        f"postgresql://u:{CANARY}@db/x": 1,
        "tokens": [CANARY],
        "hf_token": [CANARY],
        "loss": 1.5,
        "best": None,
    }
    clean = redact_value(value)
    assert clean["num_tokens"] == 5
    assert clean["loss"] == 1.5
    assert clean["best"] is None
    assert clean["tokens"] == [CANARY], "counts and lists of tokens are what this program works on"
    clean.pop("tokens")
    assert CANARY not in json.dumps(clean)
    assert "12345" not in json.dumps(clean)


def test_arguments() -> None:
    arguments = [
        "vorox",
        "train",
        "--password",
        CANARY,
        f"--token={CANARY}",
        "--train.num_tokens",
        "1000",
        "--json",
        "x",
    ]
    clean = redact_arguments(arguments)
    assert clean == [
        "vorox",
        "train",
        "--password",
        MARK,
        f"--token={MARK}",
        "--train.num_tokens",
        "1000",
        "--json",
        "x",
    ]


def test_what_follows_an_option_with_its_value_stays() -> None:
    assert redact_arguments([f"--password={CANARY}", "config.yaml"]) == [f"--password={MARK}", "config.yaml"]


@given(st.text(max_size=200))
def test_any_text_is_taken_and_redacting_is_idempotent(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@given(st.text(alphabet="pasword=:;\"' \\{}[]token,&key-@/\n", max_size=60))
def test_separators_in_any_order(text: str) -> None:
    once = redact(text)
    assert redact(once) == once


@pytest.mark.parametrize("piece", ["a", " ", "a ", "a=", "\\", "://", "a.", "-", "password=", '"', "@", "key:", "eyJ"])
def test_long_texts_cost_linear_time(piece: str) -> None:
    assert cost(lambda: redact(piece * 50_000), repeats=1) < 400
