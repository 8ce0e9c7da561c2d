"""Weight protocol: what an engine's loader asks the weight process of its machine, and gets, over a unix socket.

One JSON object per line. Beside `WeightsHere` comes a descriptor of memory that holds every tensor.
"""

import array
import socket

import msgspec

WEIGHTS_ENV = "PENSTOCK_WEIGHTS"
"""Socket of the weight process; unset leaves the loader inert, which then reads the files."""
LOAD_FORMAT = "penstock"
"""Of vLLM's ``--load-format``."""
LINE_MAX = 64 << 20
"""Bytes of an answer: some 200 for each tensor."""
ANSWER_SECONDS = 900.0
"""Until an answer is given up; the weight process itself gives up sooner, by the size of the weights."""


class WantWeights(msgspec.Struct, frozen=True, tag="want"):
    """Give me the tensors of a checkpoint. ``folder``: where its files are on this machine."""

    folder: str


class PlacedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the memory that was handed over. ``dtype``: safetensors' name of its type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


class WeightsHere(msgspec.Struct, frozen=True, kw_only=True, tag="here"):
    """All tensors, checked. ``sibling``: where they came from; ``seconds``: how long that took."""

    size: int
    tensors: list[PlacedTensor]
    sibling: str
    seconds: float


class WeightsRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Read the files."""

    reason: str


Answer = WeightsHere | WeightsRefused
_encode = msgspec.json.Encoder().encode
_decode_answer = msgspec.json.Decoder(Answer).decode
_decode_want = msgspec.json.Decoder(WantWeights).decode


def ask(path: str, want: WantWeights, timeout: float = ANSWER_SECONDS) -> tuple[Answer, int | None]:
    """Return the answer of a weight process, and the descriptor that came with it, which is the caller's to close.

    Raises:
        OSError: nobody listens, or the answer is late.
        ValueError: it is no answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        sock.connect(path)
        sock.sendall(_encode(want) + b"\n")
        line, fd = bytearray(), None
        while not line.endswith(b"\n"):
            data, given, _, _ = socket.recv_fds(sock, 1 << 20, 1)
            if given:
                fd = given[0]
            if not data or len(line) > LINE_MAX:
                if fd is not None:
                    _close(fd)
                raise ValueError(f"the weight process ended its answer after {len(line)} bytes")
            line += data
    try:
        return _decode_answer(line), fd
    except msgspec.DecodeError as error:
        if fd is not None:
            _close(fd)
        raise ValueError(f"the weight process answered something else: {error}") from error


def read_want(line: bytes) -> WantWeights:
    """Read a request.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _decode_want(line)


def answer(sock: socket.socket, what: Answer, fd: int | None = None) -> None:
    """Send an answer over a blocking socket.

    Raises:
        OSError: the engine is gone.
    """
    line = memoryview(_encode(what) + b"\n")
    ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    sent = sock.sendmsg([line], ancillary)
    if sent < len(line):  # an empty send fails where the engine has read all and is gone
        sock.sendall(line[sent:])


def _close(fd: int) -> None:
    socket.close(fd)
