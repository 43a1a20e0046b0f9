"""The keys that drafts' configurations have, so that a misspelled one can be told from one that nobody here has heard of.

`READ` are those that a family's parser looks for, beside the places of the engine models, and stand with the families; `UNREAD` are those
that public files hold and that mean nothing to a draft. A test holds `READ` against the parsers.
"""

from __future__ import annotations

from collections.abc import Mapping

from pytest_specdecode.engines import ENGINES
from pytest_specdecode.families.known_keys import READ

__all__ = ["MISTAKEN", "READ", "UNREAD", "keys_of"]

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
