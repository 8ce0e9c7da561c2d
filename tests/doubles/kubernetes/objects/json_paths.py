"""JSONPath as far as CRDs use it: fields, indexes, all items, and items that a field tells apart."""

import re

_STEP = re.compile(
    r"\.(?P<field>(?:\\.|[^.\[\\])+)|\[(?P<index>-?\d+)\]|(?P<all>\[\*\])|\['(?P<quoted>[^']+)'\]"
    r"|\[\?\(@(?P<where>(?:\.[\w-]+)+)\s*(?P<sign>==|!=)\s*[\"'](?P<value>[^\"']*)[\"']\)\]"
)


def values_at(item: object, path: str) -> list[object]:
    """Return all values at a path such as ``.status.conditions[?(@.type=="Ready")].status``.

    Raises:
        ValueError: the path is none that this reads.
    """
    values, position = [item], 0
    path = path if path.startswith((".", "[")) else f".{path}"
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None:
            raise ValueError(f"the JSONPath {path!r} is not understood from {path[position:]!r} on")
        position = step.end()
        values = [child for value in values for child in _children(value, step)]
    return values


def first_at(item: object, path: str) -> object:
    """Return the first value at a path, or None."""
    return next(iter(values_at(item, path)), None)


def _children(value: object, step: re.Match[str]) -> list[object]:
    name = step["quoted"] or (step["field"] or "").replace("\\", "")
    if name:
        return [value[name]] if isinstance(value, dict) and name in value else []
    if step["all"]:
        return list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else [])
    if not isinstance(value, list):
        return []
    if step["index"] is not None:
        return value[int(step["index"]) :][:1]
    equal = step["sign"] == "=="
    return [each for each in value if (first_at(each, step["where"]) == step["value"]) == equal]
