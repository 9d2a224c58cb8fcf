"""Errors as OpenAI clients expect them: `{"error": {message, type, param, code}}`.

Messages name fields, limits and what to do; never an internal address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A refusal or failure with its HTTP status; `body()` is what the client reads."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        type_: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.type = type_ or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    def payload(self) -> dict[str, Any]:
        """The JSON object of the body, and of an error event inside a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code if self.code is not None else self.status,
            }
        }

    def body(self) -> bytes:
        """The response body."""
        return orjson.dumps(self.payload())


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong; `param` names the field."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after_s: float, code: str = "queue_full") -> ApiError:
    """429 with Retry-After in whole seconds, at least 1."""
    return ApiError(429, message, code=code, headers={"Retry-After": str(max(1, round(retry_after_s)))})


def unavailable(message: str, code: str = "unavailable", retry_after_s: float | None = None) -> ApiError:
    """503: nothing can serve this now."""
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, round(retry_after_s)))}
    return ApiError(503, message, code=code, headers=headers)
