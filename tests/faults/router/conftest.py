from integration.router.conftest import tokenizer_folder, up

__all__ = ["tokenizer_folder", "up"]
