"""Job making: sends a request that begins a job to an engine, on the way of all requests, and remembers which one."""

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec

from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.http.http_exchange import AnswerFilter, HttpExchange, WholeAnswer
from penstock.frontend.openai.completions import carry
from penstock.frontend.openai.passthrough import ProxiedRequest, read_proxied
from penstock.frontend.prompt.request_body import IMAGES, IMAGES_MADE, VIDEO_REMIX, VIDEOS
from penstock.frontend.service import Service
from penstock.kernel.errors import EngineError
from penstock.kernel.values import WorkerCard
from penstock_extras.jobs.engine_jobs import FILE, IMAGE, VIDEO, JobKind, PlacedJob, jobs_of, renamed

_MADE = re.compile(rb'(?:https?://[^/\\"\s]+)?/v1/images/([^/\\"\s]+)/content(?=")')
"""URL of an image that lies at its engine, in the answer of a route that makes images at once."""


async def begin(kind: JobKind, service: Service, caller: HttpExchange) -> None:
    """POST /v1/videos and /v1/images"""
    timing = TokenTiming()
    await jobs_of(service).make_room()
    request = await read_proxied(service, caller, label=kind.route.rpartition("/")[2])
    await _carried(service, caller, _JobAnswer(caller, service, request, kind), request, timing)


async def remix(service: Service, caller: HttpExchange) -> None:
    """POST /v1/videos/{job}/remix: at the engine that has the video."""
    id = caller.path.removesuffix("/remix").rpartition("/")[2]
    source = await jobs_of(service).job(id, service.owner(caller.name), VIDEO)
    timing = TokenTiming()
    await jobs_of(service).make_room()
    request = await read_proxied(service, caller, label="videos", model=source.model)
    request = request.at(jobs_of(service).engine(source).id, source.path("/remix"))
    await _carried(service, caller, _JobAnswer(caller, service, request, VIDEO, source), request, timing)


async def make_images(service: Service, caller: HttpExchange) -> None:
    """POST /v1/images/generations and /v1/images/edits: what then lies at the engine is found there again."""
    timing = TokenTiming()
    await jobs_of(service).make_room()
    label = caller.path.removeprefix("/v1/").replace("/", "_")
    request = await read_proxied(service, caller, label=label)
    await _carried(service, caller, _ImagesAnswer(caller, service, request, IMAGE), request, timing)


async def upload(service: Service, caller: HttpExchange) -> None:
    """POST /v1/files of a file for engines: the one that takes it has it from now on."""
    timing = TokenTiming()
    await jobs_of(service).make_room()
    request = await read_proxied(service, caller, label="files")
    await _carried(service, caller, _JobAnswer(caller, service, request, FILE), request, timing)


Maker = Callable[[Service, HttpExchange], Awaitable[None]]
MAKERS: dict[str, Maker] = {
    VIDEOS: partial(begin, VIDEO),
    VIDEO_REMIX: remix,
    IMAGES: partial(begin, IMAGE),
    **dict.fromkeys(IMAGES_MADE, make_images),
}
"""Route -> what carries its POST."""


async def _carried(
    service: Service, caller: HttpExchange, answer: "_JobAnswer", request: ProxiedRequest, timing: TokenTiming
) -> None:
    caller.filters.insert(0, answer)
    await carry(caller, service, request.resolved, request.job, request.prompt, timing)


class _JobAnswer(AnswerFilter):
    """The answer to a request that begins a job: what its client gets has our id of it.

    Args:
        source: the job that it changes.
    """

    def __init__(
        self,
        caller: HttpExchange,
        service: Service,
        request: ProxiedRequest,
        kind: JobKind,
        source: PlacedJob | None = None,
    ) -> None:
        self._caller = caller
        self._service = service
        self._kind = kind
        self._model = request.resolved.model
        self._name = request.job.name if source is None else source.name
        self._source = None if source is None else source.id

    async def whole(self, answer: WholeAnswer) -> WholeAnswer:
        status, body, headers = answer
        if status >= 400:
            return answer
        return WholeAnswer(status, await self._noted(body, headers), {**headers, "content-type": "application/json"})

    async def _noted(self, body: bytes, headers: Mapping[str, str]) -> bytes:
        try:
            answer = msgspec.json.decode(body)
            engine_id = answer["id"]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
            raise EngineError("the engine's answer names no job (an object with an id)") from None
        job = await self._placed(str(engine_id), headers)
        return msgspec.json.encode(renamed(answer, job))

    async def _placed(self, engine_id: str, headers: Mapping[str, str]) -> PlacedJob:
        card = self._worker(headers.get("x-penstock-worker", ""))
        service = self._service
        return await jobs_of(service).add(
            card, engine_id, self._model, service.owner(self._caller.name), self._source, self._kind, self._name
        )

    def _worker(self, target: str) -> WorkerCard:
        """Return the worker that answered; ``target`` is its name, perhaps with a rank behind a slash."""
        for card in self._service.cluster.cards():
            if target == card.id or target.startswith(f"{card.id}/"):
                return card
        raise EngineError(f"the engine {target} left as it began the job; send the request again")


class _ImagesAnswer(_JobAnswer):
    """The answer to a request that makes images at once: URLs of those that lie at the engine have our ids."""

    async def whole(self, answer: WholeAnswer) -> WholeAnswer:
        status, body, headers = answer
        if status >= 400:
            return answer
        for url, engine_id in {match[0]: match[1] for match in _MADE.finditer(body)}.items():
            job = await self._placed(engine_id.decode(), headers)
            body = body.replace(url + b'"', f'{IMAGE.route}/{job.id}/content"'.encode())
            body = body.replace(b'"%b"' % engine_id, f'"{job.id}"'.encode())
        return WholeAnswer(status, body, headers)
