"""Life of a container: pull, start, probes, hooks, restarts with back-off, and its end."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.cluster_script import PACKAGES
from tests.doubles.kubernetes.controllers.cluster_objects import timestamp
from tests.doubles.kubernetes.kubelet.pod_sandbox import MissingObject, PodSandbox, command_of

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
        code = await _http_status(target, address, _port(target["port"], container))
        return "" if 200 <= code < 400 else f"HTTP probe failed with statuscode: {code}"
    return ""


def _port(port: int | str, container: JsonObject) -> int:
    if isinstance(port, int):
        return port
    ports = {each.get("name"): each["containerPort"] for each in container.get("ports") or ()}
    return int(ports.get(port, port))


async def _http_status(target: JsonObject, host: str, port: int) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        headers = {"Host": f"{host}:{port}", "User-Agent": "kube-probe/1.35", "Connection": "close"}
        lines = [f"GET {target.get('path') or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        words = (await reader.readline()).split()
        return int(words[1]) if len(words) > 1 else 0
    finally:
        writer.close()


PROCESS = Path(__file__).with_name("container_process.py")
BACK_OFF_S, BACK_OFF_LIMIT_S = 10.0, 300.0
"""Seconds before a crashed container starts again: doubled each time up to a limit."""
RETRY_S = 0.5
"""Seconds before it is looked again for a ConfigMap or Secret that is missing."""


class ContainerLife:
    """One container of a pod: ``run`` returns its last exit code once it is not to be started again."""

    def __init__(self, sandbox: PodSandbox, spec: JsonObject, restarts: str) -> None:
        self.spec = spec
        self.name = spec["name"]
        self._restarts = restarts
        self.restarts = 0
        self.started = self.ready = False
        self.pid = 0
        self.ended: int | None = None
        self._sandbox = sandbox
        self._state: JsonObject = {"waiting": {"reason": "PodInitializing"}}
        self._last: JsonObject = {}
        self._process: asyncio.subprocess.Process | None = None
        self._variables: dict[str, str] = {}
        self._stopping = False

    @property
    def status(self) -> JsonObject:
        """What the pod's status says of it."""
        return {
            "name": self.name,
            "image": self.spec.get("image", ""),
            "imageID": "",
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self._state,
            "lastState": self._last,
        }

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return "running" in self._state

    async def run(self) -> int:
        """Run it until it has ended for good."""
        back_off = 0.0
        await self._pull()
        while True:
            await self._sandbox.powered.wait()
            code = await self._run_once()
            self.ready = self.started = False
            if self._stopping or self._restarts == "Never":
                self.ended = code
                self._sandbox.report()
                return code
            self._last = self._state
            self._sandbox.report()
            if back_off:
                message = f"back-off {back_off:.0f}s restarting failed container={self.name}"
                await self._pause("CrashLoopBackOff", message, back_off)
                await self._sandbox.event("BackOff", f"Back-off restarting failed container {self.name}", warning=True)
            back_off = min(BACK_OFF_LIMIT_S, back_off * 2) or BACK_OFF_S
            self.restarts += 1

    async def _pause(self, reason: str, message: str, seconds: float) -> None:
        self._wait(reason, message)
        await asyncio.sleep(seconds / self._sandbox.speed)

    def _wait(self, reason: str, message: str = "") -> None:
        self._state = {"waiting": {"reason": reason, "message": message} if message else {"reason": reason}}
        self._sandbox.report()

    async def _pull(self) -> None:
        self._wait("ContainerCreating")
        name, image = self.spec.get("image", ""), self._sandbox.script.image(self.spec.get("image", ""))
        failures, back_off = 0, BACK_OFF_S
        while failures != image.failures:
            failures += 1
            self._wait("ErrImagePull", f'failed to pull image "{name}": not found')
            await self._sandbox.event("Failed", f'Failed to pull image "{name}": not found', warning=True)
            await asyncio.sleep(1.0 / self._sandbox.speed)
            await self._pause("ImagePullBackOff", f'Back-off pulling image "{name}"', back_off)
            back_off = min(BACK_OFF_LIMIT_S, back_off * 2)

    async def _run_once(self) -> int:
        """Start the process and wait for its end; return its exit code."""
        folder = self._sandbox.folder / "containers" / f"{self.name}-{self.restarts}"
        folder.mkdir(parents=True, exist_ok=True)
        spec = await self._process_spec(folder)
        path = folder / "process.json"
        path.write_text(json.dumps(spec))
        log = self._sandbox.logs / f"{self.name}.log"
        with log.open("wb") as file:
            words = (sys.executable, "-I", "-S", str(PROCESS), str(path))
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file
            )
        self._process = process
        self.pid = await _pid_of(Path(spec["pid_file"]), process)
        began = timestamp(time.time())
        self._state = {"running": {"startedAt": began}}
        await self._sandbox.event("Started", f"Started container {self.name}")
        if self._stopping:  # it was told to stop while it was being started
            self.signal(signal.SIGKILL)
        checks = asyncio.create_task(self._check())
        try:
            code = await process.wait()
        finally:
            checks.cancel()
        reason = "Completed" if code == 0 else "ContainerCannotRun" if code in (126, 127, 128) else "Error"
        ended = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": timestamp(time.time())}
        self._state = {"terminated": ended | ({"signal": code - 128} if code > 128 else {})}
        self.pid = 0
        return code

    async def _process_spec(self, folder: Path) -> JsonObject:
        environment, image = self._sandbox.environment, self._sandbox.script.image(self.spec.get("image", ""))
        while True:
            try:
                await environment.write_volumes()
                self._variables = environment.variables(self.spec, image)
                command = command_of(self.spec, image, self._variables)
                if command:
                    break
                self._wait("CreateContainerError", "no command specified: the image is not in the cluster's script")
            except MissingObject as missing:
                self._wait("CreateContainerConfigError", str(missing))
            await asyncio.sleep(RETRY_S)
        mounts = [*environment.mounts(self.spec), *self._sandbox.resolver_mounts()]
        security = self.spec.get("securityContext") or {}
        return {
            "command": command,
            "env": self._variables,
            "folder": self.spec.get("workingDir") or "/",
            "network": self._sandbox.network_path,
            "hostname": self._sandbox.hostname,
            "root": str(folder / "root"),
            "mounts": mounts,
            "programs": sorted({sys.prefix, sys.base_prefix, str(PACKAGES)}),
            "read_only": bool(security.get("readOnlyRootFilesystem")),
            "parent": os.getpid(),
            "pid_file": str(folder / "pid"),
        }

    # --- probes and signals -------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Run the probes: the startup probe first, then the others beside each other."""
        if self.spec.get("startupProbe"):
            passed = asyncio.Event()

            def judge(good: bool, problem: str) -> None:
                passed.set() if good else self._unhealthy("Startup", problem)

            startup = asyncio.create_task(self._probe("startupProbe", judge))
            try:
                await passed.wait()
            finally:
                startup.cancel()
        self.started = True
        self.ready = "readinessProbe" not in self.spec
        self._sandbox.report()
        async with asyncio.TaskGroup() as group:
            if "readinessProbe" in self.spec:
                group.create_task(self._probe("readinessProbe", self._judge_ready))
            if "livenessProbe" in self.spec:
                group.create_task(self._probe("livenessProbe", self._judge_alive))

    async def _probe(self, kind: str, judge) -> None:  # type: ignore[no-untyped-def]
        probe = self.spec[kind]
        await watch_probe(probe, lambda: self._do(probe), judge)

    async def _do(self, action: JsonObject) -> str:
        return await act(action, self.spec, self._sandbox.address, self.execute)

    def _judge_ready(self, good: bool, problem: str) -> None:
        if good != self.ready:
            self.ready = good
            self._sandbox.report()

    def _judge_alive(self, good: bool, problem: str) -> None:
        if not good:
            self._unhealthy("Liveness", problem)

    def _unhealthy(self, probe: str, problem: str) -> None:
        text = f"Container {self.name} failed {probe.lower()} probe ({problem}), will be restarted"
        self._sandbox.in_background(self._sandbox.event("Killing", text, warning=True))
        grace = self._sandbox.grace_s
        self._sandbox.in_background(self._end(time.monotonic() + grace))

    async def execute(self, command: Sequence[str]) -> int:
        """Run a command in the container; return its exit code."""
        into = ("--target", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd")
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            "nsenter", *into, "--", *command, env=self._variables, stdin=null, stdout=null, stderr=null
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()

    def signal(self, number: int) -> None:
        """Send a signal to the container's first process."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def stop(self, grace_s: float) -> None:
        """End it for good: its preStop hook, SIGTERM, and SIGKILL when the grace is over."""
        self._stopping = True
        if self.running:
            until = time.monotonic() + grace_s
            if (hook := (self.spec.get("lifecycle") or {}).get("preStop")) and grace_s > 0:
                with suppress(TimeoutError, OSError):
                    async with asyncio.timeout(grace_s):
                        await self._do(hook)
                until = max(until, time.monotonic() + 2.0)  # a hook that took all of it leaves two seconds
            await self._end(until)

    async def _end(self, until: float) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await process.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL) if self.pid else process.kill()
            await process.wait()

    def lose_power(self) -> None:
        """End it as its node goes off."""
        self.signal(signal.SIGKILL)


async def _pid_of(path: Path, process: asyncio.subprocess.Process) -> int:
    """Return the process id of the command, once it runs; 0 where it ended before."""
    while process.returncode is None:
        if pid := _read_pid(path):
            return pid
        await asyncio.sleep(0.005)
    return 0


def _read_pid(path: Path) -> int:
    text = path.read_text() if path.exists() else ""
    return int(text or 0)
