"""Do draft and target speak of the same tokens?

`d2t` holds offsets: draft id i stands for target id i + d2t[i]. `t2d` marks the target ids that the draft can say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from pytest_specdecode.checks.keys import ids_below
from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check
from pytest_specdecode.errors import CheckpointError
from pytest_specdecode.findings import Finding

_MAP_FIX = "save d2t with the draft: for each draft id, its target id minus the draft id"


@check(
    "vocabulary.sizes",
    title="the draft's vocabulary is no larger than the target's, the embedding has one row per target id",
    why="Ids beyond a table read other memory, or stop the server in the first batch.",
    needs=("config", "headers"),
    faults=(
        "tensor-missing",
        "embedding-missing",
        "tensor-shape",
    ),
    example={"draft_vocab_size": 600},
    fix="state vocab_size as the rows of the embedding, and draft_vocab_size as those of the head",
)
def sizes(context: Context) -> Iterator[Finding]:
    """Vd against V, and rows of the embedding."""
    vocabulary = context.spec.vocabulary
    if vocabulary.vocab_size is None:
        raise Inconclusive("vocab_size is not stated")
    if vocabulary.draft_vocab_size is not None and vocabulary.draft_vocab_size > vocabulary.vocab_size:
        yield context.fail(
            "the draft's vocabulary is larger than the target's",
            where=f"config.json: {vocabulary.draft_vocab_key}",
            got=vocabulary.draft_vocab_size,
            due=f"at most {vocabulary.vocab_size}",
        )
    yield from _owned(context, "embed_tokens.weight", "one row per target id, H columns")


@check(
    "vocabulary.tied-embeddings",
    title="tie_word_embeddings is not true beside a reduced vocabulary",
    why="A tied head has the target's rows, so the draft's own ids are read from the wrong ones.",
    needs=("config",),
    faults=("tied-reduced",),
    example={"tie_word_embeddings": True},
    fix="set tie_word_embeddings to false",
)
def tied_embeddings(context: Context) -> Iterator[Finding]:
    """A tied head with fewer rows, and a tied head that is stored all the same."""
    vocabulary = context.spec.vocabulary
    if not vocabulary.tie_word_embeddings:
        return
    if vocabulary.is_reduced:
        yield context.fail(
            f"the head is tied to an embedding of {vocabulary.vocab_size} rows, the draft predicts "
            f"{vocabulary.draft_vocab_size} ids",
            where="config.json: tie_word_embeddings",
            got=True,
            due=False,
            fix="set tie_word_embeddings to false; the file's lm_head is the head",
            fault="tied-reduced",
        )
    elif context.draft.header("lm_head.weight") is not None:
        yield context.warn(
            "the head is declared tied and is stored as well; readers differ on which counts",
            where="config.json: tie_word_embeddings",
            got=True,
            due=False,
        )


@check(
    "vocabulary.lm-head",
    title="lm_head has one row per draft id and is stored where the draft declares its vocabulary",
    why="Where it is declared and absent, an engine drafts with uninitialised memory: accepted length 1.00, no error.",
    needs=("config", "headers"),
    faults=(
        "lm-head-missing",
        "tensor-missing",
        "tensor-shape",
    ),
    cost="accepted length 1.00 with an uninitialised head (sglang issue 27829)",
    example="a draft that declares draft_vocab_size and is stored without lm_head.weight",
    fix="export lm_head with the draft",
)
def lm_head(context: Context) -> Iterator[Finding]:
    """The head's presence and rows."""
    yield from _owned(context, "lm_head.weight", "one row per draft id, H columns", fix="export lm_head with the draft")


@check(
    "vocabulary.d2t",
    title="d2t is there for a reduced vocabulary and maps draft ids to target ids by offset",
    why="Without the map, or with ids in place of offsets, the draft proposes other words than it means.",
    needs=("headers",),
    faults=(
        "d2t-missing",
        "d2t-absolute",
        "d2t-out-of-range",
        "d2t-zero",
        "tensor-shape",
    ),
    cost="accepted length 1.12 with the map lost, 2.99 with it (vllm PR 18909)",
    example="a d2t that holds the target ids themselves instead of their distance from the draft's",
    fix="save d2t with the draft: for each draft id, its target id minus the draft id",
)
def d2t(context: Context) -> Iterator[Finding]:
    """Presence, type, length, then values."""
    vocabulary = context.spec.vocabulary
    if None in (vocabulary.vocab_size, vocabulary.head_rows):
        raise Inconclusive("vocab_size is not stated")
    assert vocabulary.vocab_size is not None
    if context.draft.binding is not None and "token_map" in context.draft.binding.expected:
        yield from _token_map(context, vocabulary.vocab_size)
        return
    wrong = list(_owned(context, "d2t", "one entry per draft id", fix=_MAP_FIX))
    yield from wrong
    header = context.draft.header("d2t")
    if header is None:
        if not wrong:
            raise Skip("the draft speaks the target's vocabulary; no map is due")
        return
    where = f"{header.file}: {header.name}"
    if not header.dtype.startswith("int"):
        yield context.fail("d2t is not of an integer type", where=where, got=header.dtype, due="int64", fix=_MAP_FIX)
        return
    if not wrong:
        offsets = context.draft.checkpoint.integers(header.name)
        yield from _d2t_values(context, offsets, vocabulary.vocab_size, where, _marked(context))


@check(
    "vocabulary.t2d",
    title="t2d is a bool per target id, set exactly at the images of d2t",
    why="Training code masks the loss with it; where it and d2t differ, one of them is another draft's.",
    needs=("headers",),
    faults=(
        "t2d-wrong",
        "tensor-shape",
        "tensor-missing",
    ),
    example="a t2d that marks other ids than those that d2t maps to",
    fix="save both maps from the same draft",
)
def t2d(context: Context) -> Iterator[Finding]:
    """Type, length, then the set bits against d2t's images."""
    draft = context.draft
    header = draft.header("t2d")
    if header is None:
        raise Skip("the file holds no t2d")
    yield from (wrong := list(_owned(context, "t2d", "one entry per target id")))
    where = f"{header.file}: {header.name}"
    if header.dtype not in ("bool", "uint8", "int8"):
        yield context.fail("t2d is not of a boolean type", where=where, got=header.dtype, due="bool", fault="t2d-wrong")
        return
    map_header = draft.header("d2t")
    if wrong or map_header is None or not map_header.dtype.startswith("int") or len(map_header.shape) != 1:
        return
    marked = _marked(context) or set()
    images = {index + offset for index, offset in enumerate(draft.checkpoint.integers(map_header.name))}
    if marked != images:
        yield context.fail(
            f"t2d marks {len(marked)} ids, d2t maps to {len(images)}; "
            f"{len(marked - images)} are marked and not mapped, {len(images - marked)} mapped and not marked",
            where=where,
            got=sorted(marked ^ images)[:8],
            due="the images of d2t",
            fix="save both maps from the same draft",
            fault="t2d-wrong",
        )


@check(
    "vocabulary.common-tokens",
    title="the map holds the target's end of text and its commonest tokens",
    why="A draft that cannot say a token never proposes it; without the end of text it drafts past every answer.",
    severity="warning",
    needs=("headers", "target"),
    example="a d2t whose images leave out the eos_token_id of the target's generation_config.json",
    fix="choose the draft's ids by their count in the target's own answers, with the end of text and special tokens among them",
)
def common_tokens(context: Context) -> Iterator[Finding]:
    """The ids that the draft can say against those that nearly every text holds."""
    said = _said(context)
    target = context.target
    assert target is not None, "the check needs a target"
    try:
        ends, tokenizer = target.eos_ids, target.tokenizer
    except CheckpointError as error:
        raise Inconclusive(f"the target's tokenizer cannot be read: {error}") from None
    common = {} if tokenizer is None else tokenizer.common
    findings = []
    if ends and not said & set(ends):
        findings.append(
            context.warn(
                "the draft cannot say the end of text",
                where=context.draft.stored_name(_map_name(context)),
                got=f"none of {', '.join(map(str, ends))}",
                due="at least one of the target's eos ids",
            )
        )
    absent = {meaning: id for meaning, id in common.items() if id not in said}
    if absent:
        findings.append(
            context.warn(
                f"the draft cannot say {', '.join(map(repr, absent))}",
                where=context.draft.stored_name(_map_name(context)),
                got=absent,
                due="ids that nearly every text holds",
            )
        )
    yield from findings
    if not findings and not common:
        raise Inconclusive("the target's tokenizer.json is not beside its config.json", "target")


def _map_name(context: Context) -> str:
    return "token_map" if context.draft.header("token_map") is not None else "d2t"


def _said(context: Context) -> set[int]:
    """The target ids that the draft can say."""
    name = _map_name(context)
    header = context.draft.header(name)
    if header is None:
        if context.spec.vocabulary.is_reduced:
            raise Inconclusive("there is no map to read; see vocabulary.d2t")
        raise Skip("the draft speaks the target's whole vocabulary")
    if not header.dtype.startswith("int") or len(header.shape) != 1:
        raise Inconclusive("the map cannot be read; see vocabulary.d2t")
    stored = context.draft.checkpoint.integers(header.name)
    return set(stored) if name == "token_map" else {index + offset for index, offset in enumerate(stored)}


def _token_map(context: Context, vocab_size: int) -> Iterator[Finding]:
    """Medusa's map of target ids, not offsets: presence, type, length, then values."""
    wrong = list(_owned(context, "token_map", "one target id per draft id", fix="save token_map with the draft"))
    yield from wrong
    header = context.draft.header("token_map")
    if header is None:
        if not wrong:
            raise Skip("the draft speaks the target's vocabulary; no map is due")
        return
    where = f"{header.file}: {header.name}"
    if not header.dtype.startswith("int"):
        yield context.fail("token_map is not of an integer type", where=where, got=header.dtype, due="int64")
        return
    if wrong:
        return
    ids = context.draft.checkpoint.integers(header.name)
    outside = [index for index, id in enumerate(ids) if not 0 <= id < vocab_size]
    if outside:
        yield context.fail(
            f"{len(outside)} draft ids map outside the target's vocabulary of {vocab_size}",
            where=f"{where}[{outside[0]}]",
            got=ids[outside[0]],
            due=ids_below(vocab_size),
            fault="d2t-out-of-range",
        )
    elif len(set(ids)) < len(ids):
        yield context.fail(
            "token_map names a target id twice", where=where, got=len(set(ids)), due=f"{len(ids)} different ids"
        )


def _marked(context: Context) -> set[int] | None:
    """The target ids that t2d marks, or None where there is no t2d to read."""
    header = context.draft.header("t2d")
    if header is None or header.dtype not in ("bool", "uint8", "int8") or len(header.shape) != 1:
        return None
    return {index for index, bit in enumerate(context.draft.checkpoint.integers(header.name)) if bit}


def _d2t_values(
    context: Context, offsets: Sequence[int], vocab_size: int, where: str, marked: set[int] | None
) -> Iterator[Finding]:
    images = [index + offset for index, offset in enumerate(offsets)]
    reduced = context.spec.vocabulary.is_reduced
    if not any(offsets):
        if reduced:
            yield context.fail(
                "d2t is all zero: the draft's ids would be the first ids of the target",
                where=where,
                got="zeros",
                due="offsets of the chosen ids",
                fix=_MAP_FIX,
                fault="d2t-zero",
            )
        else:
            yield context.warn(
                "d2t is all zero over a full vocabulary: right, and slower than no map", where=where, fix="leave it out"
            )
        return
    outside = [index for index, image in enumerate(images) if not 0 <= image < vocab_size]
    falls = next((index for index in range(1, len(images)) if images[index] <= images[index - 1]), None)
    rises = all(later > earlier for earlier, later in itertools.pairwise(offsets))
    # Ids rise at every step; offsets of so many would only where no two chosen ids are neighbours, and then t2d marks their images.
    proven = marked is not None and marked == set(images)
    like_ids = rises and offsets[0] >= 0 and offsets[-1] < vocab_size and not proven
    if like_ids and (outside or len(offsets) >= 32):
        yield context.fail(
            "d2t looks like target ids where offsets are due: it rises at every step",
            where=where,
            got=list(offsets[:8]),
            due=[offset - index for index, offset in enumerate(offsets[:8])],
            fix="store d2t - arange(len(d2t))",
            fault="d2t-absolute",
        )
    elif outside:
        yield context.fail(
            f"{len(outside)} draft ids map outside the target's vocabulary of {vocab_size}",
            where=f"{where}[{outside[0]}]",
            got=images[outside[0]],
            due=ids_below(vocab_size),
            fix=_MAP_FIX,
            fault="d2t-out-of-range",
        )
    elif falls is not None:
        yield context.fail(
            "the map is not strictly increasing",
            where=f"{where}[{falls}]",
            got=images[falls - 1 : falls + 1],
            due="each target id above the one before",
            fix="sort the chosen ids before taking offsets; lm_head's rows go with them",
        )


def _owned(context: Context, name: str, meaning: str, fix: str = "") -> Iterator[Finding]:
    """Absence and shape of one tensor that a check of its own answers for."""
    draft = context.draft
    expected = None if draft.binding is None else draft.binding.expected.get(name)
    if expected is None:
        return
    header = draft.header(name)
    if header is None:
        if expected.need == "required" and draft.checkpoint.has_weights:
            stored = draft.stored_name(name)
            yield context.fail(
                f"{stored} is not in the weights",
                where=stored,
                got="absent",
                due=list(expected.shape),
                fix=fix or f"export {stored} with the draft",
                fault=expected.fault,
            )
        return
    # Where a family's own sheet states the packed shape, that is what the header is held against.
    shape = header.shape if expected.kind == "int" else draft.shape(name)
    fits = shape is None or (
        len(shape) == len(expected.shape)
        and all(None in (got, due) or due == got for got, due in zip(shape, expected.shape, strict=True))
    )
    if not fits:
        yield context.fail(
            f"{header.name} has another shape than the configuration says: {meaning}",
            where=f"{header.file}: {header.name}",
            got=list(header.shape if shape is None else shape),
            due=list(expected.shape),
            fix="state the sizes that the tensors have, or export the tensor anew",
            fault="tensor-shape",
        )
