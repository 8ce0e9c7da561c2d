"""vLLM's encoder cache connector over a folder that engines share (`--ec-transfer-config`, ec_connector_module_path).

vLLM's own ECExampleConnector keeps what it wrote for ever, and its reader ends the engine where a file goes between its
look-up and its use. This one is the same with `EmbeddingFolder` below it. Made for 0.32.
"""

from pathlib import Path
from typing import Any

import safetensors.torch
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from penstock_kv.inside.embeddings.embedding_folder import EmbeddingFolder


class PenstockEmbeddingConnector(ECExampleConnector):  # type: ignore[misc, unused-ignore]
    """Writes the embeddings that this engine makes where its role is to produce, and reads them where it is not.

    ``ec_connector_extra_config``: ``shared_storage_path``, the folder; ``bytes_max``, of all files there.
    """

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        transfer = vllm_config.ec_transfer_config
        most = transfer.get_from_extra_config("bytes_max", None)
        self._folder = EmbeddingFolder(
            Path(self._storage_path), None if most is None else int(most), str(transfer.engine_id)
        )

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        """Write one embedding."""
        if self.is_producer:
            tensors = {"ec_cache": encoder_cache[mm_hash].detach().cpu()}
            self._folder.write(mm_hash, lambda file: safetensors.torch.save_file(tensors, file))

    def has_cache_item(self, identifier: str) -> bool:
        """Return whether an embedding is in the folder; where it is, it stays until this engine has read it."""
        return self._folder.pin(identifier)

    def _generate_filename_debug(self, mm_hash: str) -> str:
        """Return the file that the class below reads."""
        return str(self._folder.pinned(mm_hash))
