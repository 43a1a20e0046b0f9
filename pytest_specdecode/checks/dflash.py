"""What a block-drafting head must state beside its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_specdecode import engines
from pytest_specdecode.checks.keys import block_key, ids_below
from pytest_specdecode.checks.registry import Context, Skip, check, require_layers
from pytest_specdecode.engines.base import at
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.families.base import ConfigView, ExpectedTensor, open_view
from pytest_specdecode.findings import Finding, Outcome
from pytest_specdecode.spec import BlockSpec
from pytest_specdecode.target import Tokenizer

#: Families that draft a block of masked rows over one context.
BLOCKS = ("dflash", "dflash2", "domino", "dflare", "dspark", "xpress")

_TYPES = ("full_attention", "sliding_attention")
#: Classes of transformers that drop the window unless `use_sliding_window` is true.
_SWITCHED = ("qwen2", "qwen3")
#: Keys that say whether row 0 drafts, in whichever section they stand.
_LAYOUT_KEYS = ("sample_from_anchor", "query_zero_predicts_next")


@check(
    "dflash.mask-token",
    title="mask_token_id is stated and is an id of the target's embedding",
    why="An id outside the embedding stops one engine; an absent one is replaced by another token, and every row drafts from it.",
    families=(*BLOCKS, "peagle"),
    faults=(
        "mask-token-missing",
        "mask-token-range",
        "mask-token-conflict",
        "parallel-mask-token-missing",
    ),
    example={"family": "dflash", "dflash_config": {"target_layer_ids": [1, 9, 17], "mask_token_id": 512}},
    fix="state the id that the masked rows were trained with, and the target's padded vocab_size",
)
def mask_token(context: Context) -> Iterator[Finding]:
    """Presence, agreement, range, and a mask that means something else."""
    block = _block(context)
    where = f"config.json: {block.mask_token_stated[0].key if block.mask_token_stated else block_key(context, 'mask token')}"
    stated = {item.key: item.value for item in block.mask_token_stated}
    if block.mask_token_id is None and stated:
        parallel = block.variant == "peagle"
        make = context.warn if parallel else context.fail
        yield make(
            "mask_token_id is not an id",
            where=where,
            got=next(iter(stated.values())),
            due="the id that masked rows were trained with: a whole number from 0 up",
            fix=f"state {block_key(context, 'mask token')} as trained",
            outcomes=_unusable_mask(context, parallel),
        )
        return
    if block.mask_token_id is None and block.variant == "peagle":
        yield context.warn(
            "mask_token_id is not stated; engines cannot draft in parallel without it",
            where="config.json: mask_token_id",
            got=None,
            due="the id that masked positions were trained with",
            fix="state mask_token_id",
            fault="parallel-mask-token-missing",
        )
        return
    if block.mask_token_id is None:
        yield context.fail(
            "mask_token_id is not stated",
            where=where,
            got=None,
            due="the id that masked rows were trained with",
            fix=f"state {block_key(context, 'mask token')}",
            fault="mask-token-missing",
        )
        return
    if any(value != block.mask_token_id for value in stated.values()):
        yield context.fail(
            "mask_token_id is stated with different values",
            where=where,
            got=stated,
            due="one value",
            fix="leave the one that was trained, in both places",
            outcomes=None if all(map(_is_id, stated.values())) else _unusable_mask(context, parallel=False),
        )
    rows = context.spec.vocabulary.vocab_size
    if context.target is not None:
        rows = context.target.embedding_rows or context.target.vocab_size or rows
    if rows is not None and block.mask_token_id >= rows:
        yield context.fail(
            f"mask_token_id {block.mask_token_id} lies outside an embedding of {rows} rows",
            where=where,
            got=block.mask_token_id,
            due=ids_below(rows),
            fix="state the id that was trained, and the target's padded vocab_size",
            fault="mask-token-range",
        )
    yield from _other_id(context, block.mask_token_id, where)
    for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if block.mask_token_id in _special_ids(context, key):
            yield context.warn(
                f"mask_token_id is {key}, which means something else to the target",
                where=where,
                got=block.mask_token_id,
                due=f"an id other than {key}",
                fix="train with an id of the target's embedding that its tokenizer does not use",
            )


@check(
    "dflash.block-size",
    title="block_size is stated, at least 2, the same in both places, and no more is asked of a block than it was trained for",
    why="Engines take 16 where they do not find it, and rows beyond the trained ones spoil those before them too.",
    needs=("config",),
    families=BLOCKS,
    faults=(
        "block-size-missing",
        "block-size-disagrees",
        "block-size-nested-only",
    ),
    cost="accepted length 2.74 with a block of 5, 1.31 with 7 tokens asked of it (vllm PR #41834)",
    example={"family": "dflash", "block_size": 16},
    fix="state block_size at top level and in dflash_config, and ask for no more tokens than a block drafts",
)
def block_size(context: Context) -> Iterator[Finding]:
    """Presence, agreement, size, a place that not all engines read, and the tokens that the server is to ask for."""
    block = _block(context)
    stated = {item.key: item.value for item in block.block_size_stated}
    key = block_key(context, "block size")
    both = key.startswith("dflash_config.")
    # Where none is stated, the top level is where most engines look.
    where = f"config.json: {next(iter(stated), 'block_size' if both else key)}"
    fix = "state block_size at top level and in dflash_config" if both else f"state {key}"
    if block.block_size is None:
        # What engines take in its place is right for some drafts; a value that is no number is read by none.
        yield context.fail(
            "block_size is not stated" if not stated else "block_size is not a number",
            where=where,
            got=next(iter(stated.values()), None),
            due="rows of a block as trained",
            fix=fix,
            fault="block-size-missing",
            severity="error" if stated else "warning",
        )
        return
    if any(value != block.block_size for value in stated.values()):
        yield context.fail(
            "block_size is stated with different values",
            where=f"config.json: {', '.join(stated)}",
            got=stated,
            due="one value",
            fix="leave the trained one, in both places",
            fault="block-size-disagrees",
        )
    if block.block_size < 2:
        yield context.fail(
            "a block has an anchor and at least one masked row", where=where, got=block.block_size, due="2 or more"
        )
    if list(stated) == ["dflash_config.block_size"]:
        yield context.warn(
            "block_size stands in dflash_config only, where not every engine looks",
            where=where,
            got=stated,
            due="both places",
            fix=fix,
            fault="block-size-nested-only",
        )
    for refusal, outcomes in engines.refusals(
        "block-size", context.draft, context.target, context.serve, context.engines
    ):
        kinds = {outcome.outcome for outcome in outcomes.values()}
        wrong = bool(kinds & set(engines.UNFIT)) or ("falls back" not in kinds and not refusal.doubtful)
        yield context.fail(
            refusal.message,
            where=f"--draft-serve: {refusal.option}",
            got=refusal.got,
            due=refusal.due,
            fix=refusal.fix,
            outcomes=outcomes,
            severity="error" if wrong else "warning",
        )


@check(
    "dflash.block-layout",
    title="whether a block's row 0 drafts is stated, and stated one way",
    why="The same file exists with both layouts; the wrong one shifts every draft by a row, and nothing fails.",
    families=BLOCKS,
    cost="accepted length 1.06 where 2.76 was due (sglang issue #40144), 1.35 where 3.42 was due (mlx-dspark)",
    example={"family": "dflash", "sample_from_anchor": True},
    fix="state sample_from_anchor: true where row 0 was trained to draft, false where it is the anchor",
)
def block_layout(context: Context) -> Iterator[Finding]:
    """Statements that contradict, a layout that readers of the family do not know, and none at all."""
    block, spec = _block(context), context.spec
    stated = _layout_statements(context)
    first = next(iter(stated), "sample_from_anchor")
    where = f"config.json: {first}"
    if len(set(stated.values())) > 1:
        yield context.fail(
            "the file says both that row 0 drafts and that it does not",
            where=f"config.json: {', '.join(stated)}",
            got=stated,
            due="one layout",
            fix="leave the one that was trained",
        )
        return
    drafts = next(iter(stated.values()), None)
    tokens = _proposed(context)
    if drafts is False and tokens is not None and tokens == block.block_size:
        yield context.fail(
            f"row 0 is the anchor, and yet a block of {tokens} rows is to propose {tokens} tokens",
            where="config.json: speculators_config.proposal_methods[0].speculative_tokens",
            got=tokens,
            due=tokens - 1,
            fix=f"state {tokens - 1} tokens, or sample_from_anchor: true where row 0 was trained to draft",
        )
    if drafts and tokens is not None and tokens + 1 == block.block_size:
        yield context.warn(
            f"row 0 drafts, and {tokens} tokens are proposed of {block.block_size} rows, as if it were the anchor",
            where=where,
            got={first: True, "speculative_tokens": tokens},
            due=block.block_size,
            fix="state as many tokens as rows draft: some readers take the layout from the difference",
        )
    meant = _meant_layout(context, drafts)
    # Domino's row 0 goes by shift_label, which its readers read; the other families' key says nothing of it.
    outcomes = {} if spec.family == "domino" else context.read_as("sample-from-anchor", meant)
    if drafts is None and not _unfit(outcomes):
        context.notes["dflash.block-layout"] = "not stated; " + (
            "row 0 is trained to draft, and read so" if meant else "row 0 is trained as the anchor, and read so"
        )
    elif _unfit(outcomes):
        kind = "drafts" if meant else "is the anchor"
        yield context.warn(
            f"whether row 0 drafts is not stated; {spec.family} is trained so that it {kind}, and not every engine takes it so"
            if drafts is None
            else f"row 0 {kind}, and not every engine takes it so",
            where=where,
            got=stated or None,
            due=meant if drafts is None else "an engine that reads it",
            fix=f"state sample_from_anchor: {str(meant).lower()} at top level and in dflash_config"
            if spec.packaging == "plain"
            else f"state sample_from_anchor: {str(meant).lower()}",
            outcomes=outcomes,
        )


@check(
    "dflash.layer-types",
    title="one known type per layer, and a window that the sliding ones get",
    why="A layer that was trained with a window and is run without one collapses beyond it, and nothing fails.",
    families=BLOCKS,
    faults=("layer-types-length", "layer-type-unknown", "window-missing"),
    cost="drafts whose sliding layers run as full ones collapse past 2048 tokens (vllm PR #40898)",
    example={"family": "dflash", "layer_types": ["full_attention"]},
    fix="state one of full_attention and sliding_attention per layer, sliding_window, and use_sliding_window: true",
)
def layer_types(context: Context) -> Iterator[Finding]:
    """The list's length and words, the window's presence and size, and a switch that drops it."""
    spec, block = context.spec, _block(context)
    if spec.packaging == "embedded":
        raise Skip("the draft lies inside its target, whose configuration says what its stages attend to")
    require_layers(context)
    view = open_view(context.draft.checkpoint)
    types = view.layer.raw("layer_types")
    where = f"config.json: {view.layer.path('layer_types')}"
    if isinstance(types, list):
        if len(types) != len(spec.layers):
            yield context.fail(
                f"{len(types)} layer types for {len(spec.layers)} layers",
                where=where,
                got=len(types),
                due=len(spec.layers),
                fix="state one type per layer",
                fault="layer-types-length",
            )
        unknown = sorted({str(item) for item in types} - set(_TYPES))
        if unknown:
            yield context.fail(
                f"{', '.join(unknown)}: no type of layer that a block drafter has",
                where=where,
                got=unknown,
                due=list(_TYPES),
                fix="state what the layer was trained as",
                fault="layer-type-unknown",
            )
    key, window = _stated_window(view)
    where = f"config.json: {key}"
    sliding = [layer.index for layer in spec.layers if layer.layer_type == "sliding_attention"]
    if not sliding:
        if view.layer.raw("use_sliding_window") is True and window is not None:
            yield context.warn(
                "a window is stated and switched on, and no layer slides",
                where=where,
                got=window,
                due="layer_types with sliding_attention, or no window",
                fix="state layer_types as trained; without them every layer is run as full attention",
            )
        return
    if window is None:
        yield context.fail(
            f"{_layers(sliding)} sliding, and no window is stated",
            where=where,
            got=None,
            due="tokens that a query sees",
            fix="state the window that was trained",
            fault="window-missing",
        )
        return
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        yield context.fail("the window is not a positive number of tokens", where=where, got=window, due="1 or more")
        return
    if block.block_size is not None and window < block.block_size:
        yield context.warn(
            f"a window of {window} tokens is narrower than a block of {block.block_size} rows",
            where=where,
            got=window,
            due=f"{block.block_size} or more",
            fix="compare with the window that was trained",
        )
    switch = view.layer.path("use_sliding_window")
    if (
        key != "dflash_config.swa_window_size"
        and view.layer.raw("model_type") in _SWITCHED
        and view.layer.raw("use_sliding_window") is not True
    ):
        yield context.warn(
            f"use_sliding_window is not true, so transformers' {view.layer.raw('model_type')} configuration drops the window "
            "and leaves the layers sliding",
            where=f"config.json: {switch}",
            got=view.layer.raw("use_sliding_window"),
            due=True,
            fix="state use_sliding_window: true",
            outcomes=context.read_as(
                "sliding-window", tuple(_window_of(window, layer, sliding) for layer in _all(context))
            ),
        )


@check(
    "dflash.causality",
    title="whether rows of a block look ahead is stated where layers slide, and read one way",
    why="Readers that find nothing stated differ in what sliding layers may see; the wrong mask costs a tenth of the tokens in silence.",
    families=BLOCKS,
    faults=("causality-unstated", "layer-types-mixed"),
    cost="accepted length 3.48 for 4.03, 5.46 for 6.17, 5.25 for 6.06 (vllm PR #43445); 5.27 for 5.62 (sglang PR #34524)",
    example={"family": "dflash", "layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "is_causal": ...},
    fix="state is_causal, or sliding_window_non_causal in the speculators packaging",
)
def causality(context: Context) -> Iterator[Finding]:
    """No statement beside sliding layers, two that differ, and mixtures that are not read alike."""
    spec, block = context.spec, _block(context)
    if spec.packaging == "embedded":
        raise Skip("the draft lies inside its target, whose code settles what its stages see")
    require_layers(context)
    config = context.draft.checkpoint.config
    both = {key: at(config, key) for key in ("is_causal", "dflash_config.causal")}
    said = [value for value in both.values() if isinstance(value, bool)]
    if spec.packaging != "speculators" and True in said and False in said:
        yield context.warn(
            "is_causal and dflash_config.causal say different things",
            where="config.json: is_causal, dflash_config.causal",
            got=both,
            due="one value",
            fix="leave is_causal, which outranks the other wherever both are read",
        )
    packaged = spec.packaging == "speculators"
    key = "sliding_window_non_causal" if packaged else "is_causal"
    stated = config.get(key) if packaged else block.is_causal
    kinds = {layer.layer_type for layer in spec.layers}
    slides = "sliding_attention" in kinds
    outcomes = context.read_as("is-causal", tuple(bool(layer.is_causal) for layer in spec.layers))
    # Where the architecture itself settles it, no key is due.
    settled = (
        not packaged
        and stated is not None
        and all(value is None for value in both.values())
        and "dflash_query_causal" not in config
    )
    # A value that is neither true nor false is config.types' to report; what it makes of an engine is no reading.
    places = {key: stated} if packaged else {**both, "dflash_query_causal": config.get("dflash_query_causal")}
    said_in = {place: value for place, value in places.items() if value is not None}
    misstated = any(not isinstance(value, bool) for value in said_in.values())
    mixed = slides and len(kinds) > 1
    if slides and stated is None and not misstated:
        yield context.warn(
            f"layers slide and {key} is not stated, so each reader takes its own default",
            where=f"config.json: {key}",
            got=None,
            due="true or false",
            fix=f"state {key} as trained",
            fault="causality-unstated",
            # Only the packaging's own library says what an absent key means.
            outcomes=outcomes if packaged and _unfit(outcomes) else None,
        )
    elif _unfit(outcomes) and not settled and not _drops_window(context) and not misstated:
        yield context.fail(
            "sliding layers are causal beside full ones that look both ways, and not every engine keeps them apart"
            if mixed and packaged
            else "not every engine lets rows of a block see what the file says",
            where=f"config.json: {next(iter(said_in), key)}",
            got=said_in or None,
            due={"causal, by layer": [bool(layer.is_causal) for layer in spec.layers]},
            fix="compare the accepted length with the trainer's before serving"
            if packaged
            else "state is_causal at top level, which every reader asks first",
            outcomes=outcomes,
            severity="error" if mixed and packaged else "warning",
        )
        return
    if mixed:
        yield context.warn(
            "sliding and full layers are mixed, which not every engine serves in every configuration",
            where=f"config.json: {open_view(context.draft.checkpoint).layer.path('layer_types')}",
            got=sorted(kinds),
            due="layers of one type, or an engine that serves both",
            fix="none in the file; choose the engine's runner that keeps both kinds",
            fault="layer-types-mixed",
        )


def _no_variant(context: Context) -> str | None:
    block = _block(context)
    if block.variant != "dflash" or block.output_multiplier <= 0:
        return None
    return "a plain DFlash states nothing beyond its layers"


@check(
    "dflash.variants",
    title="what a relative of DFlash adds is complete: its keys and its tensors",
    why="A lenient reader takes a relative that lacks a key for plain DFlash and drops the tensors that correct it.",
    needs=("config", "headers"),
    families=("dflash", "dflash2", "domino", "dflare"),
    unless=_no_variant,
    faults=(
        "dflash2-keys-missing",
        "dflash2-half-pair",
        "domino-keys",
        "domino-prefix",
        "laguna-draft-vocab",
        "output-multiplier",
        "dflare-unserved",
        "tensor-missing",
    ),
    example={"family": "domino", "dflash_config": {"emb_dim": 16, "gru_hidden_dim": 24, "pure_draft_prefix_len": 2}},
    fix="state every key that the architecture's configuration class has, and export every tensor",
)
def variants(context: Context) -> Iterator[Finding]:
    """Keys that belong together, values that readers refuse, and tensors that make the variant."""
    spec, block, config = context.spec, _block(context), context.draft.checkpoint.config
    if block.output_multiplier <= 0:
        yield context.fail(
            "output_multiplier is not positive, so the best token becomes the worst",
            where="config.json: output_multiplier",
            got=block.output_multiplier,
            due="a positive number",
            fault="output-multiplier",
        )
    if spec.family == "dflash2":
        yield from _dflash2_keys(context)
    elif spec.family == "domino":
        yield from _domino_keys(context)
    elif block.variant == "laguna":
        rows, vocabulary = spec.vocabulary.draft_vocab_size, spec.vocabulary.vocab_size
        if rows is None or (vocabulary is not None and rows != vocabulary):
            yield context.fail(
                "draft_vocab_size is not stated"
                if rows is None
                else f"draft_vocab_size {rows} is not vocab_size {vocabulary}",
                where="config.json: draft_vocab_size",
                got=rows,
                due=vocabulary or "vocab_size",
                fix="state draft_vocab_size; Laguna drafts in the target's whole vocabulary",
                fault="laguna-draft-vocab",
            )
    elif spec.family == "dflare":
        if context.judged:
            yield context.warn(
                "DFlare is served by no engine that is known here",
                where="config.json: architectures",
                got=config.get("architectures"),
                due="an engine with a class for it",
                fault="dflare-unserved",
            )
        else:
            context.notes["dflash.variants"] = "complete; no engine that is known here serves DFlare"
    missing = _missing_variant_tensors(context)
    if missing:
        shown = ", ".join(context.draft.stored_name(tensor.name) for tensor in missing[:4])
        yield context.fail(
            f"{len(missing)} of the tensors that make it {_title(context)} are not in the weights: {shown}"
            + (", …" if len(missing) > 4 else ""),
            where=context.draft.stored_name(missing[0].name),
            got=None,
            due=[context.draft.stored_name(tensor.name) for tensor in missing],
            fix="export them, or label the draft as what the weights are",
            fault="tensor-missing",
        )


def _dflash2_keys(context: Context) -> Iterator[Finding]:
    options = context.spec.options
    pairs = (("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k"))
    missing = [key for pair in pairs for key in pair if getattr(options, key, None) is None]
    if missing:
        half = any(len({key in missing for key in pair}) == 2 for pair in pairs)
        yield context.fail(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not stated; "
            "a lenient reader takes the file for plain DFlash",
            where=f"config.json: dflash_config.{missing[0]}",
            got=None,
            due="positive numbers",
            fix="state all four as trained",
            fault="dflash2-half-pair" if half else "dflash2-keys-missing",
        )


def _domino_keys(context: Context) -> Iterator[Finding]:
    config = context.draft.checkpoint.config
    for key in ("emb_dim", "gru_hidden_dim"):
        nested, top = at(config, f"dflash_config.{key}"), config.get(key)
        if nested is None or (top is not None and top != nested):
            yield context.fail(
                f"{key} is not stated in dflash_config" if nested is None else f"{key} is stated with different values",
                where=f"config.json: dflash_config.{key}",
                got={"dflash_config": nested, "top level": top},
                due="one positive number",
                fix="state in dflash_config what the weights have",
                fault="domino-keys",
            )
    prefix = at(config, "dflash_config.pure_draft_prefix_len")
    if prefix != 1 or isinstance(prefix, bool):
        yield context.warn(
            "pure_draft_prefix_len is not 1; the trainer knows other values, and not every engine does",
            where="config.json: dflash_config.pure_draft_prefix_len",
            got=prefix,
            due=1,
            fix="train with pure_draft_prefix_len 1",
            fault="domino-prefix",
        )


#: By variant, parts of the names of the tensors that DFlash does not have.
_OWN_TENSORS = {
    "dflash2": ("candidate_selector.", "attention_conv.", "mlp_conv."),
    "domino": ("prefix_gru.", "embed_proj."),
    "dflare": ("layer_fusion_weights", "_proj_target."),
    "laguna": ("aux_hidden_norms.", ".g_proj."),
}


def _missing_variant_tensors(context: Context) -> list[ExpectedTensor]:
    binding, own = context.draft.binding, _OWN_TENSORS.get(_block(context).variant, ())
    if binding is None or not context.draft.checkpoint.has_weights:
        return []
    return [tensor for tensor in binding.missing if any(part in tensor.name for part in own)]


def _title(context: Context) -> str:
    family = context.draft.family
    return "Laguna" if _block(context).variant == "laguna" or family is None else family.title


def _layout_statements(context: Context) -> dict[str, bool]:
    """Every place that says whether row 0 drafts."""
    config = context.draft.checkpoint.config
    places = [f"{prefix}{key}" for key in _LAYOUT_KEYS for prefix in ("", "dflash_config.")]
    if context.spec.family == "domino":
        places.append("dflash_config.shift_label")
    return {place: value for place in places if isinstance(value := at(config, place), bool)}


def _meant_layout(context: Context, stated: bool | None) -> bool:
    """Whether row 0 drafts: as stated, as the number of proposed tokens tells, else as the family's trainers have it."""
    if stated is not None:
        return stated
    told = _block(context).sample_from_anchor
    return context.spec.family == "dspark" if told is None else told


def _unfit(outcomes: Mapping[str, Outcome]) -> bool:
    return any(outcome.outcome in engines.UNFIT for outcome in outcomes.values())


def _proposed(context: Context) -> int | None:
    """Tokens that the first proposal method asks of a block."""
    methods = at(context.draft.checkpoint.config, "speculators_config.proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None


def _drops_window(context: Context) -> bool:
    """Whether a layer slides without the window that is stated for it; dflash.layer-types says so."""
    return any(
        layer.layer_type == "sliding_attention" and getattr(layer.attention, "sliding_window", 0) is None
        for layer in context.spec.layers
    )


def _stated_window(view: ConfigView) -> tuple[str, Any]:
    """The key that gives sliding layers their window, and what it states."""
    nested, key = view.root.section("dflash_config"), "swa_window_size"
    if nested.raw("use_swa") is True or (view.layer.raw("sliding_window") is None and nested.raw(key) is not None):
        return nested.path(key), nested.raw(key)
    return view.layer.path("sliding_window"), view.layer.raw("sliding_window")


def _all(context: Context) -> range:
    return range(len(context.spec.layers))


def _window_of(window: int, layer: int, sliding: list[int]) -> int | None:
    return window if layer in sliding else None


def _layers(indices: list[int]) -> str:
    listed = ", ".join(map(str, indices))
    return f"layer {listed} is" if len(indices) == 1 else f"layers {listed} are"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unusable_mask(context: Context, parallel: bool) -> dict[str, Outcome]:
    """What each engine does where what it reads is no id: it stops, or takes it as it is; one that does not look there finds none."""
    missing = "parallel-mask-token-missing" if parallel else "mask-token-missing"
    found = engines.outcomes(missing, context.spec, context.engines)
    for name, reading in context.readings("mask-token-id").items():
        if reading is None and not parallel:
            found[name] = Outcome(outcome="unknown")
        elif reading is not None and reading.refused:
            found[name] = engines.stops(reading.refused, reading.source)
        elif reading is not None and reading.place:
            found[name] = Outcome(outcome="unknown", message=str(reading), source=reading.source)
    return found


def _other_id(context: Context, id: int, where: str) -> Iterator[Finding]:
    """The mask token's text, where the file or an engine names one, under another id in the target's tokenizer."""
    tokenizer = _tokenizer(context)
    if tokenizer is None:
        return
    stated = [at(context.draft.checkpoint.config, place) for place in ("dflash_config.mask_token", "mask_token")]
    texts = [text for text in stated if isinstance(text, str)]
    if not texts:
        readings = context.readings("mask-token").values()
        texts = [reading.value for reading in readings if reading is not None]
    for text in dict.fromkeys(texts):
        if tokenizer.ids.get(text, id) != id:
            yield context.fail(
                f"mask_token_id is {id}, the target's tokenizer has {text} at {tokenizer.ids[text]}",
                where=where,
                got=id,
                due=tokenizer.ids[text],
                fix="state the id that was trained, and no mask_token beside it but that id's own text",
                fault="mask-token-conflict",
            )


def _tokenizer(context: Context) -> Tokenizer | None:
    try:
        return None if context.target is None else context.target.tokenizer
    except CheckpointError:
        return None


def _special_ids(context: Context, key: str) -> list[Any]:
    """What `key` states, in the draft's configuration and in the target's, and the target's tokenizer's id for it."""
    places: list[Mapping[str, Any]] = [context.draft.checkpoint.config]
    if context.target is not None:
        places += [context.target.config, context.target.text]
    found: list[Any] = []
    for place in places:
        value = place.get(key)
        found += value if isinstance(value, list) else [value]
    if (tokenizer := _tokenizer(context)) is not None:
        found.append(tokenizer.role(key.removesuffix("_id")))
    return found


def _block(context: Context) -> BlockSpec:
    block = context.spec.block
    assert block is not None, "a DFlash spec has a block"
    return block
