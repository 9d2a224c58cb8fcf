"""Each field of vLLM's request schemas has a row, each row does what it says, and the docs show the table."""

from pathlib import Path
from typing import Any

import pytest

from tilert_router.config import Model
from tilert_router.fields import TABLE, Kind, Row, Treatment, table_markdown
from tilert_router.request import Defaults, Request, resolve

MODEL = Model(name="small", tokenizer=Path("/nowhere"), max_model_len=2048)
PROMPTS: dict[Kind, dict[str, Any]] = {
    Kind.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    Kind.COMPLETION: {"prompt": "hi"},
}
# A value of each refused field that changes what is generated or returned, and a harmless one.
REFUSED: dict[str, tuple[Any, Any]] = {
    "prompt": (["a", "b"], ["a"]),
    "tool_choice": ("auto", "none"),
    "tools": ([{"type": "function", "function": {"name": "f"}}], None),
    "include_reasoning": (False, True),
    "return_prompt_text": (True, False),
    "truncate_prompt_tokens": (-1, 5),
    "frequency_penalty": (0.5, 0),
    "presence_penalty": (0.5, 0.0),
    "repetition_penalty": (1.1, 1.0),
    "min_p": (0.1, 0),
    "seed": (7, -1),
    "logit_bias": ({"5": 1}, {}),
    "logprobs": (True, None),
    "top_logprobs": (2, 0),
    "prompt_logprobs": (1, None),
    "logprob_token_ids": ([1], []),
    "n": (2, 1),
    "best_of": (2, 1),
    "use_beam_search": (True, False),
    "min_tokens": (2, 1),
    "ignore_eos": (True, False),
    "allowed_token_ids": ([1], []),
    "bad_words": (["x"], []),
    "response_format": ({"type": "json_object"}, {"type": "text"}),
    "structured_outputs": ({"regex": "a"}, None),
    "guided_json": ({}, None),
    "guided_regex": ("a", None),
    "guided_choice": (["a"], None),
    "guided_grammar": ("a", None),
    "thinking_token_budget": (5, None),
    "watermarking": (True, False),
    "repetition_detection": ({"x": 1}, None),
    "spaces_between_special_tokens": (False, True),
    "echo": (True, False),
    "suffix": ("x", ""),
    "prompt_embeds": ("AAAA", ""),
    "priority": (1, 0),
    "vllm_xargs": ({"x": 1}, {}),
    "routed_experts_prompt_start": (1, 0),
    "functions": ([{"name": "f"}], []),
    "function_call": ({"name": "f"}, "auto"),
}


def made(kind: Kind, **fields: Any) -> Request:
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]} if fields.get("tool_choice") else {}
    plain = {"skip_special_tokens": False} if "spaces_between_special_tokens" in fields else {}
    return resolve(kind, PROMPTS[kind] | plain | fields | tools, MODEL, Defaults())


CASES = [pytest.param(row, kind, id=f"{row.name}-{kind}") for row in TABLE for kind in row.kinds]


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_a_row_does_what_it_says(row: Row, kind: Kind) -> None:
    handoff = {"tilert_host": "d", "tilert_rid": "r"}
    if row.treatment is Treatment.NEUTRAL:
        refused, served = REFUSED[row.name]
        assert made(kind, **{row.name: refused}).unserved == row.name
        assert made(kind, **{row.name: served}).unserved is None
        assert made(kind, **{row.name: None} if row.name != "prompt" else {}).unserved is None
    elif row.treatment is Treatment.PREFILL:
        value = PROMPTS[kind].get(row.name, [{"type": "function", "function": {"name": "f"}}])
        sent = made(kind, **{row.name: value}).prefill_body("small", "r", handoff)
        assert sent[row.name] == value
    elif row.treatment is Treatment.STRIPPED:
        request = made(kind, **{row.name: {"tilert_host": "203.0.113.9"}})
        assert row.name not in request.body
        assert "203.0.113.9" not in str(request.prefill_body("small", "r", handoff))
    elif row.treatment is Treatment.IGNORED:
        request = made(kind, **{row.name: "x"})
        assert request.unserved is None
        assert row.name not in request.prefill_body("small", "r", handoff)
    elif row.treatment is Treatment.SAMPLING:
        request = made(kind, **{row.name: 1})
        assert request.sampling.as_json()[row.name] == 1
        assert request.prefill_body("small", "r", handoff)[row.name] == 1
    else:
        # The router's own: none of them reaches prefill as the client wrote it.
        sent = made(kind).prefill_body("small", "r", handoff)
        assert row.name not in sent or row.name in ("model", "stream", "max_tokens", "return_token_ids")
        assert (sent["max_tokens"], sent["stream"], sent["return_token_ids"]) == (1, False, True)


@pytest.mark.parametrize("kind", list(Kind))
def test_every_field_of_vllms_schema_has_a_row(kind: Kind) -> None:
    module = "chat_completion" if kind is Kind.CHAT else "completion"
    protocol = pytest.importorskip(f"vllm.entrypoints.openai.{module}.protocol")
    schema = protocol.ChatCompletionRequest if kind is Kind.CHAT else protocol.CompletionRequest
    assert set(schema.model_fields) <= {row.name for row in TABLE if kind in row.kinds}


def test_with_vllms_parsers_more_is_served() -> None:
    model = MODEL.model_copy(update={"reasoning_parser": "glm47", "tool_parser": "glm47"})
    function = {"type": "function", "function": {"name": "f"}}
    strict = {"type": "function", "function": {"name": "f", "strict": True}}

    def unserved(**fields: Any) -> str | None:
        return resolve(Kind.CHAT, PROMPTS[Kind.CHAT] | fields, model, Defaults()).unserved

    assert unserved(tools=[function]) is None
    assert unserved(tools=[function], tool_choice="auto", parallel_tool_calls=False) is None
    assert unserved(include_reasoning=False) is None
    assert unserved(tools=[strict]) == "tools"
    assert unserved(tools=[function], tool_choice="required") in ("tools", "tool_choice")
    assert unserved(tools=[function], tool_choice={"type": "function", "function": {"name": "f"}}) is not None


def test_the_docs_show_the_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "router-fields.md"
    assert page.read_text().endswith(table_markdown())
