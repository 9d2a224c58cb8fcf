"""The router's one YAML file: schema, checks, and errors that name the path and the remedy."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_tilert.wire.address import check_host
from vllm_tilert.wire.api import CONTROL_PORT

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
FAST_SUFFIX = "-fast"


class ConfigError(Exception):
    """The configuration cannot be used; the message has one line per fault."""


def _url(value: str) -> str:
    parts = urlsplit(value)
    try:
        _ = parts.port
    except ValueError:
        raise ValueError("has a bad port; write http://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("is not a URL; write http://HOST:PORT (an IPv6 address in brackets)")
    check_host(parts.hostname)
    if parts.username or parts.query or parts.fragment:
        raise ValueError("must be only scheme, host and port; put secrets into secrets.*_file")
    if parts.path not in ("", "/"):
        raise ValueError("must not have a path; the router appends /v1/...")
    return value.rstrip("/")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("may have only letters, digits, dot, dash and underscore")
    return value


Url = Annotated[str, AfterValidator(_url)]
Host = Annotated[str, AfterValidator(check_host)]
Name = Annotated[str, AfterValidator(_name)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Listen(_Section):
    """Where a server listens."""

    host: Host = "127.0.0.1"
    """Address to bind."""
    port: Port = 8080
    """0 takes a free one."""


class Model(_Section):
    """What clients see and what the prefill nodes call it."""

    name: Annotated[str, Field(min_length=1)]
    """The id clients use; NAME-fast is its alias for the latency class."""
    tokenizer: Path
    """Folder with tokenizer.json, and generation_config.json where the model has one."""
    max_model_len: Annotated[int, Field(ge=2)]
    """Tokens of prompt and answer together; the same as on the prefill and decode nodes."""
    served_name: str | None = None
    """The model's name on the prefill nodes, where it differs from `name`."""
    max_top_k: Annotated[int, Field(ge=1)] = 256
    """Largest top_k of the decode engine; larger or unlimited values become this on both legs."""
    reasoning_parser: str | None = None
    """vLLM's name of it: glm47 for GLM-5, deepseek_v3 for DeepSeek-V3.2. None: reasoning stays in the text."""
    tool_parser: str | None = None
    """vLLM's name of it: glm47 for GLM-5, deepseek_v32 for DeepSeek-V3.2. None: requests that may call tools go
    to the native pool."""


class Prefill(_Section):
    """One vLLM that prefills and hands off."""

    name: Name
    """In logs; never shown to clients."""
    url: Url
    """`http://HOST:PORT`."""


class Decode(_Section):
    """One decode node: `url` for the router, `host` and `ctrl_port` for the senders."""

    name: Name
    """In logs and the admin interface."""
    url: Url
    """`http://HOST:PORT` of its HTTP interface."""
    host: Host
    """Where senders find it: an address or a name, as the connector's allow-list has it."""
    ctrl_port: Annotated[int, Field(ge=1, le=65535)] = CONTROL_PORT
    """Where senders dial."""
    stock: bool = False
    """A stock TileRT decode server, which has no reservations: one router only."""


class Native(_Section):
    """One OpenAI endpoint that takes what TileRT does not."""

    name: Name
    """In logs."""
    url: Url
    """`http://HOST:PORT`; /v1/... is appended."""
    served_name: str | None = None
    """The model's name there, where it differs from `model.name`."""


class Secrets(_Section):
    """Files, never values: what is read from them is never logged."""

    decode_file: Path | None = None
    """The shared secret of the decode nodes."""
    prefill_file: Path | None = None
    """The API key of the prefill nodes' vLLM."""
    native_file: Path | None = None
    """The API key of the native pool, sent in place of the client's."""


class Queue(_Section):
    """Bounds of waiting."""

    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Requests that may wait; beyond it 429 with Retry-After."""
    timeout_s: Seconds = 300
    """How long a request may wait for a decode node."""


class Timeouts(_Section):
    """Bounds of each phase, in seconds."""

    connect_s: Seconds = 3
    """To any upstream."""
    reserve_s: Seconds = 5
    """Longest wait for a node's answer to a reservation or a status call."""
    prefill_s: Seconds = 120
    """Longest prefill."""
    handoff_s: Seconds = 30
    """From the first token to the open decode leg."""
    stall_s: Seconds = 60
    """Longest silence inside a decode."""
    cancel_s: Seconds = 10
    """Longest wait for a node to confirm that a cancelled request is gone; then the node is DOWN."""
    client_s: Seconds = 60
    """How long a client may leave a finished answer unread."""
    keepalive_s: Seconds = 15
    """Silence inside a stream after which a comment is sent."""
    drain_s: Seconds = 600
    """How long SIGTERM waits for running requests."""


class Policy(StrEnum):
    """Which pool serves a latency class."""

    TILERT = "tilert"
    TILERT_THEN_NATIVE = "tilert_then_native"
    NATIVE = "native"


class LatencyClass(_Section):
    """How one latency class is served."""

    policy: Policy
    """tilert, tilert_then_native or native."""
    max_wait_s: Annotated[float, Field(ge=0)] = 5
    """With tilert_then_native: expected waiting above this goes to the native pool."""


class Classes(_Section):
    """`standard` is NAME, `fast` is NAME-fast."""

    standard: LatencyClass | None = None
    fast: LatencyClass | None = None


class Limits(_Section):
    """Sizes the router accepts."""

    body_bytes: Annotated[int, Field(ge=1024)] = 32 << 20
    """Largest request body; beyond it 413."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Fresh attempts (new handoff id, new prefill) before the first token, after the first one failed."""


class Logs(_Section):
    """Logging: one JSON line per event."""

    level: Annotated[str, Field(pattern="^(debug|info|warning|error)$")] = "info"
    """debug, info, warning or error."""
    prompts: bool = False
    """Log request bodies. Off: no line carries prompt text."""


class Tracing(_Section):
    """OpenTelemetry over OTLP/HTTP; null endpoint: off."""

    endpoint: str | None = None
    """The collector's address for traces, such as http://HOST:4318/v1/traces."""
    service_name: str = "tilert-router"
    """Its `service.name`."""


class Config(_Section):
    """The whole file."""

    listen: Listen = Listen()
    admin: Listen | None = None
    model: Model
    prefill: Annotated[tuple[Prefill, ...], Field(min_length=1)]
    decode: Annotated[tuple[Decode, ...], Field(min_length=1)]
    native: tuple[Native, ...] = ()
    secrets: Secrets = Secrets()
    keys_file: Path | None = None
    """API keys (see `tilert_router.keys`); null: no authentication."""
    queue: Queue = Queue()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    classes: Classes = Classes()
    logs: Logs = Logs()
    tracing: Tracing = Tracing()
    prefill_ahead: bool = True
    """Prefill the next request while a node decodes, when there is a queue."""
    only_router: bool = False
    """True: no other router uses these decode nodes. Required with stock decode servers."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for section in ("prefill", "decode", "native"):
            nodes = getattr(self, section)
            for field in ("name", "url"):
                values = [getattr(node, field) for node in nodes]
                for i, value in enumerate(values):
                    if value in values[:i]:
                        raise ValueError(f"{section}[{i}].{field}: {value!r} is there twice; remove one")
        if any(node.stock for node in self.decode) and not self.only_router:
            raise ValueError(
                "only_router: a stock decode server (decode[].stock) cannot be shared between routers; "
                "set only_router: true and run one router, or use our decode node"
            )
        if (
            self.admin
            and self.admin.port
            and (self.admin.host, self.admin.port) == (self.listen.host, self.listen.port)
        ):
            raise ValueError("admin.port: the same as listen.port; give it a port of its own")
        for name in ("standard", "fast"):
            chosen = getattr(self.classes, name)
            if chosen and chosen.policy is not Policy.TILERT and not self.native:
                raise ValueError(
                    f"classes.{name}.policy: {chosen.policy} needs a native pool; add native, or use tilert"
                )
        return self

    def latency_class(self, name: str) -> LatencyClass:
        """The class's policy, with its default: TileRT when asked for, general traffic to the native pool."""
        chosen: LatencyClass | None = getattr(self.classes, name)
        if chosen is not None:
            return chosen
        if not self.native:
            return LatencyClass(policy=Policy.TILERT)
        return LatencyClass(policy=Policy.TILERT_THEN_NATIVE if name == "fast" else Policy.NATIVE)


_REMEDIES = {
    "extra_forbidden": "unknown key; remove it or correct its spelling",
    "missing": "missing; add it",
}


def _describe(error: dict[str, Any]) -> str:
    path = ""
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    message = _REMEDIES.get(error["type"]) or error["msg"].removeprefix("Value error, ")
    if not path:
        return message
    value = error.get("input")
    shown = "" if error["type"] in _REMEDIES or isinstance(value, dict | list) else f" (got {value!r})"
    return f"{path}: {message[0].lower() + message[1:]}{shown}"


def parse(text: str, source: str = "configuration") -> Config:
    """Parse YAML text. Raises ConfigError with one line per fault: `path: what is wrong and what to do`."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: must be a mapping with at least model, prefill and decode")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        lines = [f"{source}: {_describe(dict(e))}" for e in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def load(path: Path) -> Config:
    """Read and parse the file, and check that the files it names are there. Raises ConfigError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    config = parse(text, str(path))
    faults = []
    if not (config.model.tokenizer / "tokenizer.json").is_file():
        faults.append(
            f"model.tokenizer: no tokenizer.json in {config.model.tokenizer}; name the folder that has it"
        )
    for field, file in (
        ("secrets.decode_file", config.secrets.decode_file),
        ("secrets.prefill_file", config.secrets.prefill_file),
        ("secrets.native_file", config.secrets.native_file),
        ("keys_file", config.keys_file),
    ):
        if file is not None:
            try:
                if not file.read_text().strip():
                    faults.append(f"{field}: {file} is empty")
            except OSError as error:
                faults.append(f"{field}: {file} cannot be read: {error.strerror}")
    if faults:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in faults))
    return config


def read_secret(path: Path | None) -> str | None:
    """The secret in a file, without surrounding white space; None for no file."""
    return None if path is None else path.read_text().strip()


def reference_markdown() -> str:
    """Every key of the file with its default and meaning, as the docs show it."""
    lines = ["| key | default | meaning |", "|---|---|---|"]

    def walk(section: type[BaseModel], prefix: str) -> None:
        for name, field in section.model_fields.items():
            inner, path = field.annotation, f"{prefix}{name}"
            kinds = [inner, *get_args(inner)]
            found = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
            if found is not None:
                many = get_origin(inner) is tuple
                walk(found, f"{path}[]." if many else f"{path}.")
                continue
            default = "required" if field.is_required() else _shown(field.default)
            lines.append(f"| `{path}` | {default} | {' '.join((field.description or '').split())} |")

    walk(Config, "")
    return "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default is None else f"{default:g}" if isinstance(default, float) else str(default)
