"""Does a real vLLM get what its model says: defaults, system prompt, template file, and the requests of names?"""

from collections import Counter
from typing import Any

from tests.live.cluster import Served, post
from tests.vllm.adapters.conftest import ALIAS, OUTPUT, SHARED, SYSTEM
from tests.vllm.adapters.test_1_loads import PROMPT, engine
from tests.vllm.asking import ask, asking, chat, completion
from tests.vllm.server import BLOCK, MODEL

QUESTION = "Where is the boat?"


def unlimited(**fields: Any) -> dict[str, Any]:
    """Return a chat that says nothing of its answer's length."""
    return {name: value for name, value in chat(QUESTION, ignore_eos=True, **fields).items() if name != "max_tokens"}


def tokens(url: str, body: dict[str, Any]) -> list[int]:
    status, answer, _ = post(f"{url}/tokenize", body)
    assert status == 200, answer
    found: list[int] = answer["tokens"]
    return found


async def test_an_alias_answers_with_the_models_defaults_prompt_and_template(cluster: Served) -> None:
    system = {"role": "system", "content": SYSTEM.strip()}
    whole = [system, {"role": "user", "content": QUESTION}]
    rendered = tokens(engine(cluster), {"model": MODEL, "messages": whole})
    status, text, _ = post(f"{engine(cluster)}/detokenize", {"model": MODEL, "tokens": rendered})
    assert status == 200 and text["prompt"].endswith(f"user says {QUESTION}\nassistant says "), "the template's file"
    assert tokens(cluster.url, {"model": ALIAS, "messages": whole}) == rendered, "we render what the engine renders"
    async with asking() as http:
        first = await ask(http, cluster.url, unlimited(model=ALIAS))
        assert first.status == 200, first.raw
        assert first.raw["model"] == ALIAS and first.headers["x-penstock-model"] == MODEL
        assert (first.output_tokens, first.finish_reason) == (OUTPUT, "length")
        assert first.prompt_tokens == len(rendered) > 2 * BLOCK, "with the system prompt"
        again = await ask(http, cluster.url, unlimited(messages=whole), stream=True)
        # What the client wrote itself and what the settings put in are one prompt, to router and engine.
        assert again.cached == again.expected == len(rendered) // BLOCK * BLOCK
        assert again.text == first.text and again.output_tokens == OUTPUT
        own = await ask(http, cluster.url, {**unlimited(model=ALIAS), "max_completion_tokens": 2})
        assert own.output_tokens == 2, "the client's own limit counts"
        text_only = await ask(http, cluster.url, {**completion(PROMPT), "model": ALIAS, "max_tokens": None})
        assert text_only.output_tokens == OUTPUT


async def test_a_name_is_shared_by_the_model_and_an_adapter(cluster: Served) -> None:
    async with asking() as http:
        texts = {
            name: (await ask(http, cluster.url, {**completion(PROMPT, 12), "model": name})).text
            for name in (MODEL, "poet")
        }
        answered: Counter[str] = Counter()
        for session in range(12):
            headers = {"x-penstock-session-id": str(session)}
            answer = await ask(http, cluster.url, {**completion(PROMPT, 12), "model": SHARED}, headers=headers)
            assert answer.status == 200 and answer.raw["model"] == SHARED
            served = answer.headers["x-penstock-model"]
            assert answer.text == texts[served], "the header says who spoke"
            answered[served] += 1
    assert set(answered) == {MODEL, "poet"}
    (names,) = [each for each in cluster.get("/admin/status")[1]["names"] if each["name"] == SHARED]
    assert names["requests"] == dict(answered)
