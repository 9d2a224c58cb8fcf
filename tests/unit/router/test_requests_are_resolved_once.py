"""What the router acts on is checked by name, resolved once, and nothing of a client's reaches the handoff."""

from pathlib import Path
from typing import Any

import pytest

from tilert_router.config import ConfigError, Model, parse
from tilert_router.errors import ApiError
from tilert_router.fields import TABLE, Kind, Treatment
from tilert_router.request import Defaults, Request, parse_body, resolve

MODEL = Model(name="small", tokenizer=Path("/nowhere"), max_model_len=2048)
CHAT: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hello"}]}
HANDOFF = {
    "tilert_host": "10.0.0.2",
    "tilert_ctrl_port": 5556,
    "tilert_rid": "0" * 32,
    "tilert_generation": 3,
}


def chat(**fields: Any) -> Request:
    return resolve(Kind.CHAT, CHAT | fields, MODEL, Defaults())


def test_the_prefill_body_is_one_token_of_the_same_prompt_and_sampling() -> None:
    request = chat(
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=9,
        stop=["x"],
        temperature=0.5,
        n=1,
    )
    body = request.prefill_body("served", "0" * 32, HANDOFF)
    assert body["max_tokens"] == 1
    assert body["stream"] is False
    assert body["kv_transfer_params"] == HANDOFF
    assert body["request_id"] == "0" * 32
    assert body["temperature"] == 0.5
    assert not {"stream_options", "max_completion_tokens", "stop", "n", "min_tokens"} & body.keys()


@pytest.mark.parametrize("field", ["kv_transfer_params", "request_id", "ec_transfer_params"])
def test_what_no_client_may_set_is_removed(field: str) -> None:
    request = chat(**{field: {"tilert_host": "203.0.113.9"}, "vllm_xargs": {}})
    assert field not in request.body
    assert request.prefill_body("small", "0" * 32, HANDOFF)["kv_transfer_params"] == HANDOFF


UNSERVED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}], "return_prompt_text": True,
    "include_reasoning": False, "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1,
    "min_p": 0.1, "seed": 7, "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1,
    "n": 2, "best_of": 2, "use_beam_search": True, "min_tokens": 5, "ignore_eos": True, "allowed_token_ids": [1],
    "bad_words": ["x"], "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "a", "priority": 3, "echo": True,
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(UNSERVED))
def test_a_field_tilert_cannot_honour_is_named(field: str) -> None:
    assert chat(**{field: UNSERVED[field]}).unserved == field


def test_tools_are_shown_to_the_model_when_it_may_not_call_them() -> None:
    request = chat(tools=UNSERVED["tools"], tool_choice="none")
    assert request.unserved is None
    assert request.prefill_body("small", "0" * 32, HANDOFF)["tools"] == UNSERVED["tools"]


def test_every_field_is_in_the_table_once_a_call_and_null_is_absence() -> None:
    for kind in Kind:
        names = [row.name for row in TABLE if kind in row.kinds]
        assert len(names) == len(set(names))
    nulls = {row.name: None for row in TABLE if row.treatment is Treatment.NEUTRAL}
    assert chat(**nulls).unserved is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 4096}, "max_completion_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_wrong_values_are_400_naming_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_an_unknown_model_is_404_and_the_alias_is_the_fast_class() -> None:
    with pytest.raises(ApiError) as caught:
        chat(model="other")
    assert caught.value.status == 404
    assert chat(model="small-fast").fast
    assert not chat().fast


def test_sampling_follows_vllms_precedence() -> None:
    defaults = Defaults(temperature=0.7, top_p=0.9, top_k=20)
    assert resolve(Kind.CHAT, CHAT, MODEL, defaults).sampling.as_json() == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
    }
    assert resolve(Kind.CHAT, CHAT | {"top_k": 5}, MODEL, defaults).sampling.top_k == 5
    assert chat().sampling.top_k == MODEL.max_top_k
    assert chat(temperature=0).sampling.temperature == 0.0


def test_the_budget_is_the_rest_of_the_window() -> None:
    assert chat().budget(2000, 2048) == 48
    assert chat(max_tokens=10).budget(2000, 2048) == 10
    assert chat(max_tokens=100).budget(2000, 2048) == 48


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'"x"', b"1"])
def test_a_body_that_is_no_object_is_400(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(raw)
    assert caught.value.status == 400


GOOD = """
model: {name: small, tokenizer: /x, max_model_len: 2048}
prefill: [{name: p, url: "http://10.0.0.1:8000"}]
decode: [{name: d, url: "http://10.0.0.2:5557", host: 10.0.0.2}]
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "queu: {}\n", "queu: unknown key"),
        (GOOD.replace("max_model_len: 2048", "max_model_len: 1"), "model.max_model_len"),
        (GOOD.replace("host: 10.0.0.2", 'host: "[fd00::1]"'), "decode[0].host"),
        (GOOD.replace("http://10.0.0.1:8000", "10.0.0.1:8000"), "prefill[0].url"),
        (GOOD + "classes: {fast: {policy: native}}\n", "classes.fast.policy"),
        (GOOD.replace("host: 10.0.0.2}", "host: 10.0.0.2, stock: true}"), "only_router"),
        ("model: 3", "model"),
        ("- a", "must be a mapping"),
    ],
)
def test_a_wrong_configuration_names_the_path(text: str, says: str) -> None:
    parse(GOOD)
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert says in str(caught.value)
