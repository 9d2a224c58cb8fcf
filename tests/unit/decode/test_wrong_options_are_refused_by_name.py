"""`tilertctl decode` names the option, its value and the remedy before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_tilert.cli import main, parser
from vllm_tilert.decode.config import ConfigError, DecodeConfig
from vllm_tilert.small_model import CONFIG


def arguments(model: Path, /, **changed: str) -> list[str]:
    options = {
        "engine": "reference",
        "model": "mla",
        "model-weights-dir": str(model),
        "max-seq-len": "512",
        "host": "127.0.0.1",
        "transport": "mooncake",
        "protocol": "tcp",
    } | {name.replace("_", "-"): value for name, value in changed.items()}
    return ["decode", *(part for name, value in options.items() for part in (f"--{name}", value))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").write_text("\n")
    return tmp_path


def test_what_is_right_is_taken(model: Path) -> None:
    config = DecodeConfig.from_arguments(parser().parse_args(arguments(model, host="fd00::1")))
    assert (config.host, config.slots, config.ctrl_port, config.http_port) == ("fd00::1", 2, 5556, 5557)
    assert config.rdma_devices == ()
    named = DecodeConfig.from_arguments(parser().parse_args(arguments(model, rdma_devices="mlx5_1,mlx5_0")))
    assert named.rdma_devices == ("mlx5_1", "mlx5_0")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"host": "[fd00::1]"}, r"--host \[fd00::1\]: .*in brackets"),
        ({"host": "http://a"}, "--host"),
        ({"http_port": "5556"}, "--http-port 5556: .*control port"),
        ({"ctrl_port": "70000"}, "--ctrl-port 70000"),
        ({"protocol": "UCX"}, "--protocol UCX: .*rdma, tcp, efa"),
        ({"max_seq_len": "1"}, "--max-seq-len 1"),
        ({"slots": "0"}, "--slots 0"),
        ({"model_weights_dir": "/nowhere"}, "--model-weights-dir /nowhere: .*config.json"),
        ({"secret_file": "/nowhere"}, "--secret-file /nowhere: cannot be read"),
    ],
)
def test_what_is_wrong_is_named(model: Path, changed: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DecodeConfig.from_arguments(parser().parse_args(arguments(model, **changed)))


def test_an_empty_secret_is_no_secret(model: Path) -> None:
    with pytest.raises(ConfigError, match="the file is empty"):
        DecodeConfig.from_arguments(parser().parse_args(arguments(model, secret_file=str(model / "empty"))))


@pytest.mark.parametrize("left_out", ["engine", "model", "host", "transport", "max-seq-len"])
def test_what_must_be_said_has_no_default(
    model: Path, left_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(model)
    at = given.index(f"--{left_out}")
    with pytest.raises(SystemExit):
        main(given[:at] + given[at + 2 :])
    assert f"--{left_out}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"kv_cache_dtype": "int3"}, "int3"),
        ({"model": "llama"}, "llama"),
        ({"max_seq_len": "99999999999"}, "free"),
    ],
)
def test_the_command_ends_with_2_and_the_reason(
    tmp_path: Path, changed: dict[str, str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(arguments(tmp_path, **changed)) == 2
    assert words in capfd.readouterr().err


def test_stock_senders_have_no_such_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main([*arguments(tmp_path), "--allow-stock-senders"]) == 2
    assert "--allow-stock-senders mla: " in capfd.readouterr().err
    assert not DecodeConfig.from_arguments(parser().parse_args(arguments(tmp_path))).allow_stock_senders
