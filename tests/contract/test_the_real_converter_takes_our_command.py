"""role model_weights converts with TileRT's own converter: its arguments, its model types, and what it leaves behind.

The converter is the published one, run whole. Only the sizes of the model and the device of a few scratch tensors are
changed, so that it takes seconds and no GPU.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "roles/model_weights/files/tilert_weights.py"
DEFAULTS = yaml.safe_load((ROOT / "roles/model_weights/defaults/main.yml").read_text())
MODULE = "tilert.models.preprocess.weight_converter"
ARGS = {
    "glm-5": ("tilert.models.glm_5.model_args", "ModelArgsGLM5"),
    "deepseek-v32": ("tilert.models.deepseek_v3_2.model_args", "ModelArgs"),
}
SMALL = {
    "dim": 1024,
    "inter_dim": 1024,
    "moe_inter_dim": 1024,
    "n_layers": 2,
    "n_dense_layers": 1,
    "n_routed_experts": 8,
    "vocab_size": 1024,
    "q_lora_rank": 512,
}
# Sizes are defaults of a dataclass; the scratch tensors are made on a GPU by the constructors of its operations.
CONVERTER = """
import dataclasses, importlib, runpy, sys, torch
sys.path.insert(0, {stock!r})
for module, name in {args!r}.values():
    made = getattr(importlib.import_module(module), name)
    fields = [field.name for field in dataclasses.fields(made)]
    given = zip(fields, made.__init__.__defaults__)
    made.__init__.__defaults__ = tuple({small!r}.get(field, default) for field, default in given)
zeros = torch.zeros
torch.zeros = lambda *size, device=None, **more: zeros(*size, device="cpu", **more)
runpy.run_module({module!r}, run_name="__main__")
"""


def checkpoint(folder: Path, sizes: Any) -> Path:
    """A checkpoint as Hugging Face has it: fp8 weights with a scale for each block of 128 x 128."""
    tensors: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, fp8: bool = True) -> None:
        weight = torch.randn(rows, columns)
        tensors[f"{name}.weight"] = weight.to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
        if fp8:
            tensors[f"{name}.weight_scale_inv"] = torch.rand(-(-rows // 128), -(-columns // 128))

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    def mlp(name: str, inner: int) -> None:
        linear(f"{name}.gate_proj", inner, sizes.dim)
        linear(f"{name}.up_proj", inner, sizes.dim)
        linear(f"{name}.down_proj", sizes.dim, inner)

    for layer in range(sizes.n_layers + 1):
        at = f"model.layers.{layer}"
        norm(f"{at}.input_layernorm", sizes.dim)
        norm(f"{at}.post_attention_layernorm", sizes.dim)
        norm(f"{at}.self_attn.q_a_layernorm", sizes.q_lora_rank)
        norm(f"{at}.self_attn.kv_a_layernorm", sizes.kv_lora_rank)
        norm(f"{at}.self_attn.indexer.k_norm", sizes.index_head_dim)
        tensors[f"{at}.self_attn.indexer.k_norm.bias"] = torch.zeros(sizes.index_head_dim)
        head = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        for name, rows, columns in (
            ("q_a_proj", sizes.q_lora_rank, sizes.dim),
            ("q_b_proj", sizes.n_heads * head, sizes.q_lora_rank),
            ("kv_a_proj_with_mqa", sizes.kv_lora_rank + sizes.qk_rope_head_dim, sizes.dim),
            ("kv_b_proj", sizes.n_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), sizes.kv_lora_rank),
            ("o_proj", sizes.dim, sizes.n_heads * sizes.v_head_dim),
            ("indexer.wq_b", sizes.index_n_heads * sizes.index_head_dim, sizes.q_lora_rank),
            ("indexer.wk", sizes.index_head_dim, sizes.dim),
        ):
            linear(f"{at}.self_attn.{name}", rows, columns)
        linear(f"{at}.self_attn.indexer.weights_proj", sizes.index_n_heads, sizes.dim, fp8=False)
        if layer < sizes.n_dense_layers:
            mlp(f"{at}.mlp", sizes.inter_dim)
        else:
            linear(f"{at}.mlp.gate", sizes.n_routed_experts, sizes.dim, fp8=False)
            tensors[f"{at}.mlp.gate.e_score_correction_bias"] = torch.zeros(sizes.n_routed_experts)
            mlp(f"{at}.mlp.shared_experts", sizes.moe_inter_dim)
            for expert in range(sizes.n_routed_experts):
                mlp(f"{at}.mlp.experts.{expert}", sizes.moe_inter_dim)
    draft = f"model.layers.{sizes.n_layers}"
    norm(f"{draft}.enorm", sizes.dim)
    norm(f"{draft}.hnorm", sizes.dim)
    linear(f"{draft}.eh_proj", sizes.dim, 2 * sizes.dim, fp8=False)
    linear("model.embed_tokens", sizes.vocab_size, sizes.dim, fp8=False)
    norm("model.norm", sizes.dim)
    linear("lm_head", sizes.vocab_size, sizes.dim, fp8=False)

    folder.mkdir()
    shard = "model-00001-of-00001.safetensors"
    save_file(tensors, folder / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def weights(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


class Site:
    """A sealed checkpoint, and the converter that takes it."""

    def __init__(self, folder: Path, stock: Path, model_type: str) -> None:
        self.folder, self.model_type = folder, model_type
        self.converter = folder / "converter.py"
        self.converter.write_text(CONVERTER.format(stock=str(stock), args=ARGS, small=SMALL, module=MODULE))

    def convert(self, model: Path, dest: Path, model_type: str = "") -> subprocess.CompletedProcess[str]:
        """As role model_weights calls it, with another command in the converter's place."""
        done = weights("seal", model)
        assert done.returncode == 0, done.stderr
        given = ["--model-dir", model, "--model-type", model_type or self.model_type]
        given += ["--converter-version", DEFAULTS["model_weights_converter_version"], "--reserve-bytes", 0]
        return weights("convert", dest, *given, "--converter", sys.executable, self.converter)


@pytest.fixture(params=list(ARGS))
def site(request: pytest.FixtureRequest, tmp_path: Path, stock: Any, stock_path: Path) -> Site:
    return Site(tmp_path, stock_path, request.param)


def sizes_of(model_type: str) -> Any:
    module, name = ARGS[model_type]
    made = getattr(__import__(module, fromlist=[name]), name)
    return dataclasses.replace(made(), **SMALL)


def test_a_checkpoint_is_converted_whole_and_once(site: Site) -> None:
    sizes = sizes_of(site.model_type)
    model, dest = checkpoint(site.folder / "model", sizes), site.folder / "converted"
    done = site.convert(model, dest)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["changed"] is True
    # Every tensor that the index names is in the file that it names, each layer on each of eight devices.
    named = json.loads((dest / "model.safetensors.index.json").read_text())["weight_map"]
    for shard in set(named.values()):
        with safe_open(dest / shard, framework="pt") as stream:
            assert set(stream.keys()) == {name for name, at in named.items() if at == shard}
    places = {(name.split("_")[1], name.split("_")[-1]) for name in named if name.startswith("layer_")}
    assert places == {(str(layer), str(device)) for layer in range(sizes.n_layers + 1) for device in range(8)}
    # What the engine reads beside the weights, and the manifest that other hosts fetch by.
    listed = {file["path"] for file in json.loads((dest / "tilert-manifest.json").read_text())["files"]}
    assert listed == {*named.values(), "model.safetensors.index.json", "config.json", "tokenizer.json"}
    assert weights("verify", dest).returncode == 0
    assert not (site.folder / "converted.partial").exists()
    again = site.convert(model, dest)
    assert json.loads(again.stdout)["changed"] is False


def test_what_the_converter_does_not_take_is_said_and_leaves_nothing(site: Site) -> None:
    model, dest = checkpoint(site.folder / "model", sizes_of(site.model_type)), site.folder / "converted"
    done = site.convert(model, dest, model_type="deepseek-v3")
    assert done.returncode != 0
    assert "Invalid model type: deepseek-v3" in done.stderr  # the converter's own words
    assert "the converter ended with 1" in done.stderr
    (model / "model.safetensors.index.json").rename(model / "other.json")
    (model / "tilert-manifest.json").unlink()
    done = site.convert(model, dest)
    assert done.returncode != 0
    assert "has no model.safetensors.index.json, which the converter starts from" in done.stderr
    assert not dest.exists()


def test_the_role_names_the_module_and_the_version_of_the_wheel(stock_path: Path) -> None:
    python, *module = DEFAULTS["model_weights_converter"]
    assert python.endswith("/decode/bin/python")
    assert module == ["-m", MODULE]
    assert (stock_path / f"{MODULE.replace('.', '/')}.py").is_file()
    (metadata,) = stock_path.glob("*.dist-info/METADATA")
    assert f"Version: {DEFAULTS['model_weights_converter_version']}\n" in metadata.read_text()
    lock = (ROOT / "requirements/decode-tilert.txt").read_text().splitlines()
    assert f"tilert=={DEFAULTS['model_weights_converter_version']}" in lock
    # It makes its rotation by scipy where the CUDA package for it is not installed.
    assert any(line.startswith("scipy==") for line in lock)
