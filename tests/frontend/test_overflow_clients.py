"""Do the clients people use go on to a larger model when ours is too small? LiteLLM and LangChain themselves."""

import importlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from tests.conftest import skip_or_fail
from tests.frontend.stand import Engine, Stand, stand
from tests.frontend.test_context_overflow import REFUSALS, refusing

pytestmark = pytest.mark.slow
LONG = "more words than thirty-two tokens hold, " * 20
OURS = "penstock itself"
"""Instead of an engine: the frontend counts the tokens."""


def client(name: str) -> Any:
    """Return a client's package, or skip."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the internet for prices, three times
    try:
        return importlib.import_module(name)
    except ImportError:
        return skip_or_fail(name, "it is not installed; pip install -e '.[clients]'")


@asynccontextmanager
async def small_and_large(who: str) -> AsyncIterator[Stand]:
    """Serve the models ``m``, too small for what is asked, and ``large``."""
    settings = ClusterSettings(models={"m": ModelSettings(), "large": ModelSettings()})
    tokenizer = load_tokenizer("builtin:sim") if who == OURS else None
    large = Engine("large")
    await large.start()
    try:
        async with stand(settings=settings, tokenizer=tokenizer, card={"max_model_len": 32}) as s:
            s.join(large, model="large")
            s.engines.append(large)
            if who != OURS:
                s.engines[0].reply = refusing(*REFUSALS[who])
            yield s
    finally:
        await large.stop()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither asks anybody but us: not for prices, not to tell how it is used."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.mark.parametrize("who", [OURS, *REFUSALS])
async def test_litellm_goes_on_to_the_larger_model(who: str) -> None:
    litellm = client("litellm")
    litellm.telemetry = False
    async with small_and_large(who) as s:
        common = {"api_base": f"{s.server.url}/v1", "api_key": "none", "max_retries": 0}
        models = [
            {"model_name": name, "litellm_params": {"model": f"{kind}/{name}", **common}}
            for name, kind in (("m", "openai"), ("large", "hosted_vllm"))
        ]
        router = litellm.Router(model_list=models, context_window_fallbacks=[{"m": ["large"]}], num_retries=0)
        messages = [{"role": "user", "content": LONG}]
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(model="hosted_vllm/m", messages=messages, **common)
        answer = await router.acompletion(model="m", messages=messages)
        assert answer.choices[0].message.content == "xxxxx" and len(s.engines[1].bodies) == 1


@pytest.mark.parametrize("who", [OURS, *REFUSALS])
async def test_langchain_goes_on_to_the_larger_model(who: str) -> None:
    langchain = client("langchain_openai")
    overflow = sys.modules["langchain_core.exceptions"].ContextOverflowError
    async with small_and_large(who) as s:
        small, large = (
            langchain.ChatOpenAI(model=name, base_url=f"{s.server.url}/v1", api_key="none", max_retries=0)
            for name in ("m", "large")
        )
        answer = await small.with_fallbacks([large], exceptions_to_handle=(overflow,)).ainvoke(LONG)
        assert answer.content == "xxxxx" and len(s.engines[1].bodies) == 1
