"""API keys: a YAML file of SHA-256 hashes with what each key may do.

    - {name: alice, sha256: <64 hex digits>, class: fast, priority: 0, max_concurrent: 4, tokens_per_minute: 100000}

`printf %s KEY | sha256sum` makes the hash. The keys themselves are stored nowhere.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tilert_router.config import ConfigError
from tilert_router.errors import ApiError


class Key(BaseModel):
    """One client."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    name: Annotated[str, Field(min_length=1)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    latency_class: Annotated[Literal["standard", "fast"] | None, Field(alias="class")] = None
    priority: int = 0
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Prompt and answer of what TileRT serves, over time: a minute's worth may be used at once. Counted when an
    answer ends, so the last one before the limit is always whole."""


ANYBODY = Key(name="anybody", sha256="0" * 64)
"""The client where no keys are configured."""


class Keys:
    """Who may ask, and how many of each client's requests are under way."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}
        """Tokens of each name that have not been paid back yet, and when that was."""
        self._keys: dict[str, Key] = {}
        self._running: dict[str, int] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again; keys stay as they were when it is wrong. Raises ConfigError."""
        if self._path is None:
            return
        try:
            keys = TypeAdapter(list[Key]).validate_python(yaml.safe_load(self._path.read_text()))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"keys_file: {self._path}: {type(error).__name__}") from None
        except ValidationError as error:
            # Neither the file's text nor a value: a hash is not a secret, a key pasted in its place is.
            where = "; ".join(".".join(map(str, e["loc"])) + ": " + e["msg"] for e in error.errors())
            raise ConfigError(f"keys_file: {self._path}: {where}") from None
        self._keys = {key.sha256: key for key in keys}

    def check(self, authorization: str | None) -> Key:
        """The client a request comes from. Raises ApiError 401."""
        if self._path is None:
            return ANYBODY
        given = (authorization or "").removeprefix("Bearer ")
        key = self._keys.get(hashlib.sha256(given.encode()).hexdigest())
        if key is None:
            raise ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
        return key

    def enter(self, key: Key) -> None:
        """Count a request in. Raises ApiError 429 above the key's limit."""
        running = self._running.get(key.name, 0)
        if key.max_concurrent is not None and running >= key.max_concurrent:
            raise ApiError(
                429,
                f"This key may have {key.max_concurrent} requests at once.",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        if key.tokens_per_minute is not None:
            over = self._debt(key) - key.tokens_per_minute
            if over >= 0:
                wait_s = (over + 1) * 60 / key.tokens_per_minute
                raise ApiError(
                    429,
                    f"This key may use {key.tokens_per_minute} tokens a minute.",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": str(math.ceil(wait_s))},
                )
        self._running[key.name] = running + 1

    def _debt(self, key: Key) -> float:
        spent, since = self._spent.get(key.name, (0.0, 0.0))
        paid = (self._clock() - since) * (key.tokens_per_minute or 0) / 60
        return max(0.0, spent - paid)

    def charge(self, key: Key, tokens: int) -> None:
        """Count the tokens of an answer that has ended."""
        if key.tokens_per_minute is not None:
            self._spent[key.name] = (self._debt(key) + tokens, self._clock())

    def leave(self, key: Key) -> None:
        """Count a request out."""
        self._running[key.name] -= 1
        if not self._running[key.name]:
            del self._running[key.name]
