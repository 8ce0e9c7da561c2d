"""What `penstock attach` takes from the servers that it is given."""

import asyncio
from pathlib import Path

from penstock.cli.shared.attached_servers import attached_models
from tests.adapters.answering import answering


async def test_the_tokenizer_of_an_sglang_on_this_machine_is_where_its_settings_say(tmp_path: Path) -> None:
    listing = {"data": [{"id": "m", "owned_by": "sglang", "root": "m", "parent": None}]}
    routes = {"/v1/models": listing, "/server_info": {"tokenizer_path": str(tmp_path)}}
    async with answering(routes) as url:
        found = await asyncio.to_thread(attached_models, [url])
        assert found["m"]["tokenizer"] is None, "there is none in that folder"
        (tmp_path / "tokenizer.json").write_text("{}")
        found = await asyncio.to_thread(attached_models, [url])
        assert found["m"]["tokenizer"] == str(tmp_path)
        del routes["/server_info"]
        found = await asyncio.to_thread(attached_models, [url])
        assert found["m"]["tokenizer"] is None
