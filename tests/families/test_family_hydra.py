"""Hydra heads.

What these catch: the widths of grounded heads, which grow with their place; the residual's projection left out; a missing bias of the head;
dropouts that are counted in the names, and files from before they were; the prefix layer, misspelt as its authors have it, closed by its
norm; a configuration of six fields that leaves every size to the base model.

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


@pytest.mark.parametrize("arch", ["cross-attn", "eagle-attn"])
def test_the_attention_forms_are_judged_by_their_tensors(tmp_path: Path, arch: str) -> None:
    config = testing.tiny_config("hydra", hydra_head_arch=arch, hydra_num_heads=1, hydra_num_layers=1)
    spec, tensors = testing.expected_tensors(config, "hydra")
    assert spec.layers == ()
    made = {
        tensor.name: torch.randn([extent or 32 for extent in tensor.shape], generator=torch.Generator().manual_seed(1))
        for tensor in tensors
        if tensor.need == "required"
    }
    report = check_draft(testing.write_checkpoint(tmp_path, config, made))
    assert report["weights.missing"].status == report["weights.unexpected"].status == "passed"
    del made["attn.mlp.up_proj.weight" if arch == "eagle-attn" else "cross_attn.q_proj.weight"]
    report = check_draft(testing.write_checkpoint(tmp_path, config, made))
    assert report["weights.missing"].status == "failed"
