"""Does a video have the same blocks under another name, and another video other ones, on a real vLLM?"""

import base64
from pathlib import Path
from typing import Any

from tests.live.test_media import files
from tests.media_files import data_url
from tests.vllm.seeing.watcher import attached, told_apart

LENGTH = 4 * 64
"""Tokens of a film: four frames."""


def video(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


async def test_blocks_behind_a_video_follow_its_frames_and_not_its_name(
    venv: Path, watching: Path, tmp_path: Path
) -> None:
    films = watching / "films"
    ball, disc = (films / "ball.mp4").read_bytes(), (films / "disc.mp4").read_bytes()
    frames = [base64.b64encode((films / f"ball-{number}.jpg").read_bytes()).decode() for number in range(4)]
    mixed = [*frames[:3], frames[0]]
    names = {"one.mp4": ball, "two.mpeg": ball, "other.mp4": disc}
    with attached(venv, watching, tmp_path, "--trust-remote-code") as watched:
        with files(**names) as (site, fetched):
            same = [video(site + "one.mp4"), video(site + "two.mpeg"), video(data_url(ball, "video/mp4"))]
            others = [video(site + "other.mp4"), video(data_url(disc[:-1] + b"x", "video/mp4"))]
            await told_apart(watched, LENGTH, same, others)
        assert sorted(fetched) == ["one.mp4", "other.mp4", "two.mpeg"], "each URL was fetched once"
        film, cut = (video("data:video/jpeg;base64," + ",".join(each)) for each in (frames, mixed))
        await told_apart(watched, LENGTH, [film, {**film, "uuid": "a-name-of-the-client"}], [cut])
