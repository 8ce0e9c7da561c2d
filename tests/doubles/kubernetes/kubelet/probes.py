"""Probes of a container: HTTP, TCP, gRPC health and commands, judged by their thresholds."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence

from penstock.kernel.values import JsonObject

Execute = Callable[[Sequence[str]], Awaitable[int]]
"""Runs a command in a container and returns its exit code."""


async def watch_probe(
    probe: JsonObject, once: Callable[[], Awaitable[str]], judge: Callable[[bool, str], None]
) -> None:
    """Probe until cancelled; call ``judge`` with each result that reaches its threshold and what was wrong."""
    await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
    right = wrong = 0
    while True:
        problem = ""
        try:
            async with asyncio.timeout(probe.get("timeoutSeconds") or 1):
                problem = await once()
        except TimeoutError:
            problem = "context deadline exceeded"
        except OSError as error:
            problem = str(error)
        right, wrong = (0, wrong + 1) if problem else (right + 1, 0)
        if right >= (probe.get("successThreshold") or 1) or wrong >= (probe.get("failureThreshold") or 3):
            judge(not problem, problem)
        await asyncio.sleep(probe.get("periodSeconds") or 10)


async def act(action: JsonObject, container: JsonObject, address: str, execute: Execute) -> str:
    """Do what a probe or a hook says; return what is wrong, "" for nothing.

    Raises:
        OSError: nobody answers.
    """
    if command := action.get("exec"):
        code = await execute(command["command"])
        return f"command exited with {code}" if code else ""
    if target := action.get("httpGet"):
        port = _port(target["port"], container)
        code = await _http_status(target, target.get("host") or address, port)
        return "" if 200 <= code < 400 else f"HTTP probe failed with statuscode: {code}"
    if target := action.get("tcpSocket"):
        _, writer = await asyncio.open_connection(target.get("host") or address, _port(target["port"], container))
        writer.close()
        return ""
    if target := action.get("grpc"):
        return await _grpc_health(f"{address}:{target['port']}", target.get("service") or "")
    if target := action.get("sleep"):
        await asyncio.sleep(target["seconds"])
    return ""


def _port(port: int | str, container: JsonObject) -> int:
    if isinstance(port, int):
        return port
    ports = {each.get("name"): each["containerPort"] for each in container.get("ports") or ()}
    return int(ports.get(port, port))


async def _http_status(target: JsonObject, host: str, port: int) -> int:
    secure = unverified() if target.get("scheme") == "HTTPS" else None  # as a real kubelet does
    reader, writer = await asyncio.open_connection(host, port, ssl=secure)
    try:
        headers = {"Host": f"{host}:{port}", "User-Agent": "kube-probe/1.35", "Connection": "close"}
        headers |= {each["name"]: each["value"] for each in target.get("httpHeaders") or ()}
        lines = [f"GET {target.get('path') or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        words = (await reader.readline()).split()
        return int(words[1]) if len(words) > 1 else 0
    finally:
        writer.close()


def unverified() -> ssl.SSLContext:
    """Return settings of a TLS client that takes any certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _grpc_health(target: str, service: str) -> str:
    import grpc

    name = service.encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""  # HealthCheckRequest.service, at most 127 bytes
    async with grpc.aio.insecure_channel(target) as channel:
        try:
            answer = await channel.unary_unary("/grpc.health.v1.Health/Check")(request)
        except grpc.aio.AioRpcError as error:
            return str(error.details())
    return "" if answer == b"\x08\x01" else "the service is not serving"
