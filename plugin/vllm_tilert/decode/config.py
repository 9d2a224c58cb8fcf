"""`tilertctl decode`: its options, checked before anything is started."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_tilert.transports.base import PROTOCOLS
from vllm_tilert.wire import api
from vllm_tilert.wire.address import check_host, check_port

ENGINES: Final = ("reference", "tilert")


class ConfigError(ValueError):
    """An option that cannot be: which, its value, and the remedy."""

    def __init__(self, option: str, value: object, remedy: str) -> None:
        super().__init__(f"{option} {value}: {remedy}")


@dataclass(frozen=True)
class DecodeConfig:
    """The settings of one decode node. Lengths in tokens, times in seconds."""

    engine: str
    profile: str
    weights: Path
    max_seq_len: int
    host: str
    ctrl_port: int
    http_port: int
    transport: str
    protocol: str
    kv_cache_dtype: str
    slots: int
    secret: str | None
    with_mtp: bool
    checksum: bool
    device: str
    drain_s: float
    rdma_devices: tuple[str, ...] = ()
    allow_stock_senders: bool = False

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> DecodeConfig:
        """Check every option. Raises ConfigError naming the first wrong one."""
        a = arguments
        weights = Path(a.model_weights_dir)
        if not (weights / "config.json").is_file():
            raise ConfigError(
                "--model-weights-dir", weights, "there is no config.json in it; give the model's folder"
            )
        if a.max_seq_len < 2:
            raise ConfigError("--max-seq-len", a.max_seq_len, "give at least 2 tokens")
        try:
            host = check_host(a.host)
        except ValueError as error:
            raise ConfigError("--host", a.host, str(error)) from None
        for option, port in (("--ctrl-port", a.ctrl_port), ("--http-port", a.http_port)):
            try:
                check_port(port)
            except ValueError as error:
                raise ConfigError(option, port, str(error)) from None
        if a.ctrl_port == a.http_port:
            raise ConfigError("--http-port", a.http_port, "it is the control port already; give another")
        protocols = PROTOCOLS[a.transport]
        protocol = a.protocol or protocols[0]
        if protocol not in protocols:
            raise ConfigError("--protocol", protocol, f"transport {a.transport} knows {', '.join(protocols)}")
        if a.slots < 1:
            raise ConfigError("--slots", a.slots, "give at least 1; 2 lets the next request arrive meanwhile")
        return cls(
            engine=a.engine,
            profile=a.model,
            weights=weights,
            max_seq_len=a.max_seq_len,
            host=host,
            ctrl_port=a.ctrl_port,
            http_port=a.http_port,
            transport=a.transport,
            protocol=protocol,
            kv_cache_dtype=a.kv_cache_dtype,
            slots=a.slots,
            secret=_secret(a.secret_file),
            with_mtp=a.with_mtp,
            checksum=not a.no_checksum,
            device=a.device,
            drain_s=a.drain_s,
            allow_stock_senders=a.allow_stock_senders,
            rdma_devices=tuple(name for name in a.rdma_devices.split(",") if name),
        )

    def model_config(self) -> dict[str, Any]:
        """The model's config.json. Raises ConfigError when it is not JSON."""
        try:
            return dict(json.loads((self.weights / "config.json").read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError("--model-weights-dir", self.weights, f"config.json: {error}") from None


def _secret(path: str | None) -> str | None:
    if not path:
        return None
    try:
        secret = Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError("--secret-file", path, f"cannot be read ({error.strerror})") from None
    if not secret:
        raise ConfigError("--secret-file", path, "the file is empty: write the shared secret into it")
    return secret


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tilertctl decode`. The stock decode server's are among them, by the same names."""
    add = parser.add_argument
    # No default: a node that answers from the wrong engine looks healthy.
    add("--engine", required=True, choices=ENGINES, help="what decodes")
    add("--model", required=True, metavar="PROFILE", help="mla, glm5 or dsv32")
    add("--model-weights-dir", required=True, metavar="DIR")
    add(
        "--max-seq-len",
        required=True,
        type=int,
        metavar="TOKENS",
        help="prompt and reply; as on the prefill host",
    )
    add("--host", required=True, metavar="ADDRESS", help="this node's address for routers and prefill hosts")
    add("--ctrl-port", type=int, default=api.CONTROL_PORT)
    add("--http-port", type=int, default=api.HTTP_PORT)
    add("--transport", required=True, choices=tuple(PROTOCOLS))
    add("--protocol", help="mooncake: rdma, tcp, efa; nixl: UCX, LIBFABRIC (default: the first)")
    add(
        "--rdma-devices",
        default="",
        metavar="NIC,...",
        help="NICs for mooncake over rdma or efa, best first (default: all)",
    )
    add(
        "--kv-cache-dtype",
        default="auto",
        help="float32, bf16 or fp8_ds_mla, as on the prefill host; auto: the model's",
    )
    add(
        "--slots",
        type=int,
        default=2,
        help="receive slots; with 2 the next request arrives while one decodes",
    )
    add("--secret-file", metavar="FILE", help="shared secret of routers, prefill hosts and decode nodes")
    add("--with-mtp", action="store_true", help="decode with the model's MTP draft layer (engine tilert)")
    add("--no-checksum", action="store_true", help="accept state without checksums")
    add(
        "--allow-stock-senders",
        action="store_true",
        help="also take state from TileRT's own connector: one at a time, unproven, without checksums",
    )
    add("--device", default="cpu", help="where slots and a reference engine live: cpu or cuda:N")
    add("--drain-s", type=float, default=60.0, metavar="SECONDS", help="how long SIGTERM lets requests end")
