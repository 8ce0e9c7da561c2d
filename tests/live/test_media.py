"""Is an image that many ask about fetched once, encoded once in the cluster, and found again in the engines' caches?"""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.adapters.listen_address import free_port
from tests.live.cluster import request, served, until
from tests.media_files import data_url, jpeg, png, wav

CAT, DOG = png(448, 448, 1), png(448, 448, 2)
LONG = "the river and the village beside the mountain " * 12


@contextmanager
def files(**found: bytes) -> Iterator[tuple[str, list[str]]]:
    """Serve files on loopback; yield the URL and the list of what was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path[1:])
            data = found[self.path[1:].partition("?")[0]]
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.send_header("cache-control", "max-age=600")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", asked
    finally:
        server.shutdown()
        server.server_close()


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def counts(page: str, name: str) -> dict[str, float]:
    """Return a counter's values by its label ``outcome`` or ``result``, summed over the others."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith(f"{name}{{"):
            labels, value = line.rsplit(" ", 1)
            key = next(
                part.split('"')[1] for part in labels.split("{")[1].split(",") if part.startswith(("out", "res"))
            )
            found[key] = found.get(key, 0.0) + float(value)
    return found


def test_one_image_is_fetched_and_encoded_once_whoever_asks_and_however(tmp_path: Path) -> None:
    store = tmp_path / "embeddings"
    store.mkdir()
    sim = {"block_size": 16, "timing": {"speed_up": 50}, "encoder": {"overhead": 0.0}}
    pools = {
        "eyes": {"role": "encode", "replicas": 2, "embeddings": str(store), "sim": sim},
        "main": {"replicas": 2, "embeddings": str(store), "sim": sim},
    }
    config = {
        "models": {"m": {"tokenizer": "builtin:sim", "pools": pools}},
        "frontend": {"port": free_port(), "media": {"private_hosts": ["127.0.0.1"]}},
        "canary": {"idle": 0},
    }
    (tmp_path / "c.json").write_text(json.dumps(config))
    with files(a=CAT, b=CAT, dog=DOG, film=jpeg(448, 448)) as (site, asked), served(tmp_path, "up", "c.json") as front:

        def ask(*parts: Any) -> dict[str, Any]:
            content = [{"type": "text", "text": LONG}, *parts, {"type": "text", "text": LONG}]
            body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
            body["nvext"] = {"extra_fields": ["worker_id"]}
            status, answer = request(f"{front.url}/v1/chat/completions", json.dumps(body).encode())
            assert status == 200, answer
            usage: dict[str, Any] = answer["usage"]
            return usage

        def router() -> dict[str, float]:
            return counts(request(f"{front.url}/metrics")[1], "penstock_media_total")

        until(lambda: len(front.get("/admin/status")[1]["workers"]) == 4, 20.0)
        first = ask(image(site + "a"))
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        until(lambda: list(store.glob("*/encoder_cache.safetensors")), 5.0)
        blocks = first["prompt_tokens"] // 16 * 16

        def cached(*parts: Any) -> int:
            return int(ask(*parts)["prompt_tokens_details"]["cached_tokens"])

        # The same bytes at another URL, and as data, are the same image: its blocks are found again, to the last one.
        until(lambda: cached(image(site + "b")) >= blocks - 16, 10.0)
        assert cached(image(data_url(CAT))) >= blocks - 16
        before = cached(image(site + "dog"))
        assert 0 < before < blocks - 256, "another image has the text before it, and nothing more"
        film, sound = {"type": "video_url", "video_url": {"url": site + "film"}}, wav()
        frames = {"type": "video_url", "video_url": {"url": ",".join([data_url(jpeg(448, 448), "video/jpeg"), "AA=="])}}
        assert "frame 1" in str(refused(front.url, frames)) and "not video" in str(refused(front.url, film))
        clip = {"type": "audio_url", "audio_url": {"url": data_url(sound, "audio/wav")}}
        same = {"type": "input_audio", "input_audio": {"data": data_url(sound).partition(",")[2], "format": "wav"}}
        heard = ask(clip)["prompt_tokens"] // 16 * 16
        until(lambda: cached(same) >= heard - 16, 10.0)
        found = router()
        assert found["encoded"] == 3.0 and found["failed"] == found["here"] == 0.0, found
        assert found["cached"] >= 3.0
        urls = [worker["url"] for worker in front.get("/admin/status")[1]["workers"]]
        engines = [counts(request(f"{url}/metrics")[1], "penstock_sim_media_total") for url in urls]
        assert sum(each["encoded"] for each in engines) == 3.0, "cat, dog and the sound, once in the cluster"
        assert sorted(asked) == ["a", "b", "dog", "film"], "each URL was fetched once"
        page = request(f"{front.url}/metrics")[1]
        assert counts(page, "penstock_media_fetches_total")["fetched"] == 4.0
        file = front.run / "requests.jsonl"  # written for many requests at once
        until(lambda: file.exists() and '"media_cached":1' in file.read_text(), 20.0)
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert {"media": 1, "media_cached": 0}.items() <= records[0].items()
        assert any(record.get("media_cached") == 1 for record in records)
        legs = [leg["role"] for leg in records[0]["legs"]]
        assert legs == ["encode", "aggregated"]


def refused(url: str, part: dict[str, Any]) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    status, answer = request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    assert status == 400, answer
    return answer
