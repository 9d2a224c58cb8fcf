"""Every wrong connector setting is refused at start, by name, with its value and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_tilert.connector.config import ConfigError, ConnectorConfig

GOOD: dict[str, Any] = {
    "tilert_profile": "mla",
    "tilert_transport": "mooncake",
    "tilert_protocol": "tcp",
    "tilert_local_host": "10.0.0.1",
    "tilert_allowed_hosts": ["10.0.0.2"],
    "tilert_staging_bytes": 1 << 20,
}


def parse(**changes: Any) -> ConnectorConfig:
    return ConnectorConfig.parse(GOOD | changes, max_model_len=4096)


def test_the_least_there_must_be() -> None:
    config = parse()
    assert config.max_seq_len == 4096
    assert (config.staging_wait_s, config.admission_timeout_s, config.send_timeout_s) == (5, 5, 60)
    assert config.secret is None
    assert config.checksum is None


def test_the_stock_name_of_the_profile_works() -> None:
    extra = {name: value for name, value in GOOD.items() if name != "tilert_profile"}
    assert ConnectorConfig.parse(extra | {"tilert_model": "glm-5"}, 4096).profile == "glm-5"


def test_the_secret_is_read_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2\n")
    config = parse(tilert_secret_file=str(tmp_path / "secret"))
    assert config.secret == b"hunter2"
    assert "hunter2" not in repr(config)


def test_settings_of_others_are_ignored() -> None:
    parse(kv_buffer_device="cpu")


@pytest.mark.parametrize("name", sorted(GOOD))
@pytest.mark.parametrize("value", [None, "", [], {}, True, -1, 1.5, "nonsense!"])
def test_a_required_setting_of_the_wrong_kind_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**{name: value})
    assert error.value.field == name
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"tilert_protocol": "UCX"}, "tilert_protocol", "choose one of rdma, tcp, efa"),
        ({"tilert_transport": "nixl"}, "tilert_protocol", "choose one of UCX, LIBFABRIC"),
        ({"tilert_local_host": "[::1]"}, "tilert_local_host", "brackets"),
        ({"tilert_local_host": "10.0.0.1:80"}, "tilert_local_host", "port"),
        ({"tilert_allowed_hosts": "10.0.0.2"}, "tilert_allowed_hosts", "list"),
        ({"tilert_allowed_hosts": ["10.0.0.2", "10.0.0"]}, "tilert_allowed_hosts", "10.0.0"),
        ({"tilert_max_seq_len": 5000}, "tilert_max_seq_len", "--max-model-len is only 4096"),
        ({"tilert_max_seq_len": 0}, "tilert_max_seq_len", "positive"),
        ({"tilert_send_timeout_s": 0}, "tilert_send_timeout_s", "seconds"),
        ({"tilert_staging_wait_s": "5"}, "tilert_staging_wait_s", "seconds"),
        ({"tilert_admission_timeout_s": float("nan")}, "tilert_admission_timeout_s", "seconds"),
        ({"tilert_checksum": "yes"}, "tilert_checksum", "true or false"),
        ({"tilert_rdma_devices": "mlx5_0"}, "tilert_rdma_devices", "list"),
        ({"tilert_secret_file": "/does/not/exist"}, "tilert_secret_file", "cannot be read"),
        ({"tilert_secret_file": "/dev/null"}, "tilert_secret_file", "empty"),
        ({"tilert_model": "glm5"}, "tilert_model", "contradicts"),
        ({"tilert_stagingbytes": 1}, "tilert_stagingbytes", "no such setting"),
    ],
)
def test_what_contradicts_or_cannot_be_is_named(changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=field) as error:
        parse(**changes)
    assert error.value.field == field
    assert says in str(error.value)
