"""A server whose list of models is of no use serves a model by the word of the settings, and is healthy where it says.

The shapes are those of Transformers' server 5.19 (500, or an empty list) and of others that copy the API in part.
"""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.adapters.engines.describe import describe
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.pool_overrides import UNLISTED
from penstock.cli.shared.attached_servers import ModelUnknown, attached_models
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.values import WorkerCard, WorkerId
from penstock_lab.report.bench.bench_plan import BenchOptions
from penstock_lab.report.bench.bench_run import model_and_block_size
from tests.adapters.answering import answering, health_now

STATUS, NO_JSON, EMPTY = "answers with status {}", "answers without JSON", "lists no model"
USELESS = [
    ((500, "Internal Server Error"), STATUS.format(500)),
    (None, STATUS.format(404)),
    ((405, ""), STATUS.format(405)),
    ((501, "{}"), STATUS.format(501)),
    ("<html>", NO_JSON),
    ("", NO_JSON),
    ({"object": "list", "data": []}, EMPTY),
    ({"data": None}, EMPTY),
    ({"data": [{"id": 3}, "m"]}, EMPTY),
    ([{"id": "m"}], EMPTY),
    ({"models": [{"name": "m"}]}, EMPTY),
]


def routes_of(listing: Any, **more: Any) -> dict[str, Any]:
    return {**({} if listing is None else {"/v1/models": listing}), **more}


async def described(url: str, http: aiohttp.ClientSession, model: str | None = "m") -> WorkerCard:
    return await describe(http, url, worker=WorkerId("w"), epoch=1, model=model)


@pytest.mark.parametrize("healthy", [{"/health": {"status": "ok"}}, {}], ids=["health", "no health"])
@pytest.mark.parametrize(("listing", "why"), USELESS)
async def test_a_name_given_by_hand_is_enough(listing: Any, why: str, healthy: dict[str, Any]) -> None:
    routes = routes_of(listing, **healthy)
    async with answering(routes) as url, aiohttp.ClientSession() as http:
        assert (await health_now(url, card=None)).lack is None, "before it is described"
        card = await described(url, http)
        assert (card.model, card.engine, card.adapters) == ("m", "openai", ())
        assert card.labels == {UNLISTED: f"/v1/models {why}"}
        models = await asyncio.to_thread(attached_models, [url], model="m")
        assert list(models) == ["m"]
        assert (await health_now(url, card=card)).lack is None
        routes["/v1/models"] = {"data": [{"id": "what is in its cache"}]}
        assert (await health_now(url, card=card)).lack is None, "its list never said anything of the model"
        routes["/health"] = (503, "ending")
        assert (await health_now(url, card=card)).lack == "/health answers 503"


@pytest.mark.parametrize(("listing", "why"), USELESS)
async def test_without_a_name_the_error_says_to_give_one(listing: Any, why: str) -> None:
    async with answering(routes_of(listing, **{"/health": ""})) as url, aiohttp.ClientSession() as http:
        with pytest.raises(ModelUnknown, match=r"/v1/models (answers|lists).*\(give --model NAME"):
            await asyncio.to_thread(attached_models, [url])
        with pytest.raises(EngineError, match=why):
            await described(url, http, model=None)


async def test_a_server_that_lists_others_does_not_serve_a_name_given_by_hand() -> None:
    async with answering({"/v1/models": {"data": [{"id": "other"}]}}) as url, aiohttp.ClientSession() as http:
        with pytest.raises(EngineError, match=r"does not serve 'm'; it lists \['other'\]"):
            await described(url, http)
        assert "it lists ['other']" in str((await health_now(url, card=None)).lack)


async def test_a_list_that_named_the_model_must_go_on_naming_it() -> None:
    routes: dict[str, Any] = {"/v1/models": {"data": [{"id": "m"}]}, "/health": ""}
    async with answering(routes) as url, aiohttp.ClientSession() as http:
        card = await described(url, http)
        assert UNLISTED not in card.labels
        routes["/v1/models"] = (500, "")
        assert (await health_now(url, card=card)).lack == "/v1/models answers 500"


@pytest.mark.parametrize(
    ("listing", "healthy", "words"),
    [
        ((503, "loading"), (503, "loading"), "still loads its model"),
        ((503, "loading"), None, "still loads its model"),
        ((500, ""), (503, ""), "still loads its model"),
        ((500, ""), (500, "dead"), "/health answers 500"),
        ((401, ""), "", "asks for an API key"),
        ((403, ""), "", "forbids us"),
        ((429, ""), "", "answers 429"),
    ],
)
async def test_a_server_that_is_not_ready_or_lets_nobody_in_is_not_taken(
    listing: Any, healthy: Any, words: str
) -> None:
    routes = routes_of(listing, **({} if healthy is None else {"/health": healthy}))
    async with answering(routes) as url, aiohttp.ClientSession() as http:
        with pytest.raises(EngineError, match=words):
            await described(url, http)


async def test_beside_servers_that_list_a_model_one_that_names_none_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody has said that it serves what they do; one that does not answer yet will say so itself."""
    async with (
        answering({"/v1/models": {"data": [{"id": "m"}]}}) as listing,
        answering({"/v1/models": (500, "")}) as bad,
    ):
        found = await asyncio.to_thread(attached_models, [listing, bad, "http://127.0.0.1:9"])
        assert found["m"]["pools"]["attached"]["urls"] == [listing, "http://127.0.0.1:9"]
        assert f"{bad} is left out" in capsys.readouterr().err
        found = await asyncio.to_thread(attached_models, [listing, bad], model="m")
        assert found["m"]["pools"]["attached"]["urls"] == [listing, bad]


async def test_a_name_that_is_a_folder_here_has_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    found = attached_models(["http://127.0.0.1:9"], model=str(tmp_path))
    assert found[str(tmp_path)]["tokenizer"] == str(tmp_path)


@pytest.mark.parametrize(("listing", "why"), USELESS)
async def test_the_load_generator_takes_the_name_too(listing: Any, why: str) -> None:
    async with answering(routes_of(listing)) as url, aiohttp.ClientSession() as http:
        assert await model_and_block_size(http, BenchOptions(url=url, model="m")) == ("m", None)
        with pytest.raises((EngineError, ConfigError)):
            await model_and_block_size(http, BenchOptions(url=url))


def test_a_refusal_of_the_name_is_not_the_clients_doing() -> None:
    pinned = "{\"detail\":\"Server is pinned to '/models/tiny'; requested 'm'.\"}"
    assert dialect_of("openai").refusal(400, pinned) == "fault"
    assert dialect_of("openai").refusal(422, '{"detail":"Unexpected fields in the request: {\'x\'}"}') == "client"
