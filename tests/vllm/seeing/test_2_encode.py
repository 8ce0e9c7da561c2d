"""Does an encode worker of real vLLM encode an image once, for all others, and for as many bytes as it may keep?"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from penstock.adapters.listen_address import free_port
from tests.live.cluster import request, served
from tests.vllm.asking import ask, asking
from tests.vllm.seeing.test_1_images import picture
from tests.vllm.seeing.watcher import QUESTION, TEXT, chat
from tests.vllm.server import BLOCK, BLOCKS, CPU_ENV, CPU_FLAGS, MODEL, START_LIMIT
from tests.vllm.waiting import eventually

FILE = "encoder_cache.safetensors"


def config(venv: Path, seeing: Path, store: Path, room: int) -> str:
    pool = {
        "engine": "vllm",
        "replicas": 1,
        "block_size": BLOCK,
        "kv_blocks": BLOCKS,
        "max_model_len": 2048,
        "command": str(venv / "bin" / "vllm"),
        "model_path": str(seeing),
        "args": [*CPU_FLAGS, "--skip-mm-profiling"],
        "embeddings": str(store),
        "embeddings_max": room,
        "env": {"VLLM_LOGGING_LEVEL": "DEBUG"},  # it says there what it reads from the store
    }
    return json.dumps(
        {
            "models": {MODEL: {"tokenizer": str(seeing), "pools": {"eyes": {**pool, "role": "encode"}, "main": pool}}},
            "frontend": {"port": free_port()},
            "canary": {"idle": 0},
            "supervise": {"start_timeout": START_LIMIT},
        }
    )


async def test_an_image_is_encoded_once_by_the_encode_worker_and_read_by_the_other(
    venv: Path, seeing: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    size = 68_000  # bytes: 64 tokens of 256 numbers of 4 bytes, and a header
    (tmp_path / "c.json").write_text(config(venv, seeing, store, 3 * size))
    env = {**CPU_ENV, "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    with served(tmp_path, "up", "c.json", env=env, start_limit=START_LIMIT) as front:
        await eventually(lambda: len(front.get("/admin/status")[1]["workers"]) == 2)

        def counts() -> dict[str, Any]:
            (model,) = front.get("/admin/status")[1]["models"]
            found: dict[str, Any] = model["media"]
            return found

        def read() -> int:
            """Return how many embeddings the worker that answers has read from the store."""
            log = "\n".join(file.read_text(errors="replace") for file in front.run.rglob("*main-0*.log"))
            return log.count("Success load encoder cache for hash")

        async with asking() as http:

            async def asked(*parts: Any) -> Any:
                answer = await ask(http, front.url, chat(*parts))
                assert answer.status == 200, answer.error
                return answer

            await asked(TEXT, picture(0), QUESTION)
            assert counts() == {"cached": 0, "encoded": 1, "failed": 0, "here": 0}
            (file,) = store.glob(f"*/{FILE}")
            written = file.stat().st_mtime_ns
            assert size * 0.9 < file.stat().st_size < size
            await eventually(lambda: read() == 1)
            for question in (QUESTION, "another question " * 9):
                await asked(question, picture(0), TEXT)
            assert counts() == {"cached": 2, "encoded": 1, "failed": 0, "here": 0}
            await asyncio.sleep(1.0)  # a request that hits the cache of blocks behind it tells its learnt tokens
            await asked(picture(0), picture(0), picture(50), TEXT)
            assert counts()["encoded"] == 2, "of two new and one old only the new one"
            assert len(list(store.glob(f"*/{FILE}"))) == 2 and file.stat().st_mtime_ns >= written
            for grey in (100, 110, 120, 130):
                await asked(TEXT, picture(grey), QUESTION)
            names = {path.parent.name for path in store.glob(f"*/{FILE}")}
            assert len(names) == 3 and file.parent.name not in names, "the eldest have made room"
            assert read() >= 5
            # The worker that answers encodes what is gone: nothing depends on the store.
            before = counts()
            await asked("once more", picture(0), "and again")
            assert counts()["cached"] == before["cached"] + 1
            page = request(f"{front.url}/metrics")[1]
            assert f'penstock_media_total{{model="{MODEL}",outcome="encoded"}} {counts()["encoded"]}' in page
