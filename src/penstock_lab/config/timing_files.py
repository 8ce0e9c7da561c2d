"""Reads the files that a timing model is made from; the model itself is pure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config.files.data_files import json_object, npz_arrays, text_of
from penstock.kernel.errors import ConfigError
from penstock_dynamo.profile_folder import table_of_folder
from penstock_lab.engine.settings import TimingSettings
from penstock_lab.engine.timing.collectives import link_by_hand, link_measured
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.known_models import MODELS, known_model
from penstock_lab.engine.timing.model_fields import EMBEDS
from penstock_lab.engine.timing.operators import COLUMNS, OPTIONAL

CONFIG = "config.json"
NO_LENGTH = 10**9
"""From here on a tokenizer's length means that it has none: Hugging Face writes 10^30."""


def load_timing(settings: TimingSettings) -> Mapping[str, Any] | None:
    """Return the table that `penstock_lab.engine.timing.timing_model.timing_of` takes; None for kinds without a file.

    Raises:
        ConfigError: a file does not exist or is not as it must be; the message names it.
    """
    found: dict[str, Any] = {}
    if settings.kind == "table" and settings.profile is not None:
        if Path(settings.profile).is_dir():
            found |= table_of_folder(settings.profile, settings.tensor_parallel_size, settings.model)
        else:
            found |= npz_arrays(settings.profile, f"timing.profile {settings.profile}")
    if settings.kind == "aiconfigurator":
        from penstock_lab.config.aiconfigurator_timing import predicted_profile  # paid only where used

        found |= predicted_profile(settings)
        if settings.model is not None and (known_model(settings.model) or Path(settings.model).exists()):
            found["model"] = _model(settings.model)  # other names are aiconfigurator's own
    elif settings.model is not None and (settings.gpu is not None or settings.kind in ("roofline", "operators")):
        found["model"] = _model(settings.model)
    if settings.kind != "aiconfigurator" and settings.gpu is not None and settings.gpu.lower() not in GPUS:
        found["gpu"] = _gpu(Path(settings.gpu))
    if settings.link is not None and settings.kind in ("roofline", "operators"):
        path = Path(settings.link)
        measured = path.suffix != "" and not settings.link.endswith("us")
        if measured:
            found["link"] = link_measured(text_of(path, "timing.link").splitlines(), settings.link)
        else:
            found["link"] = link_by_hand(settings.link)
    if settings.kind == "operators" and settings.profile is not None:
        for name, columns in COLUMNS.items():
            path = Path(settings.profile) / f"{name}.csv"
            if name == "skew" and not _skewed(Path(settings.profile)):
                continue
            if name not in OPTIONAL or path.exists():
                found[name] = _read_csv_columns(path, columns)
    return found or None


def timing_files(settings: TimingSettings) -> dict[str, str]:
    """Return the files and folders that the settings name, by knob; they must exist before an engine starts."""
    named: dict[str, str | None] = {}
    if settings.kind in ("roofline", "operators") or (settings.gpu is not None and settings.kind != "aiconfigurator"):
        named = {"model": settings.model, "gpu": settings.gpu}
    if settings.kind in ("table", "operators"):
        named["profile"] = settings.profile
    return {
        knob: path
        for knob, path in named.items()
        if path is not None
        and not (knob == "gpu" and path.lower() in GPUS)
        and not (knob == "model" and not Path(path).exists() and known_model(path))
    }


def _model(named: str) -> Mapping[str, Any]:
    path = Path(named)
    if not path.exists():
        known = known_model(named)
        if known is not None:
            return known
        if path.suffix != ".json":
            raise ConfigError(
                f"timing.model {named!r} is neither a file nor a model that is known here",
                hint=f"known are {', '.join(MODELS)}; of others name the config.json",
            )
    if path.is_dir():
        path = path / CONFIG
    config = json_object(path, "timing.model", hint="name a model's config.json")
    return {**config, **_beside(path.parent, config)} if path.name == CONFIG else config


def _beside(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a checkpoint says of a model in other files than its ``config.json``, as fields of that."""

    def read(name: str) -> Mapping[str, Any]:
        return (
            json_object(folder / name, "timing.model", hint="mend it, or take it away")
            if (folder / name).is_file()
            else {}
        )

    found: dict[str, Any] = {}
    quantised = read("hf_quant_config.json").get("quantization")  # of modelopt, where config.json does not have it
    if isinstance(quantised, Mapping) and "quantization_config" not in config:
        found["quantization_config"] = {"quant_method": "modelopt", **quantised}
    sentences = read("sentence_bert_config.json").get("max_seq_length")
    length = sentences or read("tokenizer_config.json").get("model_max_length")
    if isinstance(length, int) and 0 < length < NO_LENGTH:
        found["model_max_length"] = length
    if (folder / "modules.json").is_file():
        found[EMBEDS] = True
    return found


def _gpu(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise ConfigError(
            f"timing.gpu {str(path)!r} is neither in the table nor a file", hint=f"the table has {', '.join(GPUS)}"
        )
    import yaml

    try:
        found = yaml.safe_load(text_of(path, "timing.gpu"))
    except yaml.YAMLError as error:
        raise ConfigError(f"timing.gpu {path} is not valid YAML: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"timing.gpu {path} is not a mapping", hint="write it as 'bf16_tflops: 989' and so on")
    return {"name": path.stem, **found}


def _skewed(profile: Path) -> bool:
    """Return whether a profile was corrected for uneven lengths, by its ``meta.yaml``; without one it was."""
    meta = next((path for path in (profile / "meta.yaml", profile.parent / "meta.yaml") if path.is_file()), None)
    if meta is None:
        return True
    import yaml

    try:
        fit = (yaml.safe_load(text_of(meta, "timing.profile")) or {}).get("skew_fit") or {}
        return fit.get("enabled") is not False
    except (yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"timing.profile {meta} is not a YAML mapping: {error}") from error


def _read_csv_columns(path: Path, columns: tuple[str, ...]) -> Mapping[str, list[str] | list[float]]:
    lines = text_of(path, "timing.profile").splitlines()
    head = lines[0].split(",") if lines else []
    absent = [name for name in columns if name not in head]
    if absent:
        raise ConfigError(
            f"timing.profile {path}, line 1: lacks the column {', '.join(absent)}",
            hint=f"it needs {', '.join(columns)}",
        )
    found: dict[str, Any] = {name: [] for name in columns}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        cells = line.split(",")
        if len(cells) != len(head):
            raise ConfigError(f"timing.profile {path}, line {number}: has {len(cells)} cells, its head {len(head)}")
        for name, cell in zip(head, cells, strict=True):
            if name not in found:
                continue
            try:
                found[name].append(cell if name == "layer" else float(cell))
            except ValueError as error:
                raise ConfigError(
                    f"timing.profile {path}, line {number}: {name} is {cell!r}, which is not a number"
                ) from error
    return found
