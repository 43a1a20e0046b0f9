"""EAGLE3 and P-EAGLE against speculators' own model classes: their tiny random models, saved by them, opened here.

What these catch: a tensor of the packaging that is not known by its name, or is due and not written; a flag of the configuration that is
read from another place, or the other way round; the fusion of taps with its norms in another order; layers from 1 on, Qwen3's head norms
and per-layer windows; what a later draft step takes as its hidden state; where a P-EAGLE row looks.

`float32` runs the peer as it is; it is good to about 1e-6. `float64` gives the peer angles and norms in float64, and then has to agree to
ten digits.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.families import Draft
from pytest_specdecode.layers import KVCache

TOLERANCE = {torch.float32: {"rtol": 2e-4, "atol": 3e-4}, torch.float64: {"rtol": 1e-10, "atol": 1e-10}}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float64"])

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, REDUCED, TAPS = 64, 4, 2, 32, 256, 128, 3
THETA = 500000.0
TOKENS, STEPS = 7, 3
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}


@pytest.fixture(scope="module")
def peer(transformers: ModuleType) -> Iterator[SimpleNamespace]:
    """The classes of speculators that these tests build."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = (
            "speculators is not installed: pip install -c constraints.txt -r tests/peers/requirements.txt, "
            "then pip install --no-deps -r tests/peers/requirements-no-deps.txt"
        )
        pytest.importorskip("speculators", reason=reason)
        config = importlib.import_module("speculators.config")
        greedy = importlib.import_module("speculators.proposals.greedy")
        eagle3 = importlib.import_module("speculators.models.eagle3")
        peagle = importlib.import_module("speculators.models.peagle.core")
        yield SimpleNamespace(
            config=config,
            greedy=greedy,
            eagle3=(
                importlib.import_module("speculators.models.eagle3.core").Eagle3DraftModel,
                eagle3.Eagle3SpeculatorConfig,
            ),
            peagle=(
                peagle.PEagleDraftModel,
                importlib.import_module("speculators.models.peagle.config").PEagleSpeculatorConfig,
            ),
            peagle_core=peagle,
            layers={"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config},
        )


class Angles(nn.Module):
    """Cosines and sines in float64, as the peer's layers take them."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angles = position_ids.to(torch.float64).unsqueeze(-1) * torch.cat([frequencies, frequencies])
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def built(
    peer: SimpleNamespace,
    family: str,
    dtype: torch.dtype,
    *,
    model_type: str = "llama",
    draft_vocab_size: int = REDUCED,
    layer: dict[str, Any] | None = None,
    **flags: Any,
) -> nn.Module:
    """A random model of the peer's, every parameter drawn, in `dtype`."""
    model_class, config_class = getattr(peer, family)
    layer_config = peer.layers[model_type](**{"num_hidden_layers": 1, **SIZES, **(layer or {})})
    layer_config._attn_implementation = "sdpa"
    verifier = peer.config.VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"])
    speculators_config = peer.config.SpeculatorsConfig(
        algorithm=family,
        proposal_methods=[peer.greedy.GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=verifier,
    )
    model: nn.Module = model_class(
        config_class(
            transformer_layer_config=layer_config,
            draft_vocab_size=draft_vocab_size,
            eagle_aux_hidden_state_layer_ids=[2, 8, 13],
            speculators_config=speculators_config,
            **flags,
        )
    )
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = drawn * 0.3 + 1.0 if "norm" in name else drawn * 0.2
    if draft_vocab_size != VOCABULARY:
        chosen = torch.randperm(VOCABULARY, generator=generator)[:draft_vocab_size].sort().values
        t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
        t2d[chosen] = True
        model.load_vocab_mappings(t2d, chosen - torch.arange(draft_vocab_size))  # type: ignore[operator]
    return model.to(dtype).eval().requires_grad_(False)


def saved(model: nn.Module, directory: Path, known: tuple[str, ...] = ()) -> Draft:
    """What `open_draft` makes of what the peer writes; nothing in it may be missing, unknown or broken but for the checks in `known`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)  # type: ignore[operator]
    report = check_draft(directory, skip=["layers", "fused-kv"])
    bad = {result.id: result.message for result in report if result.status == "failed"}
    assert sorted(bad) == sorted(known), bad
    draft = open_draft(directory)
    assert draft.binding is not None
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    return draft


def exact(model: nn.Module, dtype: torch.dtype) -> None:
    """In float64, angles and norms of that width in place of the peer's float32 ones."""
    if dtype != torch.float64:
        return
    model.rotary_emb = Angles()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=dtype)
                norm.weight.data = child.weight.data
                setattr(module, name, norm)


def recorded(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of the last layer and of the head, call by call."""
    states: list[Tensor] = []
    logits: list[Tensor] = []
    hooks = [
        model.layers[-1].register_forward_hook(lambda _m, _a, out: states.append(out[0])),  # type: ignore[union-attr, index]
        model.lm_head.register_forward_hook(lambda _m, _a, out: logits.append(out[0])),  # type: ignore[union-attr]
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return states, logits


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(23)
    taps = torch.randn(1, TOKENS, TAPS * HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return taps, torch.randint(VOCABULARY, (1, TOKENS), generator=generator)


def through(
    layers: Sequence[Any], embeds: Tensor, hidden: Tensor, positions: Tensor, caches: Sequence[KVCache]
) -> Tensor:
    """All layers of our draft, one after the other."""
    for layer, cache in zip(layers, caches, strict=True):
        hidden = layer.forward(embeds, hidden, positions, cache)
    return hidden


def compared(draft: Draft, model: nn.Module, dtype: torch.dtype, *, steps: int) -> None:
    """Step 0 over all rows, then every row's own later steps, against the peer's training-time forward."""
    taps, ids = drawn(dtype)
    states, logits = recorded(
        model, {"hidden_states": taps, "input_ids": ids, "document_ids": torch.zeros_like(ids), "ttt_steps": STEPS}
    )
    assert draft.spec is not None
    assert draft.family is not None
    head: Any = draft.family.build_head(draft.spec, draft.source(dtype=dtype))
    layers = draft.layers(dtype=dtype)
    table = draft.tensor("embed_tokens.weight").to(dtype)
    fused = head.fuse(taps[0])
    positions = 1 + torch.arange(TOKENS)
    fresh = [KVCache() for _ in draft.spec.layers]
    hidden = through(layers, table[ids[0]], fused, positions, fresh)
    assert states[0].abs().max() > 1
    torch.testing.assert_close(hidden, states[0], **TOLERANCE[dtype])
    torch.testing.assert_close(head.logits(hidden), logits[0], **TOLERANCE[dtype])
    for row in range(TOKENS - STEPS):
        caches = [KVCache() for _ in draft.spec.layers]
        end = row + 1
        last = through(layers, table[ids[0, :end]], fused[:end], positions[:end], caches)[-1:]
        for step in range(1, steps):
            token = ids[0, row + step : row + step + 1]
            last = through(layers, table[token], head.recycled(last), positions[row : row + 1] + step, caches)
            torch.testing.assert_close(last[0], states[step][row], **TOLERANCE[dtype])
            torch.testing.assert_close(head.logits(last)[0], logits[step][row], **TOLERANCE[dtype])


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"norm_before_fc": True, "norm_output": True},
    ],
    ids=lambda flags: "+".join(flags) or "plain",
)
@DTYPES
def test_eagle3(
    peer: SimpleNamespace, tmp_path: Path, dtype: torch.dtype, flags: dict[str, bool], norm_before_residual: bool
) -> None:
    model = built(peer, "eagle3", dtype, norm_before_residual=norm_before_residual, **flags)
    draft = saved(model, tmp_path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging, draft.spec.taps.convention) == (
        "eagle3",
        "speculators",
        "boundary",
    )
    exact(model, dtype)
    compared(draft, model, dtype, steps=STEPS)


@DTYPES
def test_eagle3_of_three_qwen3_layers_with_a_full_vocabulary(
    peer: SimpleNamespace, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = built(
        peer,
        "eagle3",
        dtype,
        model_type="qwen3",
        draft_vocab_size=VOCABULARY,
        layer={"num_hidden_layers": 3},
        norm_output=True,
        fc_norm=True,
    )
    draft = saved(model, tmp_path)
    assert draft.header("layers.2.self_attn.q_norm.weight") is not None
    exact(model, dtype)
    compared(draft, model, dtype, steps=STEPS)


@DTYPES
def test_eagle3_whose_layers_have_windows_of_their_own(
    peer: SimpleNamespace, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Step 0 only: at later steps the peer lets a row see one key more than the window."""
    window = {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 3,
        "use_sliding_window": True,
    }
    model = built(peer, "eagle3", dtype, model_type="qwen3", layer=window)
    draft = saved(model, tmp_path)
    assert draft.spec is not None
    assert [layer.attention.sliding_window for layer in draft.spec.layers] == [None, 3]  # type: ignore[union-attr]
    exact(model, dtype)
    compared(draft, model, dtype, steps=1)


def test_per_type_rope_is_the_sliding_layers_for_all(peer: SimpleNamespace, tmp_path: Path) -> None:
    """The peer rotates full layers with the sliding layers' base; the spec of its files says so.

    transformers writes a default base of 10000 beside the two, so the file does state different values.
    """
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7000.0},
    }
    layer = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}
    layer |= {"use_sliding_window": True, "rope_parameters": rope}
    model = built(peer, "eagle3", torch.float32, model_type="qwen3", layer=layer)
    draft = saved(model, tmp_path, known=("rope.theta-agrees",))
    assert draft.spec is not None
    assert [layer.attention.rope.theta for layer in draft.spec.layers] == [7000.0, 7000.0]  # type: ignore[union-attr]
    compared(draft, model, torch.float32, steps=1)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize(
    ("model_type", "flags"),
    [("llama", {}), ("llama", {"norm_before_fc": True}), ("qwen3", {"fc_norm": True})],
    ids=["llama", "llama with norm_before_fc", "qwen3 with fc_norm"],
)
@DTYPES
def test_peagle(
    peer: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    model_type: str,
    flags: dict[str, bool],
    norm_before_residual: bool,
) -> None:
    """One pass over known positions and masked ones, against the peer's forward for one chain of draft tokens.

    The peer draws its chains at random; here it is given every position at depth 0 and one chain of masked positions from the last.
    """
    model = built(
        peer,
        "peagle",
        dtype,
        model_type=model_type,
        layer={"num_hidden_layers": 2},
        mask_token_id=17,
        norm_before_residual=norm_before_residual,
        **flags,
    )
    draft = saved(model, tmp_path)
    assert draft.spec is not None
    assert draft.family is not None
    assert draft.spec.block is not None
    assert (draft.spec.family, draft.spec.block.mask_token_id) == ("peagle", 17)
    exact(model, dtype)
    masked = 3
    known = TOKENS - masked
    chain = (
        torch.tensor([*range(known), *[known - 1] * masked]),
        torch.tensor([*[0] * known, *range(1, masked + 1)]),
    )
    monkeypatch.setattr(peer.peagle_core, "generate_cod_sample_indices", lambda **_: chain)
    monkeypatch.setattr(peer.peagle_core, "compute_metrics", lambda **_: (torch.tensor(0.0), {}))
    taps, ids = drawn(dtype)
    states, logits = recorded(
        model,
        {
            "hidden_states": taps,
            "input_ids": ids,
            "document_ids": torch.zeros_like(ids),
            "verifier_last_hidden_states": torch.zeros(1, TOKENS, HIDDEN, dtype=dtype),
        },
    )
    head: Any = draft.family.build_head(draft.spec, draft.source(dtype=dtype))
    tokens = torch.cat([ids[0, :known], torch.full((masked,), 17)])
    embeds = draft.tensor("embed_tokens.weight").to(dtype)[tokens]
    layers = draft.layers(dtype=dtype)
    hidden = head.fuse_block(taps[0, :known], masked)
    hidden = through(layers, embeds, hidden, torch.arange(TOKENS), [KVCache() for _ in draft.spec.layers])
    assert states[0].abs().max() > 1
    torch.testing.assert_close(hidden, states[0], **TOLERANCE[dtype])
    torch.testing.assert_close(head.logits(hidden), logits[0], **TOLERANCE[dtype])
