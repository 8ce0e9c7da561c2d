"""Embeddings of the simulated model: unit vectors that depend on the tokens only."""

import base64

import numpy as np

from penstock.kernel.errors import ClientError
from penstock.kernel.hashing import SEED, token_bytes
from penstock.kernel.values import JsonObject
from penstock_lab.sim.sim_text import SimText

INPUTS_MAX = 2048


def embed(body: JsonObject, text: SimText, dimensions: int) -> tuple[list[list[float] | str], int]:
    """Return the vectors of an embeddings body, in its requested encoding, and the tokens read.

    Raises:
        ClientError: the input can't be embedded.
    """
    given = body.get("input")
    wanted = body.get("dimensions") or dimensions
    if type(wanted) is not int or not 1 <= wanted <= 4096:
        raise ClientError("dimensions must be a whole number from 1 to 4096.", param="dimensions")
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(token) is int for token in given)):
        given = [given]
    if not isinstance(given, list) or not 0 < len(given) <= INPUTS_MAX:
        raise ClientError(f"input must be a text, token ids, or a list of 1 to {INPUTS_MAX} of these.", param="input")
    vectors: list[list[float] | str] = []
    total = 0
    for part in given:
        if isinstance(part, str):
            tokens = text.encode(part)
        elif isinstance(part, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in part):
            tokens = part
        else:
            raise ClientError("input must be a text, token ids, or a list of these.", param="input")
        total += len(tokens)
        seed = np.frombuffer(token_bytes(tokens), dtype="<u4")
        values = np.random.Generator(np.random.PCG64([SEED, *seed.tolist()])).standard_normal(wanted)
        values /= np.linalg.norm(values)
        if body.get("encoding_format") == "base64":
            vectors.append(base64.b64encode(values.astype("<f4").tobytes()).decode())
        else:
            vectors.append(values.tolist())
    return vectors, total
