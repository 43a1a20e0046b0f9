"""The keys that the families' parsers look for.

They say what a fault of the file touches: one at a key that no parser reads costs the draft nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["READ", "is_read"]

#: At the top level, in a nested model's part and in `transformer_layer_config`.
_ROOT = """
architectures model_type speculators_model_type speculators_config speculators_version transformer_layer_config text_config model
dtype torch_dtype quantization quantization_config compression_config expert_dtype auto_map
hidden_size target_hidden_size backbone_hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
global_head_dim num_global_key_value_heads per_layer_config hidden_act hidden_activation rms_norm_eps layer_norm_eps layernorm_epsilon
norm_eps norm_type mlp_bias attention_bias qkv_bias o_bias bias use_bias eagle_fc_bias medusa_fc_bias fusion_bias use_qk_norm attn_norm
vocab_size draft_vocab_size truncated_vocab_size tie_word_embeddings tie_weights has_lm_head original_lm_head
max_position_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor original_max_position_embeddings
rope_is_neox_style is_neox_style rope_interleave use_rope position_embedding_type qk_rope_head_dim
layer_types sliding_window sliding_window_size sliding_window_pattern use_sliding_window sliding_window_non_causal swa_window_size
swa_head_dim swa_v_head_dim swa_num_attention_heads swa_num_key_value_heads swa_rope_theta attention_chunk_size is_causal
attention_value_scale attention_sink_bias add_swa_attention_sink_bias attn_temperature_tuning attn_scale floor_scale logit_scale
no_rope_layers no_rope_layer_interval attention_k_eq_v gating
q_lora_rank kv_lora_rank o_lora_rank o_groups qk_nope_head_dim v_head_dim index_head_dim index_n_heads compress_ratios
n_routed_experts num_experts num_local_experts num_experts_per_tok n_shared_experts moe_intermediate_size
shared_expert_intermediate_size moe_shared_expert_intermediate_size moe_latent_size moe_architecture moe_layers enable_moe
first_k_dense_replace interleave_moe_layer_step n_group topk_group topk_method norm_topk_prob scoring_func routed_scaling_factor
swiglu_limit hc_mult hc_eps hc_sinkhorn_iters
eagle_config dflash_config dspark_config eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids target_layer_ids
num_aux_hidden_states num_aux_layers use_aux_hidden_state num_target_layers target_num_hidden_layers
norm_before_residual norm_before_fc fc_norm use_aux_norm enable_fc_norm norm_output return_hidden_post_norm
parallel_draft_step parallel_draft_heads_num_layers parallel_drafting mask_hidden mask_token_id mask_token block_size projector_type
sample_from_anchor query_zero_predicts_next dflash_query_causal shift_label pure_draft_prefix_len emb_dim gru_hidden_dim
conv_kernel_size conv_group_size selector_rank selector_top_k fc_layernorm output_multiplier final_logit_softcapping
input_embedding_scale markov_rank markov_head_type enable_confidence_head confidence_head_with_markov
dspark_target_layer_ids dspark_block_size dspark_noise_token_id dspark_markov_rank
num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers num_centroids centroid_intermediate_top_k use_ordered_embeddings
medusa_num_heads medusa_num_layers hydra_num_heads hydra_num_layers hydra_head_arch grounded_heads n_predict inner_dim scale_input
top_k_tokens_per_head efficient_lm_head_config enable_qwen35_gated_q_proj dim_model_base scale_depth scale_emb mup_denominator
xpress_rank xpress_mlp_ratio num_jacobi_passes
"""

_EAGLE = """
eagle_aux_hidden_state_layer_ids layer_ids use_aux_hidden_state norm_before_residual norm_before_fc fc_norm use_aux_norm norm_output
return_hidden_post_norm parallel_draft_step parallel_draft_heads_num_layers
"""

_BLOCK = """
target_layer_ids mask_token_id mask_token block_size num_target_layers projector_type causal use_swa swa_window_size
attention_value_scale attention_sink_bias fc_layernorm output_multiplier final_logit_softcapping input_embedding_scale
sample_from_anchor query_zero_predicts_next shift_label pure_draft_prefix_len emb_dim gru_hidden_dim conv_kernel_size conv_group_size
selector_rank selector_top_k markov_rank markov_head_type enable_confidence_head confidence_head_with_markov
"""

#: By section; the empty name is the top level.
READ: Mapping[str, frozenset[str]] = {
    "": frozenset(_ROOT.split()),
    "eagle_config": frozenset(_EAGLE.split()),
    "dflash_config": frozenset(_BLOCK.split()),
    "dspark_config": frozenset(_BLOCK.split()),
}

#: Sections whose keys are read by the same names as those of the top level.
_NESTED = ("text_config", "model", "transformer_layer_config")


def is_read(place: str) -> bool:
    """Whether a parser may read the value at the dotted key `place`, or something inside it."""
    parts = place.split(".")
    while parts and parts[0] in _NESTED:
        parts = parts[1:]
    # The whole section is read where it is itself the place.
    if len(parts) > 1 and parts[0] in READ:
        return parts[1] in READ[parts[0]]
    return not parts or parts[0] in READ[""]
