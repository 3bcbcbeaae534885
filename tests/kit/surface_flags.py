"""Every flag and alias of SGLang 0.5.2's command line and documentation."""

NAMES = """
    model-path model tokenizer-path tokenizer-mode tokenizer-worker-num skip-tokenizer-init load-format
    model-loader-extra-config trust-remote-code context-length is-embedding enable-multimodal revision
    model-impl host port skip-server-warmup warmups nccl-port dtype quantization quantization-param-path
    kv-cache-dtype mem-fraction-static max-running-requests max-queued-requests max-total-tokens
    chunked-prefill-size max-prefill-tokens schedule-policy schedule-conservativeness page-size
    hybrid-kvcache-ratio swa-full-tokens-ratio disable-hybrid-swa-memory device tensor-parallel-size tp-size
    pipeline-parallel-size pp-size max-micro-batch-size stream-interval stream-output random-seed
    constrained-json-whitespace-pattern watchdog-timeout dist-timeout download-dir base-gpu-id gpu-id-step
    sleep-on-idle log-level log-level-http log-requests log-requests-level crash-dump-folder show-time-cost
    enable-metrics enable-metrics-for-all-schedulers bucket-time-to-first-token bucket-inter-token-latency
    bucket-e2e-request-latency collect-tokens-histogram prompt-tokens-buckets generation-tokens-buckets
    gc-warning-threshold-secs decode-log-interval enable-request-time-stats-logging kv-events-config api-key
    served-model-name weight-version chat-template completion-template file-storage-path enable-cache-report
    reasoning-parser tool-call-parser tool-server data-parallel-size dp-size load-balance-method
    prefill-round-robin-balance dist-init-addr nccl-init-addr nnodes node-rank json-model-override-args
    preferred-sampling-params enable-lora max-lora-rank lora-target-modules lora-paths max-loras-per-batch
    max-loaded-loras lora-backend attention-backend prefill-attention-backend decode-attention-backend
    sampling-backend grammar-backend mm-attention-backend speculative-algorithm speculative-draft-model-path
    speculative-draft-model speculative-draft-model-revision speculative-num-steps speculative-eagle-topk
    speculative-num-draft-tokens speculative-accept-threshold-single speculative-accept-threshold-acc
    speculative-token-map speculative-attention-mode expert-parallel-size ep-size ep moe-a2a-backend
    moe-runner-backend flashinfer-mxfp4-moe-precision enable-flashinfer-allreduce-fusion deepep-mode
    ep-num-redundant-experts ep-dispatch-algorithm init-expert-location enable-eplb eplb-algorithm
    eplb-rebalance-num-iterations eplb-rebalance-layers-per-chunk eplb-min-rebalancing-utilization-threshold
    expert-distribution-recorder-mode expert-distribution-recorder-buffer-size
    enable-expert-distribution-metrics deepep-config moe-dense-tp-size max-mamba-cache-size mamba-ssm-dtype
    enable-hierarchical-cache hicache-ratio hicache-size hicache-write-policy hicache-io-backend
    hicache-mem-layout hicache-storage-backend hicache-storage-prefetch-policy
    hicache-storage-backend-extra-config enable-lmcache enable-double-sparsity ds-channel-config-path
    ds-heavy-channel-num ds-heavy-token-num ds-heavy-channel-type ds-sparse-decode-threshold cpu-offload-gb
    offload-group-size offload-num-in-group offload-prefetch-step offload-mode disable-radix-cache
    cuda-graph-max-bs cuda-graph-bs disable-cuda-graph disable-cuda-graph-padding enable-profile-cuda-graph
    enable-cudagraph-gc enable-nccl-nvls enable-symm-mem disable-flashinfer-cutlass-moe-fp4-allgather
    enable-tokenizer-batch-encode disable-outlines-disk-cache disable-custom-all-reduce enable-mscclpp
    disable-overlap-schedule enable-mixed-chunk enable-dp-attention enable-dp-lm-head
    enable-two-batch-overlap tbo-token-distribution-threshold enable-torch-compile torch-compile-max-bs
    torchao-config enable-nan-detection enable-p2p-check triton-attention-reduce-in-fp32
    triton-attention-num-kv-splits num-continuous-decode-steps delete-ckpt-after-loading enable-memory-saver
    allow-auto-truncate enable-custom-logit-processor flashinfer-mla-disable-ragged
    disable-shared-experts-fusion disable-chunked-prefix-cache disable-fast-image-processor
    enable-return-hidden-states scheduler-recv-interval numa-node debug-tensor-dump-output-folder
    debug-tensor-dump-input-file debug-tensor-dump-inject debug-tensor-dump-prefill-only disaggregation-mode
    disaggregation-transfer-backend disaggregation-bootstrap-port disaggregation-decode-tp
    disaggregation-decode-dp disaggregation-prefill-pp disaggregation-ib-device num-reserved-decode-tokens
    custom-weight-loader weight-loader-disable-mmap enable-pdmux sm-group-num enable-ep-moe
    enable-deepep-moe enable-flashinfer-cutlass-moe enable-flashinfer-trtllm-moe enable-triton-kernel-moe
    enable-flashinfer-mxfp4-moe return-token-ids prefill-only-one-req disable-jump-forward disable-mla
    file-storage-pth enable-flashinfer-mla config disaggregation-decode-polling-interval
    enable-dynamic-batch-tokenizer dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout
    enable-flashinfer-cutedsl-moe enable-priority-scheduling schedule-low-priority-values-first
    priority-scheduling-preemption-threshold enable-trace oltp-traces-endpoint load-watch-interval
    remote-instance-weight-loader-seed-instance-ip remote-instance-weight-loader-seed-instance-service-port
    remote-instance-weight-loader-send-weights-group-ports tokenizer-metrics-custom-labels-header
    tokenizer-metrics-allowed-customer-labels triton-attention-split-tile-size otlp-traces-endpoint
    tokenizer-metrics-allowed-custom-labels
"""
FLAGS = tuple(f"--{name}" for name in NAMES.split())
