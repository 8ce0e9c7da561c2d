"""Data types of a checkpoint's weights and KV cache, as its ``quantization_config`` says them of modules by name.

A checkpoint quantises some modules and leaves others: by lists of names, wildcards or regular expressions. Here every
kind of block asks for its modules in each layer, so that a model whose attention stays in bf16 beside experts of 4 bits
counts as it is.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from penstock_lab.engine.timing.model_fields import Fields

Dtype = Literal["fp32", "bf16", "fp8", "int8", "fp4", "mxfp4", "int4"]

BYTES: dict[Dtype, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 4.5 / 8,
    "mxfp4": 4.25 / 8,
    "int4": 4.25 / 8,
}
"""Bytes per value with its scales: an 8-bit one per 16 values of NVFP4 and per 32 of MXFP4, 32 bits per 128 of int4."""

PLAIN: Mapping[str, Dtype] = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}
_ALGORITHMS: Mapping[str, Dtype] = {
    "FP8": "fp8",
    "FP8_PB_WO": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_BLOCK_SCALES": "fp8",
    "MXFP8": "fp8",
    "NVFP4": "fp4",
    "NVFP4_AWQ": "fp4",
    "W4A16_NVFP4": "fp4",
    "W4A8_NVFP4_FP8": "fp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "int4",
    "W8A16": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "INT8": "int8",
}
"""Names of modelopt's algorithms, of weights and of the KV cache."""
_GROUPS: Mapping[tuple[Any, Any], Dtype] = {
    ("float", 8): "fp8",
    ("int", 8): "int8",
    ("float", 4): "fp4",
    ("int", 4): "int4",
}
_BITS: Mapping[Any, Dtype] = {4: "int4", 8: "int8"}
_EIGHT_BITS = ("fp8", "fbgemm_fp8", "mxfp8")
_BY_BITS = ("awq", "gptq", "auto-round", "auto_round")
GROUP = 128
"""Values of int4 that share a scale where AWQ and GPTQ don't say how many."""
_EXCEPT = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""Fields with the modules that stay as they were."""
_LAYER = ("model.layers.", "model.language_model.layers.", "language_model.model.layers.", "backbone.layers.")
"""What a layer's number stands behind; multimodal checkpoints put the text model deeper."""


class Weights(msgspec.Struct, frozen=True):
    """So many parameters in one data type."""

    params: int
    dtype: Dtype


class Block(msgspec.Struct, frozen=True):
    """One kind of block: parameters in each of its layers, and its modules, named as from the layer on."""

    params: int
    modules: tuple[str, ...]
    layers: Sequence[int]


class WeightTypes:
    """Data types of one checkpoint.

    Args:
        fields: the config, for its data type and ``quantization_config``.
    Raises:
        ConfigError: a method or a number of bits is not known here.
    """

    def __init__(self, fields: Fields) -> None:
        self.plain: Dtype = _unquantized_dtype(fields)
        self.kv: Dtype = self.plain
        self.columns = 1
        """Columns of a matrix that share a scale: no GPU may have a part of them."""
        self._rules: list[tuple[_ModuleNames, Dtype]] = []
        """The first whose names match says the data type; modules that none matches have the plain one."""
        given = fields.config.get("quantization_config")
        if given is None:
            return
        if not isinstance(given, Mapping):
            raise fields.error("quantization_config", f"is {given!r}, not a mapping")
        inner = given.get("quantization")  # as modelopt's own file has it
        given = {**given, **inner} if isinstance(inner, Mapping) else given
        dynamic = given.get("dynamic")
        excepted = [str(each) for key in _EXCEPT for each in given.get(key) or ()]
        excepted += [f"re:{each[2:]}" for each in dynamic or () if each.startswith("-:")]  # of GPTQModel
        self._rules = [(_ModuleNames(excepted), self.plain), *_quantization_rules(fields, given)]
        self.kv = _cache(fields, given) or self.plain
        self.columns = _columns_per_scale(given)

    def of(self, module: str, layer: int) -> Dtype:
        """Return the data type of a module of a layer."""
        names = [f"{prefix}{layer}.{module}" for prefix in _LAYER]
        return next((dtype for rule, dtype in self._rules if rule.match(names)), self.plain)

    def weights(self, blocks: Iterable[Block]) -> tuple[Weights, ...]:
        """Return the parameters of all blocks by data type; modules of a block count alike."""
        totals: dict[Dtype, float] = {}
        for block in blocks:
            each = block.params / len(block.modules)
            for layer in block.layers:
                for module in block.modules:
                    dtype = self.of(module, layer)
                    totals[dtype] = totals.get(dtype, 0.0) + each
        whole = {dtype: round(params) for dtype, params in totals.items()}
        most = max(whole, key=lambda dtype: whole[dtype], default=None)
        if most is not None:  # what rounding has lost
            whole[most] += sum(block.params * len(block.layers) for block in blocks) - sum(whole.values())
        return tuple(Weights(params, dtype) for dtype, params in whole.items())


class _ModuleNames:
    """Names of modules as checkpoints list them: ``re:`` expressions, wildcards, or names and parts of names."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._expressions, self._wildcards, self._parts = [], [], set()
        for pattern in patterns:
            if pattern.startswith("re:"):
                self._expressions.append(re.compile(pattern.removeprefix("re:")))
            elif "*" in pattern:
                self._wildcards += [pattern, f"{pattern}.*"]
            else:
                self._parts.add(pattern.strip("."))

    def match(self, names: Sequence[str]) -> bool:
        """Tell whether one of the names that a module may have is meant."""
        return any(self._match(name) for name in names)

    def _match(self, name: str) -> bool:
        if self._parts:
            words = name.split(".")
            ends = range(1, len(words) + 1)
            if any(".".join(words[start:end]) in self._parts for end in ends for start in range(end)):
                return True
        return any(each.match(name) for each in self._expressions) or any(
            fnmatchcase(name, each) for each in self._wildcards
        )


class _All(_ModuleNames):
    """Every module."""

    def __init__(self) -> None:
        super().__init__(())

    def match(self, names: Sequence[str]) -> bool:
        return True


_EXPERTS = ("*.experts", "*.experts.*")


def _unquantized_dtype(fields: Fields) -> Dtype:
    value = fields.config.get("torch_dtype") or fields.config.get("dtype") or "bfloat16"
    if value not in PLAIN:
        raise fields.error("torch_dtype", f"is {value!r}", f"known are {', '.join(PLAIN)}")
    return PLAIN[value]


def _quantization_rules(fields: Fields, given: Mapping[str, Any]) -> list[tuple[_ModuleNames, Dtype]]:
    """Return what a quantisation does to which modules."""
    method = str(given.get("quant_method", "")).lower()
    method = method.removesuffix("_marlin").removeprefix("gpt_oss_")
    everything = _All()
    if method == "mxfp4":
        return [(_ModuleNames(_EXPERTS), "mxfp4")]  # as published, only experts are in it
    if method == "w4afp8":
        return [(_ModuleNames(_EXPERTS), "int4"), (everything, "fp8")]
    if method in _EIGHT_BITS:
        return [(everything, "fp8")]
    if method in _BY_BITS and given.get("bits", given.get("w_bit", 4)) in _BITS:
        return [(everything, _BITS[given.get("bits", given.get("w_bit", 4))])]
    if method == "bitsandbytes" and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        return [(everything, "int4" if given.get("load_in_4bit") else "int8")]
    if method.startswith("modelopt"):
        algorithm = str(given.get("quant_algo", "")).upper()
        if algorithm == "MIXED_PRECISION":
            return _mixed(fields, given)
        if algorithm in _ALGORITHMS:
            return [(everything, _ALGORITHMS[algorithm])]
        method = f"{method} {algorithm}".strip()
    if method == "compressed-tensors":
        return _compressed(fields, given)
    raise fields.error(
        "quantization_config",
        f"has the method {method!r}, which is not known here",
        "take the entry out and set timing.weight_dtype",
    )


def _mixed(fields: Fields, given: Mapping[str, Any]) -> list[tuple[_ModuleNames, Dtype]]:
    """Return the rules of a checkpoint whose modules are listed one by one with their algorithms."""
    layers = given.get("quantized_layers")
    if not isinstance(layers, Mapping):
        raise fields.error("quantization_config", "is of MIXED_PRECISION and has no quantized_layers")
    modules: dict[Dtype, list[str]] = {}
    for module, entry in layers.items():
        algorithm = str(entry.get("quant_algo", "") if isinstance(entry, Mapping) else entry).upper()
        if algorithm not in _ALGORITHMS:
            raise fields.error("quantization_config", f"has {algorithm or 'no algorithm'} of {module}, not known here")
        modules.setdefault(_ALGORITHMS[algorithm], []).append(str(module))
    return [(_ModuleNames(names), dtype) for dtype, names in modules.items()]


def _compressed(fields: Fields, given: Mapping[str, Any]) -> list[tuple[_ModuleNames, Dtype]]:
    """Return the rules of config groups: weights' types, and the modules that they are for."""
    groups = given.get("config_groups")
    rules: list[tuple[_ModuleNames, Dtype]] = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        key = (weights.get("type"), weights.get("num_bits")) if isinstance(weights, Mapping) else (None, None)
        if key not in _GROUPS:
            raise fields.error("quantization_config", "has no config_groups whose weights say type and num_bits 4 or 8")
        dtype = _GROUPS[key]
        if dtype == "fp4" and "mxfp4" in str(group.get("format") or given.get("format") or ""):
            dtype = "mxfp4"
        targets = [str(each) for each in group.get("targets") or ("Linear",)]
        named = [each for each in targets if "." in each or "*" in each or each.startswith("re:")]
        rules.append((_ModuleNames(named) if named and len(named) == len(targets) else _All(), dtype))
    if not rules:
        raise fields.error("quantization_config", "has no config_groups whose weights say type and num_bits 4 or 8")
    return rules


def _columns_per_scale(given: Mapping[str, Any]) -> int:
    """Return the columns that share a scale: of a block of FP8, or a group of int4."""
    block = given.get("weight_block_size")
    if isinstance(block, list | tuple) and block:
        return int(block[0])
    groups = given.get("config_groups")
    sizes = [(group.get("weights") or {}).get("group_size") for group in groups.values()] if groups else []
    sizes += [given.get("group_size", given.get("q_group_size", GROUP if _is_by_bits(given) else 1))]
    return max(1, *(int(size) for size in sizes if isinstance(size, int)))


def _is_by_bits(given: Mapping[str, Any]) -> bool:
    return str(given.get("quant_method", "")).lower().removesuffix("_marlin") in _BY_BITS


def _cache(fields: Fields, given: Mapping[str, Any]) -> Dtype | None:
    """Return the data type of the KV cache for which a checkpoint has scales; None where it has none."""
    scheme = given.get("kv_cache_scheme") or given.get("kv_cache_quant_algo")
    if scheme is None:
        return None
    if isinstance(scheme, Mapping):
        key = scheme.get("type"), scheme.get("num_bits")
        if key in _GROUPS:
            return _GROUPS[key]
    elif str(scheme).upper() in _ALGORITHMS:
        return _ALGORITHMS[str(scheme).upper()]
    raise fields.error("quantization_config", f"has a KV cache of {scheme!r}, which is not known here")
