"""The names that exporters give to a draft's tensors: per family, patterns of its usual names with what stands in their place.

Each is one that `Family.canonical` reads back; a draft that is written so is the same draft.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

#: Everything but what stands outside a model's own prefix.
_MODEL = r"(?!lm_head\.|d2t$|t2d$)"

PREFIXED = {_MODEL: "model."}
MIDLAYER = {r"layers\.0\.": "midlayer."}
MISTRAL = {
    r"fc\.": "eagle_linear.",
    r"embed_tokens\.": "tok_embeddings.",
    r"(layers\.\d+)\.post_attention_layernorm\.": r"\1.ffn_norm.",
    r"(layers\.\d+)\.mlp\.gate_proj\.": r"\1.feed_forward.w1.",
    r"(layers\.\d+)\.mlp\.down_proj\.": r"\1.feed_forward.w2.",
    r"(layers\.\d+)\.mlp\.up_proj\.": r"\1.feed_forward.w3.",
}
MINICPM = {r"layers\.": "eagle_layers."}
ENCODER = {r"fc\.": "encoder.fc.", r"hidden_norm\.": "encoder.output_norm_enc."}
CODEBOOK_WEIGHTS = {r"(.+_codebook)$": r"\1.weight"}
MODELOPT_DSPARK = {r"markov_head\.": "", r"confidence_head\.proj\.": "confidence_proj."}
NESTED_MTP = {r"model\.": "model.language_model."}
NESTED_QWEN = {r"mtp\.": "model.mtp."}
MTP_BLOCK = {r"(model\.layers\.\d+)\.(self_attn|mlp|.+_layernorm)\.": r"\1.mtp_block.\2."}
MEDUSA_UPSTREAM = {r"blocks\.(\d+)\.layers\.(\d+)\.": r"\1.\2.linear.", r"lm_heads\.(\d+)\.": r"\1.1."}
MEDUSA_MODELOPT = {
    r"blocks\.(\d+)\.layers\.(\d+)\.": r"medusa_heads.\1.medusa_layers.\2.linear.",
    r"lm_heads\.(\d+)\.": r"medusa_heads.\1.lm_head.",
}
SPECULATOR = {"": "speculator."}

#: The usual names, which need no pattern.
OWN = "own"

#: By form of `config.json`, the namings that its exporters use beside the family's own; packagings with one exporter have none.
NAMINGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "eagle1-plain": {"prefixed": PREFIXED, "mistral": MISTRAL, "minicpm": MINICPM},
    "eagle3-plain": {"prefixed": PREFIXED, "midlayer": MIDLAYER},
    "eagle3-mla-plain": {"midlayer": MIDLAYER},
    "peagle-plain": {"prefixed": PREFIXED, "midlayer": MIDLAYER},
    "eagle4-plain": {"prefixed": PREFIXED, "midlayer": MIDLAYER},
    "dflash-plain": {"prefixed": PREFIXED, "encoder": ENCODER},
    "dflash2-plain": {"prefixed": PREFIXED, "codebook-weights": CODEBOOK_WEIGHTS},
    "domino-plain": {"prefixed": PREFIXED},
    "dflare-plain": {"prefixed": PREFIXED},
    "dspark-plain": {"prefixed": PREFIXED},
    "xpress-speculators": {"prefixed": PREFIXED},
    "mtp-embedded": {"nested": NESTED_MTP, "mtp-block": MTP_BLOCK},
    "mtp-embedded-qwen": {"nested": NESTED_QWEN},
    "gemma4-assistant-plain": {"prefixed": PREFIXED},
    "medusa-plain": {"upstream": MEDUSA_UPSTREAM, "modelopt": MEDUSA_MODELOPT},
    "mlp-speculator-plain": {"prefixed": SPECULATOR},
}

#: Families whose exporters may store q, k and v as one tensor.
JOINED = ("eagle1", "eagle3", "peagle", "eagle4", "dflash", "dflash2", "domino", "dflare", "dspark", "xpress", "hydra")


def namings_of(form: str) -> tuple[str, ...]:
    """The namings of a form, its family's own first."""
    return (OWN, *NAMINGS.get(form, {}))


def renamed(form: str, naming: str) -> Callable[[str], str]:
    """From a family's usual name on disk to the one of `naming`."""
    patterns = {} if naming == OWN else NAMINGS[form][naming]

    def rename(name: str) -> str:
        for pattern, new in patterns.items():
            if re.match(pattern, name):
                return re.sub(pattern, new, name, count=1)
        return name

    return rename
