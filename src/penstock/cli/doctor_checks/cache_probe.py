"""Probes the view of each engine's cache: sends every worker the same new prompt twice and compares three accounts.

The router's prediction, the engine's report in its answer, and the growth of the engine's own counter must agree; so
must the two counts of the prompt's tokens, and the two sizes of a block. It costs two prompts of some blocks and two
tokens per worker.
"""

import http.client
import json
import random
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.adapters.engines.dialects.dialect import samples
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.dialects.vllm import cache_labels
from penstock.adapters.engines.http.engine_access import OPEN, EngineAccess
from penstock.adapters.engines.pool_overrides import WITH_TIERS
from penstock.cli.doctor_checks.finding import Finding, Level
from penstock.cli.shared.admin_client import AdminClient, ClusterUnreachable, RequestRefused, path_part
from penstock.frontend.admin.admin_answers import ClusterStatus
from penstock.kernel.request_record import Explanation
from penstock.router.events import Decision
from penstock.router.status_rows import WorkerStatus

BLOCKS = 4
"""Fewest blocks of a prompt."""
PATIENCE = 5.0
"""Seconds for the engine's events to reach the index."""
TRIES = 4
"""Prompts to try where one is too long for the model; each is half as long."""
METRICS_TIMEOUT = 5.0
METRICS_MAX = 8 << 20
WORDS = ("water", "gate", "river", "wheel", "stone", "bridge", "valley", "pipe", "spring", "meadow", "signal", "copper")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One answer. ``predicted``: tokens that the router expected in the cache, by an index of kind ``index``.

    ``workers``: who answered, and who prefilled, empty where that was no other.
    ``counted``: the prompt's tokens by our count; ``tokens``: by the engine's; ``cached``: how many it reports cached.
    """

    workers: tuple[str, str]
    predicted: int
    index: str
    counted: int
    tokens: int | None
    cached: int | None
    hits: float | None
    """Growth of the engine's counter of cached tokens."""


MetricsReader = Callable[[str], str | None]
"""Returns the text of the /metrics of an engine's URL; None where it can't be read from here."""


def probe(
    cluster: AdminClient, keyed: AdminClient, status: ClusterStatus, *, unknown: bool, metrics: MetricsReader
) -> Iterator[Finding]:
    """Probe every worker that can take requests.

    Args:
        cluster: for /admin.
        keyed: the same cluster, with the key for /v1.
        unknown: whether to probe servers of unknown kind too; the operator may pay for their tokens.
    """
    blind = {model.name for model in status.models if not model.tokenizer}
    for worker in status.workers:
        name = worker.id
        if worker.why_not:
            yield _new_finding("info", f"{name} was not probed: it {worker.why_not}")
        elif worker.engine == "openai" and not unknown:
            yield _new_finding(
                "info",
                f"{name} was not probed: it does not say what kind of server it is, and tokens may cost",
                "'penstock doctor --probe' asks it all the same",
            )
        elif worker.model in blind:
            yield _new_finding("info", f"{name} was not probed: without a tokenizer there is no prediction to check")
        else:
            yield from _probe_worker(cluster, keyed, worker, metrics)


def _probe_worker(
    cluster: AdminClient, keyed: AdminClient, worker: WorkerStatus, metrics: MetricsReader
) -> Iterator[Finding]:
    name, size = worker.id, worker.block_size
    yield from _block_size(worker, metrics)
    before = None if worker.kv_events is None else worker.kv_events.applied
    try:
        first, prompt = _send_new_prompt(cluster, keyed, worker, BLOCKS * (size or 64), metrics)
        heard = before is None or _heard(cluster, name, before)
        second = _send_probe(cluster, keyed, worker, prompt, metrics)
    except (ClusterUnreachable, RequestRefused) as error:
        yield _new_finding("error", f"{name} could not be probed: {error.message}", error.hint)
        return
    if name not in second.workers:
        others = " and ".join(filter(None, second.workers)) or "another"
        yield _new_finding("error", f"{name} was pinned, and {others} answered", "please report it")
        return
    yield from _token_count_findings(name, first)
    if worker.paired and worker.role == "decode" and worker.kv_events is None:
        yield _new_finding("ok", f"{name}: answers what {second.workers[1]} prefills, and keeps no prefix of its own")
        return
    if worker.kv_events is None:
        yield _new_finding(
            "warning",
            f"{name} announces no KV events: its cache is guessed from what it was sent",
            "start the engine with KV events on; docs/guides/engines.md has the flags of each",
        )
        return
    if not heard:
        yield _new_finding(
            "error",
            f"{name} computed a new prompt, and no KV event of it came within {PATIENCE:g} s",
            _why_silent(worker.url),
        )
        if second.index != "exact":
            return
    yield from _agreement(name, size, second, heard=heard)


def _agreement(name: str, size: int | None, answer: ProbeResult, *, heard: bool) -> Iterator[Finding]:
    """Compare our prediction for the repeated prompt with the engine's report and counter."""
    if answer.cached is None:
        yield _new_finding(
            "info",
            f"{name} does not tell how much of a prompt came from its cache, so our view can't be checked",
            "vLLM tells it with --enable-prompt-tokens-details, SGLang with --enable-cache-report",
        )
        return
    # The last block of a fully cached prompt is computed once more, for its first token.
    full = size is not None and answer.predicted > 0 and answer.predicted == answer.tokens
    expected = answer.predicted - (size or 0) if full else answer.predicted
    whole = "" if not full else f" (all {answer.tokens}, of which it computes the last {size} again)"
    if answer.index != "exact":
        text = f"{name} is not known exactly: the prediction came from the {answer.index} index"
        yield _new_finding("warning" if heard else "error", text, "'penstock status' shows how each cache is known")
    elif expected != answer.cached:
        yield _new_finding(
            "error",
            f"{name}: we predicted {expected} cached tokens{whole} of a repeated prompt, and it had {answer.cached}",
            "other traffic may have pushed the prompt out: try again when it is quiet; else please report it",
        )
    elif answer.hits is not None and answer.hits < answer.cached:
        yield _new_finding(
            "warning",
            f"{name} says that {answer.cached} tokens came from its cache, but its counter grew by {answer.hits:g}",
            "its answers and its metrics disagree; do both come from the same server?",
        )
    else:
        counter = "" if answer.hits is None else f", and its counter grew by {answer.hits:g}"
        yield _new_finding("ok", f"{name}: predicted {expected} cached tokens{whole}, it had {answer.cached}{counter}")


def _token_count_findings(name: str, answer: ProbeResult) -> Iterator[Finding]:
    if answer.tokens is not None and answer.counted != answer.tokens:
        yield _new_finding(
            "error",
            f"{name} counts {answer.tokens} tokens where we count {answer.counted}: the tokenizers differ",
            "set models.NAME.tokenizer to the folder of the very model that the engine serves",
        )


def _block_size(worker: WorkerStatus, metrics: MetricsReader) -> Iterator[Finding]:
    labels = (cache_labels(metrics(worker.url)) or {}) if worker.engine in WITH_TIERS else {}
    theirs, ours = labels.get("block_size"), worker.block_size
    if theirs is not None and theirs.isdigit() and ours is not None and int(theirs) != ours:
        yield _new_finding(
            "error",
            f"{worker.id} has blocks of {theirs} tokens, and we take them for {ours}",
            "leave block_size out of the pool's settings: the engine tells it",
        )


def _send_new_prompt(
    cluster: AdminClient, keyed: AdminClient, worker: WorkerStatus, words: int, metrics: MetricsReader
) -> tuple[ProbeResult, str]:
    """Send a prompt that was never sent before; where it is too long for the model, a shorter one."""
    rng = random.SystemRandom()
    for attempt in range(TRIES):
        prompt = " ".join(rng.choices(WORDS, k=max(8, words >> attempt)))
        try:
            return _send_probe(cluster, keyed, worker, prompt, metrics), prompt
        except RequestRefused as error:
            if error.status != 400 or attempt == TRIES - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _send_probe(
    cluster: AdminClient, keyed: AdminClient, worker: WorkerStatus, prompt: str, metrics: MetricsReader
) -> ProbeResult:
    """Send a prompt to one worker, and collect every account of it."""
    name, url = worker.id, worker.url
    counter = dialect_of(worker.engine).counters.hits
    before = samples(metrics(url) or "") if counter is not None else {}
    body = {"model": worker.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer, headers = keyed.post("/v1/completions", body, dict, {"x-penstock-worker": name})
    after = samples(metrics(url) or "") if counter is not None else {}
    request = headers.get("x-penstock-request-id", "")
    decisions = cluster.get(f"/admin/explain/{path_part(request)}", Explanation[Decision]).decisions
    mine = [each for each in decisions if each.chosen.worker == name]
    decision = next(reversed(mine or decisions), None)
    candidates = [] if decision is None else decision.candidates
    chosen = next((each for each in candidates if decision is not None and each.target == decision.chosen), None)
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    known = counter is not None and counter in before and counter in after
    return ProbeResult(
        workers=(headers.get("x-penstock-worker", ""), headers.get("x-penstock-prefill-worker", "")),
        predicted=int(headers.get("x-penstock-expected-cached-tokens", "0")),
        index="none" if chosen is None else chosen.index,
        counted=0 if decision is None else decision.isl,
        tokens=usage.get("prompt_tokens"),
        cached=details.get("cached_tokens"),
        hits=after[counter] - before[counter] if known and counter is not None else None,
    )


def _heard(cluster: AdminClient, worker: str, before: int) -> bool:
    """Wait until the router has applied more of a worker's KV events than before."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        rows = cluster.get("/admin/status", ClusterStatus).workers
        events = next((row.kv_events for row in rows if row.id == worker), None)
        if events is not None and events.applied > before:
            return True
        time.sleep(0.05)
    return False


def _why_silent(url: str) -> str:
    """Return what keeps an engine's events from us, as far as this machine can find out."""
    try:
        sources = json.loads(_fetch_text(f"{url.rstrip('/')}/kv_event_sources") or "{}")
        endpoint = str(sources["0"]["endpoint"])
        host, _, port = endpoint.partition("://")[2].rpartition(":")
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except (KeyError, TypeError, ValueError):
        return "is its event socket reachable from the frontend? docs/guides/engines.md says how it must be bound"
    except OSError:
        return (
            f"nobody listens at {endpoint}: an endpoint without a star makes the engine's socket connect. Give it "
            f"tcp://*:{port}, or bind it here with --events '@{endpoint}'"
        )
    return f"{endpoint} can be reached from here; is its topic the one that the frontend asks for?"


def engine_metrics(url: str, access: EngineAccess = OPEN) -> str | None:
    """Read an engine's metrics; None where it can't be reached from here."""
    return _fetch_text(f"{url.rstrip('/')}/metrics", access)


def _fetch_text(url: str, access: EngineAccess = OPEN) -> str | None:
    try:
        asked = urllib.request.Request(url, headers=dict(access.headers))
        with urllib.request.urlopen(asked, timeout=METRICS_TIMEOUT, context=access.tls) as answer:
            return str(answer.read(METRICS_MAX).decode("utf-8", "replace"))
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return None


def _new_finding(level: Level, text: str, hint: str | None = None) -> Finding:
    return Finding(level, "cache", text, hint)
