"""One row per check: the smallest change that it exists for makes it report, and without the change it passes.

What goes wrong without this file: a check that never fires, a check that fires on a good draft, a check that fires for another's
reason, and a check nobody wrote a row for.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_specdecode import check_draft, testing
from pytest_specdecode.checks import REGISTRY
from pytest_specdecode.findings import CheckResult
from pytest_specdecode.fused_kv import AXES
from pytest_specdecode.report import Report

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault and what must be reported.

    Attributes:
        family: of the tiny draft that is broken.
        config: changes of the configuration after the tensors are made; `...` drops a key.
        shape_config: changes of the configuration for which the tensors are made as well.
        tensors: changes the tensors in place.
        files: changes the written directory.
        status: what the check must say.
        text: what its message must contain.
        follow: other checks that may report because of the same fault.
        target, twin_target: files of the target, by name, for the fault and for its twin (None: the same for both).
        serve, twin_serve: the options that the server is started with.
    """

    family: str = "eagle3"
    config: dict[str, Any] = field(default_factory=dict)
    shape_config: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[Tensors], Any] | None = None
    files: Callable[[Path], Any] | None = None
    status: str = "failed"
    text: str = ""
    follow: tuple[str, ...] = ()
    target: dict[str, Any] | None = None
    twin_target: dict[str, Any] | None = None
    serve: str | None = None
    twin_serve: str | None = None


def _drop(*names: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return edit


def _put(name: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = make(tensors)

    return edit


def _prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        if name != "lm_head.weight":
            tensors[f"model.{name}"] = tensors.pop(name)


def _first_rows(*names: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in names:
            tensors[name] = tensors[name][: len(tensors[name]) // 2]

    return edit


def _nan(tensors: Tensors) -> None:
    tensors["fc.weight"][3, 5] = float("nan")


def _append_byte(path: Path) -> None:
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"\0")


def _name_absent_shard(path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"fc.weight": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _huge(tensors: Tensors) -> None:
    tensors["layers.0.mlp.down_proj.weight"].fill_(3e38)


def _zero_centred(tensors: Tensors) -> None:
    """As a class that multiplies by 1 + w stores them."""
    for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm"):
        tensors[f"layers.0.{name}.weight"] -= 1


def _cancelling(tensors: Tensors) -> None:
    """Units in pairs of opposite sign, a hundred times larger than what is left of them."""
    up, gate, down = (tensors[f"layers.0.mlp.{name}_proj.weight"] for name in ("up", "gate", "down"))
    gate[1::2] = gate[::2]
    down[:, 1::2] = down[:, ::2]
    up[1::2, 1:] = -up[::2, 1:]
    up[:, 1:] *= 100
    down *= 100


K1, V1 = "layers.1.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight"
UNREAD = ("files.readable", "files.index")
tiny = testing.tiny_config
BLOCK = {"mask_token_id": 511, "target_layer_ids": [1, 9, 17], "block_size": 8}
STACK = ("weights.shapes", "layers.build", "config.head-arithmetic")
MIMO = {
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), ...),
    "n_routed_experts": ...,
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
}
NAMED = {"target_model_name_or_path": "org/a-target"}


def _target(*, eos: int | None = None, tokens: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    """Files of the target of the tiny EAGLE3 draft."""
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
    files: dict[str, Any] = {"config.json": {**config, **changes}}
    if eos is not None:
        files["generation_config.json"] = {"eos_token_id": [eos]}
    if tokens is not None:
        files["tokenizer.json"] = {"model": {"type": "BPE", "vocab": tokens}, "added_tokens": []}
    return files


def _said(count: int) -> list[int]:
    """Target ids that the tiny EAGLE3 draft can say, and then one that it cannot."""
    offsets = testing.random_tensors(testing.tiny_config("eagle3"), "eagle3")["d2t"]
    images = (offsets + torch.arange(len(offsets))).tolist()
    return [*images[:count], next(id for id in range(512) if id not in images)]


ROWS: dict[str, Row] = {
    "files.readable": Row(files=_append_byte, text="bytes after the last tensor"),
    "files.index": Row(files=_name_absent_shard, text="is not in the directory"),
    "files.pickle": Row(files=lambda path: torch.save({}, path / "old.bin"), status="warned"),
    "files.code": Row(config={"auto_map": {"AutoModel": "x.Y"}}, status="warned", text="not followed"),
    "config.family": Row(config={"architectures": ["DFlashDraftModel"]}, text="more than one", follow=("*",)),
    "config.types": Row(config={"rms_norm_eps": "small"}, text="'small' where a number"),
    "config.architectures": Row(config={"architectures": ["LlamaForCausalLM"]}, status="warned"),
    "config.unread-keys": Row(
        config={"norm_before_fcs": True}, status="warned", text="norm_before_fc is one that readers do"
    ),
    "config.null-values": Row(config={"use_cache": None}, text="use_cache is null"),
    "config.quantization": Row(
        config={"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        text="quantization_config says fp8, and every projection of the draft is stored plain",
    ),
    "config.dtype": Row(config={"dtype": "float16"}, status="warned", text="declared float16 and stored as bfloat16"),
    "config.num-hidden-layers": Row(
        family="dflash",
        config={"num_hidden_layers": 3},
        text="the weights hold 2",
        follow=("weights.missing", "layers.build", "dflash.layer-types"),
    ),
    "config.head-arithmetic": Row(
        config={"num_key_value_heads": 3}, text="do not divide", follow=("weights.shapes", "layers.build")
    ),
    "config.q-lora-rank": Row(
        family="eagle3-mla",
        config={"q_lora_rank": None},
        text="Eagle3 MLA layer requires q_lora_rank in the draft config",
        follow=("layers.build",),
    ),
    "config.mla-fields": Row(family="eagle3-mla", config={"v_head_dim": ...}, follow=("layers.build",)),
    "vocabulary.sizes": Row(
        config={"draft_vocab_size": 600}, text="larger than", follow=("vocabulary.lm-head", "vocabulary.d2t")
    ),
    "vocabulary.tied-embeddings": Row(config={"tie_word_embeddings": True}, text="tied"),
    "vocabulary.lm-head": Row(tensors=_drop("lm_head.weight"), text="not in the weights"),
    "vocabulary.d2t": Row(
        tensors=_put("d2t", lambda found: found["d2t"] + torch.arange(len(found["d2t"]))),
        text="target ids where offsets are due",
        follow=("vocabulary.t2d",),
    ),
    "vocabulary.t2d": Row(tensors=_put("t2d", lambda found: found["t2d"].roll(1)), text="t2d marks 256 ids"),
    "vocabulary.common-tokens": Row(
        target=_target(eos=_said(0)[-1], tokens={"Ġthe": _said(1)[0]}),
        twin_target=_target(eos=_said(2)[0], tokens={"Ġthe": _said(2)[1]}),
        status="warned",
        text="cannot say the end of text",
    ),
    "weights.missing": Row(tensors=_drop("layers.0.hidden_norm.weight"), text="hidden_norm", follow=("layers.build",)),
    "weights.unexpected": Row(tensors=_put("extra_norm.weight", lambda found: torch.ones(192)), text="extra_norm"),
    "weights.flags": Row(
        tensors=_put("input_norm.weight", lambda found: torch.ones(192).bfloat16()), text="norm_before_fc is not true"
    ),
    "weights.scales": Row(
        family="dflash",
        shape_config={"quantization_config": ...},
        tensors=_put("layers.0.self_attn.attn.k_scale", lambda found: torch.tensor(0.5)),
        status="warned",
        text="k_scale is 0.5",
    ),
    "weights.shapes": Row(config={"intermediate_size": 96}, text="gate_proj", follow=("layers.build",)),
    "weights.biases": Row(
        tensors=_put("layers.0.self_attn.q_proj.bias", lambda found: torch.zeros(128).bfloat16()),
        text="without a flag",
        follow=("layers.build",),
    ),
    "weights.names": Row(
        family="eagle3-mla",
        tensors=_prefix,
        text="names start with `model.`",
    ),
    "weights.dtypes": Row(
        tensors=_put("norm.weight", lambda found: found["norm.weight"].float()), status="warned", text="2 dtypes"
    ),
    "weights.finite": Row(tensors=_nan, text="fc.weight holds 1 values"),
    "weights.degenerate": Row(
        tensors=_put("fc.weight", lambda found: torch.zeros_like(found["fc.weight"])), text="all zero"
    ),
    "taps.stated": Row(
        family="dflash",
        config={"dflash_config": {"mask_token_id": 511, "block_size": 8}},
        text="not stated",
    ),
    "taps.order": Row(
        family="dflash",
        config={"dflash_config": {**BLOCK, "target_layer_ids": [9, 1, 17]}},
        status="warned",
        text="order",
    ),
    "taps.range": Row(
        family="dflash", config={"dflash_config": {**BLOCK, "target_layer_ids": [1, 9, 20]}}, text="20 is no output of"
    ),
    "taps.convention": Row(
        config={
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 8, 13], "use_aux_hidden_state": True},
        },
        status="warned",
        text="they are the default (2, N // 2, N - 3) of a target 16 layers deep; not every engine reads them so",
    ),
    "taps.places": Row(config={"eagle_aux_hidden_state_layer_ids": [2, 8, 14]}, text="different values"),
    "taps.fc-width": Row(
        config={"eagle_aux_hidden_state_layer_ids": [2, 8], "eagle_config": ..., "num_aux_hidden_states": 2},
        text="fc reads 192 features; 2 taps of 64 give 128",
        follow=("taps.places", "layers.build"),
    ),
    "rope.theta-stated": Row(config={"rope_theta": ...}, text="not stated", follow=("layers.build",)),
    "rope.theta-agrees": Row(
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, text="different values"
    ),
    "rope.scaling-complete": Row(
        config={"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        text="llama3 scaling without low_freq_factor and high_freq_factor and original_max_position_embeddings",
        follow=("layers.build",),
    ),
    "rope.max-position": Row(
        config={"max_position_embeddings": 2048}, target=_target(), text="4096 positions are served, the draft has 2048"
    ),
    "rope.scaled-growth": Row(
        family="dflash",
        shape_config={"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
        serve="context-length=4096",
        twin_serve="context-length=4000",
        status="warned",
        text="a yarn table of 4096 rows is made 4104 rows long",
    ),
    "rope.style": Row(
        family="dflash",
        config={"rope_is_neox_style": False},
        status="warned",
        text="the layers rotate interleaved pairs, and not every engine reads that",
        follow=("config.unread-keys", "fused-kv.rope-style", "fused-kv.engine-path"),
    ),
    "rope.inherited": Row(
        family="dspark",
        config={"partial_rotary_factor": 0.25},
        status="warned",
        text="speaks of a partial rotation",
    ),
    "dflash.mask-token": Row(
        family="dflash", config={"dflash_config": {**BLOCK, "mask_token_id": 512}}, text="outside an embedding of 512"
    ),
    "dflash.block-size": Row(family="dflash", config={"block_size": 16}, text="different values"),
    "dflash.block-layout": Row(
        family="dflash", config={"sample_from_anchor": True}, status="warned", text="row 0 drafts, and not every engine"
    ),
    "dflash.layer-types": Row(
        family="dflash", config={"layer_types": ["full_attention"]}, text="1 layer types for 2 layers"
    ),
    "dflash.causality": Row(
        family="dflash",
        config={
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 64,
            "use_sliding_window": True,
            "is_causal": ...,
        },
        status="warned",
        text="is_causal is not stated",
    ),
    "dflash.variants": Row(
        family="domino",
        config={"dflash_config": {**tiny("domino")["dflash_config"], "pure_draft_prefix_len": 2}},
        status="warned",
        text="pure_draft_prefix_len is not 1",
    ),
    "dspark.keys": Row(
        family="dspark",
        config={"markov_rank": ..., "dflash_config": {"markov_rank": 16}},
        status="warned",
        text="markov_rank stands in dflash_config only",
    ),
    "dspark.heads": Row(
        family="dspark",
        config={"markov_head_type": "gated"},
        text="a gated head of rank 16 without markov_head.gate_proj.weight",
        follow=("weights.missing", "layers.build"),
    ),
    "speculators.structure": Row(
        family="xpress",
        config={
            "speculators_config": {
                **tiny("xpress")["speculators_config"],
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 0}],
            }
        },
        text="speculative_tokens is not 1 or more",
    ),
    "mtp.layers": Row(
        family="mtp",
        config={"num_nextn_predict_layers": 2},
        text="2 prediction layers are declared and the weights hold one",
        follow=("config.num-hidden-layers", "weights.missing", "layers.build"),
    ),
    "mtp.norms": Row(
        family="mtp", tensors=_zero_centred, status="warned", text="5 of 5 norms have entries of both signs"
    ),
    "mtp.combine": Row(
        family="mtp",
        shape_config=MIMO,
        config={"architectures": ["LlamaForCausalLM"]},
        status="warned",
        text="the hidden state before the embedding, and not every engine gives it so",
    ),
    "heads.counts": Row(
        family="medusa",
        config={"num_heads": 4},
        text="num_heads is 4, the weights hold 3 of lm_heads; 3 is not there",
        follow=("config.num-hidden-layers", "weights.missing", "weights.biases", "layers.build"),
    ),
    "layers.precision": Row(tensors=_cancelling, status="warned", text="more than its roundings make up"),
    "layers.build": Row(config={"hidden_act": "selu"}, text="unknown activation 'selu'", follow=("config.types",)),
    "layers.finite": Row(tensors=_huge, follow=("weights.degenerate", "layers.precision")),
    "fused-kv.num-kv-heads": Row(
        family="dflash",
        tensors=_first_rows(K1, V1),
        text="num_kv_heads mismatch across layers for fused KV path: expected 2, got 1 at layer 1.",
        follow=STACK,
    ),
    "fused-kv.tensor-parallel": Row(
        family="dflash",
        serve="tp=8",
        twin_serve="tp=4",
        text="4 query heads do not divide among 8 ranks",
        follow=("serving.algorithm",),
    ),
    "fused-kv.engine-path": Row(
        family="dspark",
        config={"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
        status="warned",
        text="does not use its fused path",
    ),
    "target.widths": Row(target=_target(hidden_size=96), twin_target=_target(), text="states of width 64"),
    "target.identity": Row(
        shape_config=NAMED,
        target=_target(_name_or_path="org/a-sibling"),
        twin_target=_target(),
        status="warned",
        text="names org/a-target, the target calls itself org/a-sibling",
    ),
    "target.rope": Row(
        target=_target(rope_theta=10000.0), twin_target=_target(), status="warned", text="the target's is 10000"
    ),
    "serving.algorithm": Row(
        serve="algorithm=EAGLE", twin_serve="algorithm=EAGLE3", text="EAGLE is not the algorithm of"
    ),
    "serving.draft-tokens": Row(
        serve="algorithm=EAGLE3 num-steps=3 eagle-topk=1 num-draft-tokens=8",
        twin_serve="algorithm=EAGLE3 num-steps=3 eagle-topk=1 num-draft-tokens=4",
        status="warned",
        text="num-steps + 1 draft tokens",
    ),
    "serving.kv-cache-dtype": Row(
        serve="attention-backend=tokenspeed_mla kv-cache-dtype=auto",
        twin_serve="attention-backend=tokenspeed_mla kv-cache-dtype=fp8_e4m3",
        text="tokenspeed_mla does not take the KV-cache type auto",
    ),
}


#: Checks whose fault no checkpoint of ours can hold, with the module of these tests that shows them failing.
ELSEWHERE = {
    "acceptance.conventions": "replay/test_probe.py",
    "acceptance.length": "replay/test_acceptance_check.py",
    "layers.batch": "checks/test_numeric_checks.py",
    "layers.incremental": "checks/test_numeric_checks.py",
    "layers.mla-absorbed": "checks/test_numeric_checks.py",
    "fused-kv.matches-reference": "checks/test_numeric_checks.py",
    "fused-kv.norm-eps": "checks/test_fused_kv_axes.py",
    "fused-kv.odd-layers": "checks/test_fused_kv_subject.py",
    "fused-kv.calls": "checks/test_fused_kv_subject.py",
    **{f"fused-kv.{axis}": "checks/test_fused_kv_axes.py" for axis in AXES},
}


def test_every_check_has_a_row() -> None:
    """A check without a row here, or a named place elsewhere, is not shown to work."""
    assert set(REGISTRY) == set(ROWS) | set(ELSEWHERE)


@pytest.mark.parametrize("id", ELSEWHERE)
def test_the_named_module_shows_the_check_failing(id: str) -> None:
    """Some test in it runs the check and asserts what it reports."""
    source = (Path(__file__).parents[1] / ELSEWHERE[id]).read_text(encoding="utf-8")
    assert _shown(source, id), f"no test in {ELSEWHERE[id]} names {id} and asserts that it failed or warned"


@pytest.mark.parametrize(
    ("source", "due"),
    [
        ("def test_a(): assert run('a.b').status == 'failed'", True),
        ("def test_a(): assert run('a.b').status == 'warned'", True),
        ("def run(): return check('a.b')\ndef test_a(): assert run() == 'failed'", True),
        ("def run(): return check('a.b')\ndef test_a(): assert other() == 'failed'", False),
        ("def test_a(): assert run('a.b').status == 'passed'", False),
        ("def test_a(): assert run('a.b.c').status == 'failed'", False),
        ("def test_a(): 'a.b'\ndef test_b(): assert run('c').status == 'failed'", False),
        ("def help(): assert run('a.b').status == 'failed'", False),
        ("@mark('axis', AXES)\ndef test_a(axis): assert run(f'a.{axis}').status == 'failed'", False),
    ],
)
def test_what_shows_a_check_failing(source: str, due: bool) -> None:
    """A test of its own, with the id and the assertion; a module that merely speaks of the check does not do."""
    assert _shown(source, "a.b") is due


def _shown(source: str, id: str) -> bool:
    """Whether a test in `source` names the check, by itself or in what it calls, and asserts that it failed or warned."""
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}

    def reached(name: str, seen: set[str]) -> set[str]:
        if name in functions and name not in seen:
            seen.add(name)
            for node in ast.walk(functions[name]):
                if isinstance(node, ast.Name):
                    reached(node.id, seen)
        return seen

    def names_it(node: ast.AST) -> bool:
        """The id as it stands, or an axis's, in a test that runs over all of them."""
        if isinstance(node, ast.Constant):
            return bool(node.value == id)
        return ast.unparse(node) == "f'fused-kv.{axis}'" and id.removeprefix("fused-kv.") in AXES

    def over_all_axes(test: ast.FunctionDef) -> bool:
        return any("'axis', AXES)" in ast.unparse(decorator) for decorator in test.decorator_list)

    def shows(test: ast.FunctionDef) -> bool:
        asserted = {
            part.value
            for node in ast.walk(test)
            if isinstance(node, ast.Assert)
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        named = any(
            names_it(node) and (isinstance(node, ast.Constant) or over_all_axes(test))
            for name in reached(test.name, set())
            for node in ast.walk(functions[name])
            if isinstance(node, (ast.Constant, ast.JoinedStr))
        )
        return named and bool({"failed", "warned"} & asserted)

    return any(shows(node) for name, node in functions.items() if name.startswith("test_"))


@pytest.mark.parametrize("id", ROWS)
def test_the_fault_is_reported(id: str, tmp_path: Path) -> None:
    """The check says what the row says, and no check fails that does not follow from the fault."""
    row = ROWS[id]
    path = _write(row, tmp_path / "draft")
    report = check_draft(path, target=_write_target(row.target, tmp_path / "target"), serve=row.serve)
    result = report[id]
    assert result.status == row.status, result
    assert row.text in result.message
    assert result.findings[0].where
    _no_others(report, {id, *row.follow})


@pytest.mark.parametrize("id", ROWS)
def test_the_twin_passes(id: str, tmp_path: Path) -> None:
    """The same draft without the fault."""
    row = ROWS[id]
    whole = testing.tiny_config(row.family, **row.shape_config)
    target = _write_target(row.target if row.twin_target is None else row.twin_target, tmp_path / "target")
    path = testing.write_tiny(tmp_path / "draft", row.family, config=whole)
    report = check_draft(path, target=target, serve=row.serve if row.twin_serve is None else row.twin_serve)
    assert report[id].status == "passed", report[id]
    assert report.ok


def _write(row: Row, path: Path) -> Path:
    whole = testing.tiny_config(row.family, **row.shape_config)
    tensors = testing.random_tensors(whole, row.family)
    if row.tensors is not None:
        row.tensors(tensors)
    config = testing.tiny_config(row.family, **{**row.shape_config, **row.config})
    testing.write_checkpoint(path, config, tensors, rename=testing.stored_names(whole, row.family))
    if row.files is not None:
        row.files(path)
    return path


def _write_target(files: dict[str, Any] | None, path: Path) -> Path | None:
    if files is None:
        return None
    path.mkdir()
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


def _no_others(report: Report, allowed: set[str]) -> None:
    if "*" in allowed:
        return
    others = [result for result in report if result.status in ("failed", "warned") and result.id not in allowed]
    assert not others, [_line(result) for result in others]


def _line(result: CheckResult) -> str:
    return f"{result.id}: {result.message}"
