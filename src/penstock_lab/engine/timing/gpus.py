"""`Gpu`: a GPU's rates and sizes: a table of common ones, and the check of a user's own description."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.timing.weight_types import Dtype

GIB = 1024**3


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU by its data sheet: dense rates, without sparsity."""

    name: str
    bf16_tflops: float
    fp8_tflops: float | None = None
    """None where the GPU has no such arithmetic: weights are then widened and computed in bf16."""
    fp4_tflops: float | None = None
    memory_gib: float
    memory_tb_per_s: float
    link_gb_per_s: float
    """To another GPU of the same domain, one way."""
    link_gpus: int = 8
    """GPUs that reach each other over that link."""
    network_gb_per_s: float
    """To a GPU outside of the domain, one way."""
    collective_gb_per_s: float | None = None
    """What collectives reach on the link (nccl-tests' busbw), where no share of its rate gives it: on PCIe."""
    collective_us: float = 20.0
    """What one collective takes there before its first byte."""
    gddr: bool = False
    """Whether its memory is GDDR, of which kernels reach another share than of HBM."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second of its memory."""
        return self.memory_tb_per_s * 1e12

    @property
    def memory(self) -> float:
        """Bytes of its memory."""
        return self.memory_gib * GIB

    def flops(self, dtype: Dtype) -> float:
        """Return operations per second for weights of a data type: that of bf16 where they are widened to it.

        Kernels for mxfp4 on GPUs with fp4 multiply by activations in fp8, at that rate.
        """
        if dtype == "fp32":
            return self.bf16_tflops * 0.5e12
        tflops: float | None = self.bf16_tflops
        if dtype in ("fp8", "fp4", "mxfp4") and not self.widens(dtype):
            tflops = self.fp4_tflops if dtype == "fp4" else self.fp8_tflops
        return (tflops or self.bf16_tflops) * 1e12

    def widens(self, dtype: Dtype) -> bool:
        """Tell whether weights of a data type must be widened before they are computed with."""
        if dtype in ("fp4", "mxfp4"):
            return self.fp4_tflops is None
        return dtype == "int4" or (dtype == "fp8" and self.fp8_tflops is None)

    def link(self, gpus: int) -> float:
        """Return bytes per second, one way, between GPUs of a group of so many."""
        return (self.link_gb_per_s if gpus <= self.link_gpus else self.network_gb_per_s) * 1e9


def _gpu_row(
    name: str, bf16: float, fp8: float | None, fp4: float | None, *rest: float, collective: float | None = None
) -> Gpu:
    bandwidth, memory, link, network, domain = rest
    return Gpu(
        name=name,
        bf16_tflops=bf16,
        fp8_tflops=fp8,
        fp4_tflops=fp4,
        memory_tb_per_s=bandwidth,
        memory_gib=memory,
        link_gb_per_s=link,
        network_gb_per_s=network,
        link_gpus=int(domain),
        collective_gb_per_s=collective,
        gddr=collective is not None,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        # name, TFLOPS of bf16, fp8, fp4; memory TB/s, GiB; link GB/s, network GB/s, GPUs on the link
        _gpu_row("a100", 312, None, None, 2.04, 80, 300, 25, 8),
        _gpu_row("h100", 989, 1978, None, 3.35, 80, 450, 50, 8),
        _gpu_row("h200", 989, 1978, None, 4.8, 141, 450, 50, 8),
        _gpu_row("b200", 2250, 4500, 9000, 7.7, 180, 900, 100, 8),
        _gpu_row("b300", 2250, 4500, 14000, 7.75, 268, 900, 100, 8),
        _gpu_row("gb200", 2500, 5000, 10000, 8.0, 185, 900, 100, 72),
        _gpu_row("gb300", 2500, 5000, 15000, 8.0, 277, 900, 100, 72),
        _gpu_row("l40s", 362, 733, None, 0.864, 45, 32, 25, 8, collective=12),
        _gpu_row("rtx4090", 165, 330, None, 1.008, 24, 32, 25, 8, collective=12),
        _gpu_row("rtxpro6000", 468, 936, 1871, 1.79, 96, 64, 50, 8, collective=16),
    )
}
"""By name. Source: the makers' data sheets as aiconfigurator's system descriptions (Apache-2.0) carry them; the last
three have no NVLink, their link is PCIe. A network of 25 or 50 GB/s is an assumption for those."""


def gpu_of(fields: Mapping[str, Any], where: str = "gpu") -> Gpu:
    """Return the GPU that a user describes.

    Args:
        fields: the fields of `Gpu`; with ``like: NAME`` those that are absent come from that entry of the table.
        where: the file, for errors.
    Raises:
        ConfigError: a field is unknown, absent, no number or not above 0.
    """
    given = dict(fields)
    base = given.pop("like", None)
    if base is not None:
        given = {**msgspec.structs.asdict(named(str(base), f"{where}: like")), **given}
    known = {field.name: field for field in msgspec.structs.fields(Gpu)}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"{where}: {key!r} is not a field of a GPU", hint=f"there are {', '.join(known)} and like"
            )
        if key == "name" or (value is None and known[key].default is None):
            continue
        if key == "gddr" and isinstance(value, bool):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise ConfigError(f"{where}: {key} is {value!r}", hint="it must be a number above 0")
    absent = [name for name, field in known.items() if name not in given and field.default is msgspec.NODEFAULT]
    if absent:
        raise ConfigError(f"{where}: {', '.join(absent)} is absent", hint="or take them from the table with like: h100")
    try:
        return msgspec.convert(given, Gpu)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def named(name: str, where: str = "timing.gpu") -> Gpu:
    """Return a GPU of the table.

    Raises:
        ConfigError: the table has none of that name.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(
            f"{where} {name!r} is not in the table",
            hint=f"there are {', '.join(GPUS)}; describe others in a YAML file and name that",
        )
    return gpu


def gpu_of_sku(sku: str) -> str:
    """Return our name of a GPU that Kubernetes or Dynamo names: ``h200_sxm``, ``NVIDIA-H100-80GB-HBM3``.

    Raises:
        ConfigError: no GPU of the table is in it.
    """
    plain = "".join(letter for letter in sku.lower() if letter.isalnum())
    names = [name for name in GPUS if name in plain]
    if not names:
        raise ConfigError(f"the GPU {sku!r} is not in the table", hint=f"there are {', '.join(GPUS)}")
    return max(names, key=len)  # gb200 has b200 in it
