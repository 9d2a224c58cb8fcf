"""A connector that flips one byte of each staged segment: the control run of the token comparison.

The checksum is made of what is staged, so nothing but the tokens can tell.
"""

import torch

from vllm_tilert.connector import connector, worker


class _Corrupting(worker.HandoffWorker):
    def _staged(self, segment: torch.Tensor) -> None:
        segment[3] ^= 0x7F  # sign and exponent of the first token's first latent


worker.HandoffWorker = _Corrupting  # type: ignore[misc]
connector.HandoffWorker = _Corrupting  # type: ignore[misc]


class TileRTConnector(connector.TileRTConnector):
    """Loaded by kv_connector_module_path."""
