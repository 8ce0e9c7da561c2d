"""Is each engine told of a hand-off what its protocol wants?"""

from typing import Any

import pytest

from penstock.adapters.engines.dialects.kv_transfer_protocol import HANDOVERS
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.events import Handoff


@pytest.mark.parametrize(
    ("labels", "sizes"), [({}, (1, 1)), ({"tp_size": "4", "engine_id": "e"}, (4, 1)), ({"pp_size": "2"}, (1, 2))]
)
def test_a_push_says_over_how_many_gpus_the_prefill_engine_is_spread(labels: dict[str, str], sizes: Any) -> None:
    source = WorkerCard(
        id=WorkerId("p"), epoch=1, model="m", url="http://127.0.0.1:1", bootstrap="127.0.0.1:9", labels=labels
    )
    told = HANDOVERS["push", "vllm"].decode({}, Handoff(protocol="push", key=1, source=source))["kv_transfer_params"]
    assert (told["tp_size"], told["pp_size"]) == sizes
    assert (told["remote_engine_id"], told["remote_host"]) == (labels.get("engine_id"), "127.0.0.1")


def test_hints_for_tiers_stay_beside_the_parameters_of_a_prefill() -> None:
    card = WorkerCard(id=WorkerId("p"), epoch=1, model="m", url="http://127.0.0.1:1")
    body = {"kv_transfer_params": {"lost": 1, "penstock": {"pin": 9}}}
    sent = HANDOVERS["completed", "vllm"].prefill(body, Handoff(protocol="completed", key=1), card)
    assert sent["kv_transfer_params"]["penstock"] == {"pin": 9} and sent["kv_transfer_params"]["do_remote_decode"]
    assert "lost" not in sent["kv_transfer_params"]


def test_both_sides_of_an_sglang_pair_meet_at_the_prefill_servers_own_port() -> None:
    def server(port: int) -> WorkerCard:
        meets = f"[::1]:{port}"
        return WorkerCard(id=WorkerId(f"p{port}"), epoch=1, model="m", url="http://[::1]:1", bootstrap=meets)

    sides = HANDOVERS["bootstrap", "sglang"]
    for port in (9001, 9002):
        one = Handoff(protocol="bootstrap", key=2**61 + port, source=server(port))
        sent = sides.prefill({"prompt": "a", "stream": True}, one, server(port))
        taken = sides.decode({}, one)
        assert taken == {"bootstrap_host": "[::1]", "bootstrap_port": port, "bootstrap_room": 2**61 + port}
        assert sent == {"prompt": "a", "stream": False, **taken}
