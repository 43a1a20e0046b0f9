"""The servers' other options: known, and of no account for a draft.

A start command is pasted whole, so its options for memory, ports and logging must not be taken for misspelled ones. The list holds what
SGLang's `launch_server`, `vllm serve` and `trtllm-serve` have been started with; it is not one version's, and an option that it lacks is
refused. Those that come in dozens go by how they begin.
"""

from __future__ import annotations

import re

__all__ = ["SHORT", "STARTS", "is_passed_over"]

_LISTED = """
model model-path model-loader-extra-config tokenizer tokenizer-path tokenizer-mode tokenizer-revision tokenizer-worker-num
skip-tokenizer-init load-format trust-remote-code is-embedding revision code-revision config config-format hf-config-path hf-overrides
hf-token hf-chat-template-name generation-config override-generation-config json-model-override-args model-impl model-config-parser
served-model-name chat-template chat-template-content-format completion-template weight-version host port uds nnodes node-rank
dist-init-addr dist-timeout nccl-port nccl-init-addr base-gpu-id gpu-id-step device random-seed seed mem-fraction-static
gpu-memory-utilization kv-cache-memory-bytes kv-cache-free-gpu-memory-fraction free-gpu-memory-fraction swap-space cpu-offload-gb
offload-backend max-running-requests max-queued-requests max-total-tokens max-prefill-tokens chunked-prefill-size prefill-max-requests
schedule-policy schedule-conservativeness schedule-low-priority-values-first priority-scheduling-preemption-threshold max-num-seqs
max-num-batched-tokens max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold max-batch-size max-beam-width
max-seq-len max-input-len max-logprobs num-lookahead-slots scheduling-policy scheduler-cls scheduler-delay-factor async-scheduling
stream-interval stream-output streaming-interval watchdog-timeout soft-watchdog-timeout download-dir ignore-patterns api-key
admin-api-key file-storage-path sleep-on-idle stream-response-default-include-usage reasoning-parser tool-call-parser tool-server
reasoning-config dp dp-size data-parallel-size data-parallel-rank data-parallel-address data-parallel-rpc-port data-parallel-backend
data-parallel-size-local data-parallel-start-rank data-parallel-hybrid-lb data-parallel-external-lb load-balance-method
load-watch-interval ep expert-parallel-size attn-cp-size moe-dp-size decode-context-parallel-size prefill-context-parallel-size dcp-size
pp-max-micro-batch-size pp-async-batch-depth distributed-executor-backend master-addr master-port headless worker-cls
worker-extension-cls max-parallel-loading-workers prefill-attention-backend mm-attention-backend sampling-backend grammar-backend
constrained-json-whitespace-pattern guided-decoding-backend structured-outputs-config sampling-defaults preferred-sampling-params
fp8-gemm-backend fp4-gemm-backend quantization-param-path modelopt-quant modelopt-checkpoint-restore-path torchao-config
calculate-kv-scales num-gpu-blocks-override block-size prefix-caching-hash-algo kv-sharing-fast-prefill kv-offloading-size
kv-offloading-backend kv-transfer-config kv-events-config ec-transfer-config compilation-config attention-config kernel-config
profiler-config optimization-level additional-config enforce-eager cuda-graph-sizes cudagraph-capture-sizes max-cudagraph-capture-size
torch-compile-max-bs num-continuous-decode-steps delete-ckpt-after-loading allow-auto-truncate custom-sigquit-handler
gc-warning-threshold-secs radix-eviction-policy hybrid-kvcache-ratio swa-full-tokens-ratio warmups skip-server-warmup
flashinfer-mla-disable-ragged triton-attention-reduce-in-fp32 triton-attention-num-kv-splits triton-attention-split-tile-size numa-node
limit-mm-per-prompt media-io-kwargs interleave-mm-strings skip-mm-profiling video-pruning-rate allowed-local-media-path
allowed-media-domains mm-processor-kwargs runner convert task pooler-config logits-processors logits-processor-pattern allow-credentials
allowed-origins allowed-methods allowed-headers root-path middleware return-tokens-as-token-ids response-role
show-hidden-metrics-for-version otlp-traces-endpoint collect-detailed-traces api-server-count uvicorn-log-level
h11-max-incomplete-event-size h11-max-header-count backend extra-llm-api-options config-file gpus-per-node cluster-size
moe-cluster-parallel-size num-postprocess-workers metadata-server-config-file server-role fail-fast-on-attention-window-too-large
draft-model-path draft-model draft-model-revision draft-load-format draft-model-quantization draft-token-map token-map
accept-threshold-single accept-threshold-acc attention-mode moe-runner-backend moe-a2a-backend use-draft-model-path model-loader-extra
model-class-overrides bucket-time-to-first-token bucket-inter-token-latency bucket-e2e-request-latency prompt-tokens-buckets
generation-tokens-buckets collect-tokens-histogram decode-log-interval scheduler-recv-interval weight-loader-disable-mmap
remote-instance-weight-loader-seed-instance-ip custom-weight-loader init-expert-location elastic-ep-backend deepep-mode deepep-config
eplb-config num-redundant-experts tbo-token-distribution-threshold max-mamba-cache-size language-only encoder-only encoder-urls
keep-mm-feature-on-device rl-on-policy-target forward-hooks external-model-package language-model-only
"""
_NAMES = frozenset(_LISTED.split())

#: How options begin that a server has dozens of.
STARTS = (
    "enable-",
    "disable-",
    "no-",
    "lora-",
    "max-lora",
    "fully-sharded-lora",
    "hicache-",
    "lmcache-",
    "kt-",
    "ds-",
    "double-sparsity-",
    "nsa-",
    "mamba-",
    "linear-attn-",
    "cuda-graph-",
    "piecewise-cuda-graph-",
    "disaggregation-",
    "log-",
    "show-time-cost",
    "export-metrics-",
    "crash-dump-",
    "debug-tensor-",
    "mm-",
    "moe-dense-",
    "eplb-",
    "ep-",
    "expert-distribution-",
    "flashinfer-",
    "offload-",
    "cpu-offload-",
    "ssl-",
    "decrypted-",
    "ngram-",
    "tool-",
    "data-parallel-",
    "otlp-",
    "metrics-",
    "remote-instance-",
    "pdmux-",
    "sm-group-",
    "dllm-",
    "all2all-",
)

#: Short ones; `-O2` too is one.
SHORT = ("-dp", "-dpn", "-dpr", "-dpa", "-dpp", "-dpb", "-ep", "-asc", "-n", "-r", "-cc", "-ac", "-dcp", "-pcp", "-h")


def is_passed_over(name: str) -> bool:
    """Whether `name`, without dashes before it and with `-` for `_`, is a server's option that no rule about drafts looks at."""
    return name.partition(".")[0] in _NAMES or name.startswith(STARTS) or re.fullmatch(r"O\d?", name) is not None
