"""Engines behind an API key, headers and TLS of their own: every exchange with them brings these, and no key leaks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.adapters.listen_address import free_port
from tests.certificate import make_certificate
from tests.live.cluster import post, request, served, stream, until

KEY = "sk-engine-5f2c91"
FAST = ["--set", "engine_stats.interval=0.2", "--set", "canary.idle=0.5", "--frontend.port", "0"]


@contextmanager
def guarded(folder: Path, *more: str) -> Iterator[int]:
    """Run a guarded engine; yield its port."""
    port = free_port()
    words = ["--port", str(port), "--key", KEY, "--refused", str(folder / "refused"), *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.live.guarded_engine", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "serving\n"
        yield port
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def refused(folder: Path) -> str:
    file = folder / "refused"
    return file.read_text() if file.exists() else ""


def mentions(folder: Path, secret: str) -> list[str]:
    """Return the files below a folder that have a secret in them."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [str(file) for file in files if secret.encode() in file.read_bytes()]


def penstock(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "penstock", *words],
        cwd=folder, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_every_exchange_with_an_engine_brings_its_key_and_trusts_its_certificate(tmp_path: Path) -> None:
    engine, ours, run = tmp_path / "engine", tmp_path / "ours", tmp_path / "here"
    for folder in (engine, ours, run):
        folder.mkdir()
    cert, cert_key = make_certificate(engine, "IP:127.0.0.1")
    mine, mine_key = make_certificate(ours)
    (ours / "team").write_text("a\n")
    tls = ("--cert", cert, "--cert-key", cert_key, "--clients", mine)
    with guarded(engine, *tls) as port:
        given = ["--api-key-env", "ENGINE_KEY", "--header", f"x-team: file:{ours / 'team'}"]
        given += ["--cacert", cert, "--cert", mine, "--cert-key", mine_key]
        words = ["attach", f"https://127.0.0.1:{port}", *given, *FAST]
        with served(run, *words, env={"ENGINE_KEY": KEY}) as cluster:
            assert cluster.chat()[0] == 200
            body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert list(stream(f"{cluster.url}/v1/chat/completions", body))[-1] == "[DONE]"
            worker = cluster.get("/admin/status")[1]["workers"][0]
            assert post(f"{cluster.url}/admin/clear_cache", {})[0] in (200, 404), worker
            assert post(f"{cluster.url}/v1/load_lora_adapter", {"lora_name": "l", "lora_path": "/x"})[0] < 500

            def looked_at() -> bool:
                row = cluster.get("/admin/status")[1]["workers"][0]
                return row["canary"]["verdict"] == "alive" and row["steps"] is not None

            until(looked_at, 20, lambda: json.dumps(cluster.get("/admin/status")[1]["workers"]))
            shown = [cluster.get(path)[1] for path in ("/admin/status", "/admin/settings", "/openapi.json", "/metrics")]
            assert KEY not in json.dumps(shown) and KEY not in cluster.text
    assert refused(engine) == "", "nobody asked it without the key"
    assert mentions(run, KEY) == []


def test_a_refusal_is_called_one_everywhere(tmp_path: Path) -> None:
    engine, run = tmp_path / "engine", tmp_path / "here"
    engine.mkdir(), run.mkdir()
    with guarded(engine) as port:
        url = f"http://127.0.0.1:{port}"
        attached = penstock(run, "attach", url, "--frontend.port", "0")
        assert (
            attached.returncode != 0
            and "it asks for an API key" in attached.stderr
            and "--api-key-file" in attached.stderr
        )
        pool = {"urls": [url], "engine": "openai"}
        config = run / "c.yaml"
        config.write_text(json.dumps({"models": {"sim": {"pools": {"main": pool}}}, "frontend": {"port": 0}}))
        checked = penstock(run, "config", "check", str(config))
        assert checked.returncode == 2
        assert "models.sim.pools.main.access.api_key_file" in checked.stderr, checked.stderr
        pool["access"] = {"api_key_env": "NOT_SET"}  # type: ignore[assignment]
        config.write_text(json.dumps({"models": {"sim": {"pools": {"main": pool}}}, "frontend": {"port": 0}}))
        for command in (["config", "check", str(config)], ["up", str(config)]):
            unset = penstock(run, *command)
            assert unset.returncode != 0 and "NOT_SET" in unset.stderr + unset.stdout, command
    forbidding = tmp_path / "forbidding"
    forbidding.mkdir()
    with guarded(forbidding, "--status", "403") as port:
        attached = penstock(run, "attach", f"http://127.0.0.1:{port}", "--frontend.port", "0")
        assert attached.returncode != 0 and "403: it forbids us" in attached.stderr


def test_an_untrusted_certificate_is_the_reason_that_is_given(tmp_path: Path) -> None:
    engine, run = tmp_path / "engine", tmp_path / "here"
    engine.mkdir(), run.mkdir()
    cert, key = make_certificate(engine, "IP:127.0.0.1")
    with guarded(engine, "--cert", cert, "--cert-key", key, "--clients", cert) as port:
        for scheme, trust, why in (
            ("https", [], "is not trusted"),
            ("https", ["--cacert", cert], ""),  # it asks for a certificate of its clients
            ("http", [], "does not answer as a server of HTTP does"),
        ):
            attached = penstock(run, "attach", f"{scheme}://127.0.0.1:{port}", *trust, "--frontend.port", "0")
            assert attached.returncode != 0 and why in attached.stderr, attached.stderr
            assert "--cert one of ours" in attached.stderr and "start the server" not in attached.stderr
            pool = {
                "urls": [f"{scheme}://127.0.0.1:{port}"],
                "engine": "openai",
                "access": {"ca": cert} if trust else {},
            }
            (run / "c.yaml").write_text(
                json.dumps({"models": {"sim": {"pools": {"main": pool}}}, "frontend": {"port": 0}})
            )
            checked = penstock(run, "config", "check", str(run / "c.yaml"))
            words = "certificate" if why == "is not trusted" else "it closes connections without an answer"
            assert checked.returncode == 2 and words in checked.stderr, checked.stderr
    with guarded(engine, "--cert", cert, "--cert-key", key) as port:
        config = run / "c.yaml"
        pool = {"urls": [f"https://127.0.0.1:{port}"], "engine": "openai"}
        config.write_text(json.dumps({"models": {"sim": {"pools": {"main": pool}}}, "frontend": {"port": 0}}))
        checked = penstock(run, "config", "check", str(config))
        assert checked.returncode == 2 and "certificate" in checked.stderr and "access.ca" in checked.stderr, (
            checked.stderr
        )


@pytest.mark.parametrize("kind", ["api_key_file", "api_key_env"])
def test_an_engine_that_is_started_here_asks_for_the_key_that_it_is_sent(tmp_path: Path, kind: str) -> None:
    from penstock.adapters.engines.http.engine_access import key_env, read_access
    from penstock.config.settings.pool_access_settings import PoolAccessSettings

    (tmp_path / "key").write_text(f"{KEY}\n")
    value = str(tmp_path / "key") if kind == "api_key_file" else "ENGINE_KEY"
    access = read_access(PoolAccessSettings(**{kind: value}), "access", {"ENGINE_KEY": KEY})
    assert access.headers == {"authorization": f"Bearer {KEY}"}
    assert key_env("vllm", access) == {"VLLM_API_KEY": KEY} and key_env("sim", access) == {}


def test_status_tells_of_a_key_that_became_wrong(tmp_path: Path) -> None:
    engine, run = tmp_path / "engine", tmp_path / "here"
    engine.mkdir(), run.mkdir()
    (run / "key").write_text("wrong")
    config = run / "c.yaml"
    with guarded(engine) as port:
        pool = {"urls": [f"http://127.0.0.1:{port}"], "engine": "openai", "access": {"api_key_file": "key"}}
        config.write_text(json.dumps({"models": {"sim": {"pools": {"main": pool}}}, "frontend": {"port": 0}}))
        with served(run, "up", str(config), "--supervise.wait", "true") as cluster:

            def pools() -> str:
                return json.dumps(request(f"{cluster.url}/admin/desired")[1])

            until(lambda: "main.access.api_key_file" in pools(), 20, pools)
