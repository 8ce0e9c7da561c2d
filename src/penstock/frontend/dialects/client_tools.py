"""Client tools of Anthropic's API, which clients run and name by a kind, with the schema that other models need."""

import re

from penstock.frontend.dialects.body_fields import set_fields
from penstock.kernel.values import JsonObject

_DATE = re.compile(r"_[0-9]{8}\Z")
_TEXT, _COUNT = {"type": "string"}, {"type": "integer"}
_POINT = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}
_FILES = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _TEXT),
    "insert_line": {**_COUNT, "description": "Line after which the text is inserted; 0 is the file's beginning."},
    "view_range": {**_POINT, "description": "First and last line to view; -1 is the file's end."},
}
_BUTTONS = ("left_click", "right_click", "middle_click", "double_click", "triple_click", "left_click_drag")
_MOUSE = (*_BUTTONS, "mouse_move", "left_mouse_down", "left_mouse_up", "cursor_position", "scroll", "zoom")


def _command(*names: str) -> JsonObject:
    return {"command": {**_TEXT, "enum": list(names)}}


_TOOLS: dict[str, tuple[str, JsonObject, str]] = {
    "bash": (
        "Run a command in a bash shell that goes on between calls; restart starts the shell anew.",
        {"command": _TEXT, "restart": {"type": "boolean"}},
        "",
    ),
    "text_editor": (
        "View a file or a folder, create a file, replace text that occurs once in a file, or insert text into it.",
        {**_command("view", "create", "str_replace", "insert"), **_FILES},
        "command",
    ),
    "memory": (
        "View, create and change files below /memories, which last between conversations.",
        {
            **_command("view", "create", "str_replace", "insert", "delete", "rename"),
            **_FILES,
            "old_path": _TEXT,
            "new_path": _TEXT,
        },
        "command",
    ),
    "computer": (
        "Use a screen of {display_width_px} x {display_height_px} pixels, with mouse and keyboard.",
        {
            "action": {**_TEXT, "enum": ["screenshot", "key", "hold_key", "type", "wait", *_MOUSE]},
            "coordinate": _POINT,
            "start_coordinate": _POINT,
            "text": _TEXT,
            "duration": {"type": "number"},
            "scroll_direction": {**_TEXT, "enum": ["up", "down", "left", "right"]},
            "scroll_amount": _COUNT,
            "region": {"type": "array", "items": _COUNT, "minItems": 4, "maxItems": 4},
        },
        "action",
    ),
}
"""Kind without its date -> what it does, its fields, and the one that each call has."""


def client_tool(kind: str, tool: JsonObject) -> JsonObject | None:
    """Return such a tool's description and parameters; None for a kind that only the vendor's own service runs."""
    known = _TOOLS.get(_DATE.sub("", kind))
    if known is None:
        return None
    description, properties, needed = known
    for name in ("display_width_px", "display_height_px"):
        description = description.replace(f"{{{name}}}", str(tool.get(name)))
    schema = set_fields(type="object", properties=properties, required=[needed] if needed else None)
    return {"description": description, "parameters": schema}
