"""Launch of an engine in a pod of its own: fixed ports, the pod's address, and servers that are started only there."""

import msgspec

from penstock.adapters.engines.launch import SERVER_START_TIMEOUT, Launch, launch_of
from penstock.adapters.engines.pool_overrides import overrides_of
from penstock.config.derived.engine_flags import TP_SIZE
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.values import JsonObject

PORT = 8000
"""Where every engine listens: each pod has an address of its own."""
POD_IP = "$(POD_IP)"
"""What the kubelet replaces with the pod's address, in commands and environment."""


def pod_launch(worker: str, model: str, pool: PoolSettings, gpus: int) -> Launch:
    """Return how to start an engine in a container; ``$(POD_IP)`` stands for its address.

    Args:
        gpus: how many the pod gets; the container sees them as 0, 1, ...
    """
    if pool.engine == "trtllm":
        return _trtllm(model, pool, gpus)
    launch = launch_of(worker, model, pool, port=PORT, gpus=range(gpus), host=POD_IP, in_pod=True)
    # The device plugin says which GPUs the container sees.
    env = {name: value for name, value in launch.env.items() if name != "CUDA_VISIBLE_DEVICES" or name in pool.env}
    return msgspec.structs.replace(launch, env=env, url=f"http://{POD_IP}:{PORT}")


def at_address(launch: Launch, address: str) -> Launch:
    """Return a launch with the address of its pod, once that is known."""
    raw = msgspec.json.encode(launch).replace(POD_IP.encode(), (f"[{address}]" if ":" in address else address).encode())
    return msgspec.json.decode(raw, type=Launch)


def _trtllm(model: str, pool: PoolSettings, gpus: int) -> Launch:
    """Written from TensorRT-LLM's documentation: no TensorRT-LLM has run here."""
    flags: dict[str, object] = {
        "--host": POD_IP,
        "--port": PORT,
        "--tp_size": gpus if gpus > 1 else None,
        "--max_seq_len": pool.max_model_len,
        "--max_num_tokens": pool.max_num_batched_tokens,
    }
    words = (pool.command or "trtllm-serve", pool.model_path or model, *_flag_words(flags, pool))
    card: JsonObject = {**overrides_of(pool), "engine": pool.engine}
    if gpus > 1:
        card["labels"] = {TP_SIZE: str(gpus), **card.get("labels", {})}
    url = f"http://{POD_IP}:{PORT}"
    return Launch(argv=(*words, *pool.args), env=pool.env, url=url, start_timeout=SERVER_START_TIMEOUT, card=card)


def _flag_words(flags: dict[str, object], pool: PoolSettings) -> list[str]:
    """Return flags as words, without those that the pool's own arguments give."""
    given = {word.partition("=")[0] for word in pool.args}
    return [
        str(word) for flag, value in flags.items() if value is not None and flag not in given for word in (flag, value)
    ]
