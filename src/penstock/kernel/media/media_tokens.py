"""Media tokens: how many tokens of a prompt stand for a picture, by the rule of Qwen2-VL and its successors.

A picture is scaled so that its sides are whole tiles and its tiles are within limits; each tile of 28 x 28 pixels (two
by two patches of 14) becomes one token. Source: `smart_resize` of Qwen2-VL's image processor, written anew.
"""

import math

SIDE = 28
"""Pixels of a tile's side."""
TOKENS_MIN, TOKENS_MAX = 4, 16_384
"""Fewest and most tokens of a picture: the image processor's own limits."""
FRAMES_PER_TOKEN = 2
"""Frames of a video that share their tokens."""
AUDIO_TOKENS_PER_SECOND = 25
"""Of Qwen2-Audio: one token for 40 ms."""


def image_tokens(width: int, height: int) -> int:
    """Return the tokens of a picture; at least `TOKENS_MIN`, whatever its sides."""
    width, height = max(1, width), max(1, height)
    wide, high = max(1, round(width / SIDE)), max(1, round(height / SIDE))
    if wide * high > TOKENS_MAX:
        scale = math.sqrt(width * height / (TOKENS_MAX * SIDE * SIDE))
        wide, high = max(1, int(width / scale / SIDE)), max(1, int(height / scale / SIDE))
    elif wide * high < TOKENS_MIN:
        scale = math.sqrt(TOKENS_MIN * SIDE * SIDE / (width * height))
        wide, high = math.ceil(width * scale / SIDE), math.ceil(height * scale / SIDE)
    return max(TOKENS_MIN, min(TOKENS_MAX, wide * high))


def video_tokens(width: int, height: int, frames: int) -> int:
    """Return the tokens of a video of so many frames."""
    return image_tokens(width, height) * max(1, -(-frames // FRAMES_PER_TOKEN))
