"""Are two images told apart, and is one that an engine holds found again behind the same text?"""

import base64
import json
from typing import Any

import pytest

from penstock.adapters.engines.kv_events.kv_event_codec import KvDecoder, encode_batch
from penstock.adapters.engines.sim.request_reader import RequestReader
from penstock.adapters.engines.sim.sim_text import SimText
from penstock.adapters.engines.sim.sim_tokenizer import IMAGE_TOKENS
from penstock.frontend.prompt.prompt_hashing import BlockHashing, PromptHasher, PromptMedia
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock.frontend.prompt.request_body import Parsed, media_id, media_of, parse, with_uuids
from penstock.kernel.hashing import MediaSpan, block_extras, block_hashes
from penstock.kernel.values import KvStored, Prompt
from penstock.router.kv_index.image_placeholders import Image, ImagePlaceholders

SIZE = 16
TOKENIZER = load_tokenizer("builtin:sim")
READER = RequestReader(SimText(), "m", (), 100_000)
CAT, DOG = (f"data:image/png;base64,{base64.b64encode(name).decode()}" for name in (b"cat", b"dog"))


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def chat(*parts: Any) -> Parsed:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    parsed = parse("chat_completions", json.dumps(body).encode())
    parsed.media = tuple(media_id(part) for part in media_of(parsed))
    return parsed


def at_frontend(parsed: Parsed, images: ImagePlaceholders) -> Prompt:
    """Return the prompt as a frontend that has heard of some images sees it."""
    media = tuple(PromptMedia(id, None if id is None else images.find(id)) for id in parsed.media)
    hashing = BlockHashing(SIZE, 64, media=media, placeholder=images.placeholder, usual=images.usual)
    return PromptHasher(1, 1, lambda name, took: None).prepare_now(parsed, TOKENIZER, hashing)


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
    assert images.find(str(parsed.media[0])) == Image(images.placeholder or 0, IMAGE_TOKENS)
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
        event = KvStored(
            hashes=list(range(first, end)),
            parent=None,
            tokens=words[first * SIZE : end * SIZE],
            block_size=SIZE,
            extras=extras[first:end] if extras else None,
        )
        parts.learn(event, SIZE)
    assert parts.find("cat") == whole


def test_names_are_the_clients_or_of_the_data_and_never_of_an_address() -> None:
    assert media_id(image(CAT)) == media_id(image(CAT)) != media_id(image(DOG))
    assert media_id(image(CAT, uuid="mine")) == "mine"
    assert media_id(image("https://example.org/cat.png")) is None
    named = with_uuids(chat("a", image(CAT), image("http://x/y"), image(DOG, uuid="d")))
    assert named is not None
    assert [part.get("uuid") for part in named[0]["content"]] == [None, media_id(image(CAT)), None, "d"]
    assert with_uuids(chat("a", image("http://x/y"))) is None


def test_what_does_not_say_where_an_image_begins_teaches_nothing() -> None:
    images = ImagePlaceholders()
    images.learn(KvStored(hashes=[1], tokens=[7] * SIZE, extras=[b"\x03\x05\x00\x00\x00image"]), SIZE)
    assert images.find("image") is None and images.placeholder is None
