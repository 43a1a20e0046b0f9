"""Hydra heads.

What these catch: the widths of grounded heads, which grow with their place; the residual's projection left out; a missing bias of the head;
dropouts that are counted in the names, and files from before they were; the prefix layer, misspelt as its authors have it, closed by its
norm; a configuration of six fields that leaves every size to the base model; keys and values of the embeddings where the states' are due,
another residual, a norm before the target's head; a message that names a tensor as no file does.

Hydra's code is no package that could be installed here, so the forward is held against the formula written out in float64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_specdecode import check_draft, open_draft, testing
from pytest_specdecode.checks import REGISTRY

HIDDEN = 64
PREFIX = "prefix_embeding_layer"


def linear(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ tensors[f"{name}.weight"].double().T + tensors[f"{name}.bias"].double()


def expected(head: int, x: Tensor, tensors: dict[str, Tensor], *, grounded: bool) -> Tensor:
    stem = f"hydra_mlp.{head}"
    y = linear(tensors, f"{stem}.1.linear", x)
    x = (linear(tensors, f"{stem}.1.res_connection", x) if grounded else x) + y * y.sigmoid()
    y = linear(tensors, f"{stem}.3.linear", x)
    return linear(tensors, f"hydra_lm_head.{head}.1", x + y * y.sigmoid())


@pytest.mark.parametrize("arch", ["prefix-mlp", "mlp"])
@pytest.mark.parametrize("grounded", [True, False])
def test_every_head(tmp_path: Path, arch: str, grounded: bool) -> None:
    config = testing.tiny_config("hydra", hydra_head_arch=arch, grounded_heads=grounded)
    tensors = testing.random_tensors(config, "hydra", seed=2, dtype="float32")
    assert any(name.startswith(PREFIX) for name in tensors) == (arch == "prefix-mlp")
    assert list(tensors["hydra_mlp.2.1.linear.weight"].shape) == [HIDDEN, 4 * HIDDEN if grounded else HIDDEN]
    draft = open_draft(testing.write_checkpoint(tmp_path, config, tensors))
    generator = torch.Generator().manual_seed(1)
    for head in range(3):
        prefix = torch.randn(5, HIDDEN, generator=generator, dtype=torch.float64)
        embeds = torch.randn(5, HIDDEN * (head + 1), generator=generator, dtype=torch.float64)
        layer: Any = draft.layer(head, dtype=torch.float64)
        got = layer.forward(prefix, embeds) if grounded else layer.forward(prefix)
        x = torch.cat([prefix, embeds], dim=-1) if grounded else prefix
        torch.testing.assert_close(got, expected(head, x, tensors, grounded=grounded), rtol=1e-11, atol=1e-11)
    assert check_draft(tmp_path).ok


def test_the_prefix_layer_is_a_llama_layer_and_a_norm(tmp_path: Path) -> None:
    config = testing.tiny_config("hydra")
    tensors = testing.random_tensors(config, "hydra", seed=2, dtype="float32")
    draft = open_draft(testing.write_checkpoint(tmp_path, config, tensors))
    assert draft.spec is not None
    layer: Any = draft.layer(3, dtype=torch.float64)
    w = {name.removeprefix(f"{PREFIX}."): value.double() for name, value in tensors.items() if name.startswith(PREFIX)}
    hidden = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def rms(x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, (HIDDEN,), w[f"{name}.weight"], 1e-6)

    def turned(x: Tensor) -> Tensor:
        angles = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
        first, second = x[:, :, :8], x[:, :, 8:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    n = rms(hidden, "layers.0.input_layernorm")
    q, k, v = ((n @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(6, 4, 16) for name in ("q", "k", "v"))
    heads = nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in (turned(q), turned(k), v)), is_causal=True
    )
    y = hidden + heads.transpose(0, 1).flatten(1) @ w["layers.0.self_attn.o_proj.weight"].T
    n = rms(y, "layers.0.post_attention_layernorm")
    gate, up = (n @ w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    due = rms(y + (gate * gate.sigmoid() * up) @ w["layers.0.mlp.down_proj.weight"].T, "norm")
    torch.testing.assert_close(layer.forward(hidden, torch.arange(6)), due, rtol=1e-11, atol=1e-11)


def test_a_released_pickle_beside_its_six_fields(tmp_path: Path) -> None:
    """Sizes are the weights', the base model's tables lie in the file, and what needs the number of heads is left out."""
    whole = testing.tiny_config("hydra", hydra_num_layers=1)
    tensors = testing.random_tensors(whole, "hydra", seed=2, dtype="float16")
    table = torch.randn(512, HIDDEN, generator=torch.Generator().manual_seed(3)).half()
    tensors |= {"input_embed_fn.weight": table, f"{PREFIX}.embed_tokens.weight": table.clone()}
    fields = ("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "base_model_name_or_path", "grounded_heads")
    (tmp_path / "config.json").write_text(json.dumps({key: whole[key] for key in fields} | {"hidden_state_offset": 0}))
    torch.save(tensors, tmp_path / "hydra_lm_head.pt")
    draft = open_draft(tmp_path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.hidden_size, draft.spec.vocabulary.vocab_size) == ("hydra", HIDDEN, 512)
    assert len(draft.spec.layers) == 3
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    report = check_draft(tmp_path)
    assert report.ok, [result for result in report if result.status == "failed"]
    assert report["layers.incremental"].status == "passed"


def test_names_from_before_the_dropouts(tmp_path: Path) -> None:
    config = testing.tiny_config("hydra", hydra_head_arch="mlp", hydra_num_layers=1)

    def old(name: str) -> str:
        kind, head, _, *rest = name.split(".")
        return ".".join([kind, head, *rest]) if kind == "hydra_lm_head" else ".".join([kind, head, "0", *rest])

    tensors = testing.random_tensors(config, "hydra")
    assert check_draft(testing.write_checkpoint(tmp_path, config, tensors, rename=old)).ok
    assert "hydra_lm_head.0.weight" in open_draft(tmp_path).checkpoint.tensors


# --- the forms with one decoder layer in place of the heads ----------------------------------------------------------


FORMS = ("cross-attn", "eagle-attn")
#: The checks that ask for nothing beside the draft.
DRAFT_ALONE = [id for id, item in REGISTRY.items() if not {"target", "serving", "trace"} & set(item.needs)]


def form(arch: str, **changes: Any) -> dict[str, Any]:
    one = {"hydra_head_arch": arch, "hydra_num_heads": 1, "hydra_num_layers": 1, "num_key_value_heads": 2}
    return testing.tiny_config("hydra", **{**one, **changes})


def turned(head: Tensor, position: int) -> Tensor:
    """A head of 16 lanes, lane i and lane i + 8 turned together."""
    angles = position * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    first, second = head[:8], head[8:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])


def looked_up(w: dict[str, Tensor], queries: Tensor, keys: Tensor, positions: list[int]) -> Tensor:
    """Causal attention, one row and one head at a time; two query heads to a KV head."""
    out = []
    for row, at in enumerate(positions):
        heads = []
        for head in range(4):
            q = turned((w["q_proj"] @ queries[row])[16 * head :][:16], at)
            start = 16 * (head // 2)
            seen = range(row + 1)
            k = [turned((w["k_proj"] @ keys[i])[start : start + 16], positions[i]) for i in seen]
            v = [(w["v_proj"] @ keys[i])[start : start + 16] for i in seen]
            weights = torch.stack([torch.exp(q @ key / 4.0) for key in k])
            heads.append(sum(weight * value for weight, value in zip(weights / weights.sum(), v, strict=True)))
        out.append(w["o_proj"] @ torch.cat(heads))
    return torch.stack(out)


@pytest.mark.parametrize("arch", FORMS)
def test_the_layer_in_place_of_the_heads(tmp_path: Path, arch: str) -> None:
    config = form(arch, rms_norm_eps=1e-3)
    tensors = testing.random_tensors(config, "hydra", seed=5, dtype="float32")
    draft = open_draft(testing.write_checkpoint(tmp_path, config, tensors))
    assert draft.spec is not None
    assert len(draft.spec.layers) == 1
    stem, attention = ("", "cross_attn") if arch == "cross-attn" else ("attn.", "attn.self_attn")
    w = {name: value.double() for name, value in tensors.items()}
    projections = {name: w[f"{attention}.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    generator = torch.Generator().manual_seed(1)
    embeds, hidden = torch.randn(2, 6, HIDDEN, generator=generator, dtype=torch.float64).unbind()
    positions = [3, 4, 5, 6, 7, 8]

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * w[f"{stem}{name}.weight"]

    if arch == "cross-attn":
        queries, keys = rms(embeds, "input_layernorm"), rms(hidden, "input_layernorm")
        y = embeds + looked_up(projections, queries, keys, positions)
    else:
        x = torch.cat([embeds, hidden], dim=-1) @ w["fc.weight"].T + w["fc.bias"]
        n = rms(x, "input_layernorm")
        y = x + looked_up(projections, n, n, positions)
    gate, up = (rms(y, "post_attention_layernorm") @ w[f"{stem}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    due = y + (gate * gate.sigmoid() * up) @ w[f"{stem}mlp.down_proj.weight"].T
    layer: Any = draft.layer(0, dtype=torch.float64)
    torch.testing.assert_close(layer.forward(embeds, hidden, torch.tensor(positions)), due, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("arch", FORMS)
def test_the_attention_forms_pass_every_check(tmp_path: Path, arch: str) -> None:
    config = form(arch)
    tensors = testing.random_tensors(config, "hydra", seed=2)
    # What the class keeps beside its parameters: the base model's tables, and the frequencies.
    table = torch.randn(512, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    tensors |= {"input_embed_fn.weight": table, "lm_head.weight": table.clone()}
    tensors["cross_attn.rotary_emb.inv_freq" if arch == "cross-attn" else "attn.self_attn.rotary_emb.inv_freq"] = (
        torch.ones(8).bfloat16()
    )
    path = testing.write_checkpoint(tmp_path, config, tensors)
    report = check_draft(path, checks=DRAFT_ALONE)
    open_ones = [result for result in report if result.status not in ("passed", "skipped") and not result.want]
    assert not open_ones, [f"{result.id}: {result.status}: {result.message}" for result in open_ones]
    assert report["layers.incremental"].status == "passed"


@pytest.mark.parametrize("arch", FORMS)
def test_the_attention_forms_are_known_by_their_tensors(tmp_path: Path, arch: str) -> None:
    """Without a configuration; and with the six fields, which leave the number of heads to the base model."""
    config = form(arch)
    tensors = testing.random_tensors(config, "hydra", seed=2)
    bare = open_draft(testing.write_checkpoint(tmp_path / "bare", {}, tensors))
    assert bare.recognition.family == "hydra"
    assert bare.recognition.disagreement == ()
    fields = ("hydra_num_heads", "hydra_num_layers", "hydra_head_arch", "base_model_name_or_path", "grounded_heads")
    path = testing.write_checkpoint(tmp_path / "six", {key: config[key] for key in fields}, tensors)
    draft = open_draft(path)
    assert draft.spec is not None
    assert (draft.spec.hidden_size, draft.spec.layers) == (HIDDEN, ())
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected) == ((), ())
    report = check_draft(path)
    assert [result.id for result in report if result.status == "failed"] == []
    assert report["layers.build"].status == "inconclusive"
    assert "num_attention_heads" in report["layers.build"].message


def _own(arch: str) -> list[str]:
    return list(testing.random_tensors(form(arch), "hydra"))


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch in FORMS for name in _own(arch)])
def test_a_tensor_of_an_attention_form_that_is_missing_or_cut_is_named(tmp_path: Path, arch: str, name: str) -> None:
    config = form(arch)
    tensors = testing.random_tensors(config, "hydra", seed=2)
    whole = tensors.pop(name)
    lost = check_draft(testing.write_checkpoint(tmp_path / "lost", config, tensors))
    assert lost["weights.missing"].findings[0].where in (name, "layers 0")
    assert name in lost["weights.missing"].message
    assert lost["layers.build"].findings[0].where == name
    tensors[name] = whole[:-1].contiguous()
    cut = check_draft(testing.write_checkpoint(tmp_path / "cut", config, tensors), checks=["weights", "layers.build"])
    assert cut["weights.shapes"].findings[0].where == name
    assert cut["layers.build"].findings[0].where == name


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hydra_num_heads": 2}, "hydra_num_heads"),
        ({"hydra_num_layers": 4}, "hydra_num_layers"),
        ({"grounded_heads": False}, "grounded_heads"),
        ({"hydra_head_arch": "crossattn"}, "hydra_head_arch"),
    ],
)
def test_what_an_attention_form_cannot_be(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    tensors = testing.random_tensors(form("cross-attn"), "hydra")
    path = testing.write_checkpoint(tmp_path, form("cross-attn", **changes), tensors)
    result = check_draft(path, checks=["config.types"])["config.types"]
    assert [finding.where for finding in result.findings] == [f"config.json: {key}"]
