"""`ServeOptions`: one line of text that says what a server is started with.

What goes wrong without this file: a misspelled option is passed over, and the check that should have judged it passes; a value of the wrong
type reaches a rule; a line that was copied from a start script is refused although every option in it is known.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_specdecode import check_draft, testing
from pytest_specdecode.engines import OPTIONS, ServeOptionError, ServeOptions

GIVEN = {"algorithm": "EAGLE3", "num-steps": 3, "kv-cache-dtype": "fp8_e4m3", "tp": 8, "dp-attention": True}


@pytest.mark.parametrize(
    "text",
    [
        "algorithm=EAGLE3 num-steps=3 kv-cache-dtype=fp8_e4m3 tp=8 dp-attention=yes",
        "  num_steps=3  tp=8\n algorithm=EAGLE3 kv_cache_dtype='fp8_e4m3' dp-attention=TRUE ",
        "--speculative-algorithm=EAGLE3 --speculative-num-steps=3 --kv-cache-dtype=fp8_e4m3 --tp=8 --enable-dp-attention=1",
        "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --kv-cache-dtype fp8_e4m3 --tp-size 8 --enable-dp-attention",
        "--enable-dp-attention --speculative-algorithm EAGLE3 --speculative_num_steps 3 tp=8 kv-cache-dtype=fp8_e4m3",
    ],
)
def test_spellings(text: str) -> None:
    assert dict(ServeOptions.parse(text).given) == GIVEN


def test_what_is_not_given_is_none() -> None:
    options = ServeOptions.parse("tp=8")
    assert options["tp"] == 8
    assert options["algorithm"] is None
    assert options
    assert not ServeOptions.parse("  ")
    assert str(ServeOptions.parse("tp=8 algorithm=EAGLE3")) == "tp=8 algorithm=EAGLE3"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("algoritm=EAGLE3", "no serving option is called 'algoritm'; did you mean algorithm?"),
        ("--speculative-num-step 3", "no serving option is called 'num-step'; did you mean num-steps"),
        ("zzz=1", "known are algorithm, method, num-steps"),
        ("=3", "no serving option is called ''"),
        ("algorithm", "algorithm has no value; write algorithm=VALUE"),
        ("algorithm=", "algorithm has no value"),
        ("--tp --pp 2", "tp has no value"),
        ("--tp", "tp has no value"),
        ("tp=8 tp=8", "tp is given twice"),
        ("tp=8 --tp-size 8", "tp is given twice"),
        ("tp=eight", "tp=eight is not a whole number"),
        ("tp=8.0", "is not a whole number"),
        ("tp=1234567890123", "is not a whole number"),
        ("dp-attention=perhaps", "dp-attention=perhaps is neither true nor false"),
        ("algorithm='EAGLE3", "cannot be read: No closing quotation"),
    ],
)
def test_what_cannot_be_read(text: str, says: str) -> None:
    with pytest.raises(ServeOptionError) as caught:
        ServeOptions.parse(text)
    assert says in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_can_be_given(name: str) -> None:
    value = {int: "4", str: "x", bool: "true"}[OPTIONS[name]]
    assert ServeOptions.parse(f"{name}={value}")[name] in (4, "x", True)
    assert ServeOptions.parse(f"--{name} {value}")[name] in (4, "x", True)


def test_the_script_door_takes_text_and_options(tmp_path: Path) -> None:
    path = testing.write_tiny(tmp_path, "eagle3")
    for serve in ("algorithm=EAGLE", ServeOptions.parse("algorithm=EAGLE")):
        assert check_draft(path, checks=["serving.algorithm"], serve=serve)["serving.algorithm"].status == "failed"
    with pytest.raises(ServeOptionError, match="did you mean algorithm"):
        check_draft(path, checks=["serving"], serve="algoritm=EAGLE")


def test_without_options_the_checks_stay_open(tmp_path: Path) -> None:
    report = check_draft(testing.write_tiny(tmp_path, "eagle3"), checks=["serving"])
    assert {result.status for result in report} == {"inconclusive"}
    assert all("--draft-serve=" in result.message for result in report)
