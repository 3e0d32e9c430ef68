"""Codec names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.codec import CodecSpecError, parse_pair, parse_spec
from swarmtrain.errors import ExitCode

from .generators import FREE_SPECS, STICKY_SPECS


@pytest.mark.parametrize("text", [*FREE_SPECS, *STICKY_SPECS, "ef-topk10:values=int8,carry", "ef-topk5-separate"])
def test_a_canonical_name_parses_to_itself(text: str) -> None:
    assert str(parse_spec(text)) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("fp64", "raw"),
        (" quant8 ", "quant8"),
        ("quant4:group=128", "quant4"),
        ("topk2.50", "topk2.5"),
        ("topk010:values=fp16", "topk10"),
        ("ef21-topk10-separate", "ef21-topk10"),
        ("lowrank8-lep:carry,factors=fp32", "lowrank8-lep:factors=fp32,carry"),
        ("quant4:critical,group=64", "quant4:group=64,critical"),
        ("aqsgd-topk30:key=fp16", "aqsgd-topk30"),
    ],
)
def test_other_spellings_have_one_canonical_name(text: str, canonical: str) -> None:
    assert str(parse_spec(text)) == canonical
    assert parse_spec(canonical) == parse_spec(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fp8",
        "fp32:group=8",
        "quant",
        "quant5",
        "quant1",
        "quant-4",
        "quant4:group=0",
        "quant4:group=12",
        "quant4:group=1000000",
        "quant4:group=",
        "quant4:group=8,group=8",
        "quant4:size=3",
        "minmax4:group=64",
        "topk",
        "topk0",
        "topk101",
        "topk1e1",
        "topk10:values=int4",
        "topk-separate",
        "lowrank0",
        "lowrank",
        "lowrank99999",
        "lowrank8:carry",
        "topk10-lep",
        "ef-minmax4",
        "ef-lowrank8",
        "ef-fp16",
        "ef21-ef-topk10",
        "ef21-topk10:carry",
        "aqsgd-minmax4",
        "aqsgd-quant4:key=int8",
        "ef-topk10:carry=2",
        "fp32:critical",
        "ef21-topk10:critical",
        "quant٤",
    ],
)
def test_a_bad_name_is_a_usage_error_that_says_what_is_allowed(text: str) -> None:
    with pytest.raises(CodecSpecError) as caught:
        parse_spec(text)
    assert caught.value.exit_code is ExitCode.USAGE
    assert "allowed:" in caught.value.fix
    assert "\n" not in str(caught.value)


PIECES = st.sampled_from(
    [
        "quant",
        "topk",
        "ef-",
        "ef21-",
        "aqsgd-",
        "lowrank",
        "-lep",
        ":",
        "=",
        ",",
        "group",
        "critical",
        "8",
        "10",
        ".",
        "/",
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=20), st.lists(PIECES, max_size=8).map("".join)))
def test_any_text_parses_or_is_a_usage_error(text: str) -> None:
    try:
        spec = parse_spec(text)
    except CodecSpecError:
        return
    assert parse_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("fp32", "fp32/fp32"),
        ("quant4/quant8", "quant4/quant8"),
        ("topk10", "topk10/topk10"),
        ("ef-topk10", "ef-topk10/topk10"),
        ("ef-topk10-separate", "ef-topk10-separate/topk10-separate"),
        ("ef21-topk10", "ef21-topk10/ef21-topk10"),
        ("aqsgd-quant4", "aqsgd-quant4/quant8"),
        ("lowrank8", "fp32/lowrank8"),
        ("lowrank8-lep:critical", "fp32/lowrank8-lep:critical"),
        ("fp32/ef-topk10", "fp32/ef-topk10"),
        ("topk10/quant8", "topk10/quant8"),
    ],
)
def test_a_single_name_stands_for_what_its_paper_does_in_each_direction(text: str, canonical: str) -> None:
    assert str(parse_pair(text)) == canonical


@pytest.mark.parametrize(
    "text",
    ["fp32/topk10", "topk10-separate/topk10", "fp32/topk10:critical", "quant8/aqsgd-quant4", "quant4/", "/quant4"],
)
def test_a_pair_whose_directions_do_not_fit_is_refused(text: str) -> None:
    with pytest.raises(CodecSpecError):
        parse_pair(text)
