"""What is a chat's next turn worth that was prepared? TTFT of second turns with and without the hint, side by side."""

import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, post, served, stream, until

CHATS = 5
SPLIT = """
models:
  sim:
    tokenizer: builtin:sim
    pools:
      prefill: {role: prefill, replicas: 1, sim: SIM}
      decode: {role: decode, replicas: 1, sim: SIM}
router:
  handoff: {conditional: "off"}
""".replace("SIM", "{timing: {prefill: [0, 1, 1], decode: [0, 0, 1]}}")  # a ms per prompt token, and per pass of decode


def second_turn(cluster: Served, number: int, *, hint: bool) -> tuple[float, str]:
    """Return the TTFT of a chat's second turn in seconds, and what explain says of the preparation."""
    url = f"{cluster.url}/v1/chat/completions"
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"chat {number}: " + f"word{number} " * 50}]
    asked = {"model": "sim", "messages": messages, "max_tokens": 400, "ignore_eos": True}
    nvext = {"agent_hints": {"speculative_prefill": hint}}
    status, first, headers = post(url, {**asked, "nvext": nvext})
    assert status == 200
    explain = f"/admin/explain/{headers['x-request-id']}"
    if hint:
        until(lambda: cluster.get(explain)[1]["request"]["next_turn"], 10.0)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    began = time.monotonic()
    for event in stream(url, {**asked, "max_tokens": 2}):
        if '"content":"' in event.replace(" ", "") and '"content":""' not in event.replace(" ", ""):
            return time.monotonic() - began, cluster.get(explain)[1]["request"]["next_turn"]
    raise AssertionError("the second turn had no output")


@pytest.mark.slow
def test_a_prepared_turn_begins_sooner_where_another_worker_wrote_the_answer(tmp_path: Path) -> None:
    """After a hand-off the worker of the prefill has never read the answer: 400 tokens that it need not wait for."""
    config = tmp_path / "split.yaml"
    config.write_text(SPLIT)
    with served(tmp_path, "up", str(config), "--frontend.port", str(free_port())) as cluster:
        plain, prepared = [], []
        for number in range(CHATS):
            plain.append(second_turn(cluster, 2 * number, hint=False)[0])
            took, explained = second_turn(cluster, 2 * number + 1, hint=True)
            assert "computed by prefill-0" in explained
            prepared.append(took)
        print(f"TTFT of a second turn: {median(plain) * 1e3:.0f} ms, prepared {median(prepared) * 1e3:.0f} ms")
        assert median(prepared) < 0.6 * median(plain)
