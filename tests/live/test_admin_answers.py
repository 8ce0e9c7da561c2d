"""Is every answer of every admin route what its route says, on a cluster that serves and plans?"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.listen_address import free_port
from penstock.frontend.admin.admin_api import ADMIN_ROUTES, AdminRoute
from tests.live.cluster import post, served, until

CONFIG = """
slo: {ttft: 1s, itl: 50ms}
frontend: {port: PORT, processes: 2}
canary: {idle: 1s}
planner: {policy: slo, advisory: true, load_interval: 1s, throughput_interval: 5s, budget: {max_gpus: 8}}
models:
  sim:
    tokenizer: builtin:sim
    adapters: {clerk: ./clerk}
    pools:
      prefill: {role: prefill, replicas: 1, sim: {timing: {speed_up: 20}}}
      decode: {role: decode, replicas: 2, sim: {timing: {speed_up: 20}}}
"""
BODIES: dict[str, list[dict[str, Any]]] = {
    "scale": [{"pools": {"decode": 2}}],
    "drain": [{"name": "decode-1"}, {"name": "decode-1", "undo": True}],
    "flip": [{"name": "decode-0", "role": "decode"}],
    "restart": [{"force": True}],
    "set": [{"values": {"router.attempts_max": 4}}],
    "clearKvBlocks": [{}],
    "loadAdapter": [{"lora_name": "pilot", "lora_path": "clerk"}],
    "scaleAdapter": [{"name": "clerk", "workers": 1}, {"name": "clerk"}],
    "unloadAdapter": [{"lora_name": "pilot"}],
}
QUERIES = {"scope": "process", "ticks": "all", "limit": "3"}


def fits(answer: Any, kind: Any) -> bool:
    """Tell whether an answer is the kind's, no field more and none less."""
    try:
        read = msgspec.convert(answer, kind, strict=True, str_keys=True)
    except msgspec.ValidationError:
        return False
    return bool(msgspec.json.decode(msgspec.json.encode(read)) == answer)


def differs(answer: Any, kind: Any) -> str:
    try:
        read = msgspec.json.decode(msgspec.json.encode(msgspec.convert(answer, kind, str_keys=True)))
    except msgspec.ValidationError as error:
        return str(error)
    return f"{json.dumps(answer)[:4000]}\nis read as\n{json.dumps(read)[:4000]}"


def test_a_field_more_or_less_does_not_fit() -> None:
    kind = next(route.answers[0] for route in ADMIN_ROUTES if route.name == "restart")
    assert fits({"revision": "r"}, kind)
    assert not fits({"revision": "r", "more": 1}, kind) and not fits({}, kind) and not fits({"revision": 1}, kind)


@pytest.mark.slow
def test_every_admin_answer_is_read_whole_by_its_struct(tmp_path: Path) -> None:
    (tmp_path / "clerk").mkdir()
    (tmp_path / "clerk/adapter_config.json").write_text("{}")
    (tmp_path / "c.yaml").write_text(CONFIG.replace("PORT", str(free_port())))
    unseen = {(route.name, kind) for route in ADMIN_ROUTES for kind in route.answers}

    def check(route: AdminRoute, url: str, answer: Any) -> None:
        kinds = [kind for kind in route.answers if fits(answer, kind)]
        assert kinds, f"{url}\n" + "\n".join(differs(answer, kind) for kind in route.answers)
        unseen.difference_update((route.name, kind) for kind in kinds)

    with served(tmp_path, "up", "c.yaml") as cluster:
        ids = [cluster.chat(f"{number} " * 200)[2]["x-penstock-request-id"] for number in range(8)]
        until(lambda: cluster.get("/admin/planner/decisions?ticks=all")[1]["decisions"], 30, lambda: cluster.text)
        until(lambda: all(row["steps"] for row in cluster.get("/admin/status")[1]["workers"]), 30)
        for route in ADMIN_ROUTES:
            paths = {route.path.format(request=id, worker=worker) for id in ids for worker in ("prefill-0", "decode-0")}
            for path in sorted(paths):
                if route.method == "POST":
                    for body in BODIES[route.name]:
                        status, answer, _ = post(f"{cluster.url}{path}", body)
                        assert status == 200, answer
                        check(route, path, answer)
                    continue
                names = {parameter.name for parameter in route.query}
                for query in ("", *(f"?{name}={value}" for name, value in QUERIES.items() if name in names)):
                    status, answer = cluster.get(path + query)
                    if status == 404 and "scope" in query:
                        continue  # another process has it
                    assert status == 200, (path, answer)
                    check(route, path + query, answer)
    assert unseen == set()
