"""Both ends derive one layout from the same model, and anything unexpected is refused by name."""

from __future__ import annotations

import json

import pytest
import torch

from unit.profiles.caches import mla_caches, nsa_caches
from vllm_tilert.profiles.base import ProfileError, get_profile

DSA = {
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}
MLA = {"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "float32"}


@pytest.mark.parametrize(
    ("alias", "name"),
    [("glm-5", "glm5"), ("glm_5", "glm5"), ("deepseek-v3.2", "dsv32"), ("v32", "dsv32"), ("mla", "mla")],
)
def test_a_profile_answers_to_its_names(alias: str, name: str) -> None:
    assert get_profile(alias).name == name


def test_an_unknown_profile_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ProfileError, match=r"'gpt'.*deepseek-v3\.2.*glm5") as error:
        get_profile("gpt")
    assert (error.value.field, error.value.value) == ("profile", "gpt")


@pytest.mark.parametrize(
    ("name", "dtype", "asked", "version", "kv"),
    [
        ("glm5", "fp8_ds_mla", "fp8", 10, 528),
        ("glm5", "bfloat16", "auto", 50, 1024),
        ("dsv32", "fp8_ds_mla", "fp8_ds_mla", 11, 528),
        ("dsv32", "bfloat16", "bf16", 51, 1024),
    ],
)
def test_sparse_models_have_one_layout_on_both_ends(
    name: str, dtype: str, asked: str, version: int, kv: int
) -> None:
    profile = get_profile(name)
    layout = profile.layout_from_caches(nsa_caches(3, 2, dtype))
    assert layout.describe() == profile.layout_from_config(DSA, asked).describe()
    assert (layout.version, layout.page) == (version, 64)
    assert [(p.name, p.unit_tokens, p.unit_bytes) for p in layout.planes] == [
        ("kv", 1, kv),
        ("pe", 1, 128),
        ("index", 64, 8448),
    ]
    assert json.loads(json.dumps(layout.describe())) == layout.describe()


@pytest.mark.parametrize(("dtype", "asked"), [("float32", "auto"), ("bfloat16", "bf16")])
def test_mla_models_have_one_layout_on_both_ends(dtype: str, asked: str) -> None:
    profile = get_profile("mla")
    caches = mla_caches(3, 2, getattr(torch, dtype))
    layout = profile.layout_from_caches(caches)
    assert layout.describe() == profile.layout_from_config(MLA, asked).describe()
    flat = {name: cache[:, 0] for name, cache in caches.items()}
    assert profile.layout_from_caches(flat) == layout


def test_layers_are_ordered_by_number_not_by_name() -> None:
    caches = mla_caches(12, 2, torch.float32)
    shuffled = {name: caches[name] for name in sorted(caches)}
    profile = get_profile("mla")
    layout = profile.layout_from_caches(shuffled)
    out = torch.empty(layout.segment_bytes(1), dtype=torch.uint8)
    profile.gatherer(shuffled, layout).gather([1], 0, 1, out)
    rows = out.view(torch.float32).view(12, 576)
    assert all(torch.equal(rows[i], caches[f"model.layers.{i}.self_attn.attn"][1, 0, 0]) for i in range(12))


def _drop_layer(caches: dict[str, torch.Tensor]) -> None:
    del caches["model.layers.1.self_attn.attn"]


def _drop_index(caches: dict[str, torch.Tensor]) -> None:
    del caches["model.layers.2.self_attn.indexer.k_cache"]


def _page_16(caches: dict[str, torch.Tensor]) -> None:
    for name, cache in caches.items():
        caches[name] = cache.view(-1, 16, cache.shape[-1])


def _short_row(caches: dict[str, torch.Tensor]) -> None:
    for i in range(3):
        caches[f"model.layers.{i}.self_attn.attn"] = torch.zeros(2, 64, 640, dtype=torch.uint8)


def _other_dtype(caches: dict[str, torch.Tensor]) -> None:
    for i in range(3):
        caches[f"model.layers.{i}.self_attn.attn"] = torch.zeros(2, 64, 656, dtype=torch.int8)


def _one_layer_differs(caches: dict[str, torch.Tensor]) -> None:
    caches["model.layers.1.self_attn.attn"] = torch.zeros(4, 64, 656, dtype=torch.uint8)


def _strided(caches: dict[str, torch.Tensor]) -> None:
    for i in range(3):
        caches[f"model.layers.{i}.self_attn.attn"] = torch.zeros(2, 64, 1312, dtype=torch.uint8)[..., ::2]


def _no_number(caches: dict[str, torch.Tensor]) -> None:
    caches["model.attn"] = caches.pop("model.layers.0.self_attn.attn")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_drop_layer, r"attention layers is \[0, 2\]"),
        (_drop_index, "indexer caches is '2 of 2 blocks'"),
        (_page_16, "--block-size 64"),
        (_short_row, "fp8_ds_mla"),
        (_other_dtype, "torch.int8"),
        (_one_layer_differs, r"model.layers.1.self_attn.attn.*\[4, 64, 656\]"),
        (_strided, "contiguous"),
        (_no_number, "model.attn"),
        (dict.clear, "attention layers"),
    ],
)
def test_unexpected_caches_are_refused_by_name(spoil, says: str) -> None:
    caches = nsa_caches(3, 2, "fp8_ds_mla")
    spoil(caches)
    with pytest.raises(ProfileError, match=says):
        get_profile("glm5").layout_from_caches(caches)


@pytest.mark.parametrize(
    ("name", "change", "dtype", "says"),
    [
        ("glm5", {"kv_lora_rank": 256}, "auto", "config.kv_lora_rank is 256"),
        ("glm5", {"index_head_dim": None}, "auto", "config.index_head_dim is None"),
        ("glm5", {"num_nextn_predict_layers": 0}, "auto", "config.num_nextn_predict_layers is 0.*draft"),
        ("dsv32", {"num_hidden_layers": "61"}, "auto", "config.num_hidden_layers is '61'"),
        ("dsv32", {"num_hidden_layers": True}, "auto", "config.num_hidden_layers is True"),
        ("dsv32", {}, "int4", "kv_cache_dtype is 'int4'"),
        ("mla", {"torch_dtype": "float16"}, "auto", "kv_cache_dtype is 'float16'"),
        ("mla", {"qk_rope_head_dim": 32}, "bf16", "config.qk_rope_head_dim is 32"),
        ("mla", {}, "fp8", "kv_cache_dtype is 'fp8'"),
    ],
)
def test_an_unexpected_config_is_refused_by_field(name: str, change: dict, dtype: str, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        get_profile(name).layout_from_config({**DSA, **change}, dtype)


def test_a_missing_draft_layer_shows_as_a_layout_mismatch() -> None:
    profile = get_profile("glm5")
    prefill = profile.layout_from_caches(nsa_caches(2, 2, "fp8_ds_mla"))
    decode = profile.layout_from_config(DSA, "fp8")
    assert decode.mismatch(prefill.describe()) == "layout.layers: here 3, peer 2"


def test_profile_mla_refuses_caches_that_do_not_lie_in_host_memory() -> None:
    profile = get_profile("mla")
    caches = {name: cache.to("meta") for name, cache in mla_caches(2, 3, torch.float32).items()}
    with pytest.raises(ProfileError, match="profile mla gathers on the CPU only") as error:
        profile.gatherer(caches, profile.layout_from_caches(caches))
    assert (error.value.field, error.value.value) == ("mla cache device", "meta")
