"""The three tensors of a target that a draft may share or a replay may need: embedding, head and final norm.

They are found by the names that model classes give them, and nothing else of the target is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.errors import DraftError
from pytest_specdecode.layers import RMSNorm
from pytest_specdecode.target import Target

_PREFIX = r"(?:(?:model|language_model|transformer|backbone|llm|text_model)\.)*"
_EMBEDDING = re.compile(_PREFIX + r"(?:embed_tokens|word_embeddings|wte|tok_embeddings|embed|embeddings)\.weight")
_HEAD = re.compile(_PREFIX + r"(?:lm_head|output|head|embed_out)\.weight")
_NORM = re.compile(_PREFIX + r"(?:norm|final_layernorm|ln_f|norm_f)\.weight")
#: Models whose norms multiply by 1 + w.
_ZERO_CENTRED = re.compile(r"gemma(?!4)|qwen3_next|qwen3_5|step3")


class TargetMissingError(DraftError):
    """Something of the target is needed, and no target was given or it does not hold it."""


class TargetWeights:
    """What is read of a target's weights, each tensor when it is first asked for.

    Attributes:
        path: its directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._target = Target.open(path)
        self._checkpoint = Checkpoint.open(path)

    @cached_property
    def embedding(self) -> Tensor:
        """[V, Ht] as stored."""
        return self._tensor(_EMBEDDING, "embedding")

    @cached_property
    def head(self) -> Tensor:
        """[V, Ht] as stored; the embedding where there is no head of its own."""
        return self._tensor(_HEAD, "head") if self._name(_HEAD) else self.embedding

    def final_norm(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, width: int | None = None
    ) -> Callable[[Tensor], Tensor]:
        """The norm between the last layer and the head.

        Args:
            dtype, device: of the arithmetic.
            width: lanes of the states that it is for; not looked at where None.

        Raises:
            DraftError: it has another number of lanes. TargetMissingError: it is not among the weights, or is no norm.
        """
        weight = self._tensor(_NORM, "final norm")
        if weight.ndim != 1:
            raise TargetMissingError(f"has shape {list(weight.shape)}; one weight per lane is due", path=self.path)
        if width is not None and len(weight) != width:
            raise DraftError(
                f"the target's final norm has {len(weight)} lanes; the draft reads states {width} wide",
                path=self.path,
                got=len(weight),
                due=width,
            )
        eps = self._target.text.get("rms_norm_eps", self._target.config.get("rms_norm_eps", 1e-6))
        model_type = str(self._target.text.get("model_type") or self._target.config.get("model_type") or "")
        zero_centred = _ZERO_CENTRED.match(model_type) is not None
        return RMSNorm(weight.to(device=device, dtype=dtype), float(eps), "gemma" if zero_centred else "rms")

    def _name(self, pattern: re.Pattern[str]) -> str | None:
        names = [name for name in self._checkpoint.tensors if pattern.fullmatch(name)]
        return min(names, key=len, default=None)

    def _tensor(self, pattern: re.Pattern[str], what: str) -> Tensor:
        name = self._name(pattern)
        if name is None:
            raise TargetMissingError(f"the target's {what} is not among its weights", path=self.path)
        found = self._checkpoint.tensor(name)
        if found.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            kind = str(found.dtype).removeprefix("torch.")
            raise TargetMissingError(f"is {kind}; the target's {what} is read unquantised", path=self.path, key=name)
        return found
