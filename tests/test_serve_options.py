"""`ServeOptions`: one line of text that says what a server is started with.

What goes wrong without this file: a misspelled option is passed over, and the check that should have judged it passes; a value of the wrong
type reaches a rule; a line that was copied from a start script is refused for an option that has nothing to do with the draft, or a
misspelled one in it is taken for such; a nonsense number or name is judged as if it meant something.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_specdecode import check_draft, testing
from pytest_specdecode.engines import OPTIONS, ServeOptionError, ServeOptions, server_options

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


@pytest.mark.parametrize(
    ("text", "given", "ignored"),
    [
        ("--speculative-algorithm EAGLE3 --mem-fraction-static 0.8", {"algorithm": "EAGLE3"}, ("--mem-fraction-static",)),
        ("--model-path org/m=x --tp 4 --speculative-draft-model-path d", {"tp": 4}, ("--model-path", "--speculative-draft-model-path")),
        ("-tp 4 -pp=2", {"tp": 4, "pp": 2}, ()),
        ("CUDA_DEVICES=0 python -m sglang.launch_server \\\n  --tp 2 \\\n --trust-remote-code", {"tp": 2}, ("--trust-remote-code",)),
        ("/usr/bin/python3.11 -m vllm.entrypoints.openai.api_server --max-model-len 32K", {"context-length": 32768}, ()),
        ("vllm serve org/model -tp 4 --max-model-len auto", {"tp": 4}, ("--max-model-len",)),
        ("vllm serve --enable-prefix-caching -tp 4 org/model", {"tp": 4}, ("--enable-prefix-caching", "org/model")),
        ("sglang serve --model-path X --max-lora-rank 8 --tp 2", {"tp": 2}, ("--model-path", "--max-lora-rank")),
        ("trtllm-serve org/model --max_seq_len 4096 --tp_size 2", {"tp": 2}, ("--max_seq_len",)),
        ("--cuda-graph-bs 1 2 4 --lora-paths a=x b=y tp=2 -O3 --seed -1", {"tp": 2}, ("--cuda-graph-bs", "--lora-paths", "-O3", "--seed")),
        (
            """vllm serve m --speculative-config '{"method":"eagle3","num_speculative_tokens":3,"model":"d"}' --port 80""",
            {"method": "eagle3", "num-speculative-tokens": 3},
            ("speculative-config.model", "--port"),
        ),
        ("""--speculative_config='{"method": "mtp", "num_speculative_tokens": null}'""", {"method": "mtp"}, ()),
        ("--speculative-config.method eagle3 -tp 2", {"method": "eagle3", "tp": 2}, ()),
        ("mem-fraction-static=0.8 tp=2", {"tp": 2}, ("mem-fraction-static",)),
    ],
)  # fmt: skip
def test_a_pasted_command(text: str, given: dict[str, object], ignored: tuple[str, ...]) -> None:
    options = ServeOptions.parse(text)
    assert dict(options.given) == given
    assert options.ignored == ignored


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--enable-dp-atention", "no serving option is called 'enable-dp-atention'"),
        ("--kv-cache-dtyp auto", "did you mean kv-cache-dtype"),
        ("--wholly-unheard-of 3", "no serving option is called 'wholly-unheard-of'"),
        ("foo", "no serving option is called 'foo'"),
        ("--speculative-config eagle3", "speculative-config is not a JSON object; quote it"),
        ('--speculative-config {"method":"eagle3"}', "speculative-config is not a JSON object; quote it"),
        ("""--speculative-config='{"num_speculative_token": 3}'""", "did you mean num_speculative_tokens?"),
        (
            """--speculative-config='{"num_speculative_tokens": 2.5}'""",
            "num-speculative-tokens=2.5 is not a whole number",
        ),
        ("page-size=0", "page-size=0 is less than one"),
        ("tp=0", "tp=0 is less than one"),
        ("--tp -2", "tp=-2 is less than one"),
        ("context-length=0", "context-length=0 is less than one"),
        ("tp=\u0664\u00b2", "is not a whole number"),
    ],
)
def test_a_command_that_cannot_be_read(text: str, says: str) -> None:
    with pytest.raises(ServeOptionError) as caught:
        ServeOptions.parse(text)
    assert says in caught.value.message


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_is_read_and_passed_over(name: str) -> None:
    assert name not in server_options._NAMES
