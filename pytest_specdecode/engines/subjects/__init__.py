"""The engines' own fused-KV paths as their packages publish them, so that they can be held to the same contract as anybody's.

An engine need not be importable for this, nor its dependencies installed: the one file that holds the path is loaded from the installed
package (`pip install --no-deps`), and nothing else of it. Nothing is looked for or imported before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from pytest_specdecode.errors import DraftError

__all__ = ["NAMES", "fused_kv_class"]

#: The names that `fused_kv_class` knows, besides `MODULE:ATTRIBUTE`.
NAMES = ("ours", "sglang", "vllm")


def fused_kv_class(name: str) -> Callable[..., Any]:
    """A stacked K/V path by name, to be called as `FusedKVContract.build` is.

    Called with (layers, rotary_emb, num_kv_heads, head_dim, device), and `max_position_hint` where wanted, it gives an object with
    `materialize(ctx_hidden, positions, write_layer_kv)`.

    Args:
        name: `ours` for FusedKV; `sglang` for FusedKVMaterializeHelper of the sglang that is installed; `vllm` for store_context_kv of
            the vllm that is installed, in that shape (`VLLMContextKV`); or `MODULE:ATTRIBUTE`, the attribute dotted or not.

    Raises:
        MissingDependencyError: the engine's package is not installed, or does not hold the file as it is known; says what to install.
        DraftError: no such name, the module cannot be imported, it has no such attribute, or that is not callable.
    """
    if name == "ours":
        from pytest_specdecode.fused_kv.path import FusedKV

        return FusedKV
    if name == "sglang":
        from pytest_specdecode.engines.subjects import installed

        return installed.sglang_helper()
    if name == "vllm":
        from pytest_specdecode.engines.subjects import vllm_context

        return vllm_context.vllm_path()
    module, colon, attribute = name.partition(":")
    if colon and module and attribute:
        return _imported(name, module, attribute)
    near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"give {', '.join(NAMES)} or MODULE:CLASS"
    raise DraftError(f"no fused-KV path is called {name!r}; {hint}", got=name, due=NAMES)


def _imported(name: str, module: str, attribute: str) -> Callable[..., Any]:
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise DraftError(
            f"module {module} of {name!r} cannot be imported: {type(error).__name__}: {error}; is its directory on sys.path?",
            got=name,
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            # `dir` of a package that loads lazily may be long; a near name is enough.
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DraftError(
                f"{name!r}: {getattr(found, '__name__', module)} has no attribute {part!r}{hint}", got=name
            )
        found = getattr(found, part)
    if not callable(found):
        raise DraftError(
            f"{name!r} is {type(found).__name__}, which cannot be called; a class is due, called with "
            "(layers, rotary_emb, num_kv_heads, head_dim, device)",
            got=name,
        )
    return found  # type: ignore[no-any-return]
