"""What vLLM has to be started with so that engines share encoded media: its encoder cache configuration."""

from penstock.kernel.values import Role

STOCK_CONNECTOR = "ECExampleConnector"
"""vLLM's own, over a folder; nothing is ever deleted there."""
OWN_CONNECTOR = "PenstockEmbeddingConnector"
"""The same with a bound of bytes, in `penstock_kv.inside.embeddings.vllm_ec_connector`: where Penstock is installed."""


def ec_transfer_config(role: Role, folder: str, bytes_max: int, *, own: bool) -> dict[str, object]:
    """Return ``--ec-transfer-config`` of an engine: an encode worker writes, all others read.

    Args:
        own: whether the engine's environment has Penstock in it.
    """
    config: dict[str, object] = {
        "ec_connector": OWN_CONNECTOR if own else STOCK_CONNECTOR,
        "ec_role": "ec_producer" if role == "encode" else "ec_consumer",
        "ec_connector_extra_config": {"shared_storage_path": folder},
    }
    if own:
        config["ec_connector_module_path"] = "penstock_kv.inside.embeddings.vllm_ec_connector"
        config["ec_connector_extra_config"] = {"shared_storage_path": folder, "bytes_max": bytes_max}
    return config
