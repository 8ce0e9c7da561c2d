"""The hashes of a prompt are those that vLLM gives its blocks."""

from hashlib import sha256

from penstock_kv.tiers.vllm_block_hashes import token_hashes


def test_hashes_are_those_of_vllm_0_32() -> None:
    """Recorded from vLLM 0.32: `init_none_hash(sha256_cbor)` with PYTHONHASHSEED=0, then `hash_block_tokens`."""
    tokens = [1, 23, 24, 255, 256, 65535, 65536, 128000]
    first, second = token_hashes([*tokens, *range(8), 5], 8, "0")
    assert first.hex() == "218d07dfbfd913e3f77f397b332c0115d0ea724de5f9be64a16e463736ead66d"
    assert second.hex() == "3b48a5598a46f36e11dfacc8e7746b470d55fd5dc6e140e0cb6878020344087d"


def test_a_prompt_shorter_than_a_block_has_no_hash() -> None:
    assert token_hashes(range(7), 8, "0") == []
    assert len(token_hashes(range(8), 8, "seed")[0]) == sha256().digest_size
