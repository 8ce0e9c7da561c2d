"""Is the plug-in inert unless switched on, does it tell what vLLM says, and does no fault of it reach vLLM?"""

import importlib
import logging
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from penstock.adapters.zmq_receive import shared_context
from penstock.inside import stats_publisher
from penstock.kernel.pass_report import STATS_ENV, PassReport

ROOT = Path(__file__).parents[2]


class StatLoggerBase:
    """Stands for vLLM's class; the real one asks for these methods and gives nothing."""


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plug-in's module, loaded as inside vLLM: by name, with vLLM's modules there."""
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["vllm.v1.metrics.loggers"].StatLoggerBase = StatLoggerBase  # type: ignore[attr-defined]
    monkeypatch.delenv(STATS_ENV, raising=False)
    monkeypatch.delitem(sys.modules, "penstock.inside.vllm_stats", raising=False)
    filters = logging.getLogger("vllm.v1.metrics.loggers").filters
    before = list(filters)
    yield importlib.import_module("penstock.inside.vllm_stats")
    filters[:] = before
    sys.modules.pop("penstock.inside.vllm_stats", None)
    for opened in stats_publisher._open.values():
        opened.close()
    stats_publisher._open.clear()


def scheduler(**more: Any) -> SimpleNamespace:
    """What vLLM 0.32 hands in, as far as we read it."""
    details = SimpleNamespace(
        iteration_index=7,
        num_ctx_requests=2,
        num_ctx_tokens=300,
        num_generation_requests=5,
        num_generation_tokens=6,
        elapsed_ms=12.5,
        is_dummy=False,
    )
    fields = {"num_running_reqs": 7, "num_waiting_reqs": 3, "num_skipped_waiting_reqs": 1, "kv_cache_usage": 0.5}
    return SimpleNamespace(**{"iteration_details": details, **fields, **more})


def subscriber(endpoint: str) -> "zmq.Socket[bytes]":
    socket = shared_context().socket(zmq.SUB)
    socket.linger = 0
    socket.rcvtimeo = 5000
    socket.subscribe(b"")
    socket.connect(endpoint)
    return socket


def heard(plugin: Any, logger: Any, socket: "zmq.Socket[bytes]", *args: Any, **kwargs: Any) -> PassReport:
    """Record a pass again and again until the subscription has got through, and return what arrived first."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    for _ in range(500):
        logger.record(*args, **kwargs)
        if poller.poll(10):
            return msgspec.msgpack.decode(socket.recv(), type=PassReport)
    raise AssertionError("nothing was published")


def test_it_is_the_entry_point_that_vllm_looks_for(plugin: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.stat_logger_plugins"]["penstock"].partition(":")
    assert module == plugin.__name__
    found = getattr(plugin, name)
    assert isinstance(found, type) and issubclass(found, StatLoggerBase)  # vLLM ends with an error where it is not


def test_without_its_environment_name_it_does_nothing(plugin: Any) -> None:
    logger = plugin.PassLogger(object(), 0)
    logger.log_engine_initialized()
    logger.record(scheduler(), None, mm_cache_stats=None, engine_idx=0)
    assert not logger.active
    assert stats_publisher._open == {}
    assert logging.getLogger("vllm.v1.metrics.loggers").filters == []


def test_a_pass_is_told_as_vllm_says_it(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATS_ENV, "tcp://127.0.0.1:*")
    logger = plugin.PassLogger(object(), 3)
    endpoint = stats_publisher._open["tcp://127.0.0.1:*"].endpoint
    with subscriber(endpoint) as socket:
        told = heard(plugin, logger, socket, scheduler(), SimpleNamespace(num_preempted_reqs=2), engine_idx=3)
        again = msgspec.msgpack.decode(socket.recv(), type=PassReport) if socket.poll(50) else None
    assert (told.rank, told.wall) == (3, 0.0125)
    assert (told.prefill_requests, told.prefill_tokens) == (2, 300)
    assert (told.decode_seqs, told.decode_tokens) == (5, 6)
    assert (told.waiting, told.running, told.kv_usage, told.preemptions) == (4, 7, 0.5, 2)
    assert again is None or again.number == told.number + 1


def test_what_vllm_does_not_say_is_absent(plugin: Any) -> None:
    bare = SimpleNamespace(iteration_details=scheduler().iteration_details)
    told = plugin.pass_report(bare.iteration_details, bare, None, 0, 0)
    assert (told.waiting, told.running, told.kv_usage, told.preemptions) == (None, None, None, None)


def test_passes_of_idle_ranks_and_those_without_details_are_left_out(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(STATS_ENV, "tcp://127.0.0.1:*")
    logger = plugin.PassLogger(object(), 0)
    dummy = scheduler()
    dummy.iteration_details.is_dummy = True
    logger.record(dummy, None)
    logger.record(None, None)
    for _ in range(3):
        logger.record(scheduler(iteration_details=None), None)
    assert logger.active
    assert stats_publisher._open["tcp://127.0.0.1:*"].next_number() == 0
    said = [r for r in caplog.records if "--enable-logging-iteration-details" in r.getMessage()]
    assert len(said) == 1


def test_a_fault_is_logged_once_and_never_reaches_vllm(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(STATS_ENV, "tcp://127.0.0.1:*")
    logger = plugin.PassLogger(object(), 0)
    renamed = SimpleNamespace(iteration_details=SimpleNamespace(tokens="everything has another name now"))
    for _ in range(3):
        logger.record(renamed, None)
    assert not logger.active
    assert len([r for r in caplog.records if "switched off" in r.getMessage()]) == 1


def test_an_endpoint_that_is_taken_or_nonsense_leaves_it_off(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for endpoint in ("nonsense", "tcp://256.0.0.1:1"):
        monkeypatch.setenv(STATS_ENV, endpoint)
        assert not plugin.PassLogger(object(), 0).active
    with shared_context().socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        monkeypatch.setenv(STATS_ENV, f"tcp://127.0.0.1:{port}")
        assert not plugin.PassLogger(object(), 0).active
    assert "can't be bound" in caplog.text


def test_ranks_of_one_server_share_the_endpoint(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATS_ENV, "tcp://127.0.0.1:*")
    assert plugin.PassLogger(object(), 0).active and plugin.PassLogger(object(), 1).active
    assert len(stats_publisher._open) == 1


def test_only_the_line_of_every_pass_is_kept_out_of_vllms_log(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(STATS_ENV, "tcp://127.0.0.1:*")
    plugin.PassLogger(object(), 0)
    plugin.PassLogger(object(), 1)
    log = logging.getLogger("vllm.v1.metrics.loggers")
    assert len(log.filters) == 1
    with caplog.at_level(logging.INFO):
        log.info("%sIteration(%d): %d context requests", "Engine 000: ", 4, 1)
        log.info("Engine 000: Avg prompt throughput: %.1f tokens/s", 3.0)
    assert [r.getMessage() for r in caplog.records if r.name == log.name] == [
        "Engine 000: Avg prompt throughput: 3.0 tokens/s"
    ]


def test_a_slow_subscriber_costs_the_engine_nothing(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATS_ENV, "tcp://127.0.0.1:*")
    logger = plugin.PassLogger(object(), 0)
    with subscriber(stats_publisher._open["tcp://127.0.0.1:*"].endpoint) as socket:
        first = heard(plugin, logger, socket, scheduler(), None)
        count = 5 * stats_publisher.HWM
        for _ in range(count):  # nobody reads meanwhile; a send that waited would never come back
            logger.record(scheduler(), None)
        assert logger.active
        assert stats_publisher._open["tcp://127.0.0.1:*"].next_number() > first.number + count
