"""Secret values in text that leaves a process."""

from __future__ import annotations

from typing import Any

import pytest

from relit_storage.run.redaction import Redactor, holds_credentials, is_secret_name

ENVIRONMENT = {
    "WANDB_API_KEY": "abcdef123456",
    "HF_TOKEN": "hf_long_value_9",
    "MY_SEED_PHRASE": "correct horse battery",
    "NUM_TOKENS": "1000000",
    "PATH": "/usr/bin:/bin",
    "DB_PASSWORD": "no",
}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("key=abcdef123456!", "key=[WANDB_API_KEY]!"),
        ("token hf_long_value_9", "token [HF_TOKEN]"),
        ("1000000 tokens in /usr/bin:/bin", "1000000 tokens in /usr/bin:/bin"),
        ("said correct horse battery", "said [MY_SEED_PHRASE]"),
        ("s3://user:pass@bucket/x", "s3://[redacted]@bucket/x"),
        ("no is too short to be masked", "no is too short to be masked"),
    ],
)
def test_values_of_secret_variables_are_masked(text: str, masked: str) -> None:
    redactor = Redactor.from_environment(("MY_SEED_PHRASE",), ENVIRONMENT)
    assert redactor.text(text) == masked


def test_data_is_masked_at_every_depth() -> None:
    redactor = Redactor.from_environment((), ENVIRONMENT)
    data: dict[str, Any] = {"a": ["abcdef123456", 3], "b": {"c": "x hf_long_value_9"}, "n": None}
    assert redactor.data(data) == {
        "a": ["[WANDB_API_KEY]", 3],
        "b": {"c": "x [HF_TOKEN]"},
        "n": None,
    }


@pytest.mark.parametrize(
    ("name", "secret"),
    [("api_key", True), ("hfToken", True), ("bos_token", False), ("key_dim", False)],
)
def test_names(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_credentials_in_a_url() -> None:
    assert holds_credentials("s3://a:b@c") and not holds_credentials("s3://bucket/a@b")


def test_working_folders_are_no_secrets() -> None:
    environment = {"PWD": "/somewhere/me/work", "OLDPWD": "/somewhere/me", "DB_PWD": "hunter22"}
    redactor = Redactor.from_environment((), environment)
    assert redactor.text("/somewhere/me/work hunter22") == "/somewhere/me/work [DB_PWD]"
