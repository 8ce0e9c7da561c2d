"""Client fields: what a request could say of an engine's KV, ranks, adapters and internals, and what each would do."""

CLIENT_FIELDS = "client_fields"
"""Label of engines whose clients may set some of these fields: their names or paths, with spaces between."""
STEERING: dict[str, str] = {
    "kv_transfer_params": "vLLM: where to fetch KV, or for whom to hold it: another's, at any address",
    "ec_transfer_params": "vLLM: the same of encoded media",
    "vllm_xargs": "vLLM: arguments of connectors and sampling plug-ins, KV transfer among them",
    "extra_args": "vLLM: the same within sampling parameters",
    "kv_cache_report_mode": "vLLM: what its KV events announce",
    "logits_processors": "vLLM: names of code to run",
    "request_id": "vLLM: the id of another's request",
    "data_parallel_rank": "vLLM, SGLang: the rank that answers",
    "routed_dp_rank": "SGLang: the rank that answers",
    "disagg_prefill_dp_rank": "SGLang: the rank that prefilled",
    "bootstrap_host": "SGLang: where to fetch KV",
    "bootstrap_port": "SGLang: where to fetch KV",
    "bootstrap_room": "SGLang: whose KV to fetch",
    "bootstrap_pair_key": "SGLang: whose KV to fetch",
    "rid": "SGLang: the id of another's request",
    "session_params": "SGLang: another's session, whose KV it goes on from",
    "extra_key": "SGLang: the key under which a prompt's KV is shared",
    "lora_path": "SGLang: an adapter's files",
    "custom_logit_processor": "SGLang: code to run",
    "custom_params": "SGLang: arguments of that code",
    "return_hidden_states": "SGLang: what the model holds inside",
    "disaggregated_params": "TensorRT-LLM: whose KV to fetch, and from where",
    "lora_request": "TensorRT-LLM: an adapter's files",
    "scheduling_params": "TensorRT-LLM: the rank that answers",
    "conversation_params": "TensorRT-LLM: another's conversation, whose KV it goes on from",
    "kv_cache_retention_config": "TensorRT-LLM: what its KV cache keeps",
    "id_slot": "llama.cpp: the slot, and with it another's KV",
    "slot_id": "llama.cpp: the same, as older ones name it",
    "cache_prompt": "llama.cpp: whether a slot's KV is used again",
    "n_cache_reuse": "llama.cpp: which parts of a slot's KV are moved",
    "lora": "llama.cpp: adapters and their scales, for all requests of a batch",
}
"""Field -> the engines that read it, and what a client could do with it."""
PLAIN_NAMES = frozenset({"request_id", "rid", "lora", "cache_prompt", "extra_args", "extra_key", "custom_params"})
"""Those that a client may well use as words of its own, below `OWN_WORDS`, where no engine looks for them."""
OWN_WORDS: dict[str, frozenset[str]] = {
    "messages": frozenset(),
    "tools": frozenset({"parameters", "input_schema"}),
    "functions": frozenset({"parameters"}),
    "response_format": frozenset({"schema"}),
    "structured_outputs": frozenset({"json"}),
    "guided_json": frozenset({"*"}),
    "json_schema": frozenset({"*"}),
    "metadata": frozenset(),
    "chat_template_kwargs": frozenset(),
}
"""Fields below which names are a client's own -> those below them that hold schemas; ``*``: it is one."""


def strange_fields(entries: tuple[str, ...]) -> list[str]:
    """Return the entries of a pool's ``client_fields`` that name nothing of `STEERING`."""
    return [entry for entry in entries if entry.partition(".")[0] not in STEERING]
