from integration.decode.conftest import model_dir, prefill

__all__ = ["model_dir", "prefill"]
