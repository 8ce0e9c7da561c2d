"""Simulated servers answer as vLLM does, as long as their block lasts."""

import aiohttp
import pytest

from penstock_lab.testing import simulated_servers


async def test_they_answer_until_the_end_of_the_block() -> None:
    async with aiohttp.ClientSession() as http:
        async with simulated_servers(2, model="tiny") as servers:
            for server in servers:
                body = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}
                async with http.post(f"{server.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["usage"]["completion_tokens"] == 3
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.get(f"{servers[0].url}/health")
