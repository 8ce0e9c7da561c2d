"""Do odd names of models lead anywhere: in a URL, in a body, in the config, in a file's name?"""

import json
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.reading.load import load
from penstock.config.reading.problems import ConfigProblems
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.worker_names import pool_prefix
from tests.frontend.stand import stand
from tests.live.cluster import served

NAMES = [
    "..",
    "../../../../etc/passwd",
    "..\\..\\windows",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/etc/passwd",
    "//evil.example/x",
    "http://evil.example/",
    "a\x00b",
    "a\r\nx-evil: 1",
    "a b",
    "",
    ".",
    "~root",
    "$(id)",
    "`id`",
    "a;b|c&d",
    "{{ 7 * 7 }}",
    "\u202eevil",
    "ﬁ",
    "m\u0301",
    "😀" * 100,
    "x" * 5000,
    "m/ready/ready",
    "<script>alert(1)</script>",
    "' OR 1=1 --",
    "\ufeffm",
    "M",
]


async def test_no_odd_name_in_a_url_is_a_model_or_a_file() -> None:
    async with stand() as s:
        for name in NAMES:
            for path in (
                f"/v1/models/{quote(name, safe='')}",
                f"/v1/models/{quote(name)}",
                f"/v1/models/{name[:200]}/ready",
            ):
                if any(ord(letter) < 33 or letter in "\\{}<>`| " for letter in path):
                    path = quote(path)
                answer = await s.http.get(path)
                text = await answer.text()
                assert answer.status in (400, 404) or (path.rstrip("/") == "/v1/models" and answer.status == 200), path
                assert "root:" not in text and "x-evil" not in answer.headers
                assert answer.headers["content-type"].startswith(("application/json", "text/plain"))
        assert (await s.chat()).status == 200


async def test_no_odd_name_in_a_body_is_a_model() -> None:
    async with stand() as s:
        for name in NAMES:
            for path, fields in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/embeddings", {"input": "x"}),
            ):
                answer = await s.http.post(path, json={"model": name, **fields})
                assert answer.status in (400, 404), (name, answer.status)
                found = json.loads(await answer.read())
                assert len(found["error"]["message"]) < 1000, "an error does not send back what was sent"
            assert (await s.http.post("/clear_kv_blocks", params={"model": name})).status in (400, 404)
            await (await s.http.get(f"/admin/explain/{quote(name, safe='')}")).read()
        assert s.engines[0].bodies == [] and s.engines[0].resets == 0
        metrics = await (await s.http.get("/metrics")).text()
        assert "evil" not in metrics and "passwd" not in metrics, "names that clients make up are no labels"


@given(st.text(min_size=1, max_size=300), st.integers(2, 3))
def test_a_workers_name_is_a_files_name(model: str, models: int) -> None:
    found = pool_prefix(model, models) + "p" * 64 + "-1023.log"
    assert len(found.encode()) < 255 and found.isascii() and "/" not in found and not found.startswith((".", "-"))
    assert Path(found).name == found


def problems(models: dict[str, ModelSettings] | str) -> str:
    try:
        load(None, (f"models={models}",))
    except ConfigProblems as error:
        return str(error)
    return ""


def test_the_config_refuses_names_that_can_not_be_told_apart_or_printed() -> None:
    pool = "{tokenizer: 'builtin:sim', pools: {main: {replicas: 1}}}"
    assert problems(f"{{'../a': {pool}, '..%2fb': {pool}}}") == ""
    assert "named like" in problems(f"{{'a/b': {pool}, 'a?b': {pool}}}")
    for name in ('"-rf"', '"a\\nb"', '"a\\x7f"', '"a\\n"', '"a b"', '"a\\x85b"', '"' + "x" * 257 + '"'):
        assert "not a valid name for a model" in problems(f"{{{name}: {pool}}}"), name
    assert "not a valid name for a pool" in problems('{m: {pools: {"main\\n": {replicas: 1}}}}')
    assert ClusterSettings(models={"m": ModelSettings(pools={"p": PoolSettings()})}).models


@pytest.mark.live
def test_a_cluster_of_oddly_named_models_stays_in_its_folder(tmp_path: Path) -> None:
    pool = "{tokenizer: 'builtin:sim', pools: {main: {replicas: 1, sim: {timing: {speed_up: 50}}}}}"
    names = ["../../../escape", "%2e%2e/x", "ä" * 200, "$(id)"]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "c.yaml").write_text(
        "frontend: {port: 0}\nmodels:\n" + "".join(f"  '{name}': {pool}\n" for name in names)
    )
    with served(tmp_path / "here", "up", "c.yaml") as cluster:
        for name in names:
            assert cluster.chat(model=name)[0] == 200
        assert cluster.get("/v1/models/" + quote(names[2]))[1]["id"] == names[2]
        logs = [path.name for path in (cluster.run / "logs").iterdir()]
        assert len(logs) == len(names) + 1, logs
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert {path.name for path in (tmp_path / "here").iterdir()} <= {"c.yaml", "runs", "state"}
