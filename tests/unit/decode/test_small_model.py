"""The small model says varied, readable things, never ends by itself, and is the same every time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tilert.small_model import EOS, make_small_model

PROMPTS = ("a", "Hello, world", "The quick brown fox " * 20, "What is the capital of France?", "x" * 300)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_model(tmp_path_factory.mktemp("small"))


def test_greedy_output_is_varied_readable_and_never_a_special_token(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model, loading = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    distinct = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        out = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :].tolist()
        assert len(out) == 64
        assert EOS not in out
        text = tokenizer.decode(out)
        assert text.isascii()
        assert text.isprintable()
        assert tokenizer.encode(text) == out
        distinct.append(len(set(out)))
    assert min(distinct) >= 20


def test_two_makings_are_the_same_bytes(model_dir: Path, tmp_path: Path) -> None:
    def digest(folder: Path) -> dict[str, str]:
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}

    assert digest(make_small_model(tmp_path)) == digest(model_dir)


def test_another_models_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(FileExistsError, match="another model"):
        make_small_model(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_the_command_starts_without_torch() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"  # any import of torch now fails
        "from vllm_tilert.cli import parser\n"
        "parser().parse_args(['make-small-model', 'd'])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
