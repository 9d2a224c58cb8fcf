"""The data plane that joins vLLM prefill and TileRT decode."""

__version__ = "0.1.0"
