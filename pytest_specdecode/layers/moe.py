"""A mixture of experts as multi-token-prediction layers have it in the place of an MLP, written for reading.

Routing is the part that goes wrong in silence: the bias that chooses but does not weigh, the groups, the order of dividing by the sum and
scaling. So it is a method of its own, and experts are gone through one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.layers.linear import Linear, frozen, known, take
from pytest_specdecode.layers.mlp import GatedMLP, PlainMLP
from pytest_specdecode.spec import MoESpec

#: Scores from router logits `[..., E]`, by the names that configurations use; the last is DeepSeek-V4's.
_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sqrtsoftplus": lambda logits: nn.functional.softplus(logits).sqrt(),
}


class MoE(nn.Module):
    """`sum_k w_k * expert_k(x) + shared(x)`, the k experts chosen per token (DeepSeek-V3, arXiv 2412.19437; Qwen3-Next).

    With `spec.weigh_inputs` the sum is of `expert_k(w_k * x)` (Llama 4), which is another function: experts are not linear. With
    `spec.latent` it is `fc2(sum_k w_k * expert_k(fc1(x))) + shared(x)` (Nemotron-H).

    Args:
        spec: shapes and options; every extent must be known.
        tensors: by local name: `gate.weight` `[E, H]`; `gate.e_score_correction_bias` `[E]` with `spec.correction_bias`; per expert e
            `experts.{e}.{gate,up,down}_proj.weight`, or all joined as `experts.gate_up_proj` `[E, 2 * I, H]` (gate first) and
            `experts.down_proj` `[E, H, I]`; `shared_experts.*` or `shared_expert.*`; `shared_expert_gate.weight` `[1, H]`;
            with `spec.latent` `fc1_latent_proj.weight` `[L, H]` and `fc2_latent_proj.weight` `[H, L]`, and L in the place of H in
            the routed experts. Without `spec.gated` there is no `gate_proj` anywhere.
        hidden_size: H.
        hidden_act: of every expert.

    Raises:
        LayerBuildError: an extent is unknown, groups do not divide the experts, or a tensor is missing or of another shape.
    """

    def __init__(
        self, spec: MoESpec, tensors: Mapping[str, Tensor], *, hidden_size: int, hidden_act: str = "silu"
    ) -> None:
        super().__init__()
        self.spec = spec
        self.num_experts = known(spec.num_experts, "num_experts")
        self.top_k = known(spec.top_k, "num_experts_per_tok")
        if self.num_experts % spec.n_group or not 0 < spec.topk_group <= spec.n_group:
            raise LayerBuildError(
                f"{self.num_experts} experts in {spec.n_group} groups, {spec.topk_group} of them chosen, is no routing",
                key="n_group",
                got=(spec.n_group, spec.topk_group),
                due=f"a divisor of {self.num_experts}, and 1 to n_group of them",
            )
        if self.top_k > self.num_experts // spec.n_group * spec.topk_group:
            raise LayerBuildError(
                f"is {self.top_k}, more than the chosen groups hold", key="num_experts_per_tok", got=self.top_k
            )
        inner = known(spec.intermediate_size, "moe_intermediate_size")
        self.gate = Linear(take(tensors, "gate.weight", (self.num_experts, hidden_size)), name="gate.weight")
        self.e_score_correction_bias: nn.Parameter | None = None
        if spec.correction_bias:
            bias = take(tensors, "gate.e_score_correction_bias", (self.num_experts,))
            self.e_score_correction_bias = frozen(bias)
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        features = hidden_size
        if spec.latent:
            features = known(spec.latent_size, "moe_latent_size")
            before, behind = "fc1_latent_proj.weight", "fc2_latent_proj.weight"
            self.fc1_latent_proj = Linear(take(tensors, before, (features, hidden_size)), name=before)
            self.fc2_latent_proj = Linear(take(tensors, behind, (hidden_size, features)), name=behind)
        parts = _separate(tensors, self.num_experts, inner, features) if spec.fused_experts else tensors

        def expert(prefix: str, features: int, width: int) -> GatedMLP | PlainMLP:
            local = _under(parts, prefix)
            try:
                if not spec.gated:
                    return PlainMLP(local, in_features=features, intermediate_size=width, hidden_act=hidden_act)
                return GatedMLP.from_tensors(
                    local,
                    in_features=features,
                    intermediate_size=width,
                    hidden_act=hidden_act,
                    limit=spec.swiglu_limit,
                )
            except LayerBuildError as error:
                key = None if error.key is None else f"{prefix}.{error.key}"
                raise LayerBuildError(error.message, key=key, got=error.got, due=error.due) from error

        self.experts = nn.ModuleList(expert(f"experts.{index}", features, inner) for index in range(self.num_experts))
        self.shared_experts: GatedMLP | PlainMLP | None = None
        self.shared_expert_gate: Linear | None = None
        if spec.shared_intermediate_size:
            name = "shared_expert" if spec.shared_gate else "shared_experts"
            self.shared_experts = expert(name, hidden_size, spec.shared_intermediate_size)
            if spec.shared_gate:
                weight = take(tensors, "shared_expert_gate.weight", (1, hidden_size))
                self.shared_expert_gate = Linear(weight, name="shared_expert_gate.weight")

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights `[..., k]`, in float32 or wider, and ids `[..., k]` of the experts that each row of `x` goes to."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = nn.functional.linear(x.to(wide), self.gate.weight.to(wide))
        scores = _SCORES[self.spec.scoring](logits)
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = scores + self.e_score_correction_bias.to(wide)
        if self.spec.n_group > 1:
            choice = choice.masked_fill(~self._in_best_groups(choice), -torch.inf)
        chosen = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.spec.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.spec.routed_scaling_factor, chosen

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H]` to the same shape in the weights' dtype."""
        rows = x.flatten(0, -2)
        weights, chosen = self.route(rows)
        seen = rows if self.fc1_latent_proj is None else self.fc1_latent_proj(rows)
        out = torch.zeros_like(seen)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            if len(row):
                given, weight = seen[row], weights[row, place, None]
                if self.spec.weigh_inputs:
                    given, weight = (given * weight).to(given.dtype), torch.ones_like(weight)
                out.index_add_(0, row, (expert(given) * weight).to(out.dtype))
        if self.fc2_latent_proj is not None:
            out = self.fc2_latent_proj(out)
        if self.shared_experts is not None:
            shared = self.shared_experts(rows)
            out = out + (
                shared if self.shared_expert_gate is None else self.shared_expert_gate(rows).sigmoid() * shared
            )
        return out.view_as(x)

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """Which experts lie in the `topk_group` groups whose best experts score highest: the best two with a bias, else the best."""
        grouped = choice.reshape(*choice.shape[:-1], self.spec.n_group, -1)
        best = min(2 if self.spec.correction_bias else 1, grouped.shape[-1])
        chosen = grouped.topk(best, dim=-1).values.sum(dim=-1).topk(self.spec.topk_group, dim=-1).indices
        groups = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=choice.device).scatter_(-1, chosen, True)
        return groups.unsqueeze(-1).expand_as(grouped).flatten(-2)


def _separate(tensors: Mapping[str, Tensor], experts: int, inner: int, hidden_size: int) -> dict[str, Tensor]:
    """Joined experts as one set of names per expert."""
    gate_up = take(tensors, "experts.gate_up_proj", (experts, 2 * inner, hidden_size))
    down = take(tensors, "experts.down_proj", (experts, hidden_size, inner))
    parts = dict(tensors)
    for index in range(experts):
        parts[f"experts.{index}.gate_up_proj.weight"] = gate_up[index]
        parts[f"experts.{index}.down_proj.weight"] = down[index]
    return parts


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
