"""EAGLE3 beyond one Llama layer: several layers, Qwen3's head norms and windows, heads without taps, ModelOpt's and speculators' files.

What these catch: a window given to every layer, or to none; head norms that a label promises and the file lacks, not missed; a head
without `fc` that is not recognised, or an `fc` that its flag says is not read; the whole chain from taps to the recycled state with a norm
in the wrong place; parallel heads that are taken for tensors of another draft, or run on the state before the last norm.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_numbers import attention, close, mlp, numbers, rms, tensor, weights_of

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.families import load
from pytest_specdecode.families.eagle3 import Eagle3Head
from pytest_specdecode.spec import DraftSpec, GQASpec
from pytest_specdecode.testing import expected_tensors, random_tensors, tiny_config, write_checkpoint, write_tiny

QWEN3 = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3, "num_hidden_layers": 2}
NO_TAPS = {
    "eagle_config": {"use_aux_hidden_state": False},
    "eagle_aux_hidden_state_layer_ids": ...,
    "num_target_layers": ...,
}
#: What ModelOpt's exporter writes: nested switches, plain names.
MODELOPT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "use_cache": True,
    "eagle_aux_hidden_state_layer_ids": ...,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 7, 12],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    },
}


def windows(spec: DraftSpec) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec.layers if isinstance(layer.attention, GQASpec)]


def parsed(**changes: Any) -> DraftSpec:
    return expected_tensors(tiny_config("eagle3", **changes), "eagle3")[0]


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        (WINDOWS, [None, 3]),
        ({**WINDOWS, "use_sliding_window": True}, [None, 3]),
        ({**WINDOWS, "layer_types": ["sliding_attention"]}, [3, None]),
        ({**WINDOWS, "layer_types": ["sliding_attention", "chunked"]}, [3, None]),
        ({**WINDOWS, "layer_types": ..., "use_sliding_window": True}, [3, 3]),
        ({**WINDOWS, "layer_types": ...}, [None, None]),
        ({**WINDOWS, "sliding_window": None}, [None, None]),
    ],
)
def test_windows_per_layer(changes: dict[str, Any], due: list[int | None]) -> None:
    assert windows(parsed(**changes)) == due


def test_a_qwen3_label_promises_head_norms_in_every_layer(tmp_path: Path) -> None:
    config = tiny_config("eagle3", **QWEN3, num_hidden_layers=2)
    tensors = random_tensors(config, "eagle3")
    assert tensors["layers.1.self_attn.k_norm.weight"].shape == (32,)
    assert not [
        result for result in check_draft(write_checkpoint(tmp_path, config, tensors)) if result.status == "failed"
    ]
    for layer in (0, 1):
        for name in ("q_norm", "k_norm"):
            del tensors[f"layers.{layer}.self_attn.{name}.weight"]
    result = check_draft(write_checkpoint(tmp_path, config, tensors), checks=["weights"])["weights.missing"]
    assert (result.status, "4 tensors" in result.message) == ("failed", True)


def test_one_head_norm_calls_for_the_others(tmp_path: Path) -> None:
    config = tiny_config("eagle3", num_hidden_layers=2)
    tensors = random_tensors(config, "eagle3")
    tensors["layers.1.self_attn.q_norm.weight"] = torch.ones(32, dtype=torch.bfloat16)
    result = check_draft(write_checkpoint(tmp_path, config, tensors), checks=["weights"])["weights.missing"]
    assert (result.status, "3 tensors" in result.message) == ("failed", True)


def test_a_head_without_taps_is_known_by_its_tensors(tmp_path: Path) -> None:
    config = tiny_config("eagle3", **NO_TAPS)
    tensors = random_tensors(config, "eagle3")
    assert "fc.weight" not in tensors
    report = check_draft(write_checkpoint(tmp_path, config, tensors))
    assert not [f"{result.id}: {result.message}" for result in report if result.status == "failed"]
    bare = {
        key: value for key, value in config.items() if key not in ("architectures", "eagle_config", "draft_vocab_size")
    }
    assert load(Checkpoint.open(write_checkpoint(tmp_path / "bare", bare, tensors))).recognition.family == "eagle3"


def test_an_fc_that_no_state_passes_is_a_finding(tmp_path: Path) -> None:
    config = tiny_config("eagle3", **NO_TAPS)
    tensors = {**random_tensors(config, "eagle3"), "fc.weight": torch.randn(64, 192).bfloat16()}
    result = check_draft(write_checkpoint(tmp_path, config, tensors), checks=["weights"])["weights.unexpected"]
    assert (result.status, result.message) == (
        "failed",
        "fc.weight has no place in this draft: use_aux_hidden_state is false, "
        "so the draft reads the target's last state as it is",
    )


def test_modelopt_s_export_is_read(tmp_path: Path) -> None:
    report = check_draft(write_tiny(tmp_path, "eagle3", **MODELOPT))
    assert not [f"{result.id}: {result.message}" for result in report if result.status == "failed"]
    spec = open_draft(tmp_path).spec
    assert spec is not None
    assert (spec.packaging, spec.taps.ids, spec.taps.count) == ("plain", (1, 7, 12), 3)


# --- ModelOpt's parallel heads ---------------------------------------------------------------------------------------


PARALLEL = {
    **MODELOPT,
    "eagle_config": {**MODELOPT["eagle_config"], "parallel_draft_step": 3, "parallel_draft_heads_num_layers": 2},
}
LATENT = {"eagle_config": {**PARALLEL["eagle_config"], "eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}
HEADS = "parallel_draft_heads"


def parallel_of(family: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = copy.deepcopy(tiny_config(family, **(PARALLEL if family == "eagle3" else LATENT)))
    return config, random_tensors(config, family, seed=3)


def renamed(name: str, how: str) -> str:
    """How the trainer's modules, TensorRT-LLM's loader and the first exporter's modules call a tensor of a parallel head."""
    parts = name.split(".")
    if parts[0] != HEADS or parts[1] == "lm_head":
        return name
    if parts[2] == "lm_head":
        return f"{HEADS}.{parts[1]}.2.weight" if how == "sequence" else name
    stem = f"{HEADS}.medusa_heads" if how == "modules" else HEADS
    return ".".join([stem, parts[1], parts[3], *parts[4:]])


@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla"])
def test_parallel_heads_are_part_of_the_draft(tmp_path: Path, family: str) -> None:
    config, tensors = parallel_of(family)
    held = sorted(name for name in tensors if name.startswith(HEADS))
    due = [f"{HEADS}.{i}.medusa_layers.{j}.linear.{end}" for i in (0, 1) for j in (0, 1) for end in ("bias", "weight")]
    assert held == [*due, f"{HEADS}.lm_head.weight"]
    # ModelOpt states the taps in one of two places, which another check points out.
    groups = ["files", "config", "weights", "rope", "layers"]
    report = check_draft(write_checkpoint(tmp_path, config, tensors), checks=groups)
    open_ones = [result for result in report if result.status not in ("passed", "skipped") and not result.want]
    assert not open_ones, [f"{result.id}: {result.status}: {result.message}" for result in open_ones]
    for name in held:
        lost = {key: value for key, value in tensors.items() if key != name}
        report = check_draft(write_checkpoint(tmp_path, config, lost), checks=["weights", "layers.build"])
        assert name in report["weights.biases" if name.endswith("bias") else "weights.missing"].message
        assert report["layers.build"].findings[0].where == name
        lost[name] = tensors[name][1:].contiguous()
        report = check_draft(write_checkpoint(tmp_path, config, lost), checks=["weights", "layers.build"])
        assert report["weights.shapes"].findings[0].where == name
        assert report["layers.build"].findings[0].where == name


@pytest.mark.parametrize("how", ["modules", "loader", "sequence"])
@pytest.mark.parametrize("shared", [True, False])
def test_parallel_heads_by_their_other_names(tmp_path: Path, how: str, shared: bool) -> None:
    config, tensors = parallel_of("eagle3")
    if not shared:
        head = tensors.pop(f"{HEADS}.lm_head.weight")
        tensors |= {f"{HEADS}.{index}.lm_head.weight": head.clone() + index for index in (0, 1)}
    path = write_checkpoint(tmp_path, config, tensors, rename=lambda name: renamed(name, how))
    draft = open_draft(path)
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    assert draft.spec is not None
    assert draft.spec.eagle3 is not None
    assert draft.spec.eagle3.parallel is not None
    assert draft.spec.eagle3.parallel.shared_head == shared
    assert check_draft(path, checks=["weights", "layers"]).ok
    if shared:
        return
    del tensors[f"{HEADS}.1.lm_head.weight"]
    report = check_draft(write_checkpoint(tmp_path, config, tensors), checks=["weights"])
    assert f"{HEADS}.1.lm_head.weight" in report["weights.missing"].message


@pytest.mark.parametrize("shared", [True, False])
def test_parallel_heads_read_the_normed_state(tmp_path: Path, shared: bool) -> None:
    config, tensors = parallel_of("eagle3")
    tensors = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    if not shared:
        head = tensors.pop(f"{HEADS}.lm_head.weight")
        tensors |= {f"{HEADS}.{index}.lm_head.weight": head * (index + 1) for index in (0, 1)}
    draft = open_draft(write_checkpoint(tmp_path, config, tensors))
    assert draft.spec is not None
    w, z = weights_of(draft), numbers(4, 5, 64)
    got = Eagle3Head(draft.spec, draft.source(dtype=torch.float64)).parallel_logits(tensor(z))
    assert len(got) == 2
    for index, logits in enumerate(got):
        x = rms(z, w["norm.weight"], 1e-5)
        for block in (0, 1):
            name = f"{HEADS}.{index}.medusa_layers.{block}.linear"
            y = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
            x = x + y / (1 + np.exp(-y))
        close(logits, x @ w[f"{HEADS}.lm_head.weight" if shared else f"{HEADS}.{index}.lm_head.weight"].T)


@pytest.mark.parametrize("steps", [1, None])
def test_parallel_heads_that_no_step_calls_for(tmp_path: Path, steps: int | None) -> None:
    config, tensors = parallel_of("eagle3")
    config["eagle_config"]["parallel_draft_step"] = steps
    result = check_draft(write_checkpoint(tmp_path, config, tensors), checks=["weights"])["weights.unexpected"]
    assert (result.status, HEADS in result.message) == ("failed", True)


@pytest.mark.parametrize("layers", [None, 0, 400])
@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla"])
def test_parallel_heads_of_no_usable_depth(tmp_path: Path, layers: int | None, family: str) -> None:
    config, tensors = parallel_of(family)
    config["eagle_config"]["parallel_draft_heads_num_layers"] = layers
    result = check_draft(write_checkpoint(tmp_path, config, tensors), checks=["config.types"])["config.types"]
    assert [finding.where for finding in result.findings] == [
        "config.json: eagle_config.parallel_draft_heads_num_layers"
    ]


def test_speculators_flags_stand_at_the_top_and_sizes_in_the_nest(tmp_path: Path) -> None:
    layer = {
        "model_type": "qwen3",
        **{k: v for k, v in tiny_config("eagle3").items() if not k.startswith(("eagle", "draft"))},
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 256,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [2, 8, 13, 15],
        "transformer_layer_config": {**layer, "model_type": "qwen3"},
    }
    report = check_draft(write_tiny(tmp_path, "eagle3", config=config))
    assert not [f"{result.id}: {result.message}" for result in report if result.status == "failed"]
    draft = open_draft(tmp_path)
    assert draft.spec is not None
    assert (draft.spec.packaging, draft.spec.taps.count, draft.spec.taps.convention) == ("speculators", 4, "boundary")
    header = draft.header("input_norm.weight")
    assert header is not None
    assert header.shape == (256,)
    assert draft.header("layers.0.self_attn.q_norm.weight") is not None


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("fused", ["plain", "norm_before_fc", "fc_norm", "bias", "no taps"])
def test_from_taps_to_logits_through_two_qwen3_layers(tmp_path: Path, fused: str, norm_output: bool) -> None:
    flags = {"plain": {}, "no taps": NO_TAPS}.get(fused, {fused: True})
    changes = {**QWEN3, **WINDOWS, "norm_output": norm_output, "rms_norm_eps": 1e-3, **flags}
    draft = open_draft(write_tiny(tmp_path, "eagle3", dtype="float32", seed=6, **changes))
    assert draft.spec is not None
    w, eps, tokens = weights_of(draft), 1e-3, 6
    taps = numbers(1, tokens, 64 if fused == "no taps" else 192)
    embeds, positions = numbers(2, tokens, 64), np.array([2.0, 3, 4, 5, 6, 7])
    g = taps
    if fused == "norm_before_fc":
        g = rms(g, w["input_norm.weight"], eps)
    if fused == "fc_norm":
        g = np.concatenate([rms(g[:, 64 * i : 64 * i + 64], w[f"fc_norm.{i}.weight"], eps) for i in range(3)], axis=-1)
    if fused != "no taps":
        g = g @ w["fc.weight"].T + w.get("fc.bias", np.zeros(64))
    states = np.concatenate(
        [rms(embeds, w["layers.0.input_layernorm.weight"], eps), rms(g, w["layers.0.hidden_norm.weight"], eps)], axis=-1
    )
    x = g
    for layer, window in enumerate((None, 3)):
        if layer:
            states = rms(x, w["layers.1.input_layernorm.weight"], eps)
        y = x + attention(
            w, layer, states, positions, heads=4, kv_heads=2, theta=500000.0, window=window, head_norm_eps=eps
        )
        x = y + mlp(w, layer, rms(y, w[f"layers.{layer}.post_attention_layernorm.weight"], eps))
    normed = rms(x, w["norm.weight"], eps)
    head = Eagle3Head(draft.spec, draft.source(dtype=torch.float64))
    hidden = head.fuse(tensor(taps))
    close(hidden, g)
    for reference in draft.layers(dtype=torch.float64):
        hidden = reference.forward(tensor(embeds), hidden, torch.from_numpy(positions.astype(np.int64)))  # type: ignore[attr-defined]
    close(hidden, x)
    close(head.logits(hidden), normed @ w["lm_head.weight"].T)
    close(head.recycled(hidden), normed if norm_output else x)


def test_a_draft_without_a_head_of_its_own_says_whose_serves(tmp_path: Path) -> None:
    draft = open_draft(write_tiny(tmp_path, "eagle3", draft_vocab_size=...))
    assert draft.spec is not None
    head = Eagle3Head(draft.spec, draft.source())
    with pytest.raises(LayerBuildError, match="the target's head serves"):
        head.logits(torch.ones(1, 64).bfloat16())
    with pytest.raises(LayerBuildError, match=r"norm\.weight"):
        Eagle3Head(draft.spec, _Nothing())


class _Nothing:
    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        return {"weight": torch.ones(64, 192)} if prefix == "fc" else {}
