"""The draft against the target that it is given: widths, name, rotary embedding, and the tokens of its tokenizer.

What goes wrong without this file: a draft beside the wrong target passes because the two were never compared; a right pair is warned of
because one file writes a type or a name in another way; a target whose files are odd or broken breaks the check; the whole of a target's
weights is read for one number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_specdecode import check_draft, testing
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.checks import REGISTRY, Context, run
from pytest_specdecode.engines import ServeOptions
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.families import load
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.target import Target

TARGET = {"hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 16, "rope_theta": 500000.0}
CORPUS = Path(__file__).parents[1] / "corpus" / "configs"
BLOCK = {"target_layer_ids": [1, 9, 17], "mask_token_id": 511, "block_size": 8}


def write_target(path: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A target's directory; the names of files have `__` for their dot."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(TARGET if config is None else config))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def judge(path: Path, check: str, family: str, target: Path, *, weights: bool = False, **changes: Any) -> CheckResult:
    if weights:
        testing.write_tiny(path / "draft", family, **changes)
    else:
        (path / "draft").mkdir(exist_ok=True)
        (path / "draft" / "config.json").write_text(json.dumps(testing.tiny_config(family, **changes)))
    return check_draft(path / "draft", target=target, checks=[check])[check]


# --- widths ---

WIDTHS = [
    ({**TARGET, "hidden_size": 96}, {}, "failed", "states of width 64, the target's have 96", "hidden_size"),
    ({**TARGET, "vocab_size": 500}, {}, "failed", "vocabulary has 512 ids, the target's has 500", "vocab_size"),
    ({**TARGET, "num_hidden_layers": 32}, {}, "warned", "target of 16 layers, this one has 32", "num_target_layers"),
    (TARGET, {"target_hidden_size": 128}, "failed", "states of width 128", "target_hidden_size"),
    (
        {"text_config": {**TARGET, "hidden_size": 96}, "hidden_size": 64},
        {},
        "failed",
        "the target's have 96",
        "hidden_size",
    ),
]


@pytest.mark.parametrize(("target", "changes", "status", "text", "key"), WIDTHS)
def test_widths_that_differ(
    target: dict[str, Any], changes: dict[str, Any], status: str, text: str, key: str, tmp_path: Path
) -> None:
    result = judge(tmp_path, "target.widths", "eagle3", write_target(tmp_path / "target", target), **changes)
    assert result.status == status, result
    assert text in result.message
    assert result.findings[0].where == f"config.json: {key}"


def test_a_wrong_width_stops_the_engines(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", {**TARGET, "hidden_size": 96})
    found = judge(tmp_path, "target.widths", "dflash", target).findings[0].outcomes
    assert (found["sglang"].outcome, found["sglang"].message) == ("stops", "DFLASH target_hidden feature dim mismatch")
    assert found["vllm"].outcome == "stops"


@pytest.mark.parametrize(
    "target",
    [TARGET, {"text_config": TARGET}, {"llm_config": {**TARGET, "num_hidden_layers": 16.0}}, {"vocab_size": 512}],
)
def test_widths_that_agree(target: dict[str, Any], tmp_path: Path) -> None:
    assert judge(tmp_path, "target.widths", "eagle3", write_target(tmp_path / "target", target)).status == "passed"


@pytest.mark.parametrize(
    "target", [{}, {"hidden_size": "64"}, {"hidden_size": True, "vocab_size": [512], "text_config": 7}]
)
def test_a_target_that_says_nothing_leaves_it_open(target: dict[str, Any], tmp_path: Path) -> None:
    result = judge(tmp_path, "target.widths", "eagle3", write_target(tmp_path / "target", target))
    assert result.status == "inconclusive"


def test_a_number_of_taps_is_no_depth(tmp_path: Path) -> None:
    """Some packagings write the number of taps in num_target_layers."""
    target = write_target(tmp_path / "target", {**TARGET, "num_hidden_layers": 93})
    assert judge(tmp_path, "target.widths", "eagle3", target, num_target_layers=3).status == "passed"


def _embedding(path: Path, rows: int, name: str = "model.embed_tokens.weight", shards: int = 1) -> None:
    tensors = {name: torch.zeros(rows, 64), "model.layers.0.embed_tokens.weight": torch.zeros(3, 64)}
    testing.write_checkpoint(path, TARGET, tensors, shards=shards)


@pytest.mark.parametrize("shards", [1, 2])
def test_padded_rows_of_the_targets_embedding_count(shards: int, tmp_path: Path) -> None:
    """A draft may state the rows that are stored, or those that the target states; its own embedding has one or the other."""
    _embedding(tmp_path / "target", 544, shards=shards)
    assert Target.open(tmp_path / "target").embedding_rows == 544
    assert (
        judge(tmp_path, "target.widths", "eagle3", tmp_path / "target", weights=True, vocab_size=544).status == "passed"
    )
    assert (
        judge(tmp_path, "target.widths", "eagle3", tmp_path / "target", weights=True, vocab_size=512).status == "passed"
    )
    result = judge(tmp_path, "target.widths", "eagle3", tmp_path / "target", weights=True, vocab_size=600)
    assert result.message == "the draft's vocabulary has 600 ids, the target's has 512 or 544"


def test_the_drafts_own_embedding_is_compared(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")

    def own_embedding(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed_tokens.weight"] = torch.zeros(480, 64)

    testing.write_tiny(tmp_path / "draft", "eagle3", edit=own_embedding)
    result = check_draft(tmp_path / "draft", target=target, checks=["target.widths"])["target.widths"]
    assert result.message == "the draft's embedding has 480 rows, the target's has 512"


@pytest.mark.parametrize("name", ["transformer.wte.weight", "language_model.model.embed_tokens.weight", "embed.weight"])
def test_names_of_a_targets_embedding(name: str, tmp_path: Path) -> None:
    _embedding(tmp_path, 7, name)
    assert Target.open(tmp_path).embedding_rows == 7


@pytest.mark.parametrize("name", ["visual.embeddings.weight", "mtp.embed_tokens.weight", "vision_tower.embed.weight"])
def test_embeddings_of_other_things(name: str, tmp_path: Path) -> None:
    _embedding(tmp_path, 7, name)
    assert Target.open(tmp_path).embedding_rows is None


def test_weights_of_the_target_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", model__safetensors="no weights")
    assert Target.open(target).embedding_rows is None
    assert judge(tmp_path, "target.widths", "eagle3", target).status == "passed"


# --- identity ---

VERIFIER = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}
SPECULATORS = {"algorithm": "xpress", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}]}


def _named(path: Path, target: Path, verifier: Any = VERIFIER) -> CheckResult:
    return judge(path, "target.identity", "xpress", target, speculators_config={**SPECULATORS, "verifier": verifier})


@pytest.mark.parametrize(
    ("directory", "config"),
    [
        ("Qwen3-8B", {}),
        ("target", {"_name_or_path": "/models/qwen3-8b/"}),
        ("models--Qwen--Qwen3-8B/snapshots/abc", {"architectures": ["Qwen3ForCausalLM"]}),
    ],
)
def test_the_target_that_the_draft_names(directory: str, config: dict[str, Any], tmp_path: Path) -> None:
    target = write_target(tmp_path / directory, {**TARGET, **config})
    assert _named(tmp_path, target).status == "passed"


def test_another_architecture_and_another_name(tmp_path: Path) -> None:
    target = write_target(
        tmp_path / "t", {**TARGET, "architectures": ["LlamaForCausalLM"], "_name_or_path": "meta/Llama"}
    )
    result = _named(tmp_path, target)
    assert result.status == "warned"
    assert [finding.message for finding in result.findings] == [
        "the draft was trained for a Qwen3ForCausalLM, the target is a LlamaForCausalLM",
        "the draft names Qwen/Qwen3-8B, the target calls itself meta/Llama",
    ]


def test_a_target_without_a_name_leaves_it_open(tmp_path: Path) -> None:
    result = _named(tmp_path, write_target(tmp_path / "target"))
    assert result.status == "inconclusive"
    assert "the draft names Qwen/Qwen3-8B" in result.message


@pytest.mark.parametrize(
    "verifier", [None, 7, {"name_or_path": ""}, {"name_or_path": None, "architectures": [7]}, ["x"]]
)
def test_a_draft_that_names_nothing_leaves_it_open(verifier: Any, tmp_path: Path) -> None:
    assert _named(tmp_path, write_target(tmp_path / "target"), verifier).status in ("inconclusive", "passed")


ROTATED = [
    {"quantization_config": {"quant_method": "ascend", "quarot": {"enabled": True}}},
    {"quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"R1": {"type": "hadamard"}}}},
    {"text_config": {"quantization_config": {"rotation": "spinquant"}}},
    {"use_quarot": True},
]
PLAIN = [
    {"rotary_pct": 0.5, "rope_scaling": {"rope_type": "default"}},
    {"quantization_config": {"quant_method": "fp8", "rotate": False, "rotary_dim": 64}},
    {"use_quarot": False},
]


@pytest.mark.parametrize("config", ROTATED)
def test_a_rotated_target(config: dict[str, Any], tmp_path: Path) -> None:
    result = judge(tmp_path, "target.identity", "eagle3", write_target(tmp_path / "target", {**TARGET, **config}))
    assert result.status == "warned"
    assert "states are rotated" in result.message
    assert result.findings[0].fault == "target-rotated"


@pytest.mark.parametrize("config", PLAIN)
def test_a_target_that_is_not_rotated(config: dict[str, Any], tmp_path: Path) -> None:
    result = judge(tmp_path, "target.identity", "eagle3", write_target(tmp_path / "target", {**TARGET, **config}))
    assert "rotated" not in result.message


def test_a_quantised_target(tmp_path: Path) -> None:
    config = {**TARGET, "quantization_config": {"quant_method": "fp8"}}
    result = judge(tmp_path, "target.identity", "eagle3", write_target(tmp_path / "target", config))
    assert result.status == "warned"
    assert "quantised (fp8)" in result.message
    # The prediction layers of a target lie in its own checkpoint.
    assert judge(tmp_path, "target.identity", "mtp", tmp_path / "target").status != "warned"


# --- rope ---

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
ROPES = [
    # (target, draft, text of the warning or None)
    ({"rope_theta": 500000}, {}, None),
    ({"rope_theta": 1e6}, {}, "rope_theta is 500000, the target's is 1e+06"),
    ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {}, None),
    ({"rope_theta": 5e5, "rope_scaling": YARN}, {}, "of type default, the target's is yarn"),
    ({"rope_theta": 5e5, "rope_scaling": YARN}, {"rope_scaling": YARN}, None),
    # The old key for the type, and a field that one side leaves to its default.
    ({"rope_theta": 5e5, "rope_scaling": {**YARN, "type": "yarn", "beta_fast": 32}}, {"rope_scaling": YARN}, None),
    (
        {"rope_theta": 5e5, "rope_scaling": {**YARN, "factor": 8.0}},
        {"rope_scaling": YARN},
        "differs from the target's in factor",
    ),
    # A target with a base per kind of layer: either will do.
    ({"rope_theta": 1e6, "rope_local_base_freq": 5e5}, {}, None),
    (
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
            }
        },
        {},
        None,
    ),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, {}, None),
]


@pytest.mark.parametrize(("target", "draft", "text"), ROPES)
def test_the_rotary_embedding_against_the_targets(
    target: dict[str, Any], draft: dict[str, Any], text: str | None, tmp_path: Path
) -> None:
    result = judge(tmp_path, "target.rope", "eagle3", write_target(tmp_path / "target", target), **draft)
    assert result.status == ("passed" if text is None else "warned"), result
    assert text is None or text in result.message


@pytest.mark.parametrize("target", [{}, {"rope_theta": "big"}, {"rope_theta": None}, {"rope_parameters": [1]}])
def test_a_target_without_a_base_leaves_it_open(target: dict[str, Any], tmp_path: Path) -> None:
    assert judge(tmp_path, "target.rope", "eagle3", write_target(tmp_path / "target", target)).status == "inconclusive"


def test_a_draft_without_a_base_leaves_it_open(tmp_path: Path) -> None:
    result = judge(tmp_path, "target.rope", "eagle3", write_target(tmp_path / "target"), rope_theta=...)
    assert result.status == "inconclusive"
    assert "see rope.theta-stated" in result.message


def test_heads_without_layers_have_no_base_to_compare(tmp_path: Path) -> None:
    assert judge(tmp_path, "target.rope", "medusa", write_target(tmp_path / "target")).status == "skipped"


def test_layers_inside_the_target_have_what_it_gives_them(tmp_path: Path) -> None:
    """DeepSeek-V4's stages are not scaled, although the target is."""
    config = json.loads((CORPUS / "dspark--embedded-DeepSeek-V4-Flash.json").read_text())
    target = write_target(tmp_path, config)
    report = check_draft(target, target=target, checks=["target"])
    assert {id: report[id].status for id in ("target.widths", "target.identity", "target.rope")} == {
        "target.widths": "passed",
        "target.identity": "passed",
        "target.rope": "skipped",
    }


def test_a_difference_from_the_target_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(testing.tiny_config("eagle3")))
    report = check_draft(
        tmp_path / "draft", target=write_target(tmp_path / "target", {"rope_theta": 1e6}), checks="rope,target"
    )
    assert [result.id for result in report if result.status == "warned"] == ["target.rope"]


# --- the tokenizer ---


def test_a_tokenizer_of_byte_level_pieces(tmp_path: Path) -> None:
    target = write_target(
        tmp_path,
        {**TARGET, "eos_token_id": 9},
        tokenizer__json={
            "model": {"type": "BPE", "vocab": {"Ċ": 3, "Ġthe": 4, ".": 5, "odd": "6", "bool": True}},
            "added_tokens": [{"id": 10, "content": "<|im_end|>"}, {"id": "x", "content": 7}, 3],
        },
        tokenizer_config__json={
            "eos_token": {"content": "<|im_end|>"},
            "mask_token": None,
            "pad_token": 5,
            "added_tokens_decoder": {"11": {"content": "<|MASK|>"}, "x": {"content": "y"}, "12": 3},
        },
        generation_config__json={"eos_token_id": [10, 8, True]},
    )
    opened = Target.open(target)
    assert opened.tokenizer is not None
    assert opened.tokenizer.common == {"newline": 3, " the": 4, ".": 5}
    assert opened.tokenizer.ids == {"Ċ": 3, "Ġthe": 4, ".": 5, "<|im_end|>": 10, "<|MASK|>": 11}
    assert opened.tokenizer.role("eos_token") == 10
    assert opened.tokenizer.role("mask_token") is None
    assert opened.eos_ids == (10, 8, 9)


def test_a_tokenizer_of_sentencepiece_pieces(tmp_path: Path) -> None:
    """Unigram models list their pieces in order of id."""
    pieces = [["<unk>", 0.0], ["<0x0A>", 0.0], ["▁the", -2.0], [",", -3.0], "odd", []]
    target = Target.open(write_target(tmp_path, tokenizer__json={"model": {"type": "Unigram", "vocab": pieces}}))
    assert target.tokenizer is not None
    assert target.tokenizer.common == {"newline": 1, " the": 2, ",": 3}


def test_other_tokenizer_files(tmp_path: Path) -> None:
    assert Target.open(write_target(tmp_path / "none")).tokenizer is None
    plain = Target.open(write_target(tmp_path / "plain", vocab__json={"Ċ": 198})).tokenizer
    assert plain is not None
    assert plain.common == {"newline": 198}
    # Added tokens alone say nothing of what is common.
    named = Target.open(
        write_target(tmp_path / "named", tokenizer_config__json={"added_tokens_decoder": {"7": {"content": "Ċ"}}})
    ).tokenizer
    assert named is not None
    assert (dict(named.ids), named.common) == ({"Ċ": 7}, {})


def test_a_tokenizer_that_cannot_be_read_names_its_file(tmp_path: Path) -> None:
    target = Target.open(write_target(tmp_path, tokenizer__json="{"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _ = target.tokenizer


# --- vocabulary.common-tokens ---


def _images() -> list[int]:
    offsets = testing.random_tensors(testing.tiny_config("eagle3"), "eagle3")["d2t"]
    found: list[int] = (offsets + torch.arange(len(offsets))).tolist()
    return found


SAID = _images()
UNSAID = next(id for id in range(512) if id not in SAID)


def _common(path: Path, *, config: dict[str, Any] | None = None, weights: bool = True, **files: Any) -> CheckResult:
    target = write_target(path / "target", config, **files)
    return judge(path, "vocabulary.common-tokens", "eagle3", target, weights=weights)


def test_a_map_without_the_end_of_text(tmp_path: Path) -> None:
    result = _common(tmp_path, generation_config__json={"eos_token_id": UNSAID})
    assert (result.status, result.message) == ("warned", "the draft cannot say the end of text")


def test_one_end_of_several_is_enough(tmp_path: Path) -> None:
    result = _common(
        tmp_path,
        generation_config__json={"eos_token_id": [UNSAID, SAID[0]]},
        tokenizer__json={"model": {"vocab": {",": SAID[1]}}},
    )
    assert result.status == "passed"


def test_a_map_without_common_tokens(tmp_path: Path) -> None:
    vocab = {"Ċ": UNSAID, "Ġ": SAID[0], "Ġthe": UNSAID + 512}
    result = _common(tmp_path, tokenizer__json={"model": {"vocab": vocab}})
    assert (result.status, result.message) == ("warned", "the draft cannot say 'newline', ' the'")
    assert result.findings[0].got == {"newline": UNSAID, " the": UNSAID + 512}


def test_without_a_tokenizer_it_stays_open(tmp_path: Path) -> None:
    assert _common(tmp_path, config={**TARGET, "eos_token_id": SAID[0]}).status == "inconclusive"
    assert _common(tmp_path, tokenizer__json="[]").status == "inconclusive"


def test_without_weights_it_stays_open(tmp_path: Path) -> None:
    assert _common(tmp_path, weights=False).status == "inconclusive"


def test_a_whole_vocabulary_has_no_map(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    assert judge(tmp_path, "vocabulary.common-tokens", "dflash", target, weights=True).status == "skipped"


# --- dflash.mask-token against the target ---


def _mask(path: Path, config: dict[str, Any] | None = None, block: dict[str, Any] = BLOCK, **files: Any) -> CheckResult:
    target = write_target(path / "target", config, **files)
    return judge(path, "dflash.mask-token", "dflash", target, dflash_config=block)


def test_the_mask_tokens_text_has_another_id(tmp_path: Path) -> None:
    """SGLang asks for `<|MASK|>` where the file names no text."""
    result = _mask(tmp_path, tokenizer_config__json={"added_tokens_decoder": {"510": {"content": "<|MASK|>"}}})
    assert result.status == "failed"
    assert result.message == "mask_token_id is 511, the target's tokenizer has <|MASK|> at 510"
    assert result.findings[0].outcomes["sglang"].message.startswith("DFLASH config mismatch: ")


def test_a_named_mask_token_is_looked_up(tmp_path: Path) -> None:
    tokens = {
        "added_tokens_decoder": {"510": {"content": "<|MASK|>"}, "511": {"content": "<|my|>"}, "9": {"content": "<o>"}}
    }
    named = {**BLOCK, "mask_token": "<|my|>"}
    assert _mask(tmp_path, block=named, tokenizer_config__json=tokens).status == "passed"
    (tmp_path / "2").mkdir()
    result = _mask(tmp_path / "2", block={**BLOCK, "mask_token": "<o>"}, tokenizer_config__json=tokens)
    assert result.message == "mask_token_id is 511, the target's tokenizer has <o> at 9"


def test_a_mask_that_is_the_tokenizers_padding(tmp_path: Path) -> None:
    tokens = {"pad_token": "<pad>", "added_tokens_decoder": {"511": {"content": "<pad>"}}}
    result = _mask(tmp_path, tokenizer_config__json=tokens)
    assert (result.status, result.message) == (
        "warned",
        "mask_token_id is pad_token_id, which means something else to the target",
    )


def test_a_mask_inside_the_padded_rows_of_the_target(tmp_path: Path) -> None:
    _embedding(tmp_path / "padded", 544)
    block = {**BLOCK, "mask_token_id": 520}
    assert judge(tmp_path, "dflash.mask-token", "dflash", tmp_path / "padded", dflash_config=block).status == "passed"
    _embedding(tmp_path / "short", 500)
    result = judge(tmp_path, "dflash.mask-token", "dflash", tmp_path / "short")
    assert result.message == "mask_token_id 511 lies outside an embedding of 500 rows"


# --- odd files ---

_ODD = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
)
_JSON = st.recursive(
    _ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
_KEYS = (
    "architectures",
    "_name_or_path",
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "quantization_config",
    "text_config",
    "eos_token_id",
    "kv_lora_rank",
)
_SECTION = st.dictionaries(st.sampled_from((*_KEYS, "rope_type", "factor", "type", "quarot")), _JSON, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    config=st.dictionaries(st.sampled_from(_KEYS), _JSON | _SECTION),
    family=st.sampled_from(["eagle3", "dflash", "mtp"]),
)
def test_no_target_breaks_a_check(config: dict[str, Any], family: str) -> None:
    """Whatever stands in its configuration; `run` lets a defect of a check through."""
    checkpoint = Checkpoint(Path("draft"))
    checkpoint.config = testing.tiny_config(family)
    context = Context(draft=load(checkpoint), target=Target(Path("target"), config), serve=_SERVE)
    for id, item in REGISTRY.items():
        if {"target", "serving"} & set(item.needs) or id in ("dflash.mask-token", "taps.range", "dflash.block-size"):
            assert run(item, context).status in ("passed", "failed", "warned", "skipped", "inconclusive")


_SERVE = ServeOptions.parse("algorithm=DFLASH kv-cache-dtype=fp8_e4m3 tp=8 num-draft-tokens=9")
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "vocab.json",
    "model.safetensors.index.json",
)
_TOKENIZER_KEYS = (
    "model",
    "vocab",
    "added_tokens",
    "added_tokens_decoder",
    "eos_token",
    "eos_token_id",
    "content",
    "7",
    "weight_map",
)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_tokenizer_breaks_a_target(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_target(tmp_path_factory.mktemp("target"))
    section = st.dictionaries(st.sampled_from(_TOKENIZER_KEYS), _JSON, max_size=3)
    whole = st.dictionaries(
        st.sampled_from(_TOKENIZER_KEYS), _JSON | section | st.lists(section, max_size=2), max_size=4
    )
    for name in data.draw(st.sets(st.sampled_from(_FILES))):
        (path / name).write_text(json.dumps(data.draw(whole)))
    target = Target.open(path)
    assert target.embedding_rows is None
    assert target.has_dense_head is None
    assert all(isinstance(id, int) for id in target.eos_ids)
    assert target.tokenizer is None or all(isinstance(id, int) for id in target.tokenizer.common.values())
