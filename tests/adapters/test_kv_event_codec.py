"""Which KV event messages do we understand, and what do we make of them?"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.engines.kv_events.kv_event_codec import KvDecoder, WireError, encode_batch
from penstock.adapters.engines.kv_events.kv_subscriber import cleared_by
from penstock.kernel.hashing import MediaSpan, block_extras, extra_bytes
from penstock.kernel.values import TIERS, KvCleared, KvRemoved, KvStored

# Captured from a vLLM 0.32 server of our own (a 2 M parameter model, block size 32).
CHILD = bytes.fromhex(
    "93cb41dac01015bf6725918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf3644ac7cb618d5deb170"
    "6172656e745f626c6f636b5f68617368cf96b4e05e2312c75fa9746f6b656e5f696473dc0020cd0110cd01eacd03eb12cd02bfcd0144"
    "cd0703cd0127cd015bcd024fcd0128cd01a7cd015dcd022acd073acd0107cd0291cd042dcd0648cd0176cd0110cd01eacd03eb12cce1"
    "cd07fccd07fccd07fccd07fccd07fccd07fccd07fcaa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a9"
    "6c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae"
    "66756c6c5f617474656e74696f6e00"
)
SALTED = bytes.fromhex(
    "93cb41dac01015c510a4918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657393cf332506f5fc621045cfa4"
    "e417cd8a56871ecf7fe195fda26d16c0b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc0060cd05f1cd0144"
    "cd0703cd0127cd015bcd024fcd0128cd01a7cd015dcd022acd073acd0107cd0291cd042dcd0648cd0176cd0110cd01eacd03eb12cd02"
    "bfcd0144cd0703cd0127cd015bcd024fcd0128cd01a7cd015dcd022acd073acd0107cd0291cd042dcd0648cd0176cd0110cd01eacd03"
    "eb12cd02bfcd0144cd0703cd0127cd015bcd024fcd0128cd01a7cd015dcd022acd073acd0107cd0291cd042dcd0648cd0176cd0110cd"
    "01eacd03eb12cd02bfcd0144cd0703cd0127cd015bcd024fcd0128cd01a7cd015dcd022acd073acd0107cd0291cd042dcd0648cd0176"
    "cd0110cd01eacd03eb12cd02bfcd0144cd0703cd0127cd015bcd024fcd0128cd01a7cd015dcd022acd073acd0107cd0291cd042dcd06"
    "48cd0176aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f"
    "6b6579739391a774656e616e7441c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f6174"
    "74656e74696f6e00"
)
CLEARED = bytes.fromhex("93cb41dac01022f2bb329181a474797065b0416c6c426c6f636b73436c656172656400")
ROOT = bytes.fromhex(
    "93cb41dac010233e448b918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfb0786dbe18c79e37b170"
    "6172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc002032333435363738393a3b3c3d3e3f40414243444546474849"
    "4a4b4c4d4e4f5051aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa6578"
    "7472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f"
    "6e00"
)

TOP = (1 << 64) - 1


def decode_batch(payload):
    """Return the events of one independent message."""
    return KvDecoder().decode(payload).events


def pack(events: object, *rest: object) -> bytes:
    return msgspec.msgpack.encode([1.5, events, *rest])


def stored(**changes: object) -> dict[str, object]:
    plain: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
    }
    return {**plain, **changes}


PLAIN = KvStored(hashes=[11, 12], parent=None, tokens=[1, 2, 3, 4], block_size=2)


# --- real frames ----------------------------------------------------------------------------------------------------


def test_a_real_root_block():
    (event,) = decode_batch(ROOT)
    assert event == KvStored(hashes=[12716034211107544631], parent=None, tokens=list(range(50, 82)), block_size=32)


def test_a_real_child_block_names_its_parent():
    (event,) = decode_batch(CHILD)
    assert isinstance(event, KvStored)
    assert (event.hashes, event.parent) == ([3910440028095436254], 10859551296417089375)
    assert len(event.tokens) == event.block_size == 32
    assert event.extras is None


def test_a_real_salted_chain_has_the_salt_in_its_first_block_only():
    (event,) = decode_batch(SALTED)
    assert isinstance(event, KvStored)
    assert event.extras == [extra_bytes(salt="tenantA"), b"", b""]


def test_a_real_clear():
    assert KvDecoder().decode(CLEARED) == (1795178635.7926755, 0, [KvCleared()])


@pytest.mark.parametrize("frame", [ROOT, CHILD, SALTED, CLEARED])
def test_what_we_send_is_byte_for_byte_what_vllm_sends(frame):
    batch = KvDecoder().decode(frame)
    assert encode_batch(batch.ts, batch.events, batch.rank or 0) == frame


# --- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [
        [stored()],
        [stored(lora_id=None, medium="GPU", lora_name=None, extra_keys=[None, None], group_idx=0, session_id="s")],
        [["BlockStored", [11, 12], None, [1, 2, 3, 4], 2]],
        [["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None]],
        [["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU"]],
        [["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None]],
        [["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None, [None, None]]],
        [["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0, "full_attention", None]],
        [["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None, None, [None, {}], 0, "full_attention"]],
        [["BlockStored", [11, 12], None, [[1, 2], [2, 3], [3, 4], [4, 5]], 2, None]],
    ],
)
def test_every_shape_of_a_stored_event_means_the_same(events):
    assert decode_batch(pack(events)) == [PLAIN]
    assert decode_batch(pack(events, 3)) == [PLAIN]
    assert decode_batch(msgspec.msgpack.encode({"ts": 1, "events": events})) == [PLAIN]
    assert decode_batch(msgspec.msgpack.encode({"ts": 1.0, "events": events, "data_parallel_rank": 1})) == [PLAIN]


def test_maps_and_arrays_may_be_mixed_and_keep_their_order():
    events = [["BlockRemoved", [7]], stored(), {"type": "BlockRemoved", "block_hashes": [8]}, ["AllBlocksCleared"]]
    assert decode_batch(pack(events)) == [KvRemoved(hashes=[7]), PLAIN, KvRemoved(hashes=[8]), KvCleared()]


def test_a_hash_that_is_stored_again_is_told_again():
    assert decode_batch(pack([stored(), stored()])) == [PLAIN, PLAIN]


def test_hashes_of_every_kind_become_unsigned_64_bits():
    full = bytes(range(32))
    hashes = [-1, 1 << 63, -(1 << 63), full, b"\x01"]
    (event,) = decode_batch(pack([{"type": "BlockRemoved", "block_hashes": hashes}]))
    assert event == KvRemoved(hashes=[TOP, 1 << 63, 1 << 63, int.from_bytes(full[24:], "big"), 1])
    (child,) = decode_batch(pack([stored(parent_block_hash=-2)]))
    assert isinstance(child, KvStored)
    assert child.parent == TOP - 1


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        *((medium, "device") for medium in (None, "", "GPU", "gpu", "HBM")),
        *((medium, "host") for medium in ("CPU", "CPU_PINNED", "CPU_TIER1", "cpu_tier2")),
        *((medium, "disk") for medium in ("STORAGE", "DISK", "DISK_0", "FS")),
    ],
)
def test_mediums_are_tiers(medium, tier):
    events = [stored(medium=medium), ["BlockRemoved", [7], medium]]
    assert [event.tier for event in decode_batch(pack(events))] == [tier, tier]


def test_an_offloaded_block_comes_without_tokens():
    (event,) = decode_batch(pack([stored(token_ids=[], block_size=0, medium="CPU")]))
    assert event == KvStored(hashes=[11, 12], tier="host")


def test_events_that_say_nothing_of_a_prefix_here_are_dropped_and_counted():
    decoder = KvDecoder()
    events = [
        stored(group_idx=1),
        stored(kv_cache_spec_kind="sliding_window"),
        ["BlockRemoved", [7], "GPU", 1],
        stored(locality="REMOTE"),
        stored(medium="ELSEWHERE"),
        stored(medium="OBJ"),
        {"type": "BlockMoved", "block_hashes": [7]},
        ["BlockPinned", [7], 3],
        stored(),
    ]
    assert decoder.decode(pack(events)).events == [PLAIN]
    assert decoder.dropped == {"group": 3, "remote": 1, "medium": 2, "type": 2}


def test_what_is_cleared_at_once_depends_on_the_engine():
    cleared = pack([{"type": "AllBlocksCleared"}])
    assert KvDecoder().decode(cleared).events == [KvCleared()]
    assert KvDecoder("device").decode(cleared).events == [KvCleared(tier="device")]
    assert (cleared_by("vllm"), cleared_by("sglang")) == ("device", None)


def test_a_group_that_turns_out_to_be_full_attention_becomes_the_main_one():
    decoder = KvDecoder()
    window = stored(group_idx=0, kv_cache_spec_kind="sliding_window")
    full = stored(group_idx=1, kv_cache_spec_kind="full_attention")
    second = stored(group_idx=2, kv_cache_spec_kind="full_attention")
    assert decoder.decode(pack([window, full, second])).events == [PLAIN]
    removed = [["BlockRemoved", [11], "GPU", group] for group in (0, 1, 2)]
    assert decoder.decode(pack(removed)).events == [KvRemoved(hashes=[11])]


def test_groups_with_a_window_or_a_state_say_how_many_blocks_they_read():
    decoder = KvDecoder()
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 10}
    events = [
        stored(group_idx=1, block_hashes=[12], **window),  # the first block has left the window, its tokens have not
        stored(group_idx=2, **window),
        stored(group_idx=3, kv_cache_spec_kind="mamba"),
        stored(group_idx=4, kv_cache_spec_kind="chunked_local_attention"),
        ["BlockStored", [12], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 5, "sliding_window_mla", 6],
        *(["BlockRemoved", [12], "GPU", group] for group in range(6)),
    ]
    found = decoder.decode(pack(events)).events
    assert [(type(event), event.window) for event in found] == [
        *((KvStored, blocks) for blocks in (5, 1, 3)),
        *((KvRemoved, blocks) for blocks in (0, 5, 1, 3)),
    ]
    assert found[0] == KvStored(hashes=[12], block_size=2, window=5)
    assert decoder.dropped == {"group": 4}


def test_a_window_that_comes_before_full_attention_is_removed_as_one_and_another_process_has_its_own():
    decoder = KvDecoder()
    window = stored(group_idx=0, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=4)
    removed = ["BlockRemoved", [11], "GPU", 0]
    assert [event.window for event in decoder.decode(pack([window, removed])).events] == [2, 2]
    decoder.restart()
    assert decoder.decode(pack([stored(), removed])).events == [PLAIN, KvRemoved(hashes=[11])]


def test_an_engine_has_a_few_windows_and_no_more():
    decoder = KvDecoder()
    events = [
        stored(group_idx=group, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=2 * group)
        for group in range(1, 100)
    ]
    assert len(decoder.decode(pack(events)).events) == 8 and decoder.dropped == {"group": 91}


# --- what besides tokens decides a block ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "extras"),
    [
        ({"lora_name": "fr"}, [extra_bytes(lora="fr")] * 2),
        ({"lora_id": 4}, [extra_bytes(lora="4")] * 2),
        ({"lora_name": "fr", "parent_block_hash": 5}, [extra_bytes(lora="fr")] * 2),
        ({"cache_salt": "s"}, [extra_bytes(salt="s"), b""]),
        ({"cache_salt": "s", "parent_block_hash": 5}, None),
        ({"lora_name": "fr", "extra_keys": [["fr", "s"], ["fr"]]}, [extra_bytes("fr", "s"), extra_bytes("fr")]),
        (
            {"extra_keys": [["image", "s"], ["image"]]},
            [extra_bytes(None, "s", [b"image"]), extra_bytes(None, None, [b"image"])],
        ),
        ({"extra_keys": [None, ["image"]], "parent_block_hash": 5}, [b"", extra_bytes(None, None, [b"image"])]),
        ({"cache_salt": "s", "extra_keys": [["s"], None]}, [extra_bytes(salt="s"), b""]),
        ({"extra_keys": []}, None),
        # Made by vLLM 0.32's generate_block_hash_extra_keys and to_event_extra_keys: an image of 3 tokens at 1.
        (
            {"extra_keys": [[["cat", 1], "s"], [["cat", -1]]]},
            block_extras(0, 2, 2, None, "s", [MediaSpan("cat", 1, 3)]),
        ),
    ],
)
def test_extras(changes, extras):
    (event,) = decode_batch(pack([stored(**changes)]))
    assert isinstance(event, KvStored)
    assert event.extras == extras


# --- malformed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "not msgpack"),
        (ROOT[:-3], "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\xa1\xff", "not msgpack"),
        (b"\x91" * 100_000, "not msgpack"),
        (msgspec.msgpack.encode(7), "the batch is int 7"),
        (msgspec.msgpack.encode([1.0]), "1 fields"),
        (msgspec.msgpack.encode({"ts": 1.0}), "events are absent"),
        (msgspec.msgpack.encode(["now", []]), "time"),
        (pack([], "first"), "rank"),
        (pack([7]), "an event is int 7"),
        (pack([[]]), "an event is list"),
        (pack([{"type": ["BlockStored"]}]), "unknown event type"),
        (pack([stored(block_hashes=None)]), "block_hashes is absent"),
        (pack([stored(block_hashes=["a", "b"])]), "a block hash is str"),
        (pack([stored(block_hashes=[1.5, 2.5])]), "a block hash is float"),
        (pack([stored(parent_block_hash=b"")]), "a block hash is bytes"),
        (pack([stored(token_ids=[1, 2, 3])]), "3 token_ids for 2 blocks of 2"),
        (pack([stored(token_ids=[1, 2, 3, -4])]), "not a u32"),
        (pack([stored(token_ids=[1, 2, 3, 1 << 32])]), "not a u32"),
        (pack([stored(token_ids=["a"])]), "not a u32"),
        (pack([stored(token_ids=[[1, 2], 3])]), "pairs"),
        (pack([stored(token_ids="abcd")]), "token_ids is str"),
        (pack([stored(block_size=-2)]), "block_size"),
        (pack([stored(medium=3)]), "medium"),
        (pack([stored(group_idx="a")]), "group_idx"),
        (pack([stored(kv_cache_spec_kind=[])]), "kv_cache_spec_kind"),
        (pack([stored(lora_name=3)]), "lora_name"),
        (pack([stored(extra_keys=[["a"]])]), "extra_keys"),
        (pack([stored(extra_keys=["a", "b"])]), "an entry of extra_keys"),
        (pack([stored(cache_salt=7)]), "cache_salt"),
    ],
)
def test_what_is_malformed_is_told_by_name(payload, says):
    with pytest.raises(WireError, match=says):
        decode_batch(payload)


numbers = st.integers(-(1 << 63), TOP) | st.floats(allow_nan=False)
leaves = st.none() | st.booleans() | numbers | st.text(max_size=5) | st.binary(max_size=40)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
tags = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])
names = ["lora_id", "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "locality", *stored()]
maps = st.builds(
    lambda changes, tag: {**stored(), **changes, "type": tag},
    st.dictionaries(st.sampled_from(names), values, max_size=8),
    tags,
)
arrays = st.builds(lambda tag, fields: [tag, *fields], tags, st.lists(values, max_size=12))
batches = st.lists(maps | arrays | values, max_size=3).map(pack)


@given(st.binary(max_size=300) | values.map(msgspec.msgpack.encode) | batches)
def test_no_message_does_worse_than_a_wire_error(payload):
    decoder = KvDecoder()
    try:
        batch = decoder.decode(payload)
    except WireError:
        return
    for event in batch.events:
        if isinstance(event, KvStored):
            assert all(0 <= h <= TOP for h in event.hashes)
            assert event.extras is None or len(event.extras) == len(event.hashes)
            assert not event.tokens or len(event.tokens) == len(event.hashes) * event.block_size


@st.composite
def events(draw):
    kind = draw(st.sampled_from(["stored", "removed", "cleared"]))
    if kind == "cleared":
        return KvCleared()
    hashes = draw(st.lists(st.integers(0, TOP), min_size=1, max_size=4))
    tier = draw(st.sampled_from(TIERS))
    if kind == "removed":
        return KvRemoved(hashes=hashes, tier=tier)
    size = draw(st.integers(1, 4))
    tokens = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=size * len(hashes), max_size=size * len(hashes)))
    parent = draw(st.none() | st.integers(0, TOP))
    lora = draw(st.none() | st.text(min_size=1, max_size=5))
    salt = draw(st.none() | st.text(min_size=1, max_size=5)) if parent is None else None
    digests = [draw(st.lists(st.binary(max_size=20), max_size=2)) for _ in hashes]
    extras = [extra_bytes(lora, salt if i == 0 else None, digests[i]) for i in range(len(hashes))]
    return KvStored(
        hashes=hashes, parent=parent, tokens=tokens, block_size=size, extras=extras if any(extras) else None, tier=tier
    )


@given(st.lists(events(), max_size=4), st.integers(0, 7))
def test_what_we_encode_decodes_to_the_same(sent, rank):
    assert KvDecoder().decode(encode_batch(2.5, sent, rank)) == (2.5, rank, sent)
