"""The router: OpenAI's API in front of vLLM prefill and TileRT decode."""
