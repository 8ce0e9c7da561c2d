"""Does a sound have the same blocks under another name, and another sound other ones, on a real vLLM?"""

from pathlib import Path
from typing import Any

from tests.live.test_media import files
from tests.media_files import data_url
from tests.vllm.seeing.watcher import attached, told_apart

LENGTH = 100
"""Tokens of a sound: four seconds."""


def sound(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


async def test_blocks_behind_a_sound_follow_its_content_and_not_its_name(
    venv: Path, hearing: Path, tmp_path: Path
) -> None:
    low, high, packed = ((hearing / "sounds" / name).read_bytes() for name in ("low.wav", "high.wav", "low.flac"))
    inline = {"type": "input_audio", "input_audio": {"data": data_url(low).partition(",")[2], "format": "wav"}}
    with attached(venv, hearing, tmp_path) as watched, files(**{"a.wav": low, "b": low, "c": high}) as (site, fetched):
        same = [sound(site + "a.wav"), sound(site + "b"), sound(data_url(low, "audio/wav")), inline]
        await told_apart(watched, LENGTH, same, [sound(site + "c"), sound(data_url(packed, "audio/flac"))])
        assert sorted(fetched) == ["a.wav", "b", "c"], "each URL was fetched once"
