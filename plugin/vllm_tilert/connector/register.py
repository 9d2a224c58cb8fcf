"""vLLM's `vllm.general_plugins` entry point: makes the connector known by name."""

from __future__ import annotations

from typing import Final

NAME: Final = "TileRTConnector"


def register() -> None:
    """Register TileRTConnector. vLLM calls this in every process, some of them more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "vllm_tilert.connector.connector", NAME)
