"""The OpenAPI document of the clients' port, made from the same table that decides what becomes of each field."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from tilert_router.fields import TABLE, Kind, Treatment

_STRING: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_FLAG: Final = {"type": ["boolean", "null"]}

_FIELDS: Final[dict[str, Any]] = {
    "model": _STRING,
    "messages": {"type": "array", "minItems": 1, "items": {"type": "object"}},
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": _COUNT},
            {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        ]
    },
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "max_completion_tokens": {"type": ["integer", "null"], "minimum": 1},
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": -1},
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": _STRING}, {"type": "null"}]},
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer"}},
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG, "continuous_usage_stats": _FLAG},
    },
    "stream_interval": {"type": ["integer", "null"], "minimum": 1},
    "tools": {"type": ["array", "null"], "minItems": 1, "items": {"type": "object"}},
} | dict.fromkeys(
    (
        "stream",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "return_token_ids",
        "include_reasoning",
        "parallel_tool_calls",
    ),
    _FLAG,
)
"""Types of the fields that the router reads. Others are vLLM's: see its own document."""


def _version() -> str:
    try:
        return version("vllm-tilert")
    except PackageNotFoundError:
        return "0"


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required or properties)}


def _request(kind: Kind) -> dict[str, Any]:
    properties = {}
    for row in TABLE:
        if kind in row.kinds and row.treatment is not Treatment.STRIPPED:
            note = f"{row.treatment.value}. {row.note}".rstrip(". ")
            properties[row.name] = _FIELDS.get(row.name, {}) | {"description": note}
    return {
        "type": "object",
        "properties": properties,
        "required": ["messages" if kind is Kind.CHAT else "prompt"],
    }


def _json(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


_STATUSES: Final = {
    "400": "The request is wrong, or asks for what this server cannot do; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "429": "Too many requests, or a limit of the key; Retry-After says when to come back.",
    "500": "The router failed.",
    "502": "An upstream failed.",
    "503": "Nothing can serve this now.",
    "504": "An upstream did not answer in time.",
}


def document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    errors = {status: _json(_ref("Error"), text) for status, text in _STATUSES.items()}
    usage = _object({name: _COUNT for name in ("prompt_tokens", "completion_tokens", "total_tokens")})
    reason = {"enum": ["stop", "length", "tool_calls"]}
    message = _object({"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}})
    head = {"id": _STRING, "created": _COUNT, "model": _STRING, "usage": usage}

    def answer(kind: Kind) -> dict[str, Any]:
        part = {"message": message} if kind is Kind.CHAT else {"text": _STRING}
        choice = _object({"index": _COUNT, "finish_reason": reason, **part})
        name = "chat.completion" if kind is Kind.CHAT else "text_completion"
        return _object(head | {"object": {"const": name}, "choices": {"type": "array", "items": choice}})

    def generate(kind: Kind) -> dict[str, Any]:
        whole = _json(answer(kind), "The answer; with stream=true server-sent events, the last one [DONE].")
        whole["content"]["text/event-stream"] = {
            "schema": {"type": "object", "properties": {"data": _STRING}}
        }
        body = {"required": True, "content": {"application/json": {"schema": _request(kind)}}}
        return {"post": {"requestBody": body, "responses": {"200": whole, **errors}}}

    model = _object({"id": _STRING, "object": {"const": "model"}, "max_model_len": _COUNT})
    models = _object({"object": {"const": "list"}, "data": {"type": "array", "items": model}})
    state = _object({"status": _STRING})
    return {
        "openapi": "3.1.0",
        "info": {"title": "tilert-router", "version": _version()},
        "paths": {
            **{kind.path: generate(kind) for kind in Kind},
            "/v1/models": {"get": {"responses": {"200": _json(models, "Models."), "401": errors["401"]}}},
            "/health": {"get": {"responses": {"200": _json(state, "It lives.")}}},
            "/ready": {"get": {"responses": {"200": _json(state, "It can serve."), "503": errors["503"]}}},
        },
        "components": {
            "schemas": {
                "Error": _object(
                    {
                        "error": _object(
                            {
                                "message": _STRING,
                                "type": _STRING,
                                "param": {"type": ["string", "null"]},
                                "code": {"type": ["string", "integer", "null"]},
                            }
                        )
                    }
                )
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
