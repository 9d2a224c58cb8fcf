"""`tilertctl verify` says identical only of what is identical."""

import argparse

import pytest

from vllm_tilert.verify import Answer, Comparison, add_arguments, make_prompts, report, tie_margin


def comparison(
    expected: list[int], got: list[int], at: int | None, margin: float | None = None
) -> Comparison:
    answer = Answer("0" * 32, got, "", "length", 0.1, 0.2)
    return Comparison(5, answer, expected, at, margin, handoff={"bytes": 10, "wire_ms": 1.0})


def last(*comparisons: Comparison, tie_margin: float = 0.0) -> str:
    return list(report(comparisons, tie_margin))[-1]


def test_equal_tokens_are_identical() -> None:
    c = comparison([1, 2, 3], [1, 2, 3], None)
    assert c.identical(0.0)
    assert last(c) == "handoff: 3/3 tokens identical"


def test_a_difference_counts_from_where_it_starts() -> None:
    c = comparison([1, 2, 3, 4], [1, 2, 9, 4], 2, margin=1.5)
    assert not c.identical(0.01)
    assert last(c) == "handoff: 2/4 tokens identical"


def test_a_near_tie_is_accepted_only_below_the_margin_and_counts_no_further() -> None:
    c = comparison([1, 2, 3, 4], [1, 2, 9, 4], 2, margin=0.004)
    assert c.identical(0.01)
    assert not c.identical(0.0)
    assert last(c, tie_margin=0.01).startswith("handoff: 2/2 tokens identical (up to near-ties below 0.01)")


def test_a_cut_reply_is_not_identical() -> None:
    assert not comparison([1, 2, 3], [1, 2], 2, margin=None).identical(0.01)


def test_prompts_are_the_same_for_a_seed_and_differ_between_seeds() -> None:
    assert make_prompts([5, 9], 1) == make_prompts([5, 9], 1)
    assert make_prompts([5, 9], 1) != make_prompts([5, 9], 2)
    assert [len(p) for p in make_prompts([1, 1500], 1)] == [1, 1500]


def test_the_near_tie_margin_comes_from_vllms_own_rounding() -> None:
    assert tie_margin([0.0] * 64) == 0.0
    assert tie_margin([]) == 0.0
    # The tail counts, and not the one move beyond it (another expert chosen).
    assert tie_margin([0.0625] * 390 + [0.5] * 9 + [2.0]) == pytest.approx(0.5)
    # A token that vLLM itself would not choose when it reads is a tie, whatever its gap was in decoding.
    assert comparison([1, 2, 3], [1, 9, 3], 1, margin=-0.1).identical(0.25)
    assert not comparison([1, 2, 3], [1, 9, 3], 1, margin=-0.1).identical(0.0)


@pytest.mark.parametrize("text", ["-0.1", "nan", "inf", "some"])
def test_a_margin_that_is_none_is_refused_with_the_remedy(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    needed = ["--ingress", "http://i", "--prefill", "http://p", "--model", "m"]
    assert parser.parse_args([*needed, "--tie-margin", "auto"]).tie_margin is None
    assert parser.parse_args([*needed, "--tie-margin", "0.5"]).tie_margin == 0.5
    with pytest.raises(SystemExit):
        parser.parse_args([*needed, f"--tie-margin={text}"])
    assert "use auto, or a gap of 0 nats or more" in capsys.readouterr().err
