"""The keys that drafts' configurations have, so that a misspelled one can be told from one that nobody here has heard of.

`READ` are those that a family's parser looks for, beside the places of the engine models; `UNREAD` are those that public files hold and
that mean nothing to a draft. A test holds `READ` against the parsers.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytest_specdecode.engines import ENGINES

__all__ = ["MISTAKEN", "READ", "UNREAD", "keys_of"]

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

#: What transformers, trainers and targets write beside that, and no reader of drafts looks at.
_OTHERS = """
transformers_version use_cache initializer_range attention_dropout hidden_dropout bos_token_id eos_token_id pad_token_id sep_token_id
eod_token_id pad_id pretraining_tp max_window_layers max_length min_length max_sequence_length chunk_size_feed_forward
output_attentions output_hidden_states output_scores output_router_logits return_dict return_dict_in_generate torchscript
pruned_heads id2label label2id problem_type is_decoder is_encoder_decoder cross_attention_hidden_size add_cross_attention
tie_encoder_decoder tf_legacy_loss use_bfloat16 finetuning_task tokenizer_class prefix task_specific_params architectures_version
do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id
forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
base_model_name_or_path name_or_path attn_implementation attention_backend attention_head_dim attention_mode qk_head_dim num_heads
router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux ep_size moe_layer_freq decoder_sparse_step mlp_only_layers topk
top_k_experts norm_topk class_num embd_pdrop resid_pdrop fc_input_size next_layer_regular use_last_layernorm
use_input_layernorm_in_first_layer use_mtp_layernorm confidence_head_alpha confidence_temperatures loss_decay_gamma num_anchors
mask_init_id hidden_state_offset target_model_type target_text_model_type target_model_name_or_path is_deepseek_mla
index_topk indexer_rope_interleave num_hash_layers num_kv_shared_layers linear_num_key_heads linear_num_value_heads
full_attention_interval attn_output_gate output_gate_type max_paths max_tree_size n_candidates dense_list
image_token_id video_token_id vision_token_id vision_start_token_id vision_end_token_id image_start_token_id image_end_token_id
vision_config audio_config use_mrope
"""
UNREAD: frozenset[str] = frozenset(_OTHERS.split())

#: Keys that public files hold in the belief that they are read, with the key that is.
MISTAKEN: Mapping[str, str] = {
    "target_vocab_size": "vocab_size",
    "speculator_config": "speculators_config",
    "use_aux_hidden_states": "eagle_config.use_aux_hidden_state",
    "eagle_config.use_aux_hidden_states": "eagle_config.use_aux_hidden_state",
    "eagle_config.aux_hidden_state_layer_ids": "eagle_config.eagle_aux_hidden_state_layer_ids",
    "eagle_config.target_layer_ids": "eagle_config.eagle_aux_hidden_state_layer_ids",
    "dflash_config.aux_hidden_state_layer_ids": "dflash_config.target_layer_ids",
    "top_k_tokesns_per_head": "top_k_tokens_per_head",
}


def keys_of(section: str) -> frozenset[str]:
    """The keys that some reader looks for in `section`."""
    prefix = f"{section}." if section else ""
    places = {
        place.removeprefix(prefix)
        for engine in ENGINES.values()
        for place in (
            *(place for rule in engine.reads for place in rule.places),
            *(item.key for item in engine.ignores),
        )
        if place.startswith(prefix)
    }
    return READ.get(section, frozenset()) | {place for place in places if "." not in place}
