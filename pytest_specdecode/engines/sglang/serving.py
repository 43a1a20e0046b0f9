"""SGLang's rules about the options it is started with.

Read from `srt/arg_groups/speculative_hook.py` (algorithm, steps, top-k, draft tokens, window, draft backend), `srt/arg_groups/overrides.py`
(attention backends and KV-cache types), `srt/configs/model_config.py` (context length) and the workers, with the project's own texts.
Names are compared as SGLang does: algorithms without regard to case, `NEXTN` as `EAGLE`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_specdecode.engines.base import Refusal, ServingRule, falls_back, serves_wrong, stops
from pytest_specdecode.engines.options import ServeOptions
from pytest_specdecode.engines.ranks import heads_divide
from pytest_specdecode.engines.sglang.fused_path import why_not_fused
from pytest_specdecode.families import Draft
from pytest_specdecode.findings import Outcome
from pytest_specdecode.spec import GQASpec, RopeSpec
from pytest_specdecode.target import Target

_HOOK = "srt/arg_groups/speculative_hook.py"
_MODELS = "srt/models/llama.py, dflash.py"
_OVERRIDES = "srt/arg_groups/overrides.py"

#: Families that each algorithm serves.
_SERVED: Mapping[str, tuple[str, ...]] = {
    "EAGLE": ("eagle1", "mtp", "gemma4-assistant"),
    "NEXTN": ("eagle1", "mtp", "gemma4-assistant"),
    "FROZEN_KV_MTP": ("gemma4-assistant",),
    "EAGLE3": ("eagle3", "eagle3-mla", "eagle4", "peagle"),
    "DFLASH": ("dflash", "dflash2", "domino"),
    "DSPARK": ("dspark",),
    "STANDALONE": (),
    "NGRAM": (),
}
_EAGLE_LIKE = ("EAGLE", "NEXTN", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE")
_CONCATENATES = ("eagle3", "eagle3-mla", "eagle4", "peagle")

_DFLASH_BACKENDS = ("flashinfer", "fa3", "fa4", "triton", "trtllm_mha", "ascend")
_TREE_BACKENDS = ("flashinfer", "fa3", "triton")

#: KV-cache types that an MLA attention backend takes, with what SGLang says to others.
_MLA_BACKENDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "trtllm_mla": (
        ("fp8_e4m3", "fp4_e2m1", "bf16", "auto"),
        "TensorRT-LLM MLA backend only supports kv-cache-dtype of fp8_e4m3, fp4_e2m1, bf16, or auto.",
    ),
    "tokenspeed_mla": (("fp8_e4m3",), "tokenspeed_mla backend requires kv-cache-dtype=fp8_e4m3, got {got}."),
    "cutedsl_mla": (
        ("fp8_e4m3", "bf16", "bfloat16", "auto"),
        "CuteDSL MLA backend only supports kv-cache-dtype of fp8_e4m3, bf16, or auto.",
    ),
}

_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


def _algorithm(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The algorithm against the draft's family."""
    algorithm, family = _name(serve), _family(draft)
    if algorithm is None or family is None:
        return
    due = [name for name, families in _SERVED.items() if family in families]
    if algorithm not in _SERVED:
        message = f"{algorithm} is no algorithm that is known"
        if near := difflib.get_close_matches(algorithm, _SERVED, n=1, cutoff=0.75):
            # Misspelled, and not one that is newer than what was read.
            yield _about_algorithm(
                f"{message}; {near[0]} is", stops("an invalid choice to its argument parser"), serve, due
            )
            return
        outcome = Outcome(outcome="unknown", message="no algorithm of this name was seen in its code")
        yield _about_algorithm(message, outcome, serve, due, doubtful=True)
    elif family not in _SERVED[algorithm]:
        yield _about_algorithm(
            f"{algorithm} is not the algorithm of {family} drafts", _mismatch(algorithm, family), serve, due
        )


def _mismatch(algorithm: str, family: str) -> Outcome:
    if algorithm in ("EAGLE", "NEXTN") and family in _CONCATENATES:
        return serves_wrong(
            "accepted length 1.00 without a warning: the target's last state is as wide as the embedding, so fc is skipped",
            "PR 21272",
        )
    if algorithm == "EAGLE3" and family == "gemma4-assistant":
        return stops(
            "Gemma4AssistantForCausalLM draft requires --speculative-algorithm NEXTN or EAGLE; "
            "EAGLE3 is not supported for this draft architecture.",
            _HOOK,
        )
    return Outcome(outcome="unknown")


def _parallelism(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """What a block-drafting algorithm is not combined with."""
    algorithm = _name(serve)
    if algorithm == "DFLASH" and serve["dp-attention"]:
        yield Refusal(
            topic="algorithm",
            message="the algorithm does not run with data-parallel attention",
            outcome=stops("Currently DFLASH speculative decoding does not support dp attention.", _HOOK),
            option="dp-attention",
            got=True,
            due=False,
        )
    if algorithm in ("DFLASH", "DSPARK") and serve["pp"] not in (None, 1):
        title = "DSpark" if algorithm == "DSPARK" else algorithm
        yield Refusal(
            topic="algorithm",
            message="the algorithm does not run with pipeline parallelism",
            outcome=stops(f"Currently {title} speculative decoding only supports pp_size == 1.", _HOOK),
            option="pp",
            got=serve["pp"],
            due=1,
        )


def _others(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """What else only some algorithms are combined with."""
    algorithm = _name(serve)
    if serve["skip-dp-mlp-sync"] and algorithm not in ("EAGLE", "NEXTN"):
        yield Refusal(
            topic="algorithm",
            message="skip-dp-mlp-sync belongs to another algorithm",
            outcome=stops(
                f"--speculative-skip-dp-mlp-sync is only supported with speculative_algorithm == EAGLE, got {algorithm}.",
                _HOOK,
            ),
            option="skip-dp-mlp-sync",
            got=True,
            due="not given",
        )
    ranks = serve["tp"] or 1
    if algorithm == "DFLASH" and ranks > 1 and target is not None and target.has_dense_head is False:
        yield Refusal(
            topic="algorithm",
            message="the target's head is stored quantised, and the algorithm does not split one over ranks",
            outcome=stops(
                f"DFLASH with a quantized target lm_head is only supported at tp=1, got tp_size={ranks}.",
                "srt/speculative/dflash_worker_v2.py",
            ),
            option="tp",
            got=ranks,
            due=1,
        )


def _draft_backend(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The attention backend of a DFlash draft: its own, else the target's."""
    option = "draft-attention-backend" if serve["draft-attention-backend"] is not None else "attention-backend"
    backend = serve[option]
    if _name(serve) != "DFLASH" or backend is None or draft.spec is None:
        return
    if backend not in _DFLASH_BACKENDS:
        says = (
            f"DFLASH draft worker only supports attention_backend in {_DFLASH_BACKENDS} for now, but got {backend!r}. "
            "Falling back to 'flashinfer'."
        )
    elif backend == "trtllm_mha" and not _takes_trtllm(draft):
        says = (
            "DFLASH only enables 'trtllm_mha' when all layers use sliding attention or the draft is explicitly causal. "
            "Falling back to 'flashinfer'."
        )
    else:
        return
    yield Refusal(
        topic="algorithm",
        message=f"the draft does not run on the attention backend {backend}",
        outcome=falls_back(says, _HOOK),
        option=option,
        got=backend,
        due=[name for name in _DFLASH_BACKENDS if name != backend],
        fix="give draft-attention-backend one that the draft runs on",
    )


def _takes_trtllm(draft: Draft) -> bool:
    assert draft.spec is not None
    layers = draft.spec.layers
    sliding = bool(layers) and all(layer.layer_type == "sliding_attention" for layer in layers)
    return sliding or draft.checkpoint.config.get("is_causal") is True


def _tree(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """Steps, top-k and draft tokens of the EAGLE algorithms."""
    if _name(serve) not in _EAGLE_LIKE:
        return
    steps, topk, tokens = serve["num-steps"], serve["eagle-topk"], serve["num-draft-tokens"]
    given = [name for name in ("eagle-topk", "num-draft-tokens") if serve[name] is not None]
    if steps is None and given:
        yield _about_tokens(
            "num-steps is not given, and without it neither eagle-topk nor num-draft-tokens may be",
            stops("an AssertionError without a text", _HOOK),
            "num-steps",
            None,
            f"a number beside {' and '.join(given)}",
        )
    if steps is None or topk is None or steps < 1 or topk < 1:
        return
    if topk == 1 and tokens not in (None, steps + 1):
        yield _about_tokens(
            "a chain of num-steps drafts has num-steps + 1 draft tokens",
            falls_back(
                "speculative_num_draft_tokens is adjusted to speculative_num_steps + 1 when speculative_eagle_topk == 1",
                _HOOK,
            ),
            "num-draft-tokens",
            tokens,
            steps + 1,
        )
    largest = topk + topk * topk * (steps - 1) + 1
    if topk > 1 and tokens is not None and tokens > largest:
        yield _about_tokens(
            "num-draft-tokens asks for more than the tree of num-steps and eagle-topk holds",
            stops("selected index k out of range", "srt/speculative/eagle_utils.py"),
            "num-draft-tokens",
            tokens,
            f"at most {largest}",
        )
    if topk > 1 and "trtllm_mha" in (serve["attention-backend"], serve["draft-attention-backend"]):
        yield _about_tokens(
            "the attention backend does not take a tree of drafts",
            stops("trtllm_mha backend only supports topk = 1 for speculative decoding.", _HOOK),
            "eagle-topk",
            topk,
            1,
        )
    backend, page = serve["attention-backend"], serve["page-size"]
    if topk > 1 and page is not None and page > 1 and backend is not None and backend not in _TREE_BACKENDS:
        yield _about_tokens(
            "the attention backend takes a tree of drafts with pages of one token only",
            stops(
                f"speculative_eagle_topk > 1 with page_size > 1 is only supported on {_TREE_BACKENDS}; "
                f"got attention_backend={backend!r}. Use page_size == 1 or one of those backends.",
                _HOOK,
            ),
            "page-size",
            page,
            1,
        )


def _positive(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """Numbers that cannot be below one."""
    says = {
        "draft-window-size": "--speculative-draft-window-size must be positive, got {got}.",
        "dflash-block-size": "DFLASH requires --speculative-dflash-block-size to be positive, got {got}.",
        "dspark-block-size": "DSpark requires --speculative-dspark-block-size to be positive, got {got}.",
    }
    needed = {"dflash-block-size": "DFLASH", "dspark-block-size": "DSPARK"}
    for option in ("num-steps", "eagle-topk", "num-draft-tokens", *says):
        got = serve[option]
        if got is None or got >= 1 or needed.get(option, _name(serve)) != _name(serve):
            continue
        outcome = stops(says[option].format(got=got), _HOOK) if option in says else Outcome(outcome="unknown")
        yield _about_tokens(f"{option} is less than one", outcome, option, got, "at least 1")


def _block(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """DFlash: one pass over a block, whose rows the anchor is one of."""
    if _name(serve) != "DFLASH":
        return
    yield from _one_pass(serve, "DFLASH")
    asked, forced = serve["num-draft-tokens"], serve["dflash-block-size"]
    if asked is not None and forced is not None and forced > 0 and asked != forced:
        yield _about_tokens(
            "num-draft-tokens and dflash-block-size differ",
            stops(
                "Both --speculative-num-draft-tokens and --speculative-dflash-block-size are set but they differ. "
                f"For DFLASH they must match. speculative_num_draft_tokens={asked}, speculative_dflash_block_size={forced}.",
                _HOOK,
            ),
            "num-draft-tokens",
            asked,
            forced,
        )
    trained = _trained_block(draft)
    rows = forced if forced is not None else asked
    if rows is not None and trained is not None and rows > trained:
        yield Refusal(
            topic="block-size",
            message=f"{rows} rows of a block are asked for, {trained} were trained",
            outcome=serves_wrong(
                f"DFLASH block size mismatch: using speculative_num_draft_tokens={rows} but draft config block_size={trained}. It goes on, "
                "and rows past the trained ones spoil those before them: accepted length 1.31 instead of 2.74 elsewhere",
                "srt/speculative/dflash_worker_v2.py; vllm PR 41834",
            ),
            option="num-draft-tokens" if forced is None else "dflash-block-size",
            got=rows,
            due=f"at most {trained}, the anchor counted",
            fix=f"start with num-draft-tokens={trained}",
        )
    if rows == 1:
        yield _about_tokens(
            "a block of one row holds the anchor and no draft",
            Outcome(outcome="unknown", message="asks for a positive number only"),
            "num-draft-tokens" if forced is None else "dflash-block-size",
            rows,
            "at least 2, the anchor counted",
        )
    window, block = serve["draft-window-size"], rows if rows is not None else trained
    if window is not None and window > 0 and block is not None and window < block:
        yield _about_tokens(
            "the draft's window is smaller than a block",
            stops(
                "--speculative-draft-window-size must be >= --speculative-num-draft-tokens (block_size). "
                f"window_size={window}, block_size={block}.",
                _HOOK,
            ),
            "draft-window-size",
            window,
            f"at least {block}",
        )


def _dspark(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """DSpark: gamma drafts, and the token that they follow."""
    if _name(serve) != "DSPARK":
        return
    yield from _one_pass(serve, "DSpark")
    asked, forced = serve["num-draft-tokens"], serve["dspark-block-size"]
    gamma = forced if forced is not None else _trained_block(draft)
    if asked is not None and gamma is not None and gamma > 0 and asked != gamma + 1:
        yield _about_tokens(
            "num-draft-tokens is not the block's drafts and one",
            stops(
                f"DSpark speculative_num_draft_tokens must equal gamma + 1 (= {gamma + 1} for gamma={gamma}), "
                f"but got speculative_num_draft_tokens={asked}.",
                _HOOK,
            ),
            "num-draft-tokens",
            asked,
            gamma + 1,
        )
    elif asked == 1:
        yield _about_tokens(
            "one draft token leaves no draft",
            stops("DSpark speculative_num_draft_tokens must be >= 2 (= gamma + 1), got 1.", _HOOK),
            "num-draft-tokens",
            asked,
            "at least 2",
        )


def _one_pass(serve: ServeOptions, title: str) -> Iterator[Refusal]:
    for option in ("num-steps", "eagle-topk"):
        got = serve[option]
        if got is not None and got > 1:
            field = f"speculative_{option.replace('-', '_')}"
            yield _about_tokens(
                f"{option} means nothing to a draft that drafts a block in one pass",
                falls_back(f"{title} only supports {field} == 1; overriding {field}={got} to 1.", _HOOK),
                option,
                got,
                1,
            )


def _window(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """A draft window that nobody reads."""
    window, algorithm = serve["draft-window-size"], _name(serve)
    if window is None or window < 1 or algorithm is None or algorithm in ("EAGLE3", "DFLASH"):
        return
    named = "EAGLE" if algorithm == "NEXTN" else algorithm
    yield _about_tokens(
        "draft-window-size has no effect with this algorithm",
        falls_back(
            f"--speculative-draft-window-size has no effect with speculative_algorithm={named} "
            "(honored by Llama EAGLE-3 and DFLASH only).",
            _HOOK,
        ),
        "draft-window-size",
        window,
        "not given",
    )


def _kv_cache(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The KV-cache type against the attention backend."""
    dtype = serve["kv-cache-dtype"]
    for option in ("attention-backend", "decode-attention-backend"):
        takes, says = _MLA_BACKENDS.get(serve[option] or "", ((), ""))
        # Nothing given is `auto`, which one of the backends does not take either.
        stated = "auto" if dtype is None else dtype
        if says and stated not in takes:
            yield Refusal(
                topic="kv-cache-dtype",
                message=f"the attention backend {serve[option]} does not take the KV-cache type {stated}",
                outcome=stops(says.format(got=stated), _OVERRIDES),
                option="kv-cache-dtype",
                got=stated,
                due=list(takes),
                fix=f"start with kv-cache-dtype={takes[0]}, or another attention backend",
            )
            return
    if serve["attention-backend"] == "fa3" and dtype == "fp8_e5m2":
        yield Refusal(
            topic="kv-cache-dtype",
            message="the attention backend fa3 does not take the KV-cache type fp8_e5m2",
            outcome=falls_back(
                "FlashAttention3 only supports fp8_e4m3 if using FP8; Setting attention backend to triton.", _OVERRIDES
            ),
            option="kv-cache-dtype",
            got=dtype,
            due=["fp8_e4m3", "bf16", "auto"],
            fix="start with kv-cache-dtype=fp8_e4m3",
        )


def _kv_page(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The page size that a backend replaces."""
    backend, page = serve["attention-backend"], serve["page-size"]
    sizes, title = {"trtllm_mla": ((32, 64), "MLA"), "trtllm_mha": ((16, 32, 64), "MHA")}.get(backend or "", ((), ""))
    if page is None or not sizes or page in sizes:
        return
    listed = f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
    yield Refusal(
        topic="kv-cache-dtype",
        message=f"the attention backend {backend} does not take pages of {page} tokens",
        outcome=falls_back(
            f"TensorRT-LLM {title} only supports page_size of {listed}, changing page_size from {page} to 64.",
            _OVERRIDES,
        ),
        option="page-size",
        got=page,
        due=list(sizes),
        fix="start with page-size=64",
    )


def _kv_layout(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """One KV-cache type for a target that keeps latents and a draft that keeps heads."""
    dtype = serve["kv-cache-dtype"]
    if target is None or not target.is_mla or draft.spec is None or not str(dtype).startswith("fp8"):
        return
    if any(isinstance(layer.attention, GQASpec) for layer in draft.spec.layers):
        yield Refusal(
            topic="kv-cache-dtype",
            message=f"the target keeps latent rows and the draft keeps heads, and both are given the KV-cache type {dtype}",
            outcome=falls_back("the draft's whole pool is converted to the compute type at every step", "PR 23461"),
            option="kv-cache-dtype",
            got=dtype,
            due=["auto", "bf16"],
            fix="measure with kv-cache-dtype=auto as well",
        )


def _context(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """The served length against the draft's."""
    served = serve["context-length"]
    if served is None and target is not None:
        served = _length((target.text, target.config), target.rope)
    derived = _draft_length(draft)
    if served is None or derived is None or served <= derived:
        return
    yield Refusal(
        topic="context-length",
        message=f"{served} positions are served, the draft has {derived}",
        outcome=stops(
            f"Warning: Target model's context_length ({served}) is greater than the derived context_length ({derived}). "
            "This may lead to incorrect model outputs or CUDA errors. Note that the derived context_length may differ from "
            "max_position_embeddings in the model's config. To allow overriding this maximum, set the env var "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
            "srt/configs/model_config.py",
        ),
        option="context-length",
        got=served,
        due=f"at most {derived}",
        fix="state the max_position_embeddings that the draft was trained for, or serve a shorter context",
    )


def _table(draft: Draft, target: Target | None, serve: ServeOptions) -> Iterator[Refusal]:
    """A scaled table that the fused path makes longer: it asks for the served length and a block more, before anything is served."""
    spec, served = draft.spec, serve["context-length"]
    if served is None and target is not None:
        served = _length((target.text, target.config), target.rope)
    if spec is None or spec.block is None or served is None or why_not_fused(draft) is not None:
        return
    block = serve["dflash-block-size"] or serve["dspark-block-size"] or spec.block.block_size or 16
    for layer in spec.layers:
        rope = None if layer.attention is None else layer.attention.rope
        rows = None if rope is None else _table_rows(rope)
        if rope is None or rows is None or served + block < rows:
            continue
        yield Refusal(
            topic="table-growth",
            message=f"a {rope.rope_type} table of {rows} rows is made {served + block} rows long",
            outcome=serves_wrong(
                f"computes the new rows without the {rope.rope_type} scaling: wrong keys from position {rows} on",
                "srt/layers/rotary_embedding, kernels/ops/speculative/fused_kv_materialize.py, by reading",
            ),
            option="context-length",
            got=served,
            due=f"at most {rows - block - 1}",
            fix=f"serve a context of at most {rows - block - 1}, or state a longer scaled table as trained",
            doubtful=True,
        )
        return


def _table_rows(rope: RopeSpec) -> int | None:
    """Rows that the class of a scaled type makes at first, for the types whose new rows are not scaled; None for others."""
    factor = rope.scaling.get("factor")
    start = rope.max_position_embeddings
    if rope.rope_type in ("yarn", "deepseek_yarn"):
        start = rope.scaling.get("original_max_position_embeddings", start)
    elif rope.rope_type != "linear":
        return None
    if any(isinstance(item, bool) or not isinstance(item, (int, float)) for item in (factor, start)):
        return None
    assert factor is not None
    assert start is not None
    return int(start * factor) if 1 <= factor < 1e6 and 0 < start < 1e9 else None


def _draft_length(draft: Draft) -> int | None:
    """Positions of the draft as SGLang derives them, or None where it has none of its own or that is not known."""
    spec = draft.spec
    ropes = [layer.attention.rope for layer in spec.layers if layer.attention is not None] if spec is not None else []
    if spec is None or not ropes or spec.packaging == "embedded" or spec.family == "mtp":
        return None
    config = draft.checkpoint.config
    nested = [config.get(key) for key in ("text_config", "transformer_layer_config")]
    places = [*(place for place in nested if isinstance(place, dict)), config]
    return _length(places, {"rope_type": ropes[0].rope_type, **ropes[0].scaling})


def _length(places: Sequence[Mapping[str, Any]], rope: Mapping[str, Any]) -> int | None:
    """The stated length, multiplied where a scaling states a factor and not the length that it starts from."""
    stated = (place.get(key) for place in places for key in _CONTEXT_KEYS)
    length = next((item for item in stated if isinstance(item, int) and not isinstance(item, bool)), None)
    factor = rope.get("factor", 1)
    grows = "original_max_position_embeddings" not in rope and rope.get("rope_type") != "llama3"
    if length is None or not grows or isinstance(factor, bool) or not isinstance(factor, (int, float)):
        return length
    return int(factor * length) if 0 < factor < 1e6 else length


def _name(serve: ServeOptions) -> str | None:
    algorithm = serve["algorithm"]
    return None if algorithm is None else str(algorithm).upper()


def _family(draft: Draft) -> str | None:
    return None if draft.spec is None else draft.spec.family


def _trained_block(draft: Draft) -> int | None:
    block = None if draft.spec is None else draft.spec.block
    return None if block is None else block.block_size


def _about_algorithm(
    message: str, outcome: Outcome, serve: ServeOptions, due: list[str], doubtful: bool = False
) -> Refusal:
    names = " or ".join(due)
    return Refusal(
        topic="algorithm",
        message=message,
        outcome=outcome,
        option="algorithm",
        got=serve["algorithm"],
        due=names or "no algorithm of this engine is known to serve this draft",
        fix=f"start with algorithm={due[0]}" if due else "",
        doubtful=doubtful,
    )


def _about_tokens(message: str, outcome: Outcome, option: str, got: Any, due: Any) -> Refusal:
    return Refusal(topic="draft-tokens", message=message, outcome=outcome, option=option, got=got, due=due)


SERVING: tuple[ServingRule, ...] = (
    _algorithm,
    _parallelism,
    _others,
    heads_divide(
        frozenset(itertools.chain.from_iterable(_SERVED.values())),
        stops(
            "asserts that the heads divide among the ranks, and KV heads too or the ranks among them: AssertionError",
            _MODELS,
        ),
    ),
    _draft_backend,
    _tree,
    _positive,
    _block,
    _dspark,
    _window,
    _kv_cache,
    _kv_page,
    _kv_layout,
    _context,
    _table,
)
