"""The test file that --draft-write-test writes: short, for people to keep and edit, and red when another checkpoint lies in its place.

What is pinned is what the draft's spec says at the time; a value that the file does not state is not pinned.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import pytest_specdecode
from pytest_specdecode.errors import DraftError
from pytest_specdecode.families import Draft
from pytest_specdecode.plugin import options
from pytest_specdecode.spec import DraftSpec, GQASpec, LayerSpec, MLASpec

#: Columns of a line, as the written file's formatter is expected to have them.
WIDTH = 120

#: Of a weight that is read for its digest, the most elements.
_MOST_ELEMENTS = 1 << 20


def write_for(config: pytest.Config) -> str:
    """Write the file that the options name for the draft that they name, and say what to do with it.

    Raises:
        pytest.UsageError: not one draft, the file is there already, or it cannot be written.
    """
    given, file = options.the_draft(config), options.test_file(config)
    try:
        write_new(file, text_for(given.draft, given.path, file.name))
    except FileExistsError:
        raise pytest.UsageError(f"{options.WRITE_TEST}={file}: is there already, and is not overwritten") from None
    except OSError as error:
        raise pytest.UsageError(f"{options.WRITE_TEST}={file}: cannot be written: {error.strerror or error}") from None
    shown = os.path.relpath(file, config.invocation_params.dir)
    return f"wrote {shown}; run it with\n  pytest {options.MODEL}={given.path} {shown}"


def write_new(file: Path, text: str) -> None:
    """Write `text` to `file`, whole or not at all, and never over another file.

    Raises:
        FileExistsError: there is such a file.
        OSError: it cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        try:
            os.link(temporary, file)
        except (NotImplementedError, PermissionError):
            # A file system without hard links: the name is taken first, then filled.
            os.close(os.open(file, os.O_CREAT | os.O_EXCL))
            os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)


def text_for(draft: Draft, path: str, file_name: str = "test_draft.py") -> str:
    """The test file `file_name` for `draft`, which the user calls `path`."""
    assert draft.spec is not None
    tests = [_pins(draft.spec), _layers(draft.spec)]
    modules: set[str] = set()
    if (weight := _told_by(draft)) is not None:
        tests.append(_weights(*weight))
        modules |= {"hashlib", "torch"}
    builds, stacks = _builds(draft), _stacks(draft)
    if builds:
        tests.append(_finite())
        modules.add("hypothesis")
    if stacks:
        tests.append(_stack(draft))
        modules |= {"hypothesis", "torch", "numerics"}
    blocks = [_head(draft, path, file_name), _imports(modules), *tests, _further(stacks)]
    return "\n\n\n".join(["\n\n".join(blocks[:2]), *(block for block in blocks[2:] if block)]) + "\n"


# --- what the draft gives ---


def _builds(draft: Draft) -> bool:
    """Whether every layer builds and runs, so that tests of layers pass on this checkpoint."""
    import torch

    if not draft.checkpoint.complete or draft.spec is None or not draft.spec.layers:
        return False
    try:
        with torch.no_grad():
            return all(bool(layer.prefill(layer.probe(2, seed=0)).isfinite().all()) for layer in draft.layers())
    except DraftError:
        return False


def _stacks(draft: Draft) -> bool:
    if draft.fused_kv_reason is not None or not draft.checkpoint.complete:
        return False
    try:
        draft.fused_kv()
    except DraftError:
        return False
    return True


def _told_by(draft: Draft) -> tuple[str, str] | None:
    """A small weight that training moves, and the beginning of its digest; None where no weights lie there.

    The last norm where there is one, else the longest vector, else the smallest tensor.
    """
    if draft.binding is None or not draft.checkpoint.complete:
        return None
    found = {name: header for name in draft.binding.stored if (header := draft.header(name)) is not None}
    usable = {name: header for name, header in found.items() if header.shape and 0 < _count(header) <= _MOST_ELEMENTS}
    floats = {name: header for name, header in usable.items() if header.is_float} or usable
    if not floats:
        return None
    vectors = {name: header for name, header in floats.items() if len(header.shape) == 1}
    if "norm.weight" in vectors:
        name = "norm.weight"
    elif vectors:
        name = max(vectors, key=lambda each: (_count(vectors[each]), each))
    else:
        name = min(floats, key=lambda each: (_count(floats[each]), each))
    import torch

    try:
        stored = draft.tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
    except (DraftError, RuntimeError):
        return None
    return name, hashlib.sha256(stored).hexdigest()[:16]


def _count(header: Any) -> int:
    count = 1
    for extent in header.shape:
        count *= extent
    return count


# --- the file, part by part ---


def _head(draft: Draft, path: str, file_name: str) -> str:
    assert draft.spec is not None
    shown, name, file = _shown(path, "DIR"), _shown(draft.name, "of this directory"), _shown(file_name, "FILE")
    return f'''"""Tests of the {draft.spec.family} draft {name}, to be kept beside it and edited.

Written from the checkpoint as it was, by pytest-specdecode {pytest_specdecode.__version__}. They run, and the built-in suite with them, by

    pytest --draft-model={shown} {file}
"""'''


def _shown(name: str, otherwise: str) -> str:
    """The name, where it is short and means nothing in a docstring."""
    return name if re.fullmatch(r"[\w./+=@-]{1,48}", name) else otherwise


def _imports(modules: set[str]) -> str:
    third = {
        "torch": ["import torch"],
        "hypothesis": ["from hypothesis import given, settings", "from hypothesis import strategies as st"],
        "numerics": [
            "from pytest_specdecode.fused_kv import eager_kv",
            "from pytest_specdecode.numerics import assert_close",
        ],
    }
    groups = [
        ["from __future__ import annotations"],
        ["import hashlib"] if "hashlib" in modules else [],
        [line for name in ("torch", "hypothesis", "numerics") if name in modules for line in third[name]],
    ]
    return "\n\n".join("\n".join(group) for group in groups if group)


def _pins(spec: DraftSpec) -> str:
    values: list[tuple[str, Any]] = [
        ("family", spec.family),
        ("packaging", spec.packaging),
        ("hidden_size", spec.hidden_size),
        ("target_hidden_size", spec.target_hidden_size),
        ("dtype", spec.dtype),
        ("vocabulary.vocab_size", spec.vocabulary.vocab_size),
        ("vocabulary.head_rows", spec.vocabulary.head_rows),
        ("taps.ids", spec.taps.ids),
        ("taps.convention", spec.taps.convention),
    ]
    if spec.block is not None:
        values += [
            ("block.block_size", spec.block.block_size),
            ("block.mask_token_id", spec.block.mask_token_id),
            ("block.is_causal", spec.block.is_causal),
        ]
    return "\n".join(
        [
            "def test_the_draft_is_the_one_we_trained(draft_spec):",
            '    """Red where another draft, or another export of this one, lies in the directory. Edit it with the model."""',
            *(line for name, value in values for line in _pinned(f"draft_spec.{name}", value)),
        ]
    )


def _layers(spec: DraftSpec) -> str:
    lines = [
        "def test_its_layers_are_the_ones_we_trained(draft_spec):",
        '    """Shapes and RoPE, which an engine takes from the same file."""',
        f"    assert len(draft_spec.layers) == {len(spec.layers)}",
    ]
    groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        groups.setdefault(tuple(_of_layer(layer)), []).append(index)
    for values, indices in groups.items():
        pinned = [line for name, value in values for line in _pinned(name, value)]
        # A loop's line must fit, however the layers alternate.
        for part in [indices] if _is_slice(indices) else _parts(indices):
            if pinned:
                lines += [f"    for layer in {_chosen(part, len(spec.layers))}:", *(f"    {line}" for line in pinned)]
    return "\n".join(lines)


def _chosen(indices: Sequence[int], count: int) -> str:
    """The layers of those numbers, as an expression."""
    if list(indices) == list(range(count)):
        return "draft_spec.layers"
    if not _is_slice(indices):
        return f"(draft_spec.layers[index] for index in {_literal(tuple(indices))})"
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    return f"draft_spec.layers[{indices[0]}:{indices[-1] + 1}{'' if step == 1 else f':{step}'}]"


def _is_slice(indices: Sequence[int]) -> bool:
    return len({after - before for before, after in itertools.pairwise(indices)}) <= 1


def _parts(indices: Sequence[int], most: int = 10) -> list[Sequence[int]]:
    return [indices[at : at + most] for at in range(0, len(indices), most)]


def _of_layer(layer: LayerSpec) -> Iterator[tuple[str, Any]]:
    attention = layer.attention
    if attention is None:
        return
    yield "layer.layer_type", layer.layer_type
    yield "layer.norm_eps", layer.norm_eps
    if isinstance(attention, GQASpec):
        for name in ("num_heads", "num_kv_heads", "head_dim", "sliding_window"):
            yield f"layer.attention.{name}", getattr(attention, name)
    elif isinstance(attention, MLASpec):
        for name in ("num_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"):
            yield f"layer.attention.{name}", getattr(attention, name)
    if getattr(attention, "rotates", True):
        yield "layer.attention.rope.theta", attention.rope.theta
        yield "layer.attention.rope.rope_type", attention.rope.rope_type


def _weights(name: str, digest: str) -> str:
    return f'''def test_its_weights_are_the_ones_we_released(draft):
    """One small weight stands for all of them, since training moves every one."""
    weight = draft.tensor({json.dumps(name)}).contiguous().view(torch.uint8)
    assert hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:16] == "{digest}"'''


def _finite() -> str:
    return '''@given(tokens=st.integers(1, 8), seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=5)
def test_its_layers_draft_something(draft_layers, tokens, seed):
    """The layers in eager torch, on inputs that Hypothesis draws."""
    for layer in draft_layers:
        assert layer.prefill(layer.probe(tokens, seed=seed)).isfinite().all()'''


def _stack(draft: Draft) -> str:
    assert draft.spec is not None
    stated = [
        layer.attention.rope.max_position_embeddings or 2048
        for layer in draft.spec.layers
        if isinstance(layer.attention, GQASpec)
    ]
    last = max(0, min(*stated, 8192) - 1)
    return f'''@given(positions=st.lists(st.integers(0, {last}), min_size=1, max_size=6), seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=5)
def test_its_context_kv_is_right(fused_kv, fused_kv_reference, draft_layers, positions, seed):
    """K and V of all layers at any positions, against float64; of your own path with --draft-fused-kv=MODULE:CLASS."""
    context = torch.randn(len(positions), fused_kv.hidden_size, generator=torch.Generator().manual_seed(seed))
    context = context.to(fused_kv.device, fused_kv.dtype)
    at = torch.tensor(positions, device=fused_kv.device)
    found = fused_kv.compute(context, at)
    truth, eager = fused_kv_reference(context, at), eager_kv(draft_layers, context, at)
    for name, got, due, baseline in zip("KV", found, truth, eager, strict=True):
        assert_close(got, due, baseline, what=name, reduction_sizes=(fused_kv.hidden_size, fused_kv.head_dim))'''


def _further(stacks: bool) -> str:
    contract = """
#
# Your engine's own stacked K/V path, held to all that one must do (docs/contracts.md):
#
#     from pytest_specdecode.contracts import FusedKVContract
#
#     class TestOurPath(FusedKVContract):
#         build = staticmethod(OurFusedKV)"""
    return f"""# How to go on. pytest --fixtures describes what tests may ask for, --draft-list-checks what is checked without any.
#
# What the draft is accepted at, once states of its target are recorded; the second run fails where it fell:
#
#     pytest --draft-model=DIR --draft-trace=TRACE --draft-baseline=accepted.json --draft-update-baseline
#     pytest --draft-model=DIR --draft-trace=TRACE --draft-baseline=accepted.json
#
# What your server does with it, in the engine's own words:
#
#     pytest --draft-model=DIR --draft-target=TARGET --draft-engine=sglang --draft-serve="algorithm=... tp=2"{contract if stacks else ""}"""


def _pinned(name: str, value: Any) -> Iterator[str]:
    """The assert that `name` is `value`; nothing where it is not known, or not of a kind that a file states plainly."""
    if value is None or (isinstance(value, str) and not re.fullmatch(r"[\w. /+:-]{1,60}", value)):
        return
    if isinstance(value, float) and not math.isfinite(value):
        return
    if isinstance(value, bool):
        yield f"    assert {name} is {value}"
        return
    line = f"    assert {name} == {_literal(value)}"
    # Pins of layers are one step further in.
    if len(line) + 4 <= WIDTH or not isinstance(value, tuple):
        yield line
        return
    yield f"    assert {name} == ("
    yield from (f"        {_literal(item)}," for item in value)
    yield "    )"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
