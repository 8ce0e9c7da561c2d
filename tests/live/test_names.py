"""Names, defaults and templates through a whole cluster of simulated engines."""

import json
from pathlib import Path
from typing import Any

from penstock.adapters.listen_address import free_port
from penstock_lab.report.run.run_files import recorded_explanation
from tests.live.cluster import Served, post, served, until

TEMPLATE = """{% for message in messages %}[{{ message.role }}] {{ message.content }}
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""
PROMPT = "You answer in one sentence. " * 12
FAST = "{timing: {prefill: [0, 1, 1], decode: [0, 0, 1]}}"
CONFIG = f"""
models:
  old:
    tokenizer: builtin:sim
    aliases: [gpt-4.1]
    defaults: {{max_tokens: 3}}
    system_prompt: file:prompt.txt
    chat_template: plain.jinja
    pools: {{main: {{replicas: 1, sim: {FAST}}}}}
  new:
    tokenizer: builtin:sim
    pools: {{main: {{replicas: 1, sim: {FAST}}}}}
names:
  chat: {{models: {{old: 1, new: 0}}, shadow: {{new: 1}}}}
"""


def ask(cluster: Served, model: str, *messages: str, system: str = "", **fields: Any) -> tuple[Any, dict[str, str]]:
    chat = [{"role": "user", "content": message} for message in messages]
    if system:
        chat.insert(0, {"role": "system", "content": system})
    body = {"model": model, "messages": chat, **fields}
    status, answer, headers = post(f"{cluster.url}/v1/chat/completions", body)
    assert status == 200, answer
    return answer, headers


def cached(answer: Any) -> int:
    found: int = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return found


def test_names_defaults_prompt_and_template_hold_together(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    (tmp_path / "plain.jinja").write_text(TEMPLATE)
    config = tmp_path / "names.yaml"
    config.write_text(CONFIG)
    with served(tmp_path, "up", str(config), "--frontend.port", str(free_port())) as cluster:
        first, _ = ask(cluster, "gpt-4.1", "hello there")
        assert first["model"] == "gpt-4.1" and first["usage"]["completion_tokens"] == 3
        # The engine renders the same template and system prompt as we do, whoever wrote the prompt.
        for again in (ask(cluster, "old", "hello there"), ask(cluster, "old", "hello there", system=PROMPT.strip())):
            answer, headers = again
            assert answer["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"] > 60
            assert cached(answer) == int(headers["x-penstock-expected-cached-tokens"]) > 48
        cards = {card["id"]: card for card in cluster.get("/v1/models")[1]["data"]}
        assert cards["gpt-4.1"]["root"] == cards["chat"]["root"] == "old" and cards["old"]["max_model_len"]

        _, headers = ask(cluster, "chat", "first", temperature=0)
        assert headers["x-penstock-model"] == "old"
        explained = cluster.get(f"/admin/explain/{headers['x-penstock-request-id']}")[1]["request"]
        assert (explained["model"], explained["name"]) == ("old", "chat")
        lines = cluster.run / "shadow.jsonl"
        until(lambda: lines.exists() and bool(lines.read_text()), 10)
        record = json.loads(lines.read_text().splitlines()[0])
        assert record["result"] == "different" and record["answered"]["model"] == "old"
        assert record["request"] == headers["x-penstock-request-id"] and record["shadow"]["seconds"] > 0
        copy = cluster.get(f"/admin/explain/{record['copy']}")[1]["request"]
        assert (copy["model"], copy["outcome"], copy["copy_of"]) == ("new", "ok", record["request"])
        copies, requests = cluster.run / "copies.jsonl", cluster.run / "requests.jsonl"
        until(lambda: copies.exists() and requests.exists() and record["request"] in requests.read_text(), 10)
        assert json.loads(copies.read_text().splitlines()[0])["id"] == record["copy"]
        assert record["copy"] not in requests.read_text(), "reports of the run are of clients' requests"
        assert recorded_explanation(cluster.run, record["copy"]).request.copy_of == record["request"]  # type: ignore[union-attr]
        assert "first" not in lines.read_text(), "no text of prompts or answers is recorded"

        weights = {"names.chat.models": "{old: 0, new: 1}"}
        status, answer, _ = post(f"{cluster.url}/admin/set", {"values": weights})
        assert status == 200, answer
        assert answer["changed"]["names.chat.models"]["new"] == {"old": 0.0, "new": 1.0}
        until(lambda: ask(cluster, "chat", "x")[1]["x-penstock-model"] == "new", 10)


def test_a_server_with_several_models_is_attached_with_all_of_them(tmp_path: Path) -> None:
    pools = f"{{main: {{replicas: 1, sim: {FAST}}}}}"
    config = tmp_path / "two.yaml"
    config.write_text(f"models: {{a: {{aliases: [a-too], pools: {pools}}}, org/b: {{pools: {pools}}}}}\n")
    behind = tmp_path / "behind"
    behind.mkdir()
    with (
        served(behind, "up", str(config), "--frontend.port", str(free_port())) as server,
        served(tmp_path, "attach", server.url, "--frontend.port", str(free_port())) as cluster,
    ):
        for name, model in (("a", "a"), ("a-too", "a"), ("org/b", "org/b")):
            answer, _ = ask(cluster, name, "hello", max_tokens=2)
            assert answer["model"] == name
            at_server = server.get("/admin/requests?limit=1")[1]["requests"][0]
            assert at_server["model"] == model
        assert {row["model"] for row in cluster.get("/admin/status")[1]["workers"]} == {"a", "org/b"}
