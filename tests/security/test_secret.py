"""What is one secret good for? Keys that differ by purpose, signatures that bind every part, and no trace of itself."""

import copy
import logging
import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.secret import LENGTH_MIN, ClusterSecret

TEXT = "a secret of this test"
parts_of_a_message = st.lists(st.binary(max_size=20), max_size=4)


def test_the_same_text_gives_the_same_keys_and_purposes_differ():
    assert ClusterSecret(TEXT).derive("a") == ClusterSecret(TEXT).derive("a")
    keys = {ClusterSecret(text).derive(purpose) for text in (TEXT, TEXT + "!") for purpose in ("a", "b")}
    assert len(keys) == 4 and {len(key) for key in keys} == {32}
    assert ClusterSecret("x" * 5000).derive("a") != ClusterSecret("x" * 5001).derive("a")


@given(parts_of_a_message, parts_of_a_message)
def test_a_signature_binds_every_part_and_where_it_ends(mine, theirs):
    secret = ClusterSecret(TEXT)
    code = secret.sign("p", *mine)
    assert secret.verify(code, "p", *mine)
    assert secret.verify(code, "p", *theirs) == (mine == theirs)
    assert not secret.verify(code, "q", *mine)
    assert not ClusterSecret(TEXT + "!").verify(code, "p", *mine)


@given(st.text(max_size=80))
def test_any_text_in_the_place_of_a_signature_is_refused_without_an_error(code):
    assert not ClusterSecret(TEXT).verify(code, "p", b"part")


def test_a_short_secret_is_refused_without_being_repeated():
    with pytest.raises(ValueError, match="at least 16") as caught:
        ClusterSecret("hush-hush")
    assert "hush-hush" not in str(caught.value) and LENGTH_MIN == 16


def test_nothing_prints_it(caplog):
    secret = ClusterSecret(TEXT)
    logging.getLogger("test").warning("%s %r", secret, {"secret": secret})
    said = f"{secret} {secret!r} {[secret]} {caplog.text}"
    assert TEXT not in said and "***" in said
    with pytest.raises(TypeError):
        msgspec.json.encode(secret)
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    assert copy.copy(secret) is secret


class Message(msgspec.Struct, kw_only=True):
    version: int = 2
    text: str


@pytest.mark.parametrize("binary", [False, True])
def test_a_newer_major_is_refused_even_where_its_shape_is_another(binary):
    decoder = VersionedDecoder(Message, "a message", binary=binary)
    codec = msgspec.msgpack if binary else msgspec.json
    assert decoder.decode(codec.encode({"version": 2, "text": "a", "added later": 1})).text == "a"
    assert decoder.decode(codec.encode({"version": 1, "text": "a"})).text == "a"
    for newer in ({"version": 3, "text": "a"}, {"version": 3, "text": [1]}, {"version": 3}):
        with pytest.raises(NewerVersion, match="a message has version 3, and this process reads up to 2"):
            decoder.decode(codec.encode(newer))
    for wrong in ({"version": 2, "text": [1]}, {}, [1], {"version": "x", "text": "a"}):
        with pytest.raises(msgspec.DecodeError):
            decoder.decode(codec.encode(wrong))
