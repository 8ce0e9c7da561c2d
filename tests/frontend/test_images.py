"""Are two images told apart, and is one that an engine holds found again behind the same text?"""

import base64
import json
from itertools import pairwise
from typing import Any

import pytest

from penstock.adapters.engines.kv_events.kv_event_codec import KvDecoder, encode_batch
from penstock.frontend.media.media_content import part_of, read_inline
from penstock.frontend.prompt.prompt_hashing import BlockHashing, PromptHasher, PromptMedia
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer, load_tokenizer
from penstock.frontend.prompt.request_body import Parsed, media_of, parse, with_uuids
from penstock.kernel.hashing import MediaSpan, block_extras, block_hashes
from penstock.kernel.values import KvStored, Prompt
from penstock.router.kv_index.image_placeholders import Image, ImagePlaceholders
from penstock_lab.sim.request_reader import RequestReader
from penstock_lab.sim.sim_text import SimText
from penstock_lab.sim.sim_tokenizer import IMAGE_TOKENS
from tests.media_files import data_url, mp4, png

SIZE = 16
TOKENIZER = load_tokenizer("builtin:sim")
READER = RequestReader(SimText(), "m", (), 100_000)
CAT, DOG = (f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (png(448, 448, 1), png(448, 448, 2)))


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def chat(*parts: Any) -> Parsed:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    parsed = parse("chat_completions", json.dumps(body).encode())
    found = [part_of(part, "part") for part in media_of(parsed.fields)]
    parsed.media = tuple(None if part is None else read_inline(part, 1 << 20).id for part in found)
    return parsed


def at_frontend(parsed: Parsed, images: ImagePlaceholders, tokenizer: PromptTokenizer = TOKENIZER) -> Prompt:
    """Return the prompt as a frontend that has heard of some images sees it."""
    media = tuple(PromptMedia(id, None if id is None else images.find(id)) for id in parsed.media)
    hashing = BlockHashing(SIZE, 64, media=media, placeholders=frozenset(images.placeholders), usual=images.usual)
    return PromptHasher(1, 1, lambda name, took: None).prepare_now(parsed, tokenizer, hashing)


def at_engine(parsed: Parsed) -> tuple[list[int], list[int], list[MediaSpan]]:
    """Return chained hashes, tokens and images of what the simulated engine makes of it."""
    fields = {**parsed.fields, "messages": with_uuids(parsed) or parsed.fields["messages"]}
    ask = READER.read("chat", fields)
    return list(block_hashes(ask.prompts[0], SIZE, media=ask.media)), ask.prompts[0], ask.media


def heard(images: ImagePlaceholders, parsed: Parsed, cut: int = 0) -> None:
    """Let an engine that was asked announce its blocks, in one event or in two, as they come off the wire."""
    hashes, tokens, media = at_engine(parsed)
    for first, end in ((0, cut), (cut, len(hashes))):
        if first < end:
            event = KvStored(
                hashes=hashes[first:end],
                parent=hashes[first - 1] if first else None,
                tokens=tokens[first * SIZE : end * SIZE],
                block_size=SIZE,
                extras=block_extras(first, end, SIZE, None, None, media),
            )
            (again,) = KvDecoder().decode(encode_batch(0.0, [event])).events
            assert isinstance(again, KvStored) and again.extras == (event.extras if any(event.extras or ()) else None)
            images.learn(again, SIZE)


LONG = "the river and the village beside the mountain " * 12


@pytest.mark.parametrize("cut", [0, 3, 8, 15])
def test_a_prompt_with_an_image_that_an_engine_holds_has_the_engines_blocks(cut: int) -> None:
    images, parsed = ImagePlaceholders(), chat(LONG, image(CAT), LONG)
    heard(images, parsed, cut)
    assert images.find(str(parsed.media[0])) == Image(*images.placeholders, IMAGE_TOKENS)
    found = at_frontend(parsed, images)
    blocks, tokens, _ = at_engine(parsed)
    assert found.blocks == blocks and found.isl == len(tokens)


def test_the_text_before_an_image_matches_and_nothing_beyond_another_image() -> None:
    images, cat, dog = ImagePlaceholders(), chat(LONG, image(CAT), LONG), chat(LONG, image(DOG), LONG)
    before = at_frontend(cat, images).blocks  # nothing is known of any image
    engines, _, media = at_engine(cat)
    assert len(before) == media[0].start // SIZE and before == engines[: len(before)]
    heard(images, cat)
    other = at_frontend(dog, images)  # the placeholder is known, the dog is not
    assert other.blocks == before and other.isl == len(at_engine(dog)[1])
    assert at_engine(dog)[0][len(before)] != engines[len(before)], "an engine tells two images apart"


def test_several_images_side_by_side_keep_their_places() -> None:
    images = ImagePlaceholders()
    heard(images, chat(LONG, image(CAT)))
    heard(images, chat(image(DOG), LONG))
    parsed = chat(image(DOG), image(CAT), LONG, image(DOG))
    heard(images, parsed)
    assert at_frontend(parsed, images).blocks == at_engine(parsed)[0]


def stored(words: list[int], extras: Any, first: int, end: int) -> KvStored:
    """Return the event of the blocks from ``first`` to ``end`` of a prompt."""
    return KvStored(
        hashes=list(range(first, end)),
        parent=None,
        tokens=words[first * SIZE : end * SIZE],
        block_size=SIZE,
        extras=extras[first:end] if extras else None,
    )


def test_an_image_between_marks_is_learnt_with_them() -> None:
    """As Idefics3 has it: a fake token, a global mark, the image, a fake token again; seen whole, and in two events."""
    fake, mark, pixel = 900, 901, 902
    words = [*range(20), fake, mark, *[pixel] * 40, fake, *range(100, 133)]
    extras = block_extras(0, 6, SIZE, None, None, [MediaSpan("cat", 20, 43)])
    images = ImagePlaceholders()
    images.learn(KvStored(hashes=[1, 2, 3, 4, 5, 6], parent=None, tokens=words, block_size=SIZE, extras=extras), SIZE)
    whole = images.find("cat")
    assert whole == Image(pixel, 43, (fake, mark), (fake,)) and whole.tokens == words[20:63]
    parts = ImagePlaceholders()
    for first, end in ((0, 3), (3, 6)):
        parts.learn(stored(words, extras, first, end), SIZE)
    assert parts.find("cat") == whole


@pytest.mark.parametrize("cuts", [(), (2,), (3, 5), (1, 2, 3, 4, 5, 6)])
def test_a_video_with_marks_between_its_frames_is_learnt_as_a_whole(cuts: tuple[int, ...]) -> None:
    """As Qwen3-VL has it: each frame's time as text (`<0.5 seconds>`), a mark, its tokens, and a mark."""
    frame = [700, 701, 702, 703, 704, 705, 800, *[900] * 20, 801]
    video = frame * 4
    words = [*range(20), *video, *range(100, 100 + 24)]
    extras = block_extras(0, len(words) // SIZE, SIZE, None, None, [MediaSpan("film", 20, len(video))])
    images = ImagePlaceholders()
    bounds = [0, *cuts, len(words) // SIZE]
    for first, end in pairwise(bounds):
        images.learn(stored(words, extras, first, end), SIZE)
    found = images.find("film")
    assert found is not None and found.tokens == video and images.placeholders == {900}


def test_images_and_videos_and_sounds_have_placeholders_of_their_own() -> None:
    images = ImagePlaceholders()
    for token, id in ((900, "picture"), (901, "film"), (902, "sound")):
        words = [*range(8), *[token] * 30, *range(50, 60)]
        extras = block_extras(0, 3, SIZE, None, None, [MediaSpan(id, 8, 30)])
        images.learn(KvStored(hashes=[1, 2, 3], parent=None, tokens=words, block_size=SIZE, extras=extras), SIZE)
        assert images.find(id) == Image(token, 30)
    assert images.placeholders == {900, 901, 902}


FRAME = "<|user|>" + "<|image|>" * 20 + "<|system|>"
FAMILIES = {
    "Qwen2-VL": ("<|user|><|image|><|system|>", "<|user|>", "<|image|>" * 40, "<|system|>"),
    "Qwen3-VL": ("<|user|><|image|><|system|>", "", "".join(f"<0{second}>{FRAME}" for second in range(3)), ""),
    "one mark for marks and placeholders": ("<|user|>", "", "<|user|>" + "<|image|>" * 40 + "<|user|>", ""),
    "Gemma 3": ("<|user|>", "", "<|user|>" + "<|image|>" * 40 + "<|system|>", ""),
    "Ovis2.5": ("<|user|>", "", "<|image|>" * 40, ""),
}
"""Family -> what its template writes for a video; what stays of it before, the engine's tokens, what stays after."""


def watched(family: str) -> tuple[PromptTokenizer, Parsed, list[int], MediaSpan]:
    """Return a family's tokenizer, a chat with a video in it, and the tokens that an engine makes of it."""
    written, before, film, behind = FAMILIES[family]
    template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'video' %}"
        + written
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}<|assistant|>"
    )
    tokenizer = load_tokenizer("builtin:sim", template=template)
    parsed = chat(LONG, {"type": "video_url", "video_url": {"url": data_url(mp4(64, 64), "video/mp4")}}, LONG)
    head, middle, tail = (
        list(tokenizer.encode(text, special=False)) for text in (LONG + before, film, behind + LONG + "<|assistant|>")
    )
    return tokenizer, parsed, [*head, *middle, *tail], MediaSpan(str(parsed.media[0]), len(head), len(middle))


def learnt(tokens: list[int], span: MediaSpan) -> ImagePlaceholders:
    """Return what is known once an engine has announced these blocks."""
    images, end = ImagePlaceholders(), len(tokens) // SIZE
    images.learn(stored(tokens, block_extras(0, end, SIZE, None, None, [span]), 0, end), SIZE)
    return images


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "Gemma 3"])
def test_a_template_may_write_something_else_than_the_engine_puts_there(family: str) -> None:
    """The engine replaces what the template wrote, or only the placeholder in it; video frames have marks between."""
    tokenizer, parsed, tokens, span = watched(family)
    images = learnt(tokens, span)
    film = images.find(span.id)
    assert film is not None and film.tokens == tokens[span.start : span.start + span.length]
    found = at_frontend(parsed, images, tokenizer)
    assert found.blocks == list(block_hashes(tokens, SIZE, media=[span])) and found.isl == len(tokens)


def test_an_end_mark_unlike_the_begin_mark_is_not_told_from_the_text_behind_it() -> None:
    """So what is behind such media does not match, and all before it does."""
    tokenizer, parsed, tokens, span = watched("Gemma 3")
    found = at_frontend(parsed, learnt(tokens, span), tokenizer)
    blocks, known = list(block_hashes(tokens, SIZE, media=[span])), (span.start + span.length - 1) // SIZE
    assert found.blocks[:known] == blocks[:known] and found.blocks[known] != blocks[known]


def test_a_text_that_looks_like_an_image_leaves_the_text_before_it() -> None:
    """A user typed what the template writes: which of the two the engine replaces is its own business."""
    images, parsed = ImagePlaceholders(), chat(LONG, image(CAT), LONG)
    heard(images, parsed)
    typed = at_frontend(chat(LONG, "<|image|>", image(CAT), LONG), images)
    blocks = at_frontend(parsed, images).blocks
    assert typed.blocks and typed.blocks == blocks[: len(typed.blocks)] and len(typed.blocks) < len(blocks) // 2


def test_what_does_not_say_where_an_image_begins_teaches_nothing() -> None:
    images = ImagePlaceholders()
    images.learn(KvStored(hashes=[1], tokens=[7] * SIZE, extras=[b"\x03\x05\x00\x00\x00image"]), SIZE)
    assert images.find("image") is None and not images.placeholders
