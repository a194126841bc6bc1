from __future__ import annotations

from typing import Any

import pytest

from relit.errors import SecretInSpecError, SpecError
from relit.spec.model import JobSpec
from relit.spec.secret_guard import Redactor, is_secret_name, refuse

BASE: dict[str, Any] = {"name": "a", "entry": "b:c"}
SECRET = "value-that-must-not-travel"

SECRET_NAMES = [
    "password", "db_passwd", "HF_TOKEN", "hfToken", "AWS_SECRET_ACCESS_KEY", "api_key", "apiKey",
    "WANDB_API_KEY", "private-key", "auth_token", "credentials", "token", "client_secret",
]  # fmt: skip
PLAIN_NAMES = [
    "tokenizer", "num_tokens", "max_tokens", "key_dim", "eos_token", "pad_token", "tokens_per_s",
    "keyboard", "attention_key", "bits_per_token", "author",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_secret_names_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_ordinary_names_pass(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"config": {"hub": {"api_key": SECRET}}}, "config.hub.api_key"),
        ({"config": {"list": [{"password": SECRET}]}}, "config.list.0.password"),
        ({"env": {"env_vars": {"HF_TOKEN": SECRET}}}, "env.env_vars.HF_TOKEN"),
        ({"config": {"data": f"s3://user:{SECRET}@bucket/x"}}, "config.data"),
        ({"store": f"https://u:{SECRET}@host/x"}, "store"),
        ({"tags": {"note": f"-----BEGIN RSA PRIVATE KEY-----{SECRET}"}}, "tags.note"),
        ({"config": {"x": "AKIA" + "ABCDEFGH12345678"}}, "config.x"),
    ],
)
def test_a_secret_is_refused_by_field_and_shown_nowhere(data: dict[str, Any], field: str) -> None:
    with pytest.raises(SecretInSpecError) as caught:
        JobSpec.parse({**BASE, **data})
    assert caught.value.field == field
    assert "env.secrets" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(caught.value.fields)


def test_numbers_and_declared_names_are_no_secrets() -> None:
    spec = {"config": {"max_token": 5, "token": None}, "env": {"secrets": ["HF_TOKEN"]}}
    assert JobSpec.parse({**BASE, **spec}).env.secrets == ("HF_TOKEN",)


def test_a_wrong_type_in_a_secret_field_is_not_echoed() -> None:
    with pytest.raises(SpecError, match="valid string") as caught:
        JobSpec.parse({**BASE, "env": {"env_vars": {"HF_TOKEN": [SECRET]}}})
    assert SECRET not in str(caught.value)


def test_redactor_masks_values_of_secret_variables_and_urls() -> None:
    environ = {"HF_TOKEN": SECRET, "HOME": "somewhere", "PIN_TOKEN": "1", "MINE": "declared-value"}
    redact = Redactor.from_environment(names=("MINE",), environ=environ)
    text = f"got {SECRET} and declared-value at http://me:pw@host/ in somewhere 1"
    assert (
        redact.text(text) == "got [HF_TOKEN] and [MINE] at http://[redacted]@host/ in somewhere 1"
    )
    assert redact.data({"a": [SECRET, 3]}) == {"a": ["[HF_TOKEN]", 3]}


def test_redactor_masks_the_longer_of_two_values_first() -> None:
    redact = Redactor({"SHORT": "abcdef", "LONG": "abcdef-ghi"})
    assert redact.text("abcdef-ghi abcdef") == "[LONG] [SHORT]"


@pytest.mark.parametrize(
    "config",
    [
        {"password": {"value": "x"}},
        {"https://user:word@host/": 1},
        {"url": "https://host/x?X-Amz-Signature=abcdef"},
        {"url": "https://host/x?a=1&access_token=abcdef"},
        {"headers": {"Authorization": "x"}},
        {"a": "Bearer eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abcdefghijk"},
        {"pat": "github_pat_11AAAAAAA0123456789abcdefghij"},
    ],
)
def test_secrets_below_a_name_in_a_key_or_in_a_query_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(SecretInSpecError):
        refuse({"config": config})
    with pytest.raises(SecretInSpecError):
        refuse({"name": "sk-abcdefghijklmnopqrstuvwxyz123"})
