"""Arguments of vLLM's LLM, methods and command line, and of OpenAI's requests, that distmk does not have."""

from __future__ import annotations

from collections.abc import Mapping

from distmk.absent_parameters import TUNES, Absent
from distmk.engine.absent_sampling import IN_STRUCTURED_OUTPUTS, NO_BEAMS, SAMPLING

_SWITCH = Absent(None, is_switch=True)
_NO_ADAPTERS = "merge the adapter into the model first (PEFT: merge_and_unload, then save_pretrained)"
_NO_TOOLS = "/v1/chat/completions has tools and tool_choice"
_NO_POOLING = "a causal language model that generates text is what is served"
_SPECULATION = "speculative_config has the method and the number of drafts"
_RANKS_ONLY = "a model is divided by tensor parallelism alone (tensor_parallel_size)"
_NO_IMAGES = "models take text alone"

GENERATE: Mapping[str, Absent] = {
    "lora_request": Absent(([],), _NO_ADAPTERS),
    "prompt_adapter_request": Absent(([],), _NO_ADAPTERS),
    "guided_options_request": Absent(([],), IN_STRUCTURED_OUTPUTS),
    "priority": Absent((0, []), "requests are served in the order in which they come"),
    "prompt_token_ids": Absent((), 'give token ids as prompts, or as {"prompt_token_ids": ids}'),
    "chat_template_content_format": TUNES,
    "tokenization_kwargs": Absent(({},)),
    "mm_processor_kwargs": Absent(({},), _NO_IMAGES),
}
"""Arguments of vLLM's LLM.generate and LLM.chat."""

REQUEST: Mapping[str, Absent] = {
    **SAMPLING,
    "priority": GENERATE["priority"],
    "tools": Absent(([],), _NO_TOOLS),
    "functions": Absent(([],), _NO_TOOLS),
    "tool_choice": Absent(("none", "auto"), _NO_TOOLS),
    "function_call": Absent(("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": TUNES,
    "structural_tag": Absent((), "structured_outputs has it"),
    "modalities": Absent((["text"],), _NO_IMAGES),
    "audio": Absent((), _NO_IMAGES),
    "mm_processor_kwargs": GENERATE["mm_processor_kwargs"],
    "prediction": TUNES,  # of the answer, which makes it come sooner
    "reasoning_effort": Absent((), "templates have variables of their own: chat_template_kwargs"),
    "verbosity": Absent(("medium",), "say it in the prompt"),
    "web_search_options": Absent((), _NO_TOOLS),
    "moderation": Absent((), "texts are not moderated"),
    "echo": Absent((False,), "/v1/completions has it"),
    "suffix": Absent(("",), "a prompt is continued at its end alone"),
    "documents": Absent(([],), 'a template gets them by chat_template_kwargs={"documents": [...]}'),
    "chat_template_content_format": TUNES,
    "include_reasoning": Absent((True,)),
    "return_tokens_as_token_ids": Absent((False,), "return_token_ids gives the ids beside the text"),
    "cache_salt": Absent(("",), "--no-enable-prefix-caching keeps requests apart"),
    "kv_transfer_params": Absent(({},)),
    "vllm_xargs": Absent(({},)),
    "include_obfuscation": TUNES,  # of stream_options
    "store": Absent((False,), "answers are not stored"),
    "service_tier": Absent(("auto", "default")),
    **dict.fromkeys(("previous_response_id", "conversation"), Absent((), "send the whole conversation as input")),
    "background": Absent((False,), "a stream shows an answer as it comes"),
    "background_options": TUNES,
    "prompt": Absent((), "prompts are not stored; send input"),
    "max_tool_calls": Absent((), "the client decides which calls it answers"),
    "truncation": Absent(("disabled",), "shorten the conversation"),
    "context_management": Absent(([],), "shorten the conversation"),
    "image": Absent((), _NO_IMAGES),
    **dict.fromkeys(("user", "metadata", "request_id", "safety_identifier"), TUNES),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"), TUNES),
}
"""Parameters of OpenAI's requests and of vLLM's. Identifiers and hints have no effect."""

ENGINE: Mapping[str, Absent] = {
    **dict.fromkeys(("enforce_eager", "disable_custom_all_reduce", "disable_async_output_proc"), _SWITCH),
    **dict.fromkeys(("async_scheduling", "enable_chunked_prefill", "multi_step_stream_outputs"), _SWITCH),
    **dict.fromkeys(("disable_log_stats", "disable_log_requests", "enable_log_requests"), _SWITCH),
    **dict.fromkeys(("use_tqdm_on_load", "disable_cascade_attn", "use_v2_block_manager"), _SWITCH),
    **dict.fromkeys(("disable_hybrid_kv_cache_manager", "fully_sharded_loras"), _SWITCH),
    **dict.fromkeys(("disable_mm_preprocessor_cache", "skip_mm_profiling"), _SWITCH),
    "trust_remote_code": _SWITCH,  # no code of a model is run
    **dict.fromkeys(("max_seq_len_to_capture", "max_context_len_to_capture", "cuda_graph_sizes"), TUNES),
    **dict.fromkeys(("compilation_config", "optimization_level", "attention_backend"), TUNES),
    **dict.fromkeys(("max_num_partial_prefills", "max_long_partial_prefills"), TUNES),
    **dict.fromkeys(("long_prefill_token_threshold", "num_scheduler_steps", "num_lookahead_slots"), TUNES),
    **dict.fromkeys(("scheduler_delay_factor", "preemption_mode", "stream_interval", "swap_space"), TUNES),
    **dict.fromkeys(("max_parallel_loading_workers", "prefix_caching_hash_algo", "code_revision"), TUNES),
    **dict.fromkeys(("pt_load_map_location", "ignore_patterns"), TUNES),
    **dict.fromkeys(("guided_decoding_backend", "structured_outputs_config"), TUNES),
    **dict.fromkeys(("tokenizer_pool_size", "tokenizer_pool_type", "tokenizer_pool_extra_config"), TUNES),
    **dict.fromkeys(("max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_extra_vocab_size"), TUNES),
    **dict.fromkeys(("mm_processor_cache_gb", "limit_mm_per_prompt", "allowed_local_media_path"), TUNES),
    "served_model_name": TUNES,  # of metrics, which a server has
    "dtype": Absent(("auto", "bfloat16"), "weights and the KV cache are bfloat16, sums are float32"),
    "kv_cache_dtype": Absent(("auto", "bfloat16"), "the KV cache is bfloat16"),
    "calculate_kv_scales": Absent((False,), "the KV cache is bfloat16"),
    "block_size": Absent((16,), "pages of the KV cache have 16 tokens"),
    "kv_cache_memory_bytes": Absent((), "num_gpu_blocks_override is its number of pages of 16 tokens"),
    "cpu_offload_gb": Absent((0,), "use more ranks (tensor_parallel_size), or a smaller model"),
    "kv_offloading_size": Absent((), "the KV cache is in the GPU's memory"),
    "kv_transfer_config": Absent(({},)),
    "kv_events_config": Absent(({},)),
    "tokenizer_mode": Absent(("auto", "hf", "fast"), "tokenizer.json is read, by the tokenizers library"),
    "hf_overrides": Absent(({},), "change config.json in a copy of the folder"),
    "hf_config_path": Absent((), "config.json is read from the model's folder"),
    "config_format": Absent(("auto", "hf"), "config.json is read"),
    "rope_scaling": Absent(({},), "change config.json in a copy of the folder"),
    "rope_theta": Absent((), "change config.json in a copy of the folder"),
    "model_impl": Absent(("auto",), "model families are distmk's own, or registered (distmk.register_model)"),
    "hf_token": Absent((True, False), "set HF_TOKEN in the environment"),
    "download_dir": Absent((), "HF_HOME in the environment says where the cache of models is"),
    "model_loader_extra_config": Absent(({},)),
    "task": Absent(("auto", "generate"), _NO_POOLING),
    "runner": Absent(("auto", "generate"), _NO_POOLING),
    "convert": Absent(("auto", "none"), _NO_POOLING),
    "pooler_config": Absent((), _NO_POOLING),
    "override_pooler_config": Absent((), _NO_POOLING),
    "mm_processor_kwargs": GENERATE["mm_processor_kwargs"],
    "pipeline_parallel_size": Absent((1,), _RANKS_ONLY),
    "data_parallel_size": Absent((1,), "start a server for each copy of the model"),
    "enable_expert_parallel": Absent((False,), _RANKS_ONLY),
    "decode_context_parallel_size": Absent((1,), _RANKS_ONLY),
    "prefill_context_parallel_size": Absent((1,), _RANKS_ONLY),
    "nnodes": Absent((1,), "several hosts are started by mpirun, torchrun or srun (launch/README.md)"),
    "distributed_executor_backend": Absent(
        ("mp", "uni", "external_launcher"), "several hosts are started by mpirun, torchrun or srun (launch/README.md)"
    ),
    "ray_workers_use_nsight": Absent((False,), "ranks are processes that Nsight Systems can follow"),
    "worker_cls": Absent(("auto",)),
    "worker_extension_cls": Absent(("",)),
    "scheduling_policy": Absent(("fcfs",), "requests are served in the order in which they come"),
    "enable_lora": Absent((False,), _NO_ADAPTERS),
    "enable_prompt_adapter": Absent((False,), _NO_ADAPTERS),
    "speculative_model": Absent((), _SPECULATION),
    "num_speculative_tokens": Absent((0,), _SPECULATION),
    "logits_processors": SAMPLING["logits_processors"],
    "logits_processor_pattern": Absent((), "logit_bias and the penalties change logits"),
    "max_logprobs": Absent(tuple(range(21)), "log probabilities are given of up to 20 tokens"),
    "disable_sliding_window": Absent((False,), "layers have the windows of config.json"),
    "enable_sleep_mode": Absent((False,), "close() frees the memory"),
    "enable_prompt_embeds": Absent((False,), "prompts are text or token ids"),
    "reasoning_parser": Absent(("",), "outputs have the text as the model writes it; `distmk serve` divides it"),
    "enable_auto_tool_choice": _SWITCH,  # a server finds the calls of every request with tools
    "tool_call_parser": Absent(("",), "outputs have the text as the model writes it; `distmk serve` finds calls in it"),
    "additional_config": Absent(({},)),
    "device": Absent(("auto",), "backend is auto, cuda or host"),
    "otlp_traces_endpoint": Absent((), "trace_iterations records what ran"),
}
"""Arguments of vLLM's LLM, EngineArgs and `vllm serve`, now and in earlier versions."""

METHODS: Mapping[str, str] = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _NO_POOLING),
    "beam_search": NO_BEAMS,
    "get_tokenizer": "llm.tokenizer encodes and decodes, and llm.render_chat(messages) gives a conversation's token ids",
    "set_tokenizer": "LLM(..., tokenizer=folder) takes another tokenizer",
    "sleep": "close() frees the memory",
    "wake_up": "make a new LLM",
    "collective_rpc": "under a launcher, every rank runs the script itself",
    "apply_model": "llm.session has the buffers of this rank",
    "start_profile": "LLM(..., trace_iterations=N) records what ran, and llm.trace has it",
    "stop_profile": "LLM(..., trace_iterations=N) records what ran, and llm.trace has it",
    "reset_prefix_cache": "LLM(..., enable_prefix_caching=False) computes every prompt",
    "get_metrics": "llm.stats() says what the engine does",
}
"""Methods of vLLM's LLM, and what exists instead."""
