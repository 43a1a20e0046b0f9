"""Failures of drafts that were reported in public, each with the smallest checkpoint that has its cause, or why no checkpoint shows it.

One row per failure of a numbered list that was gathered from public issues and pull requests. The page `docs/failures.md` is written from
these rows by `tools/failures_page.py`, and `test_public_failures.py` runs every case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pytest_specdecode import testing

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small checkpoint with the cause of a failure, and what a check says of it.

    Attributes:
        check: the id of the check that reports it.
        text: what a message or a value of its findings contains, by which a reader would know the cause.
        status: what the check ends in.
        family: of the tiny draft.
        base: a whole configuration in place of the tiny one.
        shape_config: changes of the configuration that fault and twin share, for which the tensors are made too.
        config: changes of the configuration after the tensors are made; `...` drops a key.
        tensors: changes the tensors in place.
        files: changes the written directory.
        target, twin_target: the target's files by name; the twin has the first where the second is None.
        serve, twin_serve: the options of the server, likewise.
        twin: what the check ends in without `config`, `tensors` and `files`, and with the twin's target and options; empty for no twin.
    """

    check: str
    text: str
    status: str = "failed"
    family: str = "eagle3"
    base: Mapping[str, Any] | None = None
    shape_config: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    tensors: Callable[[Tensors], Any] | None = None
    files: Callable[[Path], Any] | None = None
    target: Mapping[str, Any] | None = None
    twin_target: Mapping[str, Any] | None = None
    serve: str | None = None
    twin_serve: str | None = None
    twin: str = "passed"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failure that was reported.

    Attributes:
        number: its place in the list.
        symptom: what goes wrong, and why.
        references: where it was reported, as `repository#number`; empty where the repository is not known.
        cases: checkpoints that have the cause; empty where none can.
        reason: why no check of a checkpoint can see it.
    """

    number: int
    symptom: str
    references: tuple[str, ...]
    cases: tuple[Case, ...] = ()
    reason: str = ""

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that catch it, each once."""
        return tuple(dict.fromkeys(case.check for case in self.cases))


def drop(*names: str) -> Callable[[Tensors], None]:
    """An edit without those tensors."""

    def edit(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


def put(name: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], None]:
    """An edit with one tensor more, or another in its place."""

    def edit(tensors: Tensors) -> None:
        tensors[name] = make(tensors)

    return edit


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    """An edit that replaces `old` by `new` in every name."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def drop_containing(part: str) -> Callable[[Tensors], None]:
    """An edit without the tensors whose names hold `part`."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return edit


def scaled(part: str, factor: float) -> Callable[[Tensors], None]:
    """An edit with every matrix whose name holds `part` multiplied by `factor`."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if part in name]:
            tensors[name] = tensors[name] * factor

    return edit


def target(**changes: Any) -> dict[str, Any]:
    """The files of a target that the tiny EAGLE3 draft fits."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "_name_or_path": "org/a-target",
        "model_type": "qwen3",
        "hidden_size": 64,
        "vocab_size": 512,
        "num_hidden_layers": 16,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
    }
    return {"config.json": {key: value for key, value in {**config, **changes}.items() if value is not ...}}


def _said(count: int) -> list[int]:
    """Target ids that the tiny EAGLE3 draft can say, and then one that it cannot."""
    offsets = testing.random_tensors(testing.tiny_config("eagle3"), "eagle3")["d2t"]
    images = (offsets + torch.arange(len(offsets))).tolist()
    return [*images[:count], next(id for id in range(512) if id not in images)]


def _ends_with(id: int, common: int) -> dict[str, Any]:
    return {
        **target(),
        "generation_config.json": {"eos_token_id": [id]},
        "tokenizer.json": {"model": {"type": "BPE", "vocab": {"Ġthe": common}}, "added_tokens": []},
    }


def packaged_dflash(**changes: Any) -> dict[str, Any]:
    """A DFlash draft as the speculators library writes it."""
    plain = testing.tiny_config("dflash")
    outer = ("architectures", "dflash_config", "num_target_layers", "block_size", "is_causal", "dtype")
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "draft_vocab_size": 512,
        "block_size": 8,
        "mask_token_id": 511,
        "aux_hidden_state_layer_ids": [2, 10, 18],
        "sliding_window_non_causal": True,
        "transformer_layer_config": {key: value for key, value in plain.items() if key not in outer},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"name_or_path": "org/a-target", "architectures": ["Qwen3ForCausalLM"]},
        },
        **changes,
    }


def packaged_eagle3(**changes: Any) -> dict[str, Any]:
    """An EAGLE3 draft as the speculators library writes it."""
    plain = testing.tiny_config("eagle3")
    outer = ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "torch_dtype")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "draft_vocab_size": 256,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 8, 13],
        "transformer_layer_config": {
            key: value for key, value in plain.items() if key not in (*outer, "num_target_layers")
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/a-target", "architectures": ["Qwen3ForCausalLM"]},
        },
        **changes,
    }


def _layers_of(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The layer section of a packaged configuration, with changes."""
    section = {**config["transformer_layer_config"], **changes}
    return {key: value for key, value in section.items() if value is not ...}


TAPS = "eagle_aux_hidden_state_layer_ids"
BLOCK = {"mask_token_id": 511, "target_layer_ids": [1, 9, 17], "block_size": 8}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True}
MIXED = ["full_attention", "sliding_attention"]
_FULL = {"rope_type": "default", "rope_theta": 1e6}
_NO_THETA = {"rope_type": "default"}
_UNUSED = 0
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_QWEN = {
    **testing.tiny_config("mtp", num_nextn_predict_layers=...),
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
}
_D2T_IDS = put("d2t", lambda found: found["d2t"] + torch.arange(len(found["d2t"])))


def _zero(*shape: int) -> Callable[[Tensors], torch.Tensor]:
    return lambda found: torch.zeros(shape).bfloat16()


def _ones(*shape: int) -> Callable[[Tensors], torch.Tensor]:
    return lambda found: torch.ones(shape).bfloat16()


def _only_the_target(found: Tensors) -> None:
    """Nothing of the draft, and a tensor of the target that it lies in."""
    found.clear()
    found["model.norm.weight"] = torch.ones(64).bfloat16()


def _in_float8(found: Tensors) -> None:
    """The projections of the layers in float8, each with its scale."""
    for name in [name for name in found if name.endswith("_proj.weight") and "eh_proj" not in name]:
        found[name] = found[name].to(torch.float8_e4m3fn)
        found[f"{name}_scale"] = torch.ones(1)


def _second_layer(found: Tensors) -> None:
    found |= testing.random_tensors(testing.tiny_config("eagle3", num_hidden_layers=2), "eagle3")


def _fresh(found: Tensors) -> torch.Tensor:
    """A table as a framework initialises it."""
    return (torch.randn(512, 64, generator=torch.Generator().manual_seed(7)) * 0.02).bfloat16()


FAILURES: tuple[Failure, ...] = (
    Failure(
        number=1,
        symptom="an EAGLE-1 head is run with a norm in front of layer 0 and without its residual: half the acceptance",
        references=("vllm-project/vllm#9565", "vllm-project/vllm#11672", "vllm-project/vllm#14464"),
        reason="the head is stored as it was trained; it was the engine that put the norm in and left the residual out",
    ),
    Failure(
        number=2,
        symptom="fc has a bias in the file and no flag in the configuration: refused, or hardly anything accepted",
        references=("vllm-project/vllm#11126",),
        cases=(
            Case(
                family="eagle1",
                shape_config={"bias": False},
                tensors=put("fc.bias", _zero(64)),
                check="weights.biases",
                text="fc.bias",
            ),
        ),
    ),
    Failure(
        number=3,
        symptom="reader and file disagree on the biases of q, k and v",
        references=("vllm-project/vllm#8849", "vllm-project/vllm#12831", "NVIDIA/TensorRT-LLM#2588"),
        cases=(
            Case(
                family="eagle1",
                tensors=put("layers.0.self_attn.q_proj.bias", _zero(64)),
                check="weights.biases",
                text="without a flag",
            ),
        ),
    ),
    Failure(
        number=4,
        symptom="a head goes by the label of a plain model, and the engine does not take it for a draft",
        references=("vllm-project/vllm#17957",),
        cases=(
            Case(
                config={"architectures": ["Qwen2ForCausalLM"]},
                check="config.architectures",
                status="warned",
                text="the label Qwen2ForCausalLM is that of a plain model",
            ),
        ),
    ),
    Failure(
        number=5,
        symptom="the target's states were rotated for quantisation, the draft was trained on plain ones",
        references=("vllm-project/vllm-ascend#6914", "vllm-project/vllm-ascend#6445", "vllm-project/vllm-ascend#5974"),
        cases=(
            Case(
                shape_config={"target_model_name_or_path": "org/a-target"},
                target=target(quantization_config={"quant_method": "ascend", "rotation": "quarot"}),
                twin_target=target(),
                check="target.identity",
                status="warned",
                text="rotated",
            ),
        ),
    ),
    Failure(
        number=6,
        symptom="the target is wider than the draft, and nothing in the file says so",
        references=("vllm-project/vllm#18906", "vllm-project/vllm#19174"),
        cases=(
            Case(
                tensors=put("fc.weight", lambda found: found["fc.weight"].repeat(1, 2)),
                check="taps.fc-width",
                text="fc reads 384 features; 3 taps of 64 give 192",
            ),
            Case(
                target=target(hidden_size=96),
                twin_target=target(),
                check="target.widths",
                text="states of width 64, the target's have 96",
            ),
            Case(
                shape_config={"target_hidden_size": 96},
                tensors=drop("embed_tokens.weight"),
                check="vocabulary.sizes",
                text="embed_tokens.weight is not in the weights",
            ),
        ),
    ),
    Failure(
        number=7,
        symptom="the head has a row for each target id where the configuration declares a smaller vocabulary",
        references=("SafeAILab/EAGLE#249",),
        cases=(
            Case(
                tensors=put("lm_head.weight", lambda found: found["lm_head.weight"].repeat(2, 1)),
                check="vocabulary.lm-head",
                text="one row per draft id",
            ),
        ),
    ),
    Failure(
        number=8,
        symptom="a d2t of zeros: an identity over a full vocabulary, a lost map over a reduced one",
        references=("SafeAILab/EAGLE#222",),
        cases=(
            Case(
                tensors=put("d2t", lambda found: torch.zeros_like(found["d2t"])),
                check="vocabulary.d2t",
                text="d2t is all zero: the draft's ids would be the first ids",
            ),
        ),
    ),
    Failure(
        number=9,
        symptom="d2t is not there when the draft runs: accepted length 1.12 where 2.99 was due",
        references=("vllm-project/vllm#18909",),
        cases=(Case(tensors=drop("d2t"), check="vocabulary.d2t", text="d2t is not in the weights"),),
    ),
    Failure(
        number=10,
        symptom="an exported head stops the server at start",
        references=("NVIDIA/Model-Optimizer#628",),
        reason="the report ends before the cause; the checks of the tensors are what to run after an export",
    ),
    Failure(
        number=11,
        symptom="a head in the speculators packaging is not loaded, or only beside targets of one architecture",
        references=("vllm-project/vllm#54526", "vllm-project/vllm#22152"),
        cases=(
            Case(
                base=packaged_eagle3(),
                config={"transformer_layer_config": _layers_of(packaged_eagle3(), model_type="gemma3_text")},
                check="speculators.structure",
                status="warned",
                text="layers of type gemma3_text",
            ),
        ),
    ),
    Failure(
        number=12,
        symptom="a trainer saves a reduced vocabulary without its map: only the first ids are ever accepted",
        references=("NVIDIA-NeMo/Automodel#2447",),
        cases=(
            Case(family="peagle", tensors=drop("d2t", "t2d"), check="vocabulary.d2t", text="d2t is not in the weights"),
        ),
    ),
    Failure(
        number=13,
        symptom="d2t holds target ids where offsets are read: every id is doubled, some lie past the vocabulary",
        references=("verl-SpeCo#66", "verl-SpeCo#67"),
        cases=(
            Case(
                tensors=_D2T_IDS,
                check="vocabulary.d2t",
                text="target ids where offsets are due",
            ),
            Case(
                tensors=put("t2d", lambda found: found["t2d"].roll(1)),
                check="vocabulary.t2d",
                text="marked and not mapped",
            ),
        ),
    ),
    Failure(
        number=14,
        symptom="a head over the full vocabulary carries a map that maps nothing, and the engine runs its slow path",
        references=("vllm-project/vllm#53458",),
        cases=(
            Case(
                shape_config={"draft_vocab_size": 512},
                tensors=put("d2t", lambda found: torch.zeros(512, dtype=torch.int64)),
                check="vocabulary.d2t",
                status="warned",
                text="slower than no map",
                twin="skipped",
            ),
        ),
    ),
    Failure(
        number=15,
        symptom="draft and target have different vocabularies: index out of range",
        references=("vllm-project/vllm#34583", "vllm-project/vllm#43369"),
        cases=(
            Case(
                target=target(vocab_size=480),
                twin_target=target(),
                check="target.widths",
                text="vocabulary has 512 ids, the target's has 480",
            ),
        ),
    ),
    Failure(
        number=16,
        symptom="a draft whose reduced vocabulary misses what every answer holds collapses",
        references=("vllm-project/vllm#50158",),
        cases=(
            Case(
                target=_ends_with(_said(0)[-1], _said(1)[0]),
                twin_target=_ends_with(_said(2)[0], _said(2)[1]),
                check="vocabulary.common-tokens",
                status="warned",
                text="cannot say the end of text",
            ),
        ),
    ),
    Failure(
        number=17,
        symptom="a draft vocabulary is declared and no head is stored: uninitialised memory drafts, accepted length 1.00",
        references=("sgl-project/sglang#27829", "sgl-project/sglang#27908"),
        cases=(
            Case(
                tensors=drop("lm_head.weight"), check="vocabulary.lm-head", text="lm_head.weight is not in the weights"
            ),
            Case(
                shape_config={"draft_vocab_size": 512},
                tensors=drop("lm_head.weight"),
                check="vocabulary.lm-head",
                text="lm_head.weight is not in the weights",
            ),
        ),
    ),
    Failure(
        number=18,
        symptom="the head is tied to the embedding and has fewer rows than it",
        references=("sgl-project/SpecForge#139", "sgl-project/SpecForge#140"),
        cases=(
            Case(
                config={"tie_word_embeddings": True},
                check="vocabulary.tied-embeddings",
                text="tied to an embedding of 512 rows, the draft predicts 256 ids",
            ),
        ),
    ),
    Failure(
        number=19,
        symptom="the draft's own head or embedding is replaced by the target's after loading",
        references=("vllm-project/vllm#27737", "vllm-project/vllm#28549"),
        cases=(
            Case(
                shape_config={"draft_vocab_size": 512},
                config={"tie_word_embeddings": True},
                check="vocabulary.tied-embeddings",
                status="warned",
                text="readers differ on which counts",
            ),
        ),
    ),
    Failure(
        number=20,
        symptom="a DFlash draft brings a head over fewer ids, and the target's is used in its place",
        references=("vllm-project/vllm-ascend#11374",),
        cases=(
            Case(
                family="dflash",
                tensors=put("lm_head.weight", lambda found: torch.ones(256, 64).bfloat16()),
                check="vocabulary.lm-head",
                text="one row per draft id",
            ),
        ),
    ),
    Failure(
        number=21,
        symptom="the embedding was never copied into the export: its rows are fresh noise",
        references=("lightseekorg/TorchSpec#38",),
        cases=(
            Case(
                tensors=put("embed_tokens.weight", _fresh),
                check="weights.degenerate",
                status="warned",
                text="embed_tokens.weight looks random",
            ),
        ),
    ),
    Failure(
        number=22,
        symptom="readers stop at taps that are null, which the packaging allows",
        references=("pytorch/executorch#20149",),
        cases=(
            Case(
                base=packaged_eagle3(),
                config={TAPS: None},
                check="taps.stated",
                status="warned",
                text="each engine takes its own guess",
            ),
        ),
    ),
    Failure(
        number=23,
        symptom="tensors are missing and the loader does not notice",
        references=("sgl-project/sglang#16235",),
        cases=(
            Case(
                tensors=drop("layers.0.self_attn.o_proj.weight"),
                check="weights.missing",
                text="layers.0.self_attn.o_proj.weight is not in the weights",
            ),
        ),
    ),
    Failure(
        number=24,
        symptom="40 layers are declared, one is shipped, under the label of a plain Llama",
        references=("sgl-project/sglang#33966", "NickL77/BaldEagle#6"),
        cases=(
            Case(
                config={"num_hidden_layers": 40},
                check="config.num-hidden-layers",
                text="40 layers are declared, the weights hold 1",
            ),
            Case(
                config={"architectures": ["LlamaForCausalLM"]},
                check="config.architectures",
                status="warned",
                text="the label LlamaForCausalLM is that of a plain model",
            ),
        ),
    ),
    Failure(
        number=25,
        symptom="a latent head has a model_type that the engine's transformers does not know",
        references=("sgl-project/sglang#25673",),
        reason="which types are known changes with the version of transformers beside the engine, and the file is right",
    ),
    Failure(
        number=26,
        symptom="a latent head states its taps at top level only, and the engine takes its default without a word",
        references=("sgl-project/sglang#21274",),
        cases=(
            Case(
                family="eagle3-mla",
                config={"eagle_config": ...},
                check="taps.places",
                status="warned",
                text="not every engine looks there",
            ),
            Case(
                family="eagle3-mla",
                config={"eagle_config": ..., TAPS: ...},
                check="taps.stated",
                status="warned",
                text="each engine takes its own guess",
            ),
        ),
    ),
    Failure(
        number=27,
        symptom="an EAGLE3 head is started with the algorithm EAGLE: accepted length 1.0, no error",
        references=("sgl-project/sglang#21272",),
        cases=(
            Case(
                serve="algorithm=EAGLE",
                twin_serve="algorithm=EAGLE3",
                check="serving.algorithm",
                text="EAGLE is not the algorithm of eagle3 drafts",
            ),
        ),
    ),
    Failure(
        number=28,
        symptom="use_aux_hidden_state is false, and an fc for several taps is built all the same",
        references=("vllm-project/vllm#40656",),
        cases=(
            Case(
                config={"eagle_config": {TAPS: [1, 7, 12], "use_aux_hidden_state": False}},
                check="weights.unexpected",
                text="fc.weight has no place in this draft: use_aux_hidden_state is false",
            ),
        ),
    ),
    Failure(
        number=29,
        symptom="two mean accepted lengths are compared, one of which counts the target's own token",
        references=("SafeAILab/EAGLE#132",),
        reason="a way of counting, in a report; nothing of it lies in a checkpoint",
    ),
    Failure(
        number=30,
        symptom="a DFlash draft reads every tap one layer off: the id names an output, the engine counts states",
        references=("vllm-project/vllm#42505", "vllm-project/vllm#42704", "z-lab/dflash#118"),
        cases=(
            Case(
                family="dflash",
                base=packaged_dflash(),
                config={"aux_hidden_state_layer_ids": [1, 9, 17]},
                check="taps.convention",
                status="warned",
                text="without the 1 that is due here",
            ),
        ),
    ),
    Failure(
        number=31,
        symptom="EAGLE3 lists are shipped under two conventions, and an engine guesses the shift from the first id",
        references=("sgl-project/sglang#25454",),
        cases=(
            Case(
                config={"eagle_config": {TAPS: [2, 8, 13], "use_aux_hidden_state": True}},
                check="taps.convention",
                status="warned",
                text="not every engine reads them so",
            ),
        ),
    ),
    Failure(
        number=32,
        symptom="taps that end with the target's depth run past the end with 1 added, and a norm before fc is left out: 1.00",
        references=("sgl-project/sglang#32226", "sgl-project/sglang#32334", "lightseekorg/tokenspeed#526"),
        cases=(
            Case(
                config={
                    TAPS: [8, 12, 16],
                    "eagle_config": {TAPS: [8, 12, 16], "use_aux_hidden_state": True},
                    "num_target_layers": ...,
                },
                target=target(),
                check="taps.convention",
                status="warned",
                text="the last id is the target's depth, 16",
            ),
            Case(
                tensors=put("input_norm.weight", _ones(192)),
                check="weights.flags",
                text="input_norm.weight",
            ),
        ),
    ),
    Failure(
        number=33,
        symptom="target_layer_ids is not stated, and the engine's guess has the right number of wrong layers",
        references=(
            "sgl-project/sglang#37475",
            "sgl-project/sglang#37476",
            "z-lab/dflash#156",
            "z-lab/dflash#157",
        ),
        cases=(
            Case(
                family="dflash",
                config={"dflash_config": {"mask_token_id": 511, "block_size": 8}},
                check="taps.stated",
                text="each engine takes its own guess",
            ),
            Case(
                family="dflash2",
                config={
                    "dflash_config": {
                        key: value
                        for key, value in testing.tiny_config("dflash2")["dflash_config"].items()
                        if key != "target_layer_ids"
                    }
                },
                check="taps.stated",
                text="each engine takes its own guess",
            ),
        ),
    ),
    Failure(
        number=34,
        symptom="a layer id is the number of layers itself, and gate tensors are dropped",
        references=("ROCmFPX#44",),
        cases=(
            Case(
                family="dflash",
                config={"dflash_config": {**BLOCK, "target_layer_ids": [1, 9, 20]}},
                check="taps.range",
                text="20 is no output of a layer of a target with 20 layers",
            ),
            Case(
                family="dflash",
                tensors=put("layers.0.self_attn.g_proj.weight", _ones(4, 64)),
                check="weights.unexpected",
                text="g_proj",
            ),
        ),
    ),
    Failure(
        number=35,
        symptom="two places name different taps, and a converter makes up a third list",
        references=("ggml-org/llama.cpp#18039",),
        cases=(
            Case(
                config={TAPS: [2, 8, 14]},
                check="taps.places",
                text="stated with different values",
            ),
        ),
    ),
    Failure(
        number=36,
        symptom="a list of outputs is matched with the states entering layers, one layer early",
        references=("microsoft/onnxruntime-genai#2538",),
        reason="the list is right, and names outputs; it was the exporter that took them for the states entering layers",
    ),
    Failure(
        number=37,
        symptom="the draft has 2048 positions and the target more: stops, or drafts garbage, past them",
        references=(
            "vllm-project/vllm#48894",
            "vllm-project/vllm#49343",
            "vllm-project/vllm#23072",
            "vllm-project/vllm#21986",
            "sgl-project/sglang#10787",
            "sgl-project/sglang#10713",
            "sgl-project/sglang#3574",
            "sgl-project/sglang#6783",
        ),
        cases=(
            Case(
                config={"max_position_embeddings": 2048},
                target=target(),
                check="rope.max-position",
                text="4096 positions are served, the draft has 2048",
            ),
        ),
    ),
    Failure(
        number=38,
        symptom="the same in a training stack that asks for longer sequences than the draft has positions",
        references=("NVIDIA-NeMo/RL#3960",),
        cases=(
            Case(
                serve="context-length=8192",
                twin_serve="context-length=4096",
                check="rope.max-position",
                text="8192 positions are served, the draft has 4096",
            ),
        ),
    ),
    Failure(
        number=39,
        symptom="training took another base than the file states, or the file states none",
        references=(
            "sgl-project/SpecForge#265",
            "sgl-project/SpecForge#270",
            "sgl-project/SpecForge#702",
            "sgl-project/SpecForge#287",
        ),
        cases=(
            Case(config={"rope_theta": ...}, check="rope.theta-stated", text="rope_theta is not stated"),
            Case(
                target=target(rope_theta=1e6),
                twin_target=target(),
                check="target.rope",
                status="warned",
                text="rope_theta is 500000, the target's is 1e+06",
            ),
        ),
    ),
    Failure(
        number=40,
        symptom="the file states the target's base, the weights were trained with another",
        references=("wejoncy/sfllm#32",),
        reason="both bases fit the file and the target; only a recorded run tells them apart",
    ),
    Failure(
        number=41,
        symptom="a trainer reads the target's flat base, which lies in rope_parameters: the draft is written with a default of 10000",
        references=(
            "NVIDIA-NeMo/Automodel#2920",
            "NVIDIA/Model-Optimizer#2221",
            "NVIDIA/Model-Optimizer#2216",
            "NVIDIA/Model-Optimizer#1621",
            "THUDM/slime#1720",
        ),
        cases=(
            Case(
                family="dflash",
                shape_config={"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
                config={"rope_theta": 10000.0, "rope_parameters": ...},
                target=target(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
                check="target.rope",
                status="warned",
                text="rope_theta is 10000, the target's is 1e+06",
            ),
        ),
    ),
    Failure(
        number=42,
        symptom="a converter bakes in a base of 1M where the target has 10M: long contexts collapse",
        references=("Luce-Org/lucebox#447",),
        cases=(
            Case(
                family="dflash",
                target=target(rope_theta=1e7),
                twin_target=target(rope_theta=1e6),
                check="target.rope",
                status="warned",
                text="rope_theta is 1e+06, the target's is 1e+07",
            ),
        ),
    ),
    Failure(
        number=43,
        symptom="the target's YaRN is applied to a draft whose file states no scaling",
        references=("Avarok-Cybersecurity/atlas#78",),
        cases=(
            Case(
                family="dflash",
                target=target(
                    rope_theta=1e6,
                    rope_scaling={"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 1024},
                ),
                twin_target=target(rope_theta=1e6),
                check="target.rope",
                status="warned",
                text="of type default, the target's is yarn",
            ),
        ),
    ),
    Failure(
        number=44,
        symptom="a reader knows one of the two layouts: no block_size, or no base, where it looks",
        references=("z-lab/dflash#150", "lightseekorg/tokenspeed#510"),
        cases=(
            Case(
                family="dflash",
                config={"block_size": ...},
                check="dflash.block-size",
                status="warned",
                text="stands in dflash_config only",
            ),
            Case(
                family="dflash",
                config={"rope_theta": ..., "rope_parameters": _NO_THETA},
                check="rope.theta-stated",
                text="rope_theta is not stated",
            ),
        ),
    ),
    Failure(
        number=45,
        symptom="the draft inherits the target's interleaved pairs: accepted length 1.03 where 2.0 was due",
        references=("vllm-project/vllm#53063", "vllm-project/vllm#51655", "vllm-project/vllm#54373"),
        cases=(
            Case(
                family="dflash2",
                config={"rope_is_neox_style": False},
                check="rope.style",
                status="warned",
                text="rotate interleaved pairs, and not every engine reads that",
            ),
        ),
    ),
    Failure(
        number=46,
        symptom="the base is lost where it is nested in a converted configuration",
        references=("vllm-project/speculators#574", "vllm-project/vllm#28542"),
        cases=(
            Case(
                base=packaged_eagle3(),
                config={"transformer_layer_config": _layers_of(packaged_eagle3(), rope_theta=...)},
                check="rope.theta-stated",
                text="rope_theta is not stated",
            ),
        ),
    ),
    Failure(
        number=47,
        symptom="the share of a head that rotates is stated per type of layer, and read as the whole: 10 % accepted",
        references=(),
        cases=(
            Case(
                family="dflash",
                config={
                    "layer_types": MIXED,
                    "sliding_window": 64,
                    "rope_theta": ...,
                    "rope_parameters": {
                        "full_attention": {**_FULL, "partial_rotary_factor": 0.25},
                        "sliding_attention": _FULL,
                    },
                },
                check="fused-kv.rotary-dim",
                text="rotary",
            ),
        ),
    ),
    Failure(
        number=48,
        symptom="sliding layers are run as full ones: collapse past the window",
        references=(
            "vllm-project/vllm#40898",
            "vllm-project/speculators#684",
            "AEON-7#6",
        ),
        cases=(
            Case(
                family="dflash",
                config={**SLIDING, "use_sliding_window": False},
                check="dflash.layer-types",
                status="warned",
                text="drops the window",
            ),
            Case(
                family="dflash",
                config={**SLIDING, "sliding_window": None},
                check="dflash.layer-types",
                text="no window is stated",
            ),
        ),
    ),
    Failure(
        number=49,
        symptom="causal rows are run two-sided, or the reverse: up to a seventh of the accepted length",
        references=("vllm-project/vllm#43445", "sgl-project/sglang#34524"),
        cases=(
            Case(
                family="dflash",
                config={**SLIDING, "is_causal": ...},
                check="dflash.causality",
                status="warned",
                text="is_causal is not stated",
            ),
        ),
    ),
    Failure(
        number=50,
        symptom="one flag about sliding layers makes the full ones causal as well",
        references=("vllm-project/vllm#56692", "vllm-project/vllm#47453", "vllm-project/vllm#47745"),
        cases=(
            Case(
                family="dflash",
                base=packaged_dflash(),
                config={
                    "sliding_window_non_causal": False,
                    "transformer_layer_config": _layers_of(
                        packaged_dflash(), layer_types=MIXED, sliding_window=64, use_sliding_window=True
                    ),
                },
                check="dflash.causality",
                text="causal beside full ones that look both ways",
            ),
        ),
    ),
    Failure(
        number=51,
        symptom="the mask's embedding lies in a file of its own that the engine does not read",
        references=("vllm-project/vllm#46104", "vllm-project/vllm#46105"),
        cases=(
            Case(
                family="dflash",
                files=lambda path: torch.save(torch.zeros(64), path / "mask_embedding.pt"),
                check="files.code",
                status="warned",
                text="mask_embedding.pt replaces the mask token's embedding",
            ),
        ),
    ),
    Failure(
        number=52,
        symptom="the mask token is the padding token",
        references=("NVIDIA-NeMo/Automodel#2461",),
        cases=(
            Case(
                family="dflash",
                config={"pad_token_id": 511},
                check="dflash.mask-token",
                status="warned",
                text="mask_token_id is pad_token_id",
            ),
        ),
    ),
    Failure(
        number=53,
        symptom="the mask token is no id of the target's embedding",
        references=("NVIDIA/Model-Optimizer#1621", "NVIDIA/Model-Optimizer#2149"),
        cases=(
            Case(
                family="dflash",
                config={"dflash_config": {**BLOCK, "mask_token_id": 512}},
                check="dflash.mask-token",
                text="512 lies outside an embedding of 512 rows",
            ),
            Case(
                family="dflash",
                config={"dflash_config": {**BLOCK, "mask_token_id": -1}},
                check="dflash.mask-token",
                text="mask_token_id is not an id",
            ),
        ),
    ),
    Failure(
        number=54,
        symptom="a draft whose first row drafts is read as if that row were the anchor: 1.06 where 2.76 was due",
        references=("sgl-project/sglang#40144",),
        cases=(
            Case(
                family="dflash",
                config={"sample_from_anchor": True},
                check="dflash.block-layout",
                status="warned",
                text="row 0 drafts, and not every engine takes it so",
            ),
        ),
    ),
    Failure(
        number=55,
        symptom="a head of DSpark has other sizes than the hidden state that it reads",
        references=("vllm-project/speculators#851",),
        cases=(
            Case(
                family="dspark",
                config={"confidence_head_with_markov": False},
                check="dspark.heads",
                text="the confidence head reads 80 features",
            ),
            Case(
                family="dspark",
                config={"markov_rank": 8},
                check="dspark.heads",
                text="markov_w1 has rank 16, markov_rank is 8",
            ),
        ),
    ),
    Failure(
        number=56,
        symptom="the heads' tensors have no prefix, and the engine drafts without them",
        references=("sgl-project/sglang#29917",),
        cases=(
            Case(
                family="dspark",
                tensors=rename("markov_head.markov_w", "markov_w"),
                check="dspark.heads",
                text="names without the prefix of their head",
            ),
        ),
    ),
    Failure(
        number=57,
        symptom="a share of rotation copied from the target, a wrong anchor row, DSpark's weights under DFlash's label",
        references=("deepseek-ai/DeepSpec#71", "deepseek-ai/DeepSpec#72"),
        cases=(
            Case(
                family="dspark",
                config={"partial_rotary_factor": 0.25},
                check="rope.inherited",
                status="warned",
                text="a partial rotation",
            ),
            Case(
                family="dspark",
                config={"query_zero_predicts_next": False},
                check="dflash.block-layout",
                text="both that row 0 drafts and that it does not",
            ),
            Case(
                family="dspark",
                config={"architectures": ["DFlashDraftModel"]},
                check="config.family",
                text="more than one family: dflash, dspark",
            ),
        ),
    ),
    Failure(
        number=58,
        symptom="7 tokens are asked of a block that was trained with 5: every position falls, 1.31 where 2.74 was due",
        references=("vllm-project/vllm#41834", "vllm-project/vllm#47419", "vllm-project/vllm#50012"),
        cases=(
            Case(
                family="dspark",
                shape_config={"block_size": 5},
                serve="method=dspark num-speculative-tokens=7",
                twin_serve="method=dspark num-speculative-tokens=5",
                check="dflash.block-size",
                text="7 drafts are asked for, a block was trained on 5",
            ),
            Case(
                family="dflash",
                base=packaged_dflash(),
                config={
                    "speculators_config": {
                        **packaged_dflash()["speculators_config"],
                        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 12}],
                    }
                },
                check="speculators.structure",
                text="12 tokens are to be proposed of a block of 8 rows",
            ),
        ),
    ),
    Failure(
        number=59,
        symptom="head_dim is not stated and cannot be had by dividing",
        references=("NVIDIA/Model-Optimizer#398",),
        cases=(
            Case(
                config={"head_dim": ..., "num_attention_heads": 6},
                check="config.head-arithmetic",
                text="head_dim is not stated and hidden_size 64 does not divide by 6 heads",
            ),
            Case(
                config={"head_dim": ...},
                check="weights.shapes",
                text="q_proj.weight is [128, 128], [64, 128] was due",
            ),
        ),
    ),
    Failure(
        number=60,
        symptom="a quantised release has no weights for its prediction layer: nothing is accepted",
        references=("vllm-project/vllm#35548",),
        cases=(
            Case(
                family="mtp",
                tensors=_only_the_target,
                check="mtp.layers",
                text="the declared prediction layer is not in the weights",
            ),
        ),
    ),
    Failure(
        number=61,
        symptom="the quantiser's list of exceptions drops the prediction layer: accepted length 1.000",
        references=("vllm-project/vllm#37667", "sgl-project/sglang#35797"),
        cases=(
            Case(
                family="mtp",
                shape_config={"quantization_config": {**FP8, "ignored_layers": ["model.layers.3"]}},
                tensors=_only_the_target,
                check="mtp.layers",
                text="the declared prediction layer is not in the weights",
            ),
        ),
    ),
    Failure(
        number=62,
        symptom="the prediction layer is stored plain, and the quantiser's list of exceptions does not name it",
        references=("vllm-project/vllm#49187", "sgl-project/sglang#36158"),
        cases=(
            Case(
                family="mtp",
                config={"quantization_config": FP8},
                check="config.quantization",
                text="every projection of the draft is stored plain",
            ),
        ),
    ),
    Failure(
        number=63,
        symptom="the list of exceptions is mapped to the layer numbers of another model",
        references=("sgl-project/sglang#34906",),
        cases=(
            Case(
                family="mtp",
                config={"quantization_config": {**FP8, "ignored_layers": ["model.layers.3"]}},
                check="config.quantization",
                status="warned",
                text="names the draft's layer as 3, and not every loader maps that number",
            ),
            Case(
                family="mtp",
                config={"quantization_config": {**FP8, "ignored_layers": ["model.layers.61"]}},
                check="config.quantization",
                text="every projection of the draft is stored plain",
            ),
        ),
    ),
    Failure(
        number=64,
        symptom="the prediction layer is quantised, and built as if it were not",
        references=("vllm-project/vllm#49553",),
        cases=(
            Case(
                family="mtp",
                config={"quantization_config": {**FP8, "ignored_layers": ["model.layers.3"]}},
                tensors=_in_float8,
                check="config.quantization",
                text="is stored quantised, and quantization_config leaves it out",
            ),
        ),
    ),
    Failure(
        number=65,
        symptom="an export writes none of the prediction layer's tensors",
        references=("NVIDIA/Model-Optimizer#2427", "NVIDIA/Model-Optimizer#860", "intel/auto-round#1526"),
        cases=(
            Case(
                family="mtp",
                base=_QWEN,
                tensors=_only_the_target,
                check="mtp.layers",
                text="the declared prediction layer is not in the weights",
            ),
        ),
    ),
    Failure(
        number=66,
        symptom="one stored prediction layer stands for several steps, and the copies lose weights",
        references=("NVIDIA/TensorRT-LLM#17378", "NVIDIA/TensorRT-LLM#14457"),
        cases=(
            Case(
                family="mtp",
                config={"num_nextn_predict_layers": 2},
                check="mtp.layers",
                text="2 prediction layers are declared and the weights hold one",
            ),
        ),
    ),
    Failure(
        number=67,
        symptom="a loader passes over the embedding and the head beside a prediction layer: uninitialised, nothing accepted",
        references=(
            "vllm-project/vllm#35031",
            "vllm-project/vllm#44087",
            "vllm-project/vllm#41789",
            "vllm-project/vllm#48848",
            "vllm-project/vllm#43459",
            "vllm-project/vllm-ascend#6754",
        ),
        reason="they go by the names of the release, where the target's own are meant; it was the loader that did not follow them",
    ),
    Failure(
        number=68,
        symptom="num_nextn_predict_layers: 0, copied from the target, makes an EAGLE3 head a prediction layer",
        references=("sgl-project/sglang#26726",),
        reason="the file is right, and known for what it is; it was the engine that asked for the key and not for its value",
    ),
    Failure(
        number=69,
        symptom="a layer is stored beyond the last prediction layer: KeyError",
        references=("local-inference-lab/vllm#436",),
        cases=(
            Case(
                family="mtp",
                tensors=put("layers.1.enorm.weight", _ones(64)),
                check="mtp.layers",
                text="layer 4 beyond the 1 that num_nextn_predict_layers counts",
            ),
        ),
    ),
    Failure(
        number=70,
        symptom="use_cache is null, which transformers 5 refuses",
        references=(),
        cases=(Case(config={"use_cache": None}, check="config.null-values", text="use_cache is null"),),
    ),
    Failure(
        number=71,
        symptom="a trainer resumes from a path where a configuration is due, and its export leaves the embedding out",
        references=("sgl-project/SpecForge#407",),
        reason="an argument of a trainer; an embedding that is left out is the target's, as it is meant to be",
    ),
    Failure(
        number=72,
        symptom="an engine passes over norm_before_fc, fc_norm or a second layer without a word",
        references=(
            "NVIDIA/TensorRT-LLM#10124",
            "NVIDIA/TensorRT-LLM#14988",
            "sgl-project/sglang#14920",
            "sgl-project/sglang#24663",
        ),
        cases=(
            Case(
                config={"norm_before_fc": True},
                tensors=put("input_norm.weight", _ones(192)),
                check="weights.flags",
                status="warned",
                text="norm_before_fc is true, and not every engine reads it so",
            ),
            Case(
                config={"num_hidden_layers": 2},
                tensors=_second_layer,
                check="config.num-hidden-layers",
                status="warned",
                text="engines differ in the norms of layers from 1 on",
            ),
        ),
    ),
    Failure(
        number=73,
        symptom="a bfloat16 draft is run in float16 beside a float16 target and overflows",
        references=("InternLM/lmdeploy#4991", "NeelM0906/Mference#22"),
        cases=(
            Case(
                family="dflash",
                tensors=scaled("down_proj", 1e6),
                check="layers.finite",
                status="warned",
                text="overflow in float16",
            ),
            Case(
                family="dflash",
                config={"dtype": "float16"},
                check="config.dtype",
                status="warned",
                text="declared float16 and stored as bfloat16",
            ),
            Case(
                family="dflash",
                serve="dtype=float16",
                twin_serve="dtype=bfloat16",
                check="config.dtype",
                status="warned",
                text="to be served in float16",
            ),
        ),
    ),
    Failure(
        number=74,
        symptom="a quantised head brings scales that the engine has no parameter for",
        references=("vllm-project/vllm#45102",),
        cases=(
            Case(
                tensors=put("lm_head.input_scale", lambda found: torch.ones(1)),
                check="weights.unexpected",
                text="lm_head.input_scale",
            ),
        ),
    ),
    Failure(
        number=75,
        symptom="DFlash and DSpark share a label on disk, and only the heads tell which layout a block has",
        references=("PrismML-Eng/llama.cpp#122",),
        cases=(
            Case(
                family="dflash",
                tensors=put("markov_head.markov_w1.weight", _ones(512, 16)),
                check="config.family",
                text="more than one family: dflash, dspark",
            ),
        ),
    ),
    Failure(
        number=76,
        symptom="a nested base is read as 1e6",
        references=("lablup/mlxcel#1751",),
        reason="a base in rope_parameters alone is stated rightly, and SGLang and vLLM read it; it was another reader that did not",
    ),
    Failure(
        number=77,
        symptom="no taps in the file: the guess is right for 6 of 20 published drafts",
        references=("z-lab/dflash#156",),
        cases=(
            Case(
                family="dflash",
                config={"dflash_config": {**BLOCK, "target_layer_ids": None}},
                check="taps.stated",
                text="each engine takes its own guess",
            ),
        ),
    ),
    Failure(
        number=78,
        symptom="published heads that do not start",
        references=("vllm-project/vllm#27808", "vllm-project/vllm#49475", "z-lab/dflash#170", "syv-ai#73"),
        reason="the reports do not say why",
    ),
)
