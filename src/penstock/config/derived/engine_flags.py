"""Flags of engines' command lines: what a pool's arguments give them, and the tensor-parallel size that comes of it."""

from collections.abc import Iterator, Sequence

from penstock.config.settings.cluster_settings import PoolSettings

TP_SIZE, PP_SIZE = "tp_size", "pp_size"
"""Labels of an engine's tensor-parallel and pipeline-parallel sizes; 1 where they are absent."""
_SHORT = dict.fromkeys(("tp", "tp-size"), "tensor-parallel-size") | {"pp": "pipeline-parallel-size"}


def tensor_parallel_size(pool: PoolSettings) -> int:
    """Return the tensor-parallel size of a pool's engines: by label, arguments, timing or GPUs; 1 where none does."""
    told = pool.labels.get(TP_SIZE) or flag_value(pool.args, "tensor-parallel-size")
    if told is not None and told.isdecimal():
        return int(told)
    timed = pool.sim.timing.tensor_parallel_size
    return timed if timed > 1 or (pool.engine == "sim" and not pool.attached) else max(1, pool.gpus or 1)


def flag_value(args: Sequence[str], flag: str) -> str | None:
    """Return what a command line gives a flag; None where it is not there."""
    return next((value for name, value in flags_given(args) if plain_flag(name) == flag), None)


def flags_given(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the flags of a command line with their values, as ``--flag value`` or ``--flag=value``."""
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name.startswith("-"):
            yield name, value if equals else next(iter(args[place + 1 : place + 2]), None)


def plain_flag(flag: str) -> str:
    """Return a flag's name, so that ``--no-enable-x`` and ``--a-b.c`` meet ``--enable-x`` and ``--a-b``."""
    name = flag.lstrip("-").replace("_", "-").partition(".")[0]
    return _SHORT.get(name, name.removeprefix("no-"))
