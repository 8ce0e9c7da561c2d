"""Tokenizer of the simulated model: a small byte-level BPE of Penstock's own.

Ids 0..255 are the bytes, then come the merges learnt from `WORDS`, then the special tokens. Any text can be encoded.
``tests/lab/sim/tokenizer_maker.py`` makes the three files of `DATA_DIR`, byte for byte.
"""

from pathlib import Path

DATA_DIR = Path(__file__).parent / "data"
END = "<|end|>"
TURN = "<|assistant|>"
IMAGE = "<|image|>"
IMAGE_TOKENS = 256
"""Tokens that an image takes, whatever its size: as many as Gemma 3's."""

_TEXT = (
    "the a of and to in is it on for with as at by from this that each one all more most some any no not than then "
    "water river stream flow gate valve pipe channel basin reservoir dam wall spill turbine wheel shaft blade rotor "
    "power head pressure level meter gauge pump tank inlet outlet bend slope fall height depth width length volume "
    "when where while until before after above below under over between along across through around near far "
    "opens closes turns rises falls fills drains runs stops starts holds carries feeds leads meets joins parts waits "
    "moves keeps gives takes brings sends comes goes grows slows drops lifts drives steers guides rests settles "
    "morning evening night day hour minute second winter spring summer autumn rain snow ice wind cloud storm sun "
    "first second third last next early late slow fast steady quiet loud heavy light small large deep shallow narrow "
    "wide long short full empty open closed clear cold warm old new high low even equal common simple plain whole "
    "engine machine worker keeper engineer miller village valley mountain bridge road field forest stone iron steel "
    "wood copper cable lamp house room door window table paper letter number list line point step turn path plan "
    "question answer reason cause effect example result measure limit rule case part side end middle start change "
    "because since though unless whether often always never seldom again still already only almost about enough "
    "we you they he she who what which how why there here now today together apart alone once twice many few less "
    "can may must should will would could has have had was were been being does did done made found seen known said "
    "account balance check control count cost share store load queue cache block page token batch request response "
    "model prompt prefix session cluster router planner replica memory network schedule window sample summary report"
)
WORDS = tuple(_TEXT.split())
"""The words that answers are made of; the merges are learnt from them alone."""


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary: printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    spare = 0x100
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(spare)
            spare += 1
    return [letters[byte] for byte in range(256)]
