"""Small DSA models with random weights and the real cache geometry, for `real_vllm`.

usage: python3 tests/gpu/make_models.py FOLDER      writes FOLDER/dsv32 (61 layers) and FOLDER/glm5 (78)

Each has an MTP draft layer behind its layers and a byte tokenizer; a token's state is 656 + 132 bytes a layer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS = {"dsv32": 61, "glm5": 78}
VOCABULARY, HIDDEN, EXPERTS, HEADS, Q_RANK, KV_RANK, ROPE = 512, 512, 8, 16, 512, 512, 64
EXPERT_DIM, DENSE_DIM, INDEX_DIM = 128, 512, 128
SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")


def shape(model: str) -> dict[str, int]:
    """What differs between the families: value and key dimensions, indexer heads."""
    if model == "dsv32":
        return {"nope": 128, "value": 128, "index_heads": 64}
    return {"nope": 192, "value": 256, "index_heads": 32}


def config(model: str) -> dict[str, Any]:
    of, layers = shape(model), LAYERS[model]
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE_DIM,
        "moe_intermediate_size": EXPERT_DIM,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_shared_experts": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "kv_lora_rank": KV_RANK,
        "q_lora_rank": Q_RANK,
        "qk_nope_head_dim": of["nope"],
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": of["nope"] + ROPE,
        "head_dim": ROPE,
        "v_head_dim": of["value"],
        "index_head_dim": INDEX_DIM,
        "index_n_heads": of["index_heads"],
        "index_topk": 2048,
        "max_position_embeddings": 65536,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "ep_size": 1,
    }
    if model == "dsv32":
        return common | {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": None,
        }
    return common | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "indexer_rope_interleave": True,
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
    }


def weights(model: str) -> dict[str, torch.Tensor]:
    of, layers = shape(model), LAYERS[model]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(7)
    found: dict[str, torch.Tensor] = {}

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    def linear(name: str, *size: int, gain: float = 1.0) -> None:
        found[name] = (draw(*size) * gain / size[-1] ** 0.5).bfloat16()

    def norm(name: str, size: int) -> None:
        found[name] = (1 + 0.1 * draw(size)).bfloat16()

    def feed_forward(name: str, size: int) -> None:
        linear(f"{name}.gate_proj.weight", size, HIDDEN)
        linear(f"{name}.up_proj.weight", size, HIDDEN)
        linear(f"{name}.down_proj.weight", HIDDEN, size)

    found["model.embed_tokens.weight"] = draw(VOCABULARY, HIDDEN).bfloat16()
    norm("model.norm.weight", HIDDEN)
    linear("lm_head.weight", VOCABULARY, HIDDEN, gain=3.0)
    for i in range(layers + 1):
        layer = f"model.layers.{i}"
        if i == layers:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                norm(f"{layer}.{name}.weight", HIDDEN)
            linear(f"{layer}.eh_proj.weight", HIDDEN, 2 * HIDDEN)
            found[f"{layer}.embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
            found[f"{layer}.shared_head.head.weight"] = found["lm_head.weight"].clone()
        norm(f"{layer}.input_layernorm.weight", HIDDEN)
        norm(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        attention = f"{layer}.self_attn"
        linear(f"{attention}.q_a_proj.weight", Q_RANK, HIDDEN)
        norm(f"{attention}.q_a_layernorm.weight", Q_RANK)
        linear(f"{attention}.q_b_proj.weight", HEADS * (of["nope"] + ROPE), Q_RANK, gain=2.0)
        linear(f"{attention}.kv_a_proj_with_mqa.weight", KV_RANK + ROPE, HIDDEN)
        norm(f"{attention}.kv_a_layernorm.weight", KV_RANK)
        linear(f"{attention}.kv_b_proj.weight", HEADS * (of["nope"] + of["value"]), KV_RANK, gain=2.0)
        linear(f"{attention}.o_proj.weight", HIDDEN, HEADS * of["value"])
        linear(f"{attention}.indexer.wq_b.weight", of["index_heads"] * INDEX_DIM, Q_RANK)
        linear(f"{attention}.indexer.wk.weight", INDEX_DIM, HIDDEN)
        norm(f"{attention}.indexer.k_norm.weight", INDEX_DIM)
        found[f"{attention}.indexer.k_norm.bias"] = (0.1 * draw(INDEX_DIM)).bfloat16()
        linear(f"{attention}.indexer.weights_proj.weight", of["index_heads"], HIDDEN)
        if i == 0:
            feed_forward(f"{layer}.mlp", DENSE_DIM)
            continue
        linear(f"{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
        found[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
        for name in (*(f"experts.{j}" for j in range(EXPERTS)), "shared_experts"):
            feed_forward(f"{layer}.mlp.{name}", EXPERT_DIM)
    return {name: tensor.cpu() for name, tensor in found.items()}


def write_tokenizer(folder: Path) -> None:
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + list(SPECIAL)
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "model_max_length": 1 << 20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def make(folder: Path, model: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model), indent=1))
    generation = {"bos_token_id": 256, "eos_token_id": 257, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(folder)
    tensors = weights(model)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    print(folder, f"{sum(t.numel() for t in tensors.values()) / 1e6:.0f} M parameters", flush=True)


if __name__ == "__main__":
    for model in LAYERS:
        make(Path(sys.argv[1]) / model, model)
