"""What of Triton's private surface this package reaches into is where it is expected.

Failure mode this file exists to catch: a release of Triton that moves, renames or reshapes one of these functions, so that every kernel
test fails far from the cause. Here the test that fails has the function's name, and says what needs it.
"""

from __future__ import annotations

import importlib
import inspect
import os

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

#: Where it is, what it must take (None: anything), and what would break.
SURFACE = {
    "triton.runtime.interpreter:InterpretedFunction.rewrite": ((), "device functions called by an interpreted kernel"),
    "triton.runtime.interpreter:InterpretedFunction": (("fn",), "every interpreted launch"),
    "triton.runtime.interpreter:InterpreterError": (None, "errors raised inside a kernel"),
    "triton.runtime.interpreter:GridExecutor.__call__": (None, "watching.last_part"),
    "triton.runtime.interpreter:InterpreterBuilder.set_grid_idx": (("x", "y", "z"), "watching.last_part"),
    "triton.runtime.interpreter:InterpreterBuilder.create_masked_load": (("ptrs", "mask", "other"), "the guard"),
    "triton.runtime.interpreter:InterpreterBuilder.create_masked_store": (("ptrs", "value", "mask"), "the guard"),
    "triton.runtime.interpreter:InterpreterBuilder.create_addptr": (("ptr", "offset"), "the guard's origins"),
    "triton.runtime.interpreter:InterpreterBuilder.create_splat": (None, "the guard's origins"),
    "triton.runtime.interpreter:InterpreterBuilder.create_broadcast": (None, "the guard's origins"),
    "triton.runtime.interpreter:InterpreterBuilder.create_expand_dims": (None, "the guard's origins"),
    "triton.runtime.interpreter:InterpreterBuilder.cast_impl": (("src", "dst_type"), "the bfloat16 repair"),
    "triton.runtime.interpreter:InterpreterBuilder.create_fp_to_fp": (("src", "dst_type"), "the bfloat16 repair"),
    "triton.runtime.interpreter:InterpreterBuilder.binary_op": (("lhs", "rhs", "op"), "the bfloat16 repair"),
    "triton.runtime.interpreter:InterpreterBuilder.unary_op": (("arg", "op"), "the bfloat16 repair"),
    "triton.runtime.interpreter:interpreter_builder.options": (None, "int32 overflow"),
    "triton.runtime.interpreter:TensorHandle": (("data", "dtype"), "loads, stores and the quick operators"),
    "triton.runtime.interpreter:_get_np_dtype": (None, "loads"),
    "triton.runtime.interpreter:_patch_lang": (("fn",), "the language made ready for a launch"),
    "triton.runtime.jit:JITFunction.run": (("grid", "warmup"), "engines' launches interpreted"),
    "triton.runtime.jit:JITFunction.__call__": (None, "device functions called by an interpreted kernel"),
    "triton.language.core:tensor.__init__": (("handle", "type"), "the quick operators"),
    "triton.language.core:block_type.__init__": (("element_ty", "shape"), "the quick operators"),
    "triton.language.core:tensor.__add__": (None, "the quick operators"),
}


@pytest.mark.parametrize("place", SURFACE)
def test_is_where_it_is_expected(place):
    due, needed_by = SURFACE[place]
    module, path = place.split(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(found, name), f"triton {triton.__version__} has no {place}; needed by {needed_by}"
        found = getattr(found, name)
    if due is not None:
        takes = inspect.signature(found).parameters
        missing = [name for name in due if name not in takes]
        assert not missing, f"{place} of triton {triton.__version__} takes no {missing}; needed by {needed_by}"


def test_the_overflow_check_is_where_it_is_replaced():
    from triton.language import semantic

    owner = getattr(semantic, "TritonSemantic", semantic)
    assert hasattr(owner, "binary_op_sanitize_overflow_impl"), "needed by the check for int32 overflow"
    assert hasattr(owner, "broadcast_impl_value"), "needed by the quick operators"


def test_a_kernel_still_compiles_after_one_was_interpreted():
    import torch

    from pytest_specdecode.launch import launch
    from pytest_specdecode.quick_ops import namespaces

    def contents(owner):
        # Looking at a class's members gives it an empty `__annotations__`.
        return {name: value for name, value in vars(owner).items() if name != "__annotations__"}

    before = [(owner, contents(owner)) for owner in namespaces()]
    out = torch.zeros(8)
    launch(_row_sums, (1,), out, BLOCK=8)
    assert out.tolist() == [28.0] * 8
    for owner, known in before:
        assert contents(owner) == known, f"{owner} was left patched"


@triton.jit
def _row_sums(out, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.sum(lane, axis=0).to(tl.float32))


def test_this_is_the_release_that_was_asked_for():
    asked = os.environ.get("SPECDECODE_TRITON")
    if asked is None:
        pytest.skip("set by tools/triton_versions.py")
    assert triton.__version__ == asked
