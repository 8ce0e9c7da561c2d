"""`penstock up` as a new user meets it: one command, real processes, then everything that can go wrong."""

import base64
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, alive, post, request, served, stream, until
from tests.media_files import png

FAST = ["--frontend.port", "0", "--set", "models.sim.pools.main.sim.timing.speed_up=20"]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("up"), "up", *FAST) as cluster:
        yield cluster


def test_it_prints_what_to_try_next(up: Served) -> None:
    for word in ("Model", "Endpoint", "Page", "Run"):
        assert up.find(word)
    assert "penstock status" in up.text and "curl" in up.text
    assert len(up.children()) == 9, "four engines, each with its shim, and a frontend"


def test_chat_unary_and_streamed_give_the_same_text(up: Served) -> None:
    status, body, headers = up.chat("Tell me a story")
    assert status == 200 and body["usage"]["completion_tokens"] == 8
    assert headers["x-penstock-worker"] and headers["x-penstock-request-id"]
    fields = {"model": "sim", "messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 8}
    events = list(stream(f"{up.url}/v1/chat/completions", fields))
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"] for event in events[:-1]]
    text = "".join(choices[0]["delta"].get("content") or "" for choices in pieces if choices)
    assert text == body["choices"][0]["message"]["content"]


def test_completions_take_text_and_token_ids(up: Served) -> None:
    for prompt in ("Once upon a time", [72, 101, 108, 108, 111]):
        status, body, _ = post(f"{up.url}/v1/completions", {"model": "sim", "prompt": prompt, "max_tokens": 4})
        assert status == 200 and body["usage"]["completion_tokens"] == 4


def test_a_repeated_prompt_goes_to_the_worker_that_holds_it(up: Served) -> None:
    text = "The same long story. " * 60
    _, first, one = up.chat(text)
    _, second, two = up.chat(text)
    assert one["x-penstock-worker"] == two["x-penstock-worker"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0 and int(two["x-penstock-expected-cached-tokens"]) == cached
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]


def test_a_repeated_prompt_with_an_image_is_found_behind_the_image_and_another_image_is_not(up: Served) -> None:
    def ask(grey: int) -> tuple[int, int]:
        image = base64.b64encode(png(448, 448, grey)).decode()
        parts = [
            {"type": "text", "text": "Look at this. " * 40},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
            {"type": "text", "text": "What does it show? " * 40},
        ]
        fields = {"model": "sim", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
        status, body, headers = post(f"{up.url}/v1/chat/completions", fields)
        assert status == 200
        return int(headers["x-penstock-expected-cached-tokens"]), body["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    assert ask(1) == (0, 0)
    # The engine's KV events say what the image is, and may come a moment after its first answer.
    again = [(0, 0)]

    def known() -> bool:
        again.append(ask(1))
        return again[-1][0] == again[-1][1] > 256

    until(known, 10, lambda: f"the image's own tokens, and the text behind it, are not known: {again}")
    other = ask(2)
    assert 0 < other[0] == other[1] < again[-1][1] - 256


def test_an_unknown_model_is_a_404_that_lists_the_known_ones(up: Served) -> None:
    status, body, _ = up.chat(model="gpt-nope")
    assert status == 404 and "sim" in body["error"]["message"]


def test_models_health_and_metrics(up: Served) -> None:
    assert up.get("/v1/models")[1]["data"][0]["id"] == "sim"
    assert up.get("/v1/models/sim")[0] == 200 and up.get("/v1/models/sim/ready")[0] == 200
    assert up.get("/health")[0] == 200 and up.get("/live")[0] == 200
    up.chat("for the metrics")
    metrics = up.get("/metrics")[1]
    for name in (
        "dynamo_frontend_requests_total",
        "dynamo_frontend_time_to_first_token_seconds",
        "dynamo_component_router_kv_hit_rate",
        "penstock_",
    ):
        assert name in metrics


def test_other_v1_routes_are_proxied_through_an_allow_list(up: Served) -> None:
    status, body, _ = post(f"{up.url}/v1/embeddings", {"model": "sim", "input": "hello"})
    assert status == 200 and body["data"][0]["embedding"]
    assert post(f"{up.url}/v1/secret", {"model": "sim"})[0] == 404


def test_clear_kv_blocks_reaches_every_engine(up: Served) -> None:
    text = "Forget me. " * 80
    up.chat(text)
    status, body, _ = post(f"{up.url}/clear_kv_blocks", {})
    assert status == 200 and "main-3" in json.dumps(body)
    _, again, _headers = up.chat(text)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def penstock(*arguments: str, status: int | tuple[int, ...] = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode in (status if isinstance(status, tuple) else (status,)), done.stdout + done.stderr
    return done.stdout + (done.stderr if done.returncode == 2 else "")


def test_status_explain_and_doctor_speak_of_it(up: Served) -> None:
    _, _, headers = up.chat("Explain yourself")
    found = json.loads(penstock("status", "--url", up.url, "--json"))
    assert len(found["workers"]) == 4 and found["mode"] == "kv"
    told = penstock("explain", headers["x-penstock-request-id"], "--url", up.url)
    assert headers["x-penstock-worker"] in told
    table = json.loads(penstock("explain", headers["x-penstock-request-id"], "--url", up.url, "--json"))
    assert len(table["decisions"][0]["candidates"]) == 4
    penstock("doctor", "--url", up.url)


def test_chat_command_and_bench_command(up: Served, tmp_path: Path) -> None:
    assert penstock("chat", "--url", up.url, "Hello").strip()
    # Status 1 says that the machine was too busy for the figures to count; the requests are answered all the same.
    told = penstock(
        *("bench", up.url, "--workload", "chat", "--rate", "20", "--requests", "40", "--seed", "1"),
        *("--out", str(tmp_path), "--json"),
        status=(0, 1),
    )
    found = json.loads(told)
    assert found["requests"]["ok"] == 40
    assert list(tmp_path.rglob("report.html"))


def test_the_run_folder_holds_hashes_and_lengths_never_text(up: Served) -> None:
    up.chat("a very secret sentence")
    until(lambda: (up.run / "requests.jsonl").exists(), 15)
    until(lambda: (up.run / "metrics.csv").exists(), 15)
    run = json.loads((up.run / "run.json").read_text())
    assert run["schema"] == 2 and run["clock_anchor"]
    for path in up.run.rglob("*"):
        if path.is_file():
            assert b"very secret sentence" not in path.read_bytes(), path


def test_its_journal_comes_to_the_same_decisions_again(up: Served) -> None:
    up.chat("Write this down, but not in words")

    def replayed(*more: str) -> Any:
        return json.loads(penstock("replay", str(up.run), "--limit", "1000", "--json", *more))

    until(lambda: replayed()["decisions"] > 0, 15)
    found = replayed("--set", "router.mode=round_robin")
    assert found["mismatch"] is None and 0 < found["whole"]["decisions"] <= found["decisions"]
    assert any("round robin over 4 workers" in other["reason"] for other in found["others"])


def test_join_adds_engines_and_takes_them_out(up: Served, tmp_path: Path) -> None:
    with served(tmp_path, "join", "--url", up.url, "--replicas", "1"):
        until(lambda: len(up.get("/admin/status")[1]["workers"]) == 5, 20)
    until(lambda: len(up.get("/admin/status")[1]["workers"]) == 4, 20)


def test_attach_puts_a_frontend_before_servers_that_run(up: Served, tmp_path: Path) -> None:
    urls = [worker["url"] for worker in up.get("/admin/status")[1]["workers"]][:2]
    # Engines of ours tell their KV events only to who knows their cluster's secret.
    env = {"PENSTOCK_CLUSTER_SECRET": (up.run / "cluster.secret").read_text().strip()}
    with served(tmp_path, "attach", *urls, "--frontend.port", "0", env=env) as front:
        status, _body, _headers = front.chat("through the second frontend")
        assert status == 200
        until(lambda: [each["index"] for each in front.get("/admin/status")[1]["workers"]] == ["exact"] * 2, 20)
    with served(tmp_path, "attach", *urls, "--frontend.port", "0") as stranger:
        assert stranger.chat("requests need no secret")[0] == 200
        until(lambda: all(w["index"] != "exact" for w in stranger.get("/admin/status")[1]["workers"]), 20)
        # Until its first event is refused, the past of each engine is merely not known yet.
        until(lambda: "another cluster secret" in json.dumps(stranger.get("/admin/status")[1]["findings"]), 20)
        assert "another cluster secret" in penstock("doctor", "--url", stranger.url)


def test_a_killed_engine_loses_no_new_request_and_comes_back(tmp_path: Path) -> None:
    with served(tmp_path, "up", *FAST) as cluster:
        workers = cluster.get("/admin/status")[1]["workers"]
        victim = workers[0]["pid"]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            running = [pool.submit(cluster.chat, f"question {n} " * 40, max_tokens=40) for n in range(40)]
            os.kill(victim, signal.SIGKILL)
            running += [pool.submit(cluster.chat, f"later {n} " * 40) for n in range(40)]
            outcomes = [future.result() for future in running]
        later = outcomes[40:]
        assert [status for status, _, _ in later] == [200] * 40
        # What ran on the victim had sent nothing yet (unary answers), so it was placed again.
        assert [status for status, _, _ in outcomes] == [200] * 80
        until(lambda: all(w["pid"] != victim and w["state"] == "ready" for w in _workers(cluster)), 30)
        assert len(_workers(cluster)) == 4


def _workers(cluster: Served) -> list[dict[str, object]]:
    found = cluster.get("/admin/status")[1]["workers"]
    return found if len(found) == 4 else [{"pid": None, "state": "missing"}]


def test_a_killed_frontend_is_started_again(tmp_path: Path) -> None:
    arguments = ["--frontend.port", str(free_port()), "--set", "models.sim.pools.main.replicas=1"]
    with served(tmp_path, "up", *arguments) as cluster:
        first = frontend_pid(cluster)
        os.kill(first, signal.SIGKILL)

        def another_answers() -> bool:
            try:
                return request(f"{cluster.url}/health")[0] == 200 and frontend_pid(cluster) != first
            except (OSError, StopIteration):
                return False

        until(another_answers, 30, lambda: cluster.text)
        assert cluster.chat()[0] == 200


def frontend_pid(cluster: Served) -> int:
    pids = [int(key.rpartition("-")[2]) for key in cluster.keys("frontends/frontend-0-")]
    return next(pid for pid in pids if alive(pid))


def test_a_killed_supervisor_leaves_no_process_behind(tmp_path: Path) -> None:
    cluster = Served(["up", *FAST], tmp_path).wait_up()
    family = cluster.children()
    assert len(family) == 9
    cluster.process.kill()
    cluster.process.wait(10)
    until(lambda: not any(alive(pid) for pid in family), 40)


def test_ctrl_c_lets_a_running_stream_finish(tmp_path: Path) -> None:
    with served(tmp_path, "up", "--frontend.port", "0", "--set", "models.sim.pools.main.replicas=1") as cluster:
        body = {"model": "sim", "messages": [{"role": "user", "content": "slowly"}], "max_tokens": 150}
        events = stream(f"{cluster.url}/v1/chat/completions", body)
        next(events)
        cluster.process.send_signal(signal.SIGINT)
        rest = list(events)
        assert rest[-1] == "[DONE]"
        assert cluster.process.wait(40) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("router:\n  mode: kvv\n", ["bad.yaml:2:9", "kv"]),
        ("ruoter: {}\n", ["bad.yaml:1:1", "router"]),
        ("frontend:\n  port: 99999\n  host: 0.0.0.0\n", ["port", "bad.yaml:2"]),
    ],
)
def test_nothing_starts_on_a_bad_config(tmp_path: Path, text: str, words: list[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(text)
    told = penstock("up", str(bad), status=2)
    assert all(word in told for word in words) and "Traceback" not in told
    assert not (tmp_path / "runs").exists()


def test_an_unknown_environment_name_is_an_error(tmp_path: Path) -> None:
    cluster = Served(["up", *FAST], tmp_path, env={"PENSTOCK_ROUTER__MODUS": "kv"})
    assert cluster.process.wait(30) == 2
    until(lambda: "PENSTOCK_ROUTER__MODE" in cluster.text, 5, lambda: cluster.text)


def test_a_taken_port_is_named_with_a_way_out(up: Served, tmp_path: Path) -> None:
    port = up.url.rsplit(":", 1)[1]
    cluster = Served(["up", "--frontend.port", port], tmp_path)
    assert cluster.process.wait(30) == 2
    until(lambda: port in cluster.text and "--frontend.port" in cluster.text, 5, lambda: cluster.text)


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cluster = Served(["up", *FAST, "--set", f"runs.dir={tmp_path / 'file'}"], tmp_path)
    assert cluster.process.wait(30) == 2
    until(lambda: "runs.dir" in cluster.text, 5, lambda: cluster.text)


@pytest.mark.slow
def test_losing_the_discovery_folder_freezes_membership_and_traffic_goes_on(tmp_path: Path) -> None:
    with served(tmp_path, "up", *FAST) as cluster:
        discovery = cluster.run / "discovery"
        moved = cluster.run / "moved"
        discovery.rename(moved)
        discovery.write_text("not a folder")
        until(lambda: "frozen" in json.dumps(cluster.get("/admin/status")[1]["findings"]), 30)
        assert [cluster.chat(f"still there {n}")[0] for n in range(8)] == [200] * 8
        discovery.unlink()
        moved.rename(discovery)
        until(lambda: "frozen" not in json.dumps(cluster.get("/admin/status")[1]["findings"]), 30)
        assert len(cluster.get("/admin/status")[1]["workers"]) == 4


def test_two_frontends_share_a_port_and_see_each_others_load(tmp_path: Path) -> None:
    arguments = ["--frontend.processes", "2", "--set", "models.sim.pools.main.sim.timing.speed_up=20"]
    with served(tmp_path, "up", "--frontend.port", str(free_port()), *arguments) as cluster:
        text = "A shared beginning of some length. " * 30
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(lambda n: cluster.chat(text + str(n)), range(40)))
        assert {status for status, _, _ in outcomes} == {200}
        assert len(cluster.children()) == 10
        assert cluster.get("/admin/status")[1]["frontends"], "it sees the other one"


def test_several_models_in_one_config(tmp_path: Path) -> None:
    config = tmp_path / "two.yaml"
    config.write_text(
        """
frontend: {port: 0}
models:
  small: {tokenizer: "builtin:sim", pools: {main: {engine: sim, replicas: 1, sim: {timing: {speed_up: 20}}}}}
  other/model: {tokenizer: "builtin:sim", pools: {main: {engine: sim, replicas: 1, sim: {timing: {speed_up: 20}}}}}
"""
    )
    with served(tmp_path, "up", str(config)) as cluster:
        for model in ("small", "other/model"):
            assert cluster.chat(model=model)[0] == 200
        assert cluster.get("/v1/models/other/model")[0] == 200
