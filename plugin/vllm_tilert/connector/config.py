"""`kv_connector_extra_config`: parsing and validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vllm_tilert.profiles.base import ProfileError, get_profile
from vllm_tilert.transports.base import PROTOCOLS
from vllm_tilert.wire.address import AllowList, check_host

_PREFIX: Final = "kv_connector_extra_config."


class ConfigError(ValueError):
    """A connector setting that cannot be: which one, its value, and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{_PREFIX}{field} is {value!r}: {remedy}")
        self.field = field


@dataclass(frozen=True)
class ConnectorConfig:
    """The settings of one connector. Times in seconds, sizes in bytes and tokens."""

    profile: str
    transport: str
    protocol: str
    local_host: str
    allowed_hosts: AllowList
    max_seq_len: int
    staging_bytes: int
    staging_wait_s: float = 5.0
    admission_timeout_s: float = 5.0
    send_timeout_s: float = 60.0
    secret: bytes | None = field(default=None, repr=False)
    checksum: bool | None = None
    rdma_devices: tuple[str, ...] = ()

    @classmethod
    def parse(cls, extra: Mapping[str, Any], max_model_len: int) -> ConnectorConfig:
        """Read `kv_connector_extra_config`. Raises ConfigError naming the first wrong setting."""
        fields = _Fields(extra)
        profile = fields.text("tilert_profile", alias="tilert_model")
        try:
            get_profile(profile)
        except ProfileError as error:
            raise ConfigError("tilert_profile", profile, error.remedy) from None
        transport = fields.choice("tilert_transport", tuple(PROTOCOLS))
        protocol = fields.choice("tilert_protocol", PROTOCOLS[transport])
        local_host = fields.host("tilert_local_host")
        allowed = fields.hosts("tilert_allowed_hosts")
        max_seq_len = fields.integer("tilert_max_seq_len", default=max_model_len)
        if max_seq_len > max_model_len:
            raise ConfigError(
                "tilert_max_seq_len", max_seq_len, f"vLLM's own --max-model-len is only {max_model_len}"
            )
        config = cls(
            profile=profile,
            transport=transport,
            protocol=protocol,
            local_host=local_host,
            allowed_hosts=allowed,
            max_seq_len=max_seq_len,
            staging_bytes=fields.integer("tilert_staging_bytes"),
            staging_wait_s=fields.seconds("tilert_staging_wait_s", cls.staging_wait_s),
            admission_timeout_s=fields.seconds("tilert_admission_timeout_s", cls.admission_timeout_s),
            send_timeout_s=fields.seconds("tilert_send_timeout_s", cls.send_timeout_s),
            secret=fields.secret("tilert_secret_file"),
            checksum=fields.flag("tilert_checksum"),
            rdma_devices=fields.names("tilert_rdma_devices"),
        )
        fields.refuse_unknown()
        return config


class _Fields:
    """Typed access to the settings that remembers which were asked for."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self._extra = extra
        self._known: set[str] = set()

    def _get(self, name: str) -> Any:
        self._known.add(name)
        return self._extra.get(name)

    def _required(self, name: str, remedy: str) -> Any:
        value = self._get(name)
        if value is None or value == "":
            raise ConfigError(name, value, f"required: {remedy}")
        return value

    def text(self, name: str, alias: str) -> str:
        value = self._get(name)
        other = self._get(alias)
        if value is not None and other is not None and value != other:
            raise ConfigError(alias, other, f"it contradicts {name} = {value!r}; give one of them")
        value = value if value is not None else other
        if not isinstance(value, str) or not value:
            raise ConfigError(name, value, "required: mla, glm5 or dsv32")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self._required(name, f"one of {', '.join(choices)}")
        if value not in choices:
            raise ConfigError(name, value, f"choose one of {', '.join(choices)}")
        return str(value)

    def host(self, name: str) -> str:
        value = self._required(name, "the address this host announces to decode nodes")
        try:
            return check_host(value)
        except ValueError as error:
            raise ConfigError(name, value, str(error)) from None

    def hosts(self, name: str) -> AllowList:
        value = self._required(name, "a list of the decode hosts a request may name")
        if not isinstance(value, list) or not value:
            raise ConfigError(name, value, "expected a list of decode hosts, with at least one")
        try:
            return AllowList.of(value)
        except ValueError as error:
            raise ConfigError(name, value, str(error)) from None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(name, value, "expected a positive whole number")
        return value

    def seconds(self, name: str, default: float) -> float:
        value = self._get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86400:
            raise ConfigError(name, value, "expected seconds, more than 0 and less than a day")
        return float(value)

    def flag(self, name: str) -> bool | None:
        value = self._get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(name, value, "expected true or false")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        value = self._get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise ConfigError(name, value, "expected a list of device names, such as mlx5_0")
        return tuple(value)

    def secret(self, name: str) -> bytes | None:
        path = self._get(name)
        if path is None or path == "":
            return None
        if not isinstance(path, str):
            raise ConfigError(name, path, "expected a path")
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(
                name, path, f"cannot be read ({error.strerror}): check path and owner"
            ) from None
        if not secret:
            raise ConfigError(name, path, "the file is empty: write the shared secret into it")
        return secret

    def refuse_unknown(self) -> None:
        for name in self._extra:
            if name.startswith("tilert_") and name not in self._known:
                raise ConfigError(
                    name, self._extra[name], f"no such setting; known are {', '.join(sorted(self._known))}"
                )
