"""Response metadata: headers with the routing result, and ``nvext`` where the client requested it."""

import time

import msgspec

from penstock.frontend.exchange.token_timing import TokenTiming
from penstock.frontend.exchange.upstream_request import UpstreamRequest, ignored_hints, warming_card
from penstock.frontend.prompt.request_body import Parsed
from penstock.kernel.values import JsonObject
from penstock.router.events import Dispatch


def marks(dispatch: Dispatch, job: UpstreamRequest) -> dict[str, str]:
    """Return the headers that name a request's workers, and its hints that have no effect on them."""
    decision = dispatch.decision
    ignored = () if job.hints is None or not job.hints.uncertain else ignored_hints(job, dispatch)
    return {
        "x-penstock-worker": str(decision.chosen),
        **({} if prefill_of(dispatch) is None else {"x-penstock-prefill-worker": str(prefill_of(dispatch))}),
        "x-penstock-expected-cached-tokens": str(decision.expected_cached_tokens),
        "x-penstock-queue-ms": f"{decision.queued * 1e3:.1f}",
        **({"x-penstock-ignored-hints": ", ".join(ignored)} if ignored else {}),
        **(job.limits or {}),
    }


def prefill_of(dispatch: Dispatch) -> str | None:
    """Return the worker that did the prefill, where that was another one."""
    handoff = dispatch.handoff
    return None if handoff is None or handoff.source is None else handoff.source.id


def extra_fields(job: UpstreamRequest, dispatch: Dispatch, timing: TokenTiming) -> JsonObject:
    """Return the fields that ``nvext.extra_fields`` requests. Milliseconds and tokens."""
    decision = dispatch.decision
    names = () if job.hints is None else job.hints.extra
    out: JsonObject = {}
    if "worker_id" in names:
        worker, rank = decision.chosen
        out["worker_id"] = {
            "worker_id": worker,
            "dp_rank": rank,
            "prefill_worker_id": prefill_of(dispatch) or worker,
            "decode_worker_id": worker,
        }
    if names and (ignored := ignored_hints(job, dispatch)):
        out["ignored_hints"] = list(ignored)
    if names and job.hints is not None and job.hints.warms and (card := warming_card(job, dispatch)) is not None:
        out["speculative_prefill"] = card.id
    if "timing" in names:
        out["timing"] = {
            "queue_ms": round(decision.queued * 1e3, 3),
            "ttft_ms": None if timing.ttft is None else round(timing.ttft * 1e3, 3),
            "total_time_ms": round((time.monotonic() - timing.arrived) * 1e3, 3),
            "expected_cached_tokens": decision.expected_cached_tokens,
            "cached_tokens": timing.cached,
        }
    return out


def with_nvext(body: bytes, extra: JsonObject) -> bytes:
    """Return a JSON object with ``nvext`` added at its end; anything else is returned unchanged."""
    end = body.rstrip()
    if not end.startswith(b"{") or not end.endswith(b"}") or len(end) < 3:
        return body
    return end[:-1] + b',"nvext":' + msgspec.json.encode(extra) + b"}"


def before_end(out: bytes, job: UpstreamRequest, request: str, extra: JsonObject) -> bytes:
    """Put one more event before the end mark of a stream."""
    end = out.rfind(b"[DONE]")
    at = out.rfind(b"data:", 0, end) if end >= 0 else -1
    if at < 0 or job.parsed is None:
        return out
    return out[:at] + _chunk(job.parsed, request, extra) + out[at:]


def _chunk(parsed: Parsed, request: str, extra: JsonObject) -> bytes:
    """Return one event that holds ``nvext`` and no choice, as the usage chunk does."""
    chat = parsed.endpoint == "chat_completions"
    chunk: JsonObject = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": parsed.model,
        "choices": [],
        "nvext": extra,
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
