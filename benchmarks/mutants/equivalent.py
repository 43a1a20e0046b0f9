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
    "layers.gqa": {
        ("GQAAttention._kv: return (k, v [if self.value_scale == 1.0 else v  => ]* self.value_scale)"): (
            "a product with 1.0 changes no bit"
        ),
        ("GQAAttention._turned: late = self.spec.head_norm == '[plain => plain_x]'"): (
            "a rotation keeps the root mean square, so a norm without a weight may come before it; the orders differ by rounding"
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
        ("MoE.__init__.expert: key = [None if error.key is None else f => f]'{prefix}.{error.key}'"): (
            "no error of an expert is without a key"
        ),
    },
    "layers.prefix_gru": {
        ("PrefixGRU.forward: tate = inputs.new_zeros(*inputs.shape[:-[2 => 3]], self.hidden)"): (
            "a state of zeros without the last batch axis is broadcast along it"
        ),
    },
    "layers.refiner": {
        ("Refiner.draft:  torch.cat([before, anchor, best[..., 1:[-1 => ]]], dim=-1)[..., :best.shape[-"): (
            "the row too many is cut off behind it"
        ),
    },
    "layers.rope": {
        ("RotaryEmbedding._apply: llable[[Tensor], Tensor], recurse: bool=[True => False]) -> RotaryEmbedding:"): (
            "a rotary embedding has no modules in it to go down to"
        ),
        (
            "RotaryEmbedding._ensure_cos_sin_cache_length: f self.max_length is not None and rows >[ => =] s"
            "elf.max_length:"
        ): ("where they are equal it is set to what it is"),
        (
            "RotaryEmbedding._ensure_cos_sin_cache_length: if self._seq_len is not None and rows >[ => =] se"
            "lf._seq_len:"
        ): ("where they are equal the frequencies are worked out for the same length again"),
        (
            "RotaryEmbedding._ensure_cos_sin_cache_length: if [scale != self._scale or not torch.equal(inv_f"
            "req, self._inv_freq) => True]:"
        ): ("a table made anew from the same frequencies is the same table"),
        (
            "RotaryEmbedding._ensure_cos_sin_cache_length: if [scale != self._scale or not => not] torch.equ"
            "al(inv_freq, self._i"
        ): ("no type's factor on cos and sin depends on the length"),
        ("RotaryEmbedding._ensure_cos_sin_cache_length: if scale [! => =]= self._scale or not torch.equ"): (
            "a table made anew from the same frequencies is the same table"
        ),
        ("RotaryEmbedding._ensure_cos_sin_cache_length: self._table = self._table[:[0 => 1]]"): (
            "the row of position 0 is the same for all frequencies, and the factor does not depend on the length"
        ),
        ("RotaryEmbedding._apply: [super()._apply(fn, recurse) => pass]"): (
            "the module has no parameters and no buffers"
        ),
        ("RotaryEmbedding._apply: super()._apply([fn, recurse => recurse, fn])"): (
            "the module has no parameters and no buffers"
        ),
        ("RotaryEmbedding._apply: _table = self._table.to(fn(self._table[:[0 => ]]).device)"): (
            "only the device is looked at"
        ),
        ("RotaryEmbedding._apply: _table = self._table.to(fn(self._table[:[0 => 1]]).device)"): (
            "only the device is looked at"
        ),
        ("yarn_mscale: ale * math.log(factor) + 1.0 if factor >[ => =] 1.0 else 1.0"): (
            "the logarithm of 1 is 0, so both give 1"
        ),
        ("_dynamic: if dim <= [2 => 3]:"): ("dim is even"),
        ("_yarn: _freq, _float(rope, 'attention_factor', [1.0 => 2.0]))"): (
            "the field is there, so its default is not used"
        ),
        ("_yarn: _freq, _float(rope, 'attention_factor', [1.0 => 0.5]))"): (
            "the field is there, so its default is not used"
        ),
        ("_yarn_frequencies: high += [0.001 => 0.0005]"): (
            "pairs are a whole lane apart, so none lies within either width"
        ),
        ("_llama3: return (torch.where(turns <[ => =] low, plain / factor, torch.wh"): (
            "at the bound the blend is what lies beyond it"
        ),
        ("_llama3: low, plain / factor, torch.where(turns >[ => =] high, plain, blended)), 1.0)"): (
            "at the bound the blend is what lies beyond it"
        ),
        ("_longrope: actor) / math.log(original)) if factor >[ => =] 1.0 else 1.0"): (
            "the logarithm of 1 is 0, so both give 1"
        ),
        ("_longrope: cale = _float(rope, 'attention_factor', [1.0 => 2.0])"): (
            "the field is there, so its default is not used"
        ),
        ("_longrope: cale = _float(rope, 'attention_factor', [1.0 => 0.5])"): (
            "the field is there, so its default is not used"
        ),
        ("_proportional: urn (inv_freq / (_float(rope, 'factor', [0.0 => 1.0]) or 1.0), 1.0)"): ("0 stands for 1"),
        ("_rotary_dim: if dim <= [0 => 1] or dim % 2 or (head_dim is no"): (
            "1 is odd, so the other condition refuses it"
        ),
        ("apply_rotary: first, second = (turning[..., [0 => ]::2], turning[..., 1::2])"): (
            "a slice starts at 0 anyway"
        ),
    },
}
