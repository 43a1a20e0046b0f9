"""Mutants that change nothing, by module and name, with the reason why.

A name is what `python benchmarks/mutation.py --list` prints: it holds the code's text and not its line. An entry whose text is gone is
reported, and with `--listed` one that a test notices after all.
"""

from __future__ import annotations

EQUIVALENT: dict[str, dict[str, str]] = {
    "fused_kv.stack": {
        (
            "mismatches: rom _remaining_axes(facts, shared_rope, [num_kv_heads, head_dim => head_dim, num_kv"
            "_heads], rotary_dim)"
        ): ("only the product of the two is used there"),
        (
            "common_facts: ne else norm_kind_of(norm), 'norm_eps': [None if norm is None else norm_eps_of =>"
            " norm_eps_of](norm), 'quantization': quanti"
        ): ("`norm_eps_of(None)` is None, too"),
        ("valid_rotary: return [0 => 1] < rotary_dim <= head_dim and "): (
            "1 is odd, so the other condition refuses it"
        ),
        ("quantization_of: if [qkv is None => False]:"): (
            "None has neither a method nor a weight, which ends in None as well"
        ),
        ("quantization_of: [return None => pass]"): (
            "None has neither a method nor a weight, which ends in None as well"
        ),
        ("dtype_limit: return fact.dtype if fact.dtype [is not None and fact.dtype not => not] in DTYPES else None"): (
            "a dtype of None is returned as None either way"
        ),
        ("first_differing_row: if due is None or got is [None or due is got => None]:"): (
            "a shortcut: a table does not differ from itself"
        ),
        ("first_differing_row: if [first.dtype == second.dtype and torch.equal(first, second) => False]:"): (
            "a shortcut: equal tables are no distance apart"
        ),
        ("first_differing_row: if [first.dtype == second.dtype and torch.equal => torch.equal](first, second):"): (
            "equal values are no distance apart in two dtypes either"
        ),
        ("first_differing_row: if first.dtype [= => !]= second.dtype and torch.equal"): (
            "a shortcut that is not taken"
        ),
        ("first_differing_row: [return None => pass] (3)"): ("a shortcut that is not taken"),
    },
    "layers.attention": {
        (
            "KVCache.joined: if self.k is None [or self.v is None or self.positions is None => and self.v is"
            " None and (self.positions is None)]:"
        ): ("what the three hold is set together, so that all are None or none is"),
        ("KVCache.joined: if [self.k is None or self.v => self.v] is None or self.positions is "): (
            "what the three hold is set together, so that all are None or none is"
        ),
        ("KVCache.joined: if self.k is None or [self.v is None or self.positions => self.positions] is None:"): (
            "what the three hold is set together, so that all are None or none is"
        ),
        ("KVCache.joined: if self.k is None or self.v is [None or self.positions is None => None]:"): (
            "what the three hold is set together, so that all are None or none is"
        ),
        ("LatentCache.joined: if self.rows is None [or => and] self.positions is None:"): (
            "what the two hold is set together, so that both are None or none is"
        ),
        ("LatentCache.joined: if [self.rows is None or self.positions => self.positions] is None:"): (
            "what the two hold is set together, so that both are None or none is"
        ),
        ("LatentCache.joined: if self.rows is [None or self.positions is None => None]:"): (
            "what the two hold is set together, so that both are None or none is"
        ),
    },
    "layers.mla": {
        (
            "MLAAttention._query: if self.q_a_proj is None [or self.q_a_layernorm is None or self.q_b_proj i"
            "s None => and self.q_a_layernorm is None and (self.q_b_proj is None)]:"
        ): ("what the three hold is set together, so that all are None or none is"),
        (
            "MLAAttention._query: if [self.q_a_proj is None or self.q_a_layernorm => self.q_a_layernorm] is "
            "None or self.q_b_proj is N"
        ): ("what the three hold is set together, so that all are None or none is"),
        (
            "MLAAttention._query: if self.q_a_proj is None or [self.q_a_layernorm is None or self.q_b_proj ="
            "> self.q_b_proj] is None:"
        ): ("what the three hold is set together, so that all are None or none is"),
        ("MLAAttention._query: a_proj is None or self.q_a_layernorm is [None or self.q_b_proj is None => None]:"): (
            "what the three hold is set together, so that all are None or none is"
        ),
        ("mla_scaling:  spec.rope.scaling.get('mscale_all_dim')[ or 0.0 => ]"): ("None is as little stated as 0"),
    },
    "layers.mlp": {
        ("GatedMLP.from_tensors: ue for name, value in biases.items() if [value is not None => True]}, limit)"): (
            "a bias of None is no bias to a projection either"
        ),
    },
    "layers.moe": {
        ("MoE.route: if [self.spec.n_group > 1 => True]:"): ("with one group every expert lies in a chosen group"),
        ("MoE.route: if self.spec.n_group >[ => =] 1:"): ("with one group every expert lies in a chosen group"),
        ("MoE.route: if self.spec.n_group > [1 => 0]:"): ("with one group every expert lies in a chosen group"),
        ("MoE.forward: if [len(row) => True]:"): ("an expert to which no row goes adds nothing"),
    },
}
