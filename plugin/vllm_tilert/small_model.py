"""The small model of the local cluster and the tests: DeepSeek-V3 in miniature, random weights, seed 0.

Real where it matters to a handoff (MLA latents of 512 + 64, a dense and a sparse layer, routed and shared
experts), tiny elsewhere, and made so that its greedy output is varied, readable and never ends by itself.
Needs torch, safetensors and tokenizers; they are imported when the model is made.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL_TOKENS: Final = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
BOS: Final = 256
EOS: Final = 257
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "ep_size": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def make_small_model(directory: str | Path) -> Path:
    """Write config, weights (float32 safetensors), byte-level tokenizer and generation config to `directory`.

    The same bytes every time. Returns the directory. Raises FileExistsError when it holds another model.
    """
    out = Path(directory)
    config = out / "config.json"
    if config.exists() and json.loads(config.read_text()).get("architectures") != CONFIG["architectures"]:
        raise FileExistsError(f"{out} holds another model; name an empty folder")
    out.mkdir(parents=True, exist_ok=True)
    vocab = _write_tokenizer(out)
    _write_weights(out, [vocab[c] for c in string.ascii_letters + string.digits + string.punctuation])
    _write_json(
        out / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False}
    )
    # Last, so that a folder with a config is a whole model.
    _write_json(config, CONFIG)
    return out


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_tokenizer(out: Path) -> dict[str, int]:
    """One token a byte (ids 0 to 255), then the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, *SPECIAL_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "model_max_length": CONFIG["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return vocab


def _write_weights(out: Path, pickable: list[int]) -> None:
    import torch
    from safetensors.torch import save_file

    c = CONFIG
    hidden, vocab, heads = c["hidden_size"], c["vocab_size"], c["num_attention_heads"]
    latent, rope, q_rank = c["kv_lora_rank"], c["qk_rope_head_dim"], c["q_lora_rank"]
    query = c["qk_nope_head_dim"] + rope
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=generator) * (c["initializer_range"] * scale)
        weights[f"{name}.weight"] = drawn
        return drawn

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(size, generator=generator)

    def mlp(name: str, size: int) -> None:
        matrix(f"{name}.gate_proj", size, hidden)
        matrix(f"{name}.up_proj", size, hidden)
        matrix(f"{name}.down_proj", hidden, size)[0] = 0

    # Nothing writes to feature 0 of the residual stream, so it stays positive, and a negative weight on it
    # in a token's row of lm_head makes sure that greedy never picks that token: special ones, unused ids
    # and bytes that are no text by themselves.
    matrix("model.embed_tokens", vocab, hidden, 4.0)[:, 0] = 1.0
    head = matrix("lm_head", vocab, hidden, 2.0)
    head[:, 0] = 0.0
    barred = torch.ones(vocab, dtype=torch.bool)
    barred[pickable] = False
    head[barred] = 0.0
    head[barred, 0] = -100.0

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        attention = f"{layer}.self_attn"
        matrix(f"{attention}.q_a_proj", q_rank, hidden)
        norm(f"{attention}.q_a_layernorm", q_rank)
        # Sharp attention: with flat, the next token hangs on the last one alone and the output soon loops.
        matrix(f"{attention}.q_b_proj", heads * query, q_rank, 6.0)
        matrix(f"{attention}.kv_a_proj_with_mqa", latent + rope, hidden)
        norm(f"{attention}.kv_a_layernorm", latent)
        matrix(f"{attention}.kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent)
        matrix(f"{attention}.o_proj", hidden, heads * c["v_head_dim"])[0] = 0
        if i < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        matrix(f"{layer}.mlp.gate", c["n_routed_experts"], hidden)
        weights[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(c["n_routed_experts"])
        for expert in range(c["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{expert}", c["moe_intermediate_size"])
        mlp(f"{layer}.mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
    norm("model.norm", hidden)
    weights["model.norm.weight"][0] = 1.0
    path = out / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # save_file leaves 0600; the service that loads it runs as another user
