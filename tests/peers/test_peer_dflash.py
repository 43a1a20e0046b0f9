"""DFlash and its relatives against the models of three public packages, saved by their own `save_pretrained` and opened here.

What these catch: a packaging whose keys or tensor names are not what the package writes; taps shifted by one; the context normed once too
often; a sliding window read as another package reads it; causality taken from the wrong key; a convolution that looks across the block, or
forward; a selector's codebooks swapped; a refiner that conditions row 0 on the anchor; logits capped before they are scaled; in a whole
generation, the context or the positions of a later block off by what was accepted before it.

The peers compute their angles and norms in float32, so agreement is held to 2e-5 of outputs of order one, and each test shows that the
reading next to the right one is off by far more. `domino`, `dflare` and Laguna have no package that installs: `test_family_*.py` hold them
against a separate NumPy computation.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_specdecode.api import check_draft
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.families import Draft, load

SLIDING, FULL = "sliding_attention", "full_attention"
H, V, B, C, K = 64, 512, 8, 12, 3
LAYERS: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "layer_types": [FULL, FULL],
}
WINDOWED = {"layer_types": [SLIDING, FULL], "sliding_window": 5, "use_sliding_window": True}
ALL_WINDOWED = {"layer_types": [SLIDING, SLIDING], "sliding_window": 5, "use_sliding_window": True}


@pytest.fixture(scope="session")
def speculators(transformers: ModuleType) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(
            "speculators", reason="speculators is not installed; see tests/peers/requirements*.txt"
        )


@pytest.fixture(scope="session")
def zlab(transformers: ModuleType) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("dflash", reason="dflash is not installed; see tests/peers/requirements*.txt")
        from dflash import model

    return model  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _peers_may_warn() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def drawn(module: nn.Module, seed: int = 5) -> nn.Module:
    """Every parameter drawn anew: norms around one, the rest of size 1 / sqrt(columns), a scale at which every part is felt."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name and parameter.ndim == 1
        parameter.data = 1 + noise / 10 if is_norm else noise / parameter.shape[-1] ** 0.5
    return module.eval().requires_grad_(False)


def inputs(seed: int = 7) -> SimpleNamespace:
    """Taps of C context tokens and a block behind them, batch 1."""
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        taps=2 * torch.randn(1, C, K, H, generator=generator),
        block=torch.randn(1, B, H, generator=generator),
        context_positions=torch.arange(C),
        positions=torch.arange(C, C + B),
    )


def opened(model: Any, path: Path) -> Draft:
    """`model` saved by its own method and opened here; whatever the checks say of it, no tensor is missing, extra or misshapen."""
    model.save_pretrained(path)
    draft = load(Checkpoint.open(path))
    assert draft.binding is not None
    assert draft.config_faults == ()
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    report = check_draft(path, skip=["fused-kv.matches-reference", "layers", "weights.degenerate"])
    # Windows are read differently by engines, which is no fault of what the peer wrote.
    failed = {result.id for result in report if result.status == "failed"}
    assert failed <= {"dflash.causality", "dflash.layer-types"}, report
    return draft


def ours(draft: Draft, given: SimpleNamespace, change: Callable[[Any], Any] = lambda layer: layer) -> Tensor:
    """The states after the final norm, float32; `change` edits each LayerSpec first."""
    assert draft.spec is not None
    spec = dataclasses.replace(draft.spec, layers=tuple(change(layer) for layer in draft.spec.layers))
    model = draft.family.build_model(spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr]
    found: Tensor = model.forward(given.block, given.positions, given.taps, given.context_positions)
    return found


def same(found: Tensor, due: Tensor) -> None:
    assert due.abs().max() > 1
    torch.testing.assert_close(found, due, rtol=2e-5, atol=2e-5)


def other(found: Tensor, due: Tensor) -> None:
    assert (found - due).abs().max() > 0.05


def reading(name: str) -> Callable[[Any], Any]:
    return lambda layer: dataclasses.replace(layer, window_reading=name)


def flipped(layer: Any) -> Any:
    return dataclasses.replace(layer, is_causal=not layer.is_causal) if layer.layer_type == SLIDING else layer


# --- dflash 0.1.0 -------------------------------------------------------------------------------------------------------------

ZLAB = {
    "block_size": B,
    "num_target_layers": 20,
    "dflash_config": {"mask_token_id": V - 1, "target_layer_ids": [1, 9, 17]},
}
FLASH2 = {"conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}


def zlab_model(transformers: ModuleType, zlab: ModuleType, kind: str, **changes: Any) -> Any:
    config = transformers.Qwen3Config(**{**LAYERS, **ZLAB, **changes})
    return drawn(getattr(zlab, kind)(config))


def zlab_states(model: Any, given: SimpleNamespace) -> Tensor:
    found: Tensor = model(
        position_ids=torch.cat([given.context_positions, given.positions])[None],
        noise_embedding=given.block,
        target_hidden=given.taps.flatten(-2),
    )
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"is_causal": True}, {"attention_bias": True}, WINDOWED, ALL_WINDOWED, {**ALL_WINDOWED, "is_causal": False}],
    ids=["full", "causal", "bias", "mixed", "sliding", "two-sided window"],
)
def test_zlab_dflash(tmp_path: Path, transformers: ModuleType, zlab: ModuleType, changes: dict[str, Any]) -> None:
    model, given = zlab_model(transformers, zlab, "DFlashDraftModel", **changes), inputs()
    due = zlab_states(model, given)
    draft = opened(model, tmp_path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging, draft.spec.taps.ids) == ("dflash", "plain", (1, 9, 17))
    same(ours(draft, given), due)
    if "layer_types" in changes:
        other(ours(draft, given, reading("anchor")), due)
        other(ours(draft, given, reading("row-inclusive")), due)
        other(ours(draft, given, flipped), due)


@pytest.mark.parametrize("changes", [{}, {**ALL_WINDOWED, "is_causal": False}], ids=["full", "two-sided window"])
def test_zlab_dflash2_states_and_drafts(
    tmp_path: Path, transformers: ModuleType, zlab: ModuleType, changes: dict[str, Any]
) -> None:
    nested = {**ZLAB["dflash_config"], **FLASH2}  # type: ignore[dict-item]
    model, given = zlab_model(transformers, zlab, "DFlash2DraftModel", dflash_config=nested, **changes), inputs()
    due = zlab_states(model, given)
    draft = opened(model, tmp_path)
    assert draft.spec is not None
    assert draft.spec.family == "dflash2"
    same(ours(draft, given), due)

    head = torch.randn(V, H, generator=torch.Generator().manual_seed(1)) / 8
    anchor = torch.tensor([17])
    due_path, _, _ = model.propose(due[:, 1:], anchor, nn.Linear(H, V, bias=False).requires_grad_(False), 0.0)
    assert due_path.shape == (1, B - 1)
    out = nn.Linear(H, V, bias=False).requires_grad_(False)
    out.weight.data = head
    due_path, _, _ = model.propose(due[:, 1:], anchor, out, 0.0)
    selector = draft.family.build_head(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr]
    logits = out(due[:, 1:])
    assert torch.equal(selector(logits, due[:, 1:], anchor), due_path)
    assert not torch.equal(logits.argmax(dim=-1), due_path), "the selector changes nothing here"


def test_zlab_dflash2_is_the_same_draft_once_loaded_and_saved_again(
    tmp_path: Path, transformers: ModuleType, zlab: ModuleType
) -> None:
    """A fresh model saves its codebooks with `.weight`, a loaded one without."""
    nested = {**ZLAB["dflash_config"], **FLASH2}  # type: ignore[dict-item]
    model = zlab_model(transformers, zlab, "DFlash2DraftModel", dflash_config=nested)
    first = opened(model, tmp_path / "first")
    second = opened(zlab.DFlash2DraftModel.from_pretrained(tmp_path / "first"), tmp_path / "second")
    name = "candidate_selector.successor_codebook"
    assert torch.equal(first.tensor(name), second.tensor(name))
    assert sorted(first.binding.stored) == sorted(second.binding.stored)  # type: ignore[union-attr]


def test_zlab_logits_are_multiplied_and_then_capped(tmp_path: Path, transformers: ModuleType, zlab: ModuleType) -> None:
    nested = {**ZLAB["dflash_config"], "output_multiplier": 3.0, "final_logit_softcapping": 2.0}  # type: ignore[dict-item]
    model, given = zlab_model(transformers, zlab, "DFlashDraftModel", dflash_config=nested), inputs()
    states = zlab_states(model, given)
    out = nn.Linear(H, V, bias=False).requires_grad_(False)
    draft = opened(model, tmp_path)
    built = draft.family.build_model(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr]
    torch.testing.assert_close(built.logits(states, out.weight), model.compute_logits(states, out))


# --- transformers' muse_glimmer_assistant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", [[SLIDING, SLIDING], [SLIDING, FULL]])
def test_muse_glimmer_assistant(tmp_path: Path, transformers: ModuleType, types: list[str]) -> None:
    changes = {"layer_types": types, "sliding_window": 5, "target_layer_ids": [1, 9, 17], "mask_token_id": V - 1}
    settings = {**LAYERS, **changes, "block_size": B}
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    model = drawn(transformers.MuseGlimmerAssistantModel(transformers.MuseGlimmerAssistantConfig(**settings)))
    given, cache = inputs(), transformers.cache_utils.DFlashCache(config=model.config)
    # As the package's own candidate generator does it: the cache has to know how many context tokens come.
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(C)
    due = model(
        noise_embeds=given.block,
        context_hidden_states=given.taps.flatten(-2),
        position_ids=torch.arange(C + B)[None],
        attention_mask=torch.ones(1, C + B, dtype=torch.long),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    draft = opened(model, tmp_path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging) == ("dflash", "plain")
    assert {layer.window_reading for layer in draft.spec.layers} == {"row-inclusive"}
    same(ours(draft, given), due)
    other(ours(draft, given, reading("row")), due)
    other(ours(draft, given, reading("anchor")), due)


# --- transformers' DFlash generation --------------------------------------------------------------------------------------------------

PROMPT, NEW = 12, 30
#: Tokens of a block that the target accepts, block by block; None leaves the draft's own tokens in place.
ACCEPTED = [0, 3, B - 1, 1, 0, 2, 5, 1, B - 1]


def dflash_generation(
    transformers: ModuleType, monkeypatch: pytest.MonkeyPatch, accepted: list[int] | None, types: list[str]
) -> SimpleNamespace:
    """Greedy generation of a small random target with a small random assistant, and what was drafted on the way.

    A random assistant is hardly ever right. So that blocks of every length are accepted, `accepted` has the target's own tokens put in the
    place of the first drafted ones, after those are recorded.

    Returns:
        target, assistant: the models. tokens: [PROMPT + NEW]. greedy: what the target generates alone.
        blocks: per block, the number of tokens before it (its anchor included), the drafted ids and their logits [B - 1, V].
    """
    shared = {key: value for key, value in LAYERS.items() if key not in ("num_hidden_layers", "layer_types")}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.Qwen3Config(**shared, num_hidden_layers=4, tie_word_embeddings=False, **special)
    target = drawn(transformers.Qwen3ForCausalLM(config), 1)
    settings = {"sliding_window": 5, "layer_types": types, "block_size": B, "mask_token_id": V - 1}
    settings |= {"num_hidden_layers": 2, "target_layer_ids": [0, 2, 3]}
    assistant = transformers.MuseGlimmerAssistantConfig(**shared, **settings, **special)
    assistant = drawn(transformers.MuseGlimmerAssistantModel(assistant), 2)
    prompt = torch.randint(0, V - 1, (1, PROMPT), generator=torch.Generator().manual_seed(3))
    greedy = target.generate(prompt, max_new_tokens=NEW, do_sample=False)[0]

    generator = transformers.generation.candidate_generator.DFlashTokenCandidateGenerator
    candidates, blocks = generator.get_candidates, []

    def recorded(self: Any, input_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        ids, logits = candidates(self, input_ids, **given)
        length = input_ids.shape[1]
        if logits is not None:
            blocks.append((length, ids[0, length:].tolist(), logits[0]))
            if accepted is not None:
                right = accepted[(len(blocks) - 1) % len(accepted)]
                due = greedy[length : length + right]
                ids = ids.clone()
                ids[0, length : length + len(due)] = due
        return ids, logits

    monkeypatch.setattr(generator, "get_candidates", recorded)
    how = transformers.GenerationConfig(speculation_type="dflash", max_new_tokens=NEW, do_sample=False, **special)
    tokens = target.generate(prompt, assistant_model=assistant, generation_config=how)[0]
    return SimpleNamespace(target=target, assistant=assistant, tokens=tokens, greedy=greedy, blocks=blocks)


def target_taps(target: Any, tokens: Tensor, *, last_normed: bool = True) -> Tensor:
    """The tapped states [T, K, H] of every token, from one pass over all of them."""
    last: list[Tensor] = []
    handle = target.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    states = list(target(tokens[None], output_hidden_states=True).hidden_states)
    handle.remove()
    if not last_normed:
        states[-1] = last[0]
    return torch.stack([states[layer + 1][0] for layer in (0, 2, 3)], dim=-2)


def reference_drafts(draft: Draft, run: SimpleNamespace, taps: Tensor, rows: int = B) -> list[Tensor]:
    """Our logits [rows - 1, V] for each recorded block, every block computed from its whole context at once."""
    assert draft.spec is not None
    assert draft.spec.block is not None
    model = draft.family.build_model(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr]
    embedding, head = run.target.get_input_embeddings().weight, run.target.get_output_embeddings().weight
    found = []
    for length, _, _ in run.blocks:
        anchor = length - 1
        ids = torch.tensor([int(run.tokens[anchor]), *[draft.spec.block.mask_token_id] * (rows - 1)])
        block = embedding[ids] * draft.spec.block.input_embedding_scale
        states = model.forward(block, torch.arange(anchor, anchor + rows), taps[:anchor], torch.arange(anchor))
        found.append(model.logits(states, head)[1:])
    return found


@pytest.mark.parametrize("types", [[FULL, FULL], [SLIDING, FULL]], ids=["full", "window"])
@pytest.mark.parametrize("accepted", [None, ACCEPTED], ids=["own drafts", "accepted"])
def test_dflash_generation_drafts(
    tmp_path: Path,
    transformers: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    accepted: list[int] | None,
    types: list[str],
) -> None:
    """Token by token, with the target's last layer among the taps: transformers hands over its state after the final norm."""
    run = dflash_generation(transformers, monkeypatch, accepted, types)
    assert torch.equal(run.tokens, run.greedy)
    lengths = [length for length, _, _ in run.blocks]
    if accepted is not None:
        assert {after - before for before, after in itertools.pairwise(lengths)} == {right + 1 for right in ACCEPTED}
    draft = opened(run.assistant, tmp_path)
    taps = target_taps(run.target, run.tokens)
    found = reference_drafts(draft, run, taps)
    assert [logits.argmax(dim=-1).tolist() for logits in found] == [ids for _, ids, _ in run.blocks]
    for logits, (_, _, due) in zip(found, run.blocks, strict=True):
        same(logits, due)
    # The block keeps its length at the end of a generation too.
    assert {len(ids) for _, ids, _ in run.blocks} == {B - 1}
    assert lengths[-1] + B > PROMPT + NEW


def test_dflash_generation_told_apart(
    tmp_path: Path, transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a last tap before the final norm, taps one layer early, states of the next token, and a shorter block."""
    run = dflash_generation(transformers, monkeypatch, ACCEPTED, [FULL, FULL])
    draft, taps = opened(run.assistant, tmp_path), target_taps(run.target, run.tokens)
    states = run.target(run.tokens[None], output_hidden_states=True).hidden_states
    early = torch.stack([states[layer][0] for layer in (0, 2, 3)], dim=-2)
    raw = target_taps(run.target, run.tokens, last_normed=False)
    readings = {"raw": (raw, B), "early": (early, B), "next": (taps.roll(-1, 0), B), "short": (taps, B // 2)}
    for wrong, rows in readings.values():
        found = reference_drafts(draft, run, wrong, rows)
        for logits, (_, _, due) in zip(found, run.blocks, strict=True):
            other(logits, due[: rows - 1])
        mine = [logits.argmax(dim=-1).tolist() for logits in found]
        differ = [ids != due[: rows - 1] for ids, (_, due, _) in zip(mine, run.blocks, strict=True)]
        assert sum(differ) > len(differ) // 2


# --- speculators ------------------------------------------------------------------------------------------------------------------


def packaged(transformers: ModuleType, kind: str, *, layers: dict[str, Any], **fields: Any) -> Any:
    """A model of speculators, drawn anew; eager attention, since flex attention is compiled."""
    from speculators.config import SpeculatorsConfig, VerifierConfig  # type: ignore[import-not-found]
    from speculators.model import SpeculatorModel  # type: ignore[import-not-found]
    from speculators.proposals.greedy import GreedyTokenProposalConfig  # type: ignore[import-not-found]

    inner = transformers.Qwen3Config(**{**LAYERS, **layers})
    inner._attn_implementation = "eager"
    model_class = SpeculatorModel.registry[kind]
    config = model_class.config_class(
        **{
            "transformer_layer_config": inner,
            "draft_vocab_size": V,
            "block_size": B,
            "aux_hidden_state_layer_ids": [2, 10, 18],
            "mask_token_id": V - 1,
            "speculators_config": SpeculatorsConfig(
                algorithm=kind,
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=B - 1)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
            ),
            **fields,
        }
    )
    model: Any = drawn(model_class(config))
    if model.d2t is not None:
        images = torch.randperm(V, generator=torch.Generator().manual_seed(2))[: len(model.d2t)].sort().values
        model.d2t.copy_(images - torch.arange(len(images)))
        model.t2d.zero_()[images] = True
    return model


def packaged_run(model: Any, given: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """States, logits and tokens of one block behind C tokens, from speculators' own training forward with one anchor."""
    core = __import__("speculators.models.dflash.core", fromlist=["core"])
    monkeypatch.setattr(core, "select_anchors", lambda *_: (torch.tensor([C]), torch.tensor([True])))
    length = C + B
    tokens = torch.randint(0, V - 1, (1, length), generator=torch.Generator().manual_seed(3))
    taps = torch.cat([given.taps, torch.full((1, B, K, H), 1e3)], dim=1)
    hidden, logits, _, _, _ = model._backbone_forward(
        taps.flatten(-2),
        tokens,
        torch.ones(1, length),
        torch.zeros(1, length, H),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
    )
    ids = torch.full((1, B), V - 1)
    ids[0, 0] = tokens[0, C]
    given.block = model.embed_tokens(ids)
    return SimpleNamespace(hidden=hidden, logits=logits, tokens=tokens)


NESTED = {
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "default", "rope_theta": 1000000.0},
    }
}


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "xpress"])
@pytest.mark.parametrize(
    ("layers", "fields"),
    [
        ({}, {}),
        (WINDOWED, {"sliding_window_non_causal": False}),
        (ALL_WINDOWED, {"sliding_window_non_causal": True}),
        ({"layer_types": [SLIDING, FULL]}, {"sliding_window_non_causal": False}),
        ({**WINDOWED, **NESTED}, {"sliding_window_non_causal": True}),
    ],
    ids=["full", "causal window", "two-sided window", "window switched off", "a RoPE per type"],
)
def test_speculators_states(
    tmp_path: Path,
    transformers: ModuleType,
    speculators: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    layers: dict[str, Any],
    fields: dict[str, Any],
) -> None:
    model, given = packaged(transformers, kind, layers=layers, **fields), inputs()
    due = packaged_run(model, given, monkeypatch).hidden
    draft = opened(model, tmp_path)
    assert draft.spec is not None
    assert (draft.spec.family, draft.spec.packaging) == (kind, "speculators")
    assert (draft.spec.taps.ids, draft.spec.taps.convention) == ((2, 10, 18), "boundary")
    assert draft.header("embed_tokens.weight") is None
    assert draft.header("lm_head.weight") is None
    found = ours(draft, given)
    torch.testing.assert_close(found, due, rtol=5e-5, atol=5e-5)
    if "sliding_window" in layers:
        other(ours(draft, given, reading("row")), due)
        other(ours(draft, given, flipped), due)


@pytest.mark.parametrize("kind", ["dflash", "xpress"])
def test_speculators_reduced_vocabulary(
    tmp_path: Path, transformers: ModuleType, speculators: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model, given = packaged(transformers, kind, layers={}, draft_vocab_size=200), inputs()
    run = packaged_run(model, given, monkeypatch)
    draft = opened(model, tmp_path)
    assert draft.spec is not None
    assert draft.header("lm_head.weight").shape == (200, H)  # type: ignore[union-attr]
    built = draft.family.build_model(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr]
    same(built.logits(run.hidden, draft.tensor("lm_head.weight")), run.logits)
    assert torch.equal(draft.tensor("d2t"), model.d2t)


@pytest.mark.parametrize("vocabulary", [V, 200])
@pytest.mark.parametrize("from_anchor", [False, True])
def test_speculators_xpress_refiner(
    tmp_path: Path,
    transformers: ModuleType,
    speculators: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    vocabulary: int,
    from_anchor: bool,
) -> None:
    """Each of three rounds, from the logits that speculators' own training forward hands to its loss."""
    fields = {
        "draft_vocab_size": vocabulary,
        "sample_from_anchor": from_anchor,
        "xpress_rank": 12,
        "xpress_mlp_ratio": 3,
    }
    model, given = packaged(transformers, "xpress", layers={}, **fields), inputs()
    run = packaged_run(model, given, monkeypatch)
    handed: list[Any] = []
    core = __import__("speculators.models.xpress.core", fromlist=["core"])

    def keep(teacher: Tensor, rounds: list[Tensor], *_: Any, **__: Any) -> tuple[Tensor, dict[str, Any]]:
        handed.extend([teacher, *rounds])
        return torch.zeros(()), {}

    monkeypatch.setattr(core, "compute_metrics", keep)
    length = C + B
    model(
        torch.cat([given.taps, torch.full((1, B, K, H), 1e3)], dim=1).flatten(-2),
        run.tokens,
        torch.ones(1, length),
        torch.zeros(1, length, H),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
        consistency_passes=3,
    )
    draft = opened(model, tmp_path)
    assert draft.spec is not None
    assert draft.spec.block is not None
    assert draft.spec.block.sample_from_anchor is from_anchor
    head = draft.family.build_head(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr]
    d2t = draft.tensor("d2t") if vocabulary < V else None
    rounds = {"sample_from_anchor": from_anchor, "d2t": d2t}
    anchor, before = run.tokens[:, C], run.tokens[:, C - 1]
    for count in (1, 2, 3):
        found = head.draft(run.logits, run.hidden, anchor, before, rounds=count, **rounds)
        same(found, handed[count])
        other(found, run.logits)
    if not from_anchor:
        other(head.draft(run.logits, run.hidden, anchor, anchor, rounds=1, **rounds), handed[1])


@pytest.mark.parametrize("from_anchor", [False, True])
def test_speculators_dflash2_selector(
    tmp_path: Path,
    transformers: ModuleType,
    speculators: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    from_anchor: bool,
) -> None:
    fields = {"selector_rank": 8, "selector_top_k": 4, "conv_group_size": 8, "sample_from_anchor": from_anchor}
    model, given = packaged(transformers, "dflash2", layers={}, **fields), inputs()
    run = packaged_run(model, given, monkeypatch)
    draft = opened(model, tmp_path)
    selector = draft.family.build_head(draft.spec, draft.source(dtype=torch.float32))  # type: ignore[union-attr, arg-type]
    previous = torch.arange(B)[None]
    candidates, due = model.candidate_selector.select(run.logits, run.hidden, previous)
    torch.testing.assert_close(selector.scores(run.logits, run.hidden, previous, candidates), due)
    other(due, run.logits.gather(-1, candidates))
