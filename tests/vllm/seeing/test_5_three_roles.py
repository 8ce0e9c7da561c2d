"""Do three real vLLM servers encode, prefill and decode one request, and answer as one server alone?"""

import json
import os
from pathlib import Path
from typing import Any

from penstock.adapters.listen_address import free_port
from tests.live.cluster import request, served
from tests.vllm.asking import Answer, ask, asking
from tests.vllm.handoff.conftest import KV, WIRE
from tests.vllm.seeing.test_1_images import picture
from tests.vllm.seeing.test_2_encode import FILE
from tests.vllm.seeing.watcher import OTHER, QUESTION, TEXT, chat
from tests.vllm.server import BLOCK, BLOCKS, CPU_ENV, CPU_FLAGS, MODEL, START_LIMIT, counter
from tests.vllm.waiting import eventually

ROLES = ("encode", "prefill", "decode")


def config(venv: Path, seeing: Path, store: Path) -> str:
    def pool(role: str) -> dict[str, Any]:
        transfer = [] if role == "encode" else [f"--kv-transfer-config={json.dumps(KV)}"]
        return {
            "engine": "vllm",
            "role": role,
            "replicas": 1,
            "block_size": BLOCK,
            "kv_blocks": BLOCKS,
            "max_model_len": 2048,
            "command": str(venv / "bin" / "vllm"),
            "model_path": str(seeing),
            "args": [*CPU_FLAGS, "--skip-mm-profiling", "--enable-prompt-tokens-details", *transfer],
            "embeddings": str(store),
            "env": WIRE | {"VLLM_LOGGING_LEVEL": "DEBUG"},  # it says there what it reads from the store
        }

    return json.dumps(
        {
            "models": {MODEL: {"tokenizer": str(seeing), "pools": {role: pool(role) for role in ROLES}}},
            "router": {"handoff": {"conditional": "off"}},
            "frontend": {"port": free_port()},
            "canary": {"idle": 0},
            "supervise": {"start_timeout": START_LIMIT},
        }
    )


async def test_an_image_goes_from_encode_by_prefill_to_decode_and_the_text_is_that_of_one(
    venv: Path, seeing: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "c.json").write_text(config(venv, seeing, store))
    env = {**CPU_ENV, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with served(tmp_path, "up", "c.json", env=env, start_limit=START_LIMIT) as front:
        await eventually(lambda: len(front.get("/admin/status")[1]["workers"]) == len(ROLES))
        urls = {row["role"]: row["url"] for row in front.get("/admin/status")[1]["workers"]}
        assert urls.keys() == set(ROLES)

        def model() -> dict[str, Any]:
            (row,) = front.get("/admin/status")[1]["models"]
            return dict(row)

        def read(role: str) -> int:
            """Return how many embeddings a server has read from the store."""
            log = "\n".join(file.read_text(errors="replace") for file in front.run.rglob(f"*{role}-0*.log"))
            return log.count("Success load encoder cache for hash")

        async with asking() as http:

            async def asked(*parts: Any) -> Answer:
                body = {**chat(*parts), "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
                answer = await ask(http, front.url, body)
                assert answer.status == 200, answer.error
                assert answer.worker == "decode-0" and answer.headers["x-penstock-prefill-worker"] == "prefill-0"
                assert request(f"{urls['decode']}/reset_prefix_cache", b"")[0] == 200
                alone = await ask(http, urls["decode"], body)  # the same server computes all of it by itself
                assert alone.status == 200 and alone.cached == 0
                assert answer.token_ids[-12:] == alone.token_ids[-12:] and answer.text == alone.text
                assert request(f"{urls['decode']}/reset_prefix_cache", b"")[0] == 200
                return answer

            for number, (grey, text) in enumerate(((0, QUESTION), (255, QUESTION), (0, OTHER)), 1):
                moved = counter(urls["decode"], "vllm:nixl_bytes_transferred_sum")
                await asked(TEXT, picture(grey), text)
                assert counter(urls["decode"], "vllm:nixl_bytes_transferred_sum") > moved
                assert model()["handoffs"]["done"] == number
            assert model()["media"] == {"cached": 1, "encoded": 2, "failed": 0, "here": 0}
            assert len(list(store.glob(f"*/{FILE}"))) == 2
            assert read("prefill") >= 2
