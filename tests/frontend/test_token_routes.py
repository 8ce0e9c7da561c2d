"""Does the frontend tokenize as the engines do, and leave to them what only they can say?"""

from typing import Any

import pytest

from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.events import WorkerJoined
from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim.sim_server import start
from tests.frontend.stand import stand

openai = pytest.importorskip("openai")
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "two words"}]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "Hello, big world"}


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokens_are_those_of_the_engine(prefix):
    engine = await start(SimSettings(), model="m")
    tokenizer = load_tokenizer("builtin:sim")
    try:
        async with stand(0, tokenizer=tokenizer) as local, stand(0) as remote:
            for s in (local, remote):
                card = WorkerCard(id=WorkerId("e"), url=engine.url, model="m", block_size=16, epoch=1)
                s.live.post("router", WorkerJoined(card=card))
            for body in (
                PROMPT,
                {**PROMPT, "return_token_strs": True},
                CHAT,
                {**CHAT, "add_generation_prompt": False, "return_token_strs": True},
            ):
                here = await (await local.http.post(prefix + "/tokenize", json=body)).json()
                there = await (await remote.http.post(prefix + "/tokenize", json=body)).json()
                assert "tokens" in here and "tokens" in there, (here, there)
                assert here["tokens"] == there["tokens"] and here["count"] == len(here["tokens"]) > 0
                assert here["token_strs"] is None or len(here["token_strs"]) == here["count"]
                back = {"model": "m", "tokens": here["tokens"]}
                texts = [await (await s.http.post(prefix + "/detokenize", json=back)).json() for s in (local, remote)]
                # vLLM writes special tokens out; the simulated engine leaves them away, so chats differ there.
                assert texts[0] == texts[1] if "prompt" in body else texts[1]["prompt"] in texts[0]["prompt"]
            assert not local.records and remote.records  # only what went to an engine was routed
            own = await local.http.post("/tokenize", json={**CHAT, "chat_template": "{{ messages }}"})
            assert own.status == 200 and len(local.records) == 1
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "m"}, "prompt"),
        ("/tokenize", {"model": "m", "messages": "x"}, "messages"),
        ("/detokenize", {"model": "m", "tokens": [-1]}, "tokens"),
        ("/detokenize", {"model": "m", "tokens": "x"}, "tokens"),
    ],
)
async def test_wrong_bodies_name_the_field(path, body, param):
    async with stand(0, tokenizer=load_tokenizer("builtin:sim")) as s:
        answer = await s.http.post(path, json=body)
        assert answer.status == 400 and (await answer.json())["error"]["param"] == param


async def test_embeddings_of_the_openai_client_are_routed_with_their_usage():
    engine = await start(SimSettings(), model="m", faults=True)
    try:
        async with stand(1) as s, openai.AsyncOpenAI(base_url=s.server.url + "/v1", api_key="k") as ai:
            await s.engines[0].stop()  # a worker that is there no more: the next one takes the request
            card = WorkerCard(id=WorkerId("e"), url=engine.url, model="m", block_size=4, epoch=1)
            s.live.post("router", WorkerJoined(card=card))
            for _ in range(4):
                found = await ai.embeddings.create(model="m", input=["one", "two words"])
                assert [len(each.embedding) for each in found.data] == [64, 64] and found.usage.prompt_tokens > 2
            assert {record.outcome for record in s.records} == {"ok"}
            assert any(record.attempts > 1 for record in s.records)
            with pytest.raises(openai.NotFoundError):
                await ai.embeddings.create(model="other", input="x")
            with pytest.raises(openai.BadRequestError):
                await ai.embeddings.create(model="m", input="x", dimensions=-1)
    finally:
        await engine.stop()


async def test_engine_paths_and_forms_of_other_routes():
    async with stand() as s:
        for path, upstream in (
            ("/v1/classify", "/classify"),
            ("/pooling", "/pooling"),
            ("/rerank", "/rerank"),
            ("/v2/rerank", "/v2/rerank"),
            ("/score", "/score"),
        ):
            assert (await s.http.post(path, json={"model": "m"})).status == 200
            assert s.engines[0].paths[-1] == upstream
        form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await s.http.post("/v1/audio/transcriptions", data=form, headers=headers)
        assert answer.status == 200 and s.engines[0].bodies[-1] == form
