"""Template sandbox: jinja's sandbox with limits on a chat template's time, output and single operations.

The library's sandbox keeps a template from reaching anything but its arguments. It does not keep one from running for
ever or filling the memory: a loop within a loop, a string doubled forty times, a width of a billion. Here every block
counts a step, the results of operators, filters and calls are summed up, and operations whose result can be far larger
than their input are checked beforehand.
"""

import re
import time
from collections.abc import Callable, Iterable
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SOURCE_MAX = 1 << 20
"""Characters of a template; those of models have some thousands."""
MADE_MAX = 512 << 20
"""Characters that one rendering may make in all, also discarded ones; an item of a list counts as `_ITEM`."""
ONE_MAX = 64 << 20
"""Characters of one result."""
WIDTH_MAX = 1000
"""Width of padding, indenting and similar: useless in a prompt beyond that."""
LINKED_MAX = 10_000
"""Characters of a text in which links may be searched; chat templates have no use for that."""
BITS_MAX = 65_536
"""Of a number."""
_ITEM = 8
_STEPS_PER_LOOK = 128
"""Steps between reads of the clock."""

_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDE = frozenset({"batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap"})
"""Filters with an argument for a width or a count."""
_WIDTH = re.compile(r"\d{4,}|\*")
_NUMBER = (int, float)


class Exceeded(Exception):
    """A template exceeded a limit."""


class TooSlow(Exceeded):
    """A template exceeded its time limit."""


class _Counting(CodeGenerator):
    """Makes the code of a template count its steps: one at the start of each block, so also in each round of a loop."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    @optimizeconst
    def visit_Add(self, node: nodes.Add, frame: Frame) -> None:  # type: ignore[override]
        self.write("environment.plus(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with limits, for one thread at a time; `allow` begins a new budget."""

    code_generator_class = _Counting
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.allow(1.0)
        self.globals.pop("lipsum", None)
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.add_filter("join", _join_filter)
        self.add_filter("sum", _sum_filter)

    def allow(self, seconds: float) -> None:
        """Begin a new budget for the next rendering or compilation."""
        self._deadline = time.monotonic() + seconds
        self._steps = self._made = 0
        self._next_look = _STEPS_PER_LOOK

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, or replace one, under the same limits."""
        self.filters[name] = self._guarded(name, function)

    # --- calls from a template's code -------------------------------------------------------------------------------

    def step(self) -> None:
        """Count one block.

        Raises:
            TooSlow: it runs for too long.
        """
        self._steps += 1
        if self._steps >= self._next_look:
            self._check_deadline()

    def plus(self, left: Any, right: Any) -> Any:
        """Add two values: nearly always texts, many times in a chat, so this is written for speed."""
        if left.__class__ is str and right.__class__ is str:
            self._made += (size := len(left) + len(right))
            if size > ONE_MAX or self._made > MADE_MAX:
                raise Exceeded(f"it makes {size} characters more")
        elif not isinstance(left, _NUMBER):
            self._make(_value_size(left) + _value_size(right))
        return left + right

    def joined(self, parts: Iterable[Any]) -> str:
        """Join texts, as ``~`` does."""
        return self.concat([str(part) for part in parts])

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Join the pieces that a block wrote."""
        pieces = list(parts)
        self._make(sum(map(len, pieces)))
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Carry out an operator whose result can be far larger than its sides."""
        self.step()
        if operator == "%":
            if isinstance(left, str):
                _check_pattern(left)
        elif operator == "**":
            self._power(left, right)
        else:
            self._product(left, right)
        return self._counted(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function for the template."""
        __self.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes):
            __self._method(owner, getattr(__obj, "__name__", ""), args)
        return __self._counted(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe replacement of a text's ``format``, whose fields take no width from an argument."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        @wraps(safe)
        def checked(*args: Any, **kwargs: Any) -> str:
            for _, _, spec, _ in Formatter().parse(value.__self__):
                if spec and (_WIDTH.search(spec) or "{" in spec):
                    raise Exceeded(f"a width in {spec[:40]!r} is above {WIDTH_MAX}, or told by an argument")
            return safe(*args, **kwargs)

        return checked

    # --- checks -----------------------------------------------------------------------------------------------------

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        check = self._check_of(name)
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)  # which also copies the marks that request the context
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.step()
            if check is not None:
                check(args[skip:], kwargs)
            return self._counted(function(*args, **kwargs))

        return guarded

    def _check_of(self, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], None] | None:
        """Return the check of a filter's arguments (the value itself first) before it is applied, or None."""
        if name in _WIDE:
            return _check_widths
        if name == "replace":
            return lambda values, named: self._replacing(str(values[0]), (*values[1:], *named.values()))
        if name == "urlize":
            return lambda values, named: _check_length(values[0])
        if name == "format":
            return lambda values, named: _check_pattern(str(values[0]))
        return None

    def _method(self, owner: str | bytes, name: str, args: tuple[Any, ...]) -> None:
        """Check a method of a text before it is called."""
        if name in _PADDING:
            for width in args[:1]:
                _check_width(width)
        elif name == "replace":
            self._replacing(owner, args)
        elif name == "join" and args:
            self._make(_joined_size(owner, list(args[0])))

    def _replacing(self, owner: Any, args: tuple[Any, ...]) -> None:
        if len(args) > 1 and isinstance(old := args[0], type(owner)) and isinstance(new := args[1], type(owner)):
            self._make(len(owner) + owner.count(old) * max(0, len(new) - len(old)))

    def _product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > BITS_MAX:
                raise Exceeded("a number is too large")
        elif isinstance(left, int) or isinstance(right, int):
            times, what = (left, right) if isinstance(left, int) else (right, left)
            if not isinstance(what, float):
                self._make(_value_size(what) * max(0, times))

    def _power(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > BITS_MAX:
            raise Exceeded("a number is too large")

    def _make(self, size: int) -> None:
        """Count a result before it is made."""
        self._made += size
        if size > ONE_MAX or self._made > MADE_MAX:
            raise Exceeded(f"it makes {size} characters more")
        if size > 100_000:
            self._check_deadline()

    def _counted(self, result: Any) -> Any:
        """Count a result after it was made."""
        size = _value_size(result)
        if size > 64:
            self._make(size)
        return result

    def _check_deadline(self) -> None:
        self._next_look = self._steps + _STEPS_PER_LOOK
        if time.monotonic() > self._deadline:
            raise TooSlow("it takes too long")


def _value_size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM * len(value) if isinstance(value, list | tuple | dict) else 0


def _check_pattern(pattern: str) -> None:
    """Refuse a printf pattern with a width that is too large, or from an argument."""
    if _WIDTH.search(pattern):
        raise Exceeded(f"a width in {pattern[:40]!r} is above {WIDTH_MAX}")


def _check_length(value: Any) -> None:
    """Refuse a long text to a filter whose time grows faster than the text."""
    if len(str(value)) > LINKED_MAX:
        raise Exceeded(f"more than {LINKED_MAX} characters to look for links in")


def _check_widths(values: tuple[Any, ...], named: dict[str, Any]) -> None:
    for width in (*values[1:], *named.values()):
        _check_width(width)


def _check_width(width: Any) -> None:
    if isinstance(width, int) and abs(width) > WIDTH_MAX:
        raise Exceeded(f"a width of {width} is above {WIDTH_MAX}")
    if isinstance(width, str) and len(width) > WIDTH_MAX:
        raise Exceeded(f"an indent of {len(width)} characters is above {WIDTH_MAX}")


def _joined_size(between: str | bytes, parts: list[Any]) -> int:
    return sum(map(_value_size, parts)) + len(between) * len(parts)


def _join_filter(value: Iterable[Any], d: Any = "", attribute: str | None = None) -> str:
    """Join texts; as the library's filter, but the size of the result is checked before it is made."""
    items = list(value)
    if attribute is not None:
        items = [item.get(attribute, "") if isinstance(item, dict) else "" for item in items]
    texts = [str(item) for item in items]
    if _joined_size(str(d), texts) > ONE_MAX:
        raise Exceeded("one result would be too large")
    return str(d).join(texts)


def _sum_filter(value: Iterable[Any], attribute: str | None = None, start: Any = 0) -> Any:
    """Add numbers up; lists, which the library's filter takes as well, would be copied once for each."""
    items = list(value)
    if attribute is not None:
        items = [item.get(attribute, 0) if isinstance(item, dict) else 0 for item in items]
    if not all(isinstance(item, _NUMBER) for item in (start, *items)):
        raise Exceeded("only numbers are added up")
    return sum(items, start)
