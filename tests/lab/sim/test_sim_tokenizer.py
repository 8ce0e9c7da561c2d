"""Is the built-in tokenizer what its own recipe makes, and does it keep any text?"""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock_lab.sim.sim_text import SimText
from penstock_lab.sim.sim_tokenizer import DATA_DIR
from tests.lab.sim.tokenizer_maker import tokenizer_files, write

TEXT = SimText()


def test_the_shipped_files_are_what_the_recipe_makes_byte_for_byte(tmp_path: Path) -> None:
    write(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(made) == set(tokenizer_files())
    assert made == {path.name: path.read_bytes() for path in DATA_DIR.iterdir() if path.is_file()}


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert "<|" in text or TEXT.decode(TEXT.encode(text)) == text


@given(st.lists(st.integers(0, 316), max_size=60))
def test_an_answer_read_again_has_the_same_tokens(picks: list[int]) -> None:
    tokens = [token for pick in picks for token in TEXT.words[pick]]
    text = TEXT.decode(tokens)
    assert TEXT.encode(text) == tokens
    assert "".join(TEXT.pieces(tokens)) == text


def test_a_longer_chat_begins_with_the_tokens_of_the_shorter_one() -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    short = TEXT.encode(TEXT.chat(turns))
    answered = [*turns, {"role": "assistant", "content": " water"}, {"role": "user", "content": "more"}]
    long = TEXT.encode(TEXT.chat(answered))
    assert long[: len(short)] == short
    assert TEXT.encode(TEXT.chat([{"role": "user", "content": [{"type": "text", "text": "hello"}]}])) == TEXT.encode(
        TEXT.chat([{"role": "user", "content": "hello"}])
    )
