"""The object tier of a tier process, over a real S3 server: what one process stored another one loads."""

from pathlib import Path

import pytest

from tests.runtime.kv_tiers.conftest import Start
from tests.runtime.kv_tiers.plain_engine import PlainEngine, block_hashes
from tests.transfer.object_servers import BUCKET, s3_server

pytestmark = pytest.mark.live


def test_blocks_in_an_object_store_outlive_the_process_and_its_machine(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = block_hashes(8)
    with s3_server(tmp_path) as (options, _):
        for option, value in options.items():
            monkeypatch.setenv(option.upper() if option.startswith("aws") else f"AWS_{option.upper()}", value)
        url = ("--object-url", f"s3://{BUCKET}/tiers")
        with PlainEngine(start(64, 0, *url, name="a").socket) as engine:
            assert engine.welcome.tiers == ["host", "object"]
            engine.store(hashes)
            engine.until(lambda: engine.stored.get("object") == set(hashes))
        start.last.kill()
        with PlainEngine(start(64, 0, *url, name="b").socket) as engine:
            assert engine.ask(hashes).blocks == 8
            assert engine.load(hashes, first_row=32) == [True] * 8
            assert engine.right(hashes, [True] * 8, first_row=32)
