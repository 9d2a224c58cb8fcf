"""A stock peer's buffer is addressed exactly, or not at all."""

from __future__ import annotations

import pytest
import torch

from vllm_tilert.profiles import stock
from vllm_tilert.profiles.base import ProfileError, get_profile
from vllm_tilert.profiles.layout import Layout

CONFIG = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_nextn_predict_layers": 1}


def glm5(layers: int = 79) -> Layout:
    return get_profile("glm5").layout_from_config({**CONFIG, "num_hidden_layers": layers - 1}, "fp8")


@pytest.mark.parametrize("segments", [[1], [64, 1], [128, 64, 7], [199]])
def test_segments_written_to_a_stock_buffer_convert_as_if_landed_whole(segments: list[int]) -> None:
    layout, total, limit = glm5(), sum(segments), 200
    generator = torch.Generator().manual_seed(total)
    compact = torch.randint(0, 120, (layout.segment_bytes(total),), dtype=torch.uint8, generator=generator)
    buffer = torch.full((stock.slot_bytes(layout, limit),), 0xA5, dtype=torch.uint8)
    hello = {"max_seq_len": limit, **stock.hello_bases(layout, limit, address=0)}
    at = 0
    for tokens in segments:
        segment = compact[layout.offset(at) :][: layout.segment_bytes(tokens)]
        for source, target, length in stock.parts(layout, hello, at, tokens):
            buffer[target : target + length] = segment[source : source + length]
        at += tokens
    profile = get_profile("glm5")
    ours, theirs = (
        profile.convert(compact, layout, segments),
        profile.convert_strided(buffer, layout, limit, total),
    )
    assert all(
        torch.equal(ours.planes[n].view(torch.int16), theirs.planes[n].view(torch.int16)) for n in ours.order
    )


def test_a_segment_beyond_the_peer_is_refused() -> None:
    hello = {"max_seq_len": 128, **stock.hello_bases(glm5(), 128, 0)}
    with pytest.raises(ValueError, match="exceed the peer's max_seq_len of 128"):
        stock.parts(glm5(), hello, 64, 65)


def test_a_layer_count_the_stock_peer_would_not_notice_is_refused() -> None:
    with pytest.raises(ProfileError, match="layers is 78"):
        stock.parts(glm5(78), {"max_seq_len": 128}, 0, 64)


def test_a_profile_the_stock_peer_does_not_have_is_refused() -> None:
    layout = get_profile("mla").layout_from_config({**CONFIG, "num_hidden_layers": 3}, "bf16")
    with pytest.raises(ProfileError, match="profile is 'mla'"):
        stock.check_layout(layout)
