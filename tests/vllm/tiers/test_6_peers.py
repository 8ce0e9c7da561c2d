"""Two hosts with a tier process each: does one engine go on with what another engine computed and stored?

The engines run one after the other, since two take the machine; the tier process of the first outlives it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.adapters.listen_address import free_port
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock_kv.tiers.tier_admin_client import TierAdminClient
from penstock_kv.tiers.tier_admin_protocol import AskStat, CacheStat
from tests.kv.tiers.conftest import PATIENT
from tests.live.cluster import until
from tests.vllm.server import BLOCK
from tests.vllm.tiers.processes import HOST, STOP_LIMIT
from tests.vllm.tiers.test_1_guard import texts
from tests.vllm.tiers.tiered import CACHED, PROMPTS, native, prompts, tiered


@contextmanager
def tier_process(folder: Path, port: int, peer: str) -> Iterator[Path]:
    """Run a tier process, patient with its peer, in a folder of its own, as on another host; return its socket."""
    folder.mkdir()
    socket = folder / "s"
    command = [sys.executable, PATIENT, "cache", "serve", "--socket", str(socket), "--host", str(HOST)]
    command += ["--name", folder.name, "--peer-listen", f"127.0.0.1:{port}", "--peer", peer]
    env = {**os.environ, SECRET_ENV: "a secret of both hosts"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env)
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["socket"] == str(socket)
        yield socket
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def stat(socket: Path) -> CacheStat:
    client = TierAdminClient(socket)
    answer = client.ask(AskStat(), CacheStat)
    client.close()
    return answer


async def test_a_prompt_comes_from_the_host_memory_of_another_host(
    venv: Path, checkpoint: Path, tmp_path: Path
) -> None:
    here, there = free_port(), free_port()
    tier = {"type": "PenstockTier", "module_path": "penstock_kv.inside.vllm_tier"}
    with ExitStack() as stack:
        first_socket = stack.enter_context(tier_process(tmp_path / "a", here, f"b=127.0.0.1:{there}"))
        with tiered(venv, checkpoint, tmp_path / "1.log", native({**tier, "socket": str(first_socket)})) as one:
            first = await one.answers(prompts())
            until(lambda: stat(first_socket).tiers[0].blocks >= PROMPTS * CACHED // BLOCK, 20.0)
        second_socket = stack.enter_context(tier_process(tmp_path / "b", there, f"a=127.0.0.1:{here}"))
        with tiered(venv, checkpoint, tmp_path / "2.log", native({**tier, "socket": str(second_socket)})) as two:
            until(lambda: "peers are now: a" in (tmp_path / "b" / "log").read_text(), 30.0)
            again = await two.answers(prompts())
        assert texts(again) == texts(first)
        assert min(answer.cached for answer in again) >= CACHED, "nothing of it was computed by this engine before"
        assert stat(second_socket).tiers[0].blocks >= PROMPTS * CACHED // BLOCK, "they are in the own host tier now"
