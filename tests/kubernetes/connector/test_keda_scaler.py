"""KEDA's questions: a pool's recommendation as a metric, whether there is any, and no answer where that is unknown."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.kernel.errors import ConfigError
from penstock_extras.plugins.protobuf_messages import KEDA, message, service
from penstock_kubernetes.keda_scaler import AGE_MAX, METRIC, KedaScaler

grpc = pytest.importorskip("grpc")


class Asking:
    """A scaler with its own clock, and a client of it such as KEDA is one."""

    def __init__(self) -> None:
        self.now = 0.0
        self.scaler = KedaScaler(clock=lambda: self.now)
        self.channel: Any = None

    async def ask(self, method: str, question: Any) -> Any:
        path, kind, reply = service("ExternalScaler", KEDA)[method]
        call = self.channel.unary_unary(
            path, request_serializer=kind.SerializeToString, response_deserializer=reply.FromString
        )
        return await call(question, timeout=5)

    def stream(self, question: Any) -> Any:
        path, kind, reply = service("ExternalScaler", KEDA)["StreamIsActive"]
        call = self.channel.unary_stream(
            path, request_serializer=kind.SerializeToString, response_deserializer=reply.FromString
        )
        return call(question, timeout=10)


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    asking = Asking()
    port = await asking.scaler.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as asking.channel:
        yield asking
    await asking.scaler.close()


def scaled(pool: str) -> Any:
    return message("ScaledObjectRef", KEDA)(name="vllm", namespace="default", scalerMetadata={"pool": pool})


async def test_the_metric_of_a_pool_is_its_recommended_replicas(asking: Asking) -> None:
    await asking.scaler.recommend({"decode": 7, "prefill": 2})
    spec = (await asking.ask("GetMetricSpec", scaled("decode"))).metricSpecs[0]
    assert (spec.metricName, spec.targetSize) == (METRIC, 1)
    question = message("GetMetricsRequest", KEDA)(scaledObjectRef=scaled("decode"), metricName=METRIC)
    value = (await asking.ask("GetMetrics", question)).metricValues[0]
    assert (value.metricName, value.metricValue, value.metricValueFloat) == (METRIC, 7, 7.0)


async def test_a_pool_of_none_is_not_active_and_news_are_streamed(asking: Asking) -> None:
    await asking.scaler.recommend({"decode": 0})
    assert not (await asking.ask("IsActive", scaled("decode"))).result
    stream = asking.stream(scaled("decode"))
    assert not (await stream.read()).result
    await asking.scaler.recommend({"decode": 1})
    async with asyncio.timeout(5):
        assert (await stream.read()).result


async def test_news_that_come_while_an_answer_goes_out_are_streamed_too() -> None:
    scaler = KedaScaler()
    await scaler.recommend({"decode": 0})
    stream = scaler._actives(scaled("decode"), None)
    assert not (await anext(stream)).result
    await scaler.recommend({"decode": 1})  # nobody waits yet
    async with asyncio.timeout(5):
        assert (await anext(stream)).result


async def test_what_is_unknown_or_too_old_is_no_answer(asking: Asking) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="none yet") as unknown:
        await asking.ask("IsActive", scaled("decode"))
    assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE
    await asking.scaler.recommend({"decode": 3})
    with pytest.raises(grpc.aio.AioRpcError, match="'elsewhere'; the pools are decode"):
        await asking.ask("IsActive", scaled("elsewhere"))
    asking.now = AGE_MAX + 1
    with pytest.raises(grpc.aio.AioRpcError, match="61 s old") as old:
        await asking.ask("IsActive", scaled("decode"))
    assert old.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_port_that_another_server_has_is_an_error_of_the_settings(asking: Asking) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        with pytest.raises(ConfigError, match=r"external_scaler_port.*another server has it"):
            await KedaScaler().start(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_a_host_that_cannot_be_resolved_is_no_other_server() -> None:
    with pytest.raises(ConfigError, match="can't be resolved"):
        await KedaScaler().start("no-such-host.invalid:9001")
