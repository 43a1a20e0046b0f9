"""MLP speculator: a chain of small stages, each fed by the state before it and the token just drafted.

    s = hidden, or hidden normed without a weight and divided by sqrt(2) with `scale_input`     [T, D]
    s = gelu(ln_i(proj_i(s) + (emb_weight / state_weight) * emb_i(token)))                        [T, inner]
    logits = head_i(s)                                                                            [T, V]

    state_weight = 0.5 ** (0.5 / n_predict)           emb_weight = sqrt((1 - state_weight ** 2) * inner / 2)

`ln` divides by the root mean square and has a weight and a bias. With `tie_weights` all stages share one emb, head and ln, and all but the
first one proj. `inner_dim` 0 means `emb_dim`. Names on disk start with `speculator.`; canonical ones do not.

Sources: arXiv 2404.19124; vLLM `mlp_speculator.py` (until 0.32) and `transformers_utils/configs/mlp_speculator.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_specdecode.errors import ConfigError
from pytest_specdecode.families.base import ConfigView, ExpectedTensor, Family, ReferenceLayer, Signal, TensorSource
from pytest_specdecode.families.common import read_dtype, read_vocabulary
from pytest_specdecode.families.config import Section
from pytest_specdecode.families.heads import HeadLayer, head_linear
from pytest_specdecode.spec import DraftSpec, Extent, LayerSpec, TapsSpec

if TYPE_CHECKING:
    import torch

_EPS = 1e-6
_STAGE = re.compile(r"(?:emb|proj|head|ln)\.(\d{1,6})\.")
_TIED = "tied stages share one"


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorOptions:
    """Widths and switches of the stages.

    Attributes:
        inner_dim: width of every state after the first.
        tie_weights, scale_input: as stated.
        n_predict: number of stages; the mixing weights depend on it.
        top_k_tokens_per_head: candidates that a tree takes from each stage, or None.
    """

    inner_dim: Extent
    tie_weights: bool
    scale_input: bool
    n_predict: Extent
    top_k_tokens_per_head: tuple[int, ...] | None = None


class MLPSpeculator(Family):
    """IBM's MLP speculator."""

    name = "mlp-speculator"
    title = "MLP speculator"
    packagings: tuple[str, ...] = ("plain",)
    fused_kv = "an MLP speculator has no attention, so there is no K/V"
    tiny: Mapping[str, Any] = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": 512,
        "emb_dim": 64,
        "inner_dim": 48,
        "n_predict": 3,
        "top_k_tokens_per_head": [4, 3, 2],
        "n_candidates": 5,
        "tie_weights": False,
        "scale_input": True,
        "torch_dtype": "bfloat16",
    }

    def signals(self, view: ConfigView) -> list[Signal]:
        """The label, the type, the first stage's tensors, or the two widths beside `n_predict`."""
        found = [
            Signal(family=self.name, kind="label", where=f"architectures[{position}]", value=architecture)
            for position, architecture in enumerate(view.root.texts("architectures"))
            if "MLPSpeculator" in architecture
        ]
        if view.root.text("model_type") == "mlp_speculator":
            found.append(Signal(family=self.name, kind="label", where="model_type", value="mlp_speculator"))
        first = {f"{part}.0.weight" for part in ("emb", "proj", "head", "ln")}
        if first <= set(view.tensors):
            shape = list(view.tensors["proj.0.weight"].shape)
            found.append(Signal(family=self.name, kind="tensors", where="proj.0.weight", value=shape))
        if all(view.root.raw(key) is not None for key in ("n_predict", "emb_dim", "inner_dim")):
            found.append(Signal(family=self.name, kind="keys", where="n_predict", value=view.root.raw("n_predict")))
        return found

    def parse(self, view: ConfigView) -> DraftSpec:
        """The spec; one layer per stage."""
        stated = view.root.layers("n_predict")
        width = view.root.extent("emb_dim")
        return DraftSpec(
            family=self.name,
            packaging=view.packaging,
            architectures=view.root.texts("architectures"),
            model_type=view.layer.text("model_type"),
            hidden_size=width,
            target_hidden_size=width,
            num_hidden_layers=stated,
            layer_key="n_predict",
            layers=tuple(LayerSpec(index=index, hidden_act="gelu", norm_eps=_EPS) for index in range(stated or 0)),
            vocabulary=read_vocabulary(view),
            taps=TapsSpec(required=False),
            dtype=read_dtype(view),
            options=MLPSpeculatorOptions(
                inner_dim=view.root.extent("inner_dim") or width,
                tie_weights=bool(view.root.flag("tie_weights")),
                scale_input=bool(view.root.flag("scale_input")),
                n_predict=stated,
                top_k_tokens_per_head=view.root.ids("top_k_tokens_per_head"),
            ),
        )

    def tensors(self, spec: DraftSpec) -> tuple[ExpectedTensor, ...]:
        """Embedding, projection, norm and head of each stage."""
        return tuple(_tensors(spec))

    def build_layer(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> ReferenceLayer:
        """One stage."""
        return SpeculatorStage(spec, layer, source)

    def faults(self, spec: DraftSpec) -> tuple[ConfigError, ...]:
        """`top_k_tokens_per_head` must hold one number per stage."""
        options = spec.options
        assert isinstance(options, MLPSpeculatorOptions)
        stated, count = options.top_k_tokens_per_head, options.n_predict
        due = "one positive number per stage" if count is None else f"{count} positive numbers, one per stage"
        if stated is None:
            return (ConfigError("top_k_tokens_per_head is not stated", key="top_k_tokens_per_head", due=due),)
        if (count is not None and len(stated) != count) or any(number < 1 for number in stated):
            message = f"top_k_tokens_per_head is {list(stated)} for {count} stages"
            return (ConfigError(message, key="top_k_tokens_per_head", got=list(stated), due=due),)
        return ()

    def canonical(self, name: str, root: Section | None = None) -> str:
        """Without `speculator.`."""
        return name.removeprefix("speculator.")

    def layer_index(self, name: str) -> int | None:
        """The stage."""
        match = _STAGE.match(name)
        return int(match[1]) if match else None


class SpeculatorStage(HeadLayer):
    """One stage; see the module's formula.

    Attributes:
        ratio: emb_weight / state_weight.
    """

    def __init__(self, spec: DraftSpec, layer: LayerSpec, source: TensorSource) -> None:
        import torch

        from pytest_specdecode.layers import RMSNorm
        from pytest_specdecode.layers.linear import known, take

        options = spec.options
        assert isinstance(options, MLPSpeculatorOptions)
        inner, width = known(options.inner_dim, "inner_dim"), known(spec.hidden_size, "emb_dim")
        vocab, count = known(spec.vocabulary.vocab_size, "vocab_size"), known(options.n_predict, "n_predict")
        own = 0 if options.tie_weights else layer.index
        projection = min(layer.index, 1) if options.tie_weights else layer.index
        columns = width if layer.index == 0 else inner
        self.proj = head_linear(source, f"proj.{projection}", inner, columns)
        self.lm_head = head_linear(source, f"head.{own}", vocab, inner)
        self.emb = head_linear(source, f"emb.{own}", vocab, inner).weight
        held = {f"ln.{own}.{rest}": value for rest, value in source.under(f"ln.{own}").items()}
        self.ln = RMSNorm(take(held, f"ln.{own}.weight", (inner,)), _EPS)
        self.ln_bias = take(held, f"ln.{own}.bias", (inner,))
        self.ln0: RMSNorm | None = None
        if options.scale_input and layer.index == 0:
            self.ln0 = RMSNorm(torch.ones(width, dtype=self.emb.dtype, device=self.emb.device), _EPS)
        state_weight = 0.5 ** (0.5 / count)
        self.ratio = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
        self.widths = {"state": columns}

    def step(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The next state `[..., T, inner]`.

        Args:
            state: `[..., T, D]`; the target's hidden state before stage 0, the last state after it.
            tokens: ids `[..., T]`.
        """
        from torch.nn.functional import gelu

        if self.ln0 is not None:
            state = self.ln0(state) / math.sqrt(2.0)
        mixed = self.proj(state) + self.ratio * self.emb[tokens]
        out: torch.Tensor = gelu(self.ln(mixed) + self.ln_bias)
        return out

    def forward(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[..., T, V]`; see `step` for the arguments (`tokens` may come as `[..., T, 1]`)."""
        ids = tokens.squeeze(-1) if tokens.ndim == state.ndim else tokens
        logits: torch.Tensor = self.lm_head(self.step(state, ids))
        return logits

    def probe(self, tokens: int, seed: int, scale: float = 1.0, batch: int = 1) -> Mapping[str, torch.Tensor]:
        """Random states and ids, the ids `[..., T, 1]`."""
        import torch

        inputs = dict(super().probe(tokens, seed, scale, batch))
        shape = (*inputs["state"].shape[:-1], 1)
        ids = torch.randint(len(self.emb), shape, generator=torch.Generator().manual_seed(seed))
        return {**inputs, "tokens": ids.to(self.emb.device)}


def _tensors(spec: DraftSpec) -> Iterator[ExpectedTensor]:
    options, vocab = spec.options, spec.vocabulary.vocab_size
    assert isinstance(options, MLPSpeculatorOptions)
    inner = options.inner_dim
    for layer in spec.layers:
        index = layer.index
        shapes: dict[str, tuple[Extent, ...]] = {
            f"emb.{index}.weight": (vocab, inner),
            f"proj.{index}.weight": (inner, spec.hidden_size if index == 0 else inner),
            f"ln.{index}.weight": (inner,),
            f"ln.{index}.bias": (inner,),
            f"head.{index}.weight": (vocab, inner),
        }
        for name, shape in shapes.items():
            tied = options.tie_weights and index >= (2 if name.startswith("proj.") else 1)
            yield ExpectedTensor(
                name=name,
                shape=shape,
                need="optional" if tied else "required",
                reason=f"{_TIED} {name.partition('.')[0]}" if tied else "",
                layer=index,
                same_as=f"{name.partition('.')[0]}.{int(name.startswith('proj.'))}.{name.split('.', 2)[2]}"
                if tied
                else None,
            )
