"""How long a replay of a draft of real size takes, and what memory it needs: a DFlash draft for Qwen3-8B over 4,096 recorded tokens.

    python benchmarks/replay.py [--tokens 4096] [--probe] [--keep DIR]

The draft is written for the purpose, 2.1 GB of it, beside the embedding, the head and the final norm of its target, 2.5 GB. Its layers add
next to nothing to the state, so that every mask drafts one and the same token, and the recorded text is made to fit: three of that token,
then another one. So the accepted length is known beforehand, 4.0 with the target's own token, and the work is that of any draft that is
accepted as far. Printed are the whole process's wall time, processor time and greatest memory, and the figure.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pytest_specdecode.testing import expected_tensors, stored_names, write_checkpoint

HIDDEN, LAYERS, VOCAB, TAPS, BLOCK = 4096, 5, 151936, (1, 9, 17, 25, 33), 16
#: Tokens of each round that the draft is right about.
RIGHT = 3

CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 12288,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "vocab_size": VOCAB,
    "block_size": BLOCK,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": list(TAPS)},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    """Write, replay in a process of its own, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="length of the trace (default: 4096)")
    parser.add_argument("--probe", action="store_true", help="run the probe, too")
    parser.add_argument("--keep", type=Path, help="write into this directory and leave it, or use what is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = options.keep or Path(folder)
        if not (place / "trace" / "hs_0.safetensors").exists():
            write(place, options.tokens)
        for check in ("acceptance.length", *(("acceptance.conventions",) if options.probe else ())):
            judge(place, check)


def write(place: Path, tokens: int) -> None:
    """Draft, target and trace under `place`."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, scale, generator=generator)

    _, tensors = expected_tensors(CONFIG, "dflash")
    weights = {}
    for tensor in tensors:
        if tensor.need != "required":
            continue
        shape = tuple(int(extent) for extent in tensor.shape if extent is not None)
        adds = tensor.name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = shape[-1] ** -0.5 * (1e-6 if adds else 1.0)
        weights[tensor.name] = (
            torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else normal(*shape, scale=scale)
        )
    write_checkpoint(place / "draft", CONFIG, weights, rename=stored_names(CONFIG, "dflash"))
    embedding, head = normal(VOCAB, HIDDEN), normal(VOCAB, HIDDEN, scale=HIDDEN**-0.5)
    right = 7
    # The state of every mask is its embedding, and so the token whose row of the head looks most like it is drafted.
    head[right] = embedding[CONFIG["dflash_config"]["mask_token_id"]] / HIDDEN**0.5  # type: ignore[index]
    target = place / "target"
    target.mkdir(parents=True, exist_ok=True)
    text = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36}
    for key in ("block_size", "num_target_layers", "dflash_config"):
        del text[key]
    (target / "config.json").write_text(json.dumps(text, indent=2), encoding="utf-8")
    save_file(
        {
            "model.embed_tokens.weight": embedding,
            "lm_head.weight": head,
            "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        },
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    ids = torch.randint(1000, 150000, (tokens,), generator=generator)
    ids[torch.arange(tokens) % (RIGHT + 1) != 0] = right
    (place / "trace").mkdir(parents=True, exist_ok=True)
    save_file(
        {
            "token_ids": ids,
            # Without the last state, from which it would show that no such target wrote this text.
            "hidden_states": normal(tokens, len(TAPS), HIDDEN),
            "loss_mask": torch.ones(tokens, dtype=torch.bool),
        },
        place / "trace" / "hs_0.safetensors",
        metadata={"format": "pt"},
    )


def judge(place: Path, check: str) -> None:
    """One check in a process of its own; what it cost."""
    report = place / "report.json"
    args = [
        *("-q", "--no-header", "-p", "no:cacheprovider", f"--draft-model={place / 'draft'}"),
        *(f"--draft-target={place / 'target'}", f"--draft-trace={place / 'trace'}"),
        *(f"--draft-checks={check}", f"--draft-report={report}", "draft-model"),
    ]
    began = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", "pytest", *args], cwd=place, check=False).returncode
    wall = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{check}: exit {code}, {wall:.0f} s, {usage.ru_utime + usage.ru_stime:.0f} s of processor time so far, "
        f"{usage.ru_maxrss / 2**20:.2f} GiB at most"
    )
    (result,) = json.loads(report.read_text(encoding="utf-8"))["drafts"][0]["checks"]
    figures = result["figures"]
    if check == "acceptance.length":
        served, files = figures["served"], figures["files"]
        print(
            f"accepted length {figures['accepted_length']:.3f} of {RIGHT + 1} due, {served['rounds']} rounds, "
            f"sampled: {any(file['sampled'] for file in files)}"
        )
    else:
        print(f"{len(figures['readings'])} readings of {figures['trace']['starts']} starts")


if __name__ == "__main__":
    main()
