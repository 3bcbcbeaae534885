"""The Prometheus names of SGLang 0.5.2, as its `/metrics` calls them without the suffixes of prometheus-client."""

NAMES = {
    "gauge": """
        num_running_reqs num_used_tokens token_usage gen_throughput num_queue_reqs
        num_grammar_queue_reqs cache_hit_rate spec_accept_length total_retracted_reqs
        num_prefill_prealloc_queue_reqs num_prefill_inflight_queue_reqs
        num_decode_prealloc_queue_reqs num_decode_transfer_queue_reqs swa_token_usage
        num_running_reqs_offline_batch kv_transfer_speed_gb_s kv_transfer_latency_ms
        num_retracted_reqs num_paused_reqs utilization max_running_requests_under_SLO
        engine_startup_time engine_load_weights_time avg_request_queue_latency
        startup_latency_breakdown_seconds_max
    """,
    "counter": """
        num_bootstrap_failed_reqs num_transfer_failed_reqs num_grammar_cache_hit num_grammar_aborted
        num_grammar prompt_tokens generation_tokens cached_tokens num_requests num_so_requests
        num_aborted_requests prefetched_tokens backuped_tokens
    """,
    "histogram": """
        queue_time_s grammar_compilation_time_seconds grammar_schema_count grammar_ebnf_size
        grammar_tree_traversal_time_avg grammar_tree_traversal_time_max time_to_first_token_seconds
        time_to_first_token_seconds_offline_batch inter_token_latency_seconds
        e2e_request_latency_seconds prompt_tokens_histogram generation_tokens_histogram prefetch_pgs
        backup_pgs prefetch_bandwidth backup_bandwidth func_latency_seconds
    """,
}
KINDS = {f"sglang:{name}": kind for kind, names in NAMES.items() for name in names.split()}
