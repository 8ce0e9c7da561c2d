"""`PlanRequest`: what a deployment is planned for: model, GPUs with their prices, service level, traffic and limits."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Slo
from penstock_dynamo.profile_folder import says_size
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.settings import TimingSettings
from penstock_lab.engine.timing.gpus import GPUS, Gpu, gpu_of, named
from penstock_lab.engine.timing.known_models import repository_of
from penstock_lab.engine.timing.model_shape import ModelShape, shape_of

PlannedEngine = Literal["sim", "vllm", "sglang"]

_ANSWERLESS = re.compile("embed|rerank", re.IGNORECASE)
"""What names of models say that have the architecture of one that makes tokens, and are not used as that."""
PRICES: Mapping[str, float] = {
    "a100": 1.8,
    "h100": 2.5,
    "h200": 3.5,
    "b200": 5.5,
    "b300": 6.5,
    "gb200": 6.5,
    "gb300": 7.5,
    "l40s": 1.0,
    "rtx4090": 0.4,
    "rtxpro6000": 1.5,
}
"""Dollars per GPU and hour where no price is given. Guesses: about what clouds asked for in 2026; ``--price`` replaces
them."""


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One question to the planner of deployments.

    Args:
        model: a config.json, its folder, or a well-known name.
        served: the name that clients ask for; empty takes the model's.
        gpus: kinds that may be used, each a name of the table or a YAML file; pools may have different ones.
        prices: dollars per GPU and hour, by kind.
        slo: TTFT and mean ITL, both set; of a model without answers TTFT only.
        attainment: share of requests that must keep both, 0..1.
        trace: file of requests; None makes requests of ``prompt`` and ``answer`` tokens at ``rate``.
        rate: requests per second; None keeps a trace's own, and else takes the highest that ``max_gpus`` keep.
        prompt, answer: lengths, such as ``3000`` or ``lognormal:median=800``.
        requests: end of the traffic after so many requests.
        max_gpus: most GPUs of a deployment.
        profiles: ``GPU:TENSOR_PARALLEL_SIZE``, or ``GPU`` for every size that a folder has -> profile of that engine,
            which then counts instead of other timing.
        verify: deployments that are simulated.
        notes: what of the input was interpreted or left out.
        answers: whether the model makes tokens; `checked_request` finds out.
    """

    model: str = ""
    served: str = ""
    engine: PlannedEngine = "sim"
    gpus: tuple[str, ...] = ()
    prices: Mapping[str, float] = {}
    slo: Slo = Slo()
    attainment: float = 0.95
    trace: str | None = None
    rate: float | None = None
    prompt: str | None = None
    answer: str | None = None
    requests: int | None = None
    max_gpus: int | None = None
    profiles: Mapping[str, str] = {}
    verify: int = 3
    seed: int = 0
    notes: tuple[str, ...] = ()
    answers: bool = True

    @property
    def path(self) -> str:
        """The model as a config that lies elsewhere names it: a path in full, or a well-known name."""
        return str(Path(self.model).resolve()) if Path(self.model).exists() else self.model

    @property
    def repository(self) -> str:
        """The model as an engine finds it: its folder, or the whole name of its repository.

        Raises:
            ConfigError: the name lacks an owner, and none is known.
        """
        path = Path(self.model)
        if path.exists():
            return str(path.resolve() if path.is_dir() else path.resolve().parent)
        return repository_of(self.model)

    @property
    def name(self) -> str:
        """The name that clients ask for."""
        path = Path(self.model)
        if self.served or not path.exists():
            return self.served or self.model
        return (path if path.is_dir() else path.resolve().parent).name or "model"

    def price(self, gpu: str) -> float:
        """Return dollars per hour of one GPU.

        Raises:
            ConfigError: none is given, and no guess is known.
        """
        price = self.prices.get(gpu, PRICES.get(gpu))
        if price is None:
            raise ConfigError(f"no price of {gpu} is known", hint=f"give one with --price {gpu}=2.5")
        return price

    def shape(self) -> ModelShape:
        """Return the model's dimensions.

        Raises:
            ConfigError: the model is neither known nor a config.json that can be read.
        """
        table = load_timing(TimingSettings(kind="roofline", model=self.path, gpu="h100"))
        assert table is not None
        return shape_of(table["model"], self.model)

    def gpu(self, kind: str) -> Gpu:
        """Return a GPU's data sheet.

        Raises:
            ConfigError: there is neither such an entry of the table nor such a file.
        """
        table = load_timing(TimingSettings(gpu=kind)) or {}
        return gpu_of(table["gpu"], kind) if "gpu" in table else named(kind, "--gpu")


def checked_request(request: PlanRequest) -> PlanRequest:
    """Return the request with GPUs of the table in lower case, or raise where it contradicts itself.

    Raises:
        ConfigError: names the field, its value and what would be right.
    """
    if not request.model:
        raise ConfigError("no model is named", hint="give --model, a config.json or a name such as Qwen3-8B")
    if not request.gpus:
        raise ConfigError(
            "no GPU is named, and this machine has none",
            hint="give --gpu h200, hardware: {gpu: h200} or spec.hardware.gpuSku: h200_sxm; several may share the work",
        )
    if not _makes_answers(request):
        request = _without_answers(request)
    if request.slo.ttft is None or (request.slo.itl is None and request.answers):
        raise ConfigError("the SLO needs ttft and itl", hint="such as --ttft 500ms --itl 20ms")
    if request.engine != "sim" and not request.repository:
        raise ConfigError("no model is named")  # what has no owner is said before anything is planned
    if not 0.0 < request.attainment < 1.0:
        raise ConfigError(f"attainment is {request.attainment:g}", hint="a share between 0 and 1, such as 95%")
    if request.trace is None and None in (request.prompt, request.answer):
        raise ConfigError("the traffic is not known", hint="give --trace FILE, or --rate, --isl and --osl")
    if request.trace is None and request.rate is None and request.max_gpus is None:
        raise ConfigError("the rate is not known", hint="give --rate; or --max-gpus, to plan for the most they keep")
    if request.trace is not None and (request.prompt or request.answer):
        raise ConfigError("--isl and --osl are for traffic without a trace", hint="leave them or --trace out")
    for name, value in (("rate", request.rate), *((f"price of {gpu}", each) for gpu, each in request.prices.items())):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} is {value:g}", hint="it must be a number above 0")
    gpus = tuple(dict.fromkeys(_gpu_kind(gpu) for gpu in request.gpus))
    prices = {_gpu_kind(gpu): price for gpu, price in request.prices.items()}
    unused = [gpu for gpu in prices if gpu not in gpus]
    if unused:
        raise ConfigError(f"a price is given of {', '.join(unused)}, which --gpu does not name")
    profiles = {}
    for key, path in request.profiles.items():
        gpu, _, size = key.partition(":")
        kind = _gpu_kind(gpu or gpus[0])
        if kind not in gpus or not (size or "1").isdecimal():
            raise ConfigError(f"the profile {key}={path} is of no GPU of the plan", hint="such as h200:2=FOLDER")
        # A file and a folder of Dynamo have one size of an engine; ours may have several, and says which.
        size = size or ("1" if Path(path).exists() and not says_size(path) else "")
        profiles[f"{kind}:{size}" if size else kind] = path
    return msgspec.structs.replace(request, gpus=gpus, prices=prices, profiles=profiles)


def _makes_answers(request: PlanRequest) -> bool:
    """Tell whether a model makes tokens; an embedder or reranker may have the config of a model that does."""
    return request.shape().generates and _ANSWERLESS.search(request.model) is None


def _without_answers(request: PlanRequest) -> PlanRequest:
    """Return the request of a model that only reads: its one answer comes with the end of its prompt."""
    note = f"{request.name} makes no tokens: it is planned without decode, TTFT is the time until its answer"
    left_out = [name for name, value in (("itl", request.slo.itl), ("osl", request.answer)) if value is not None]
    if left_out:
        note += f", and {' and '.join(left_out)} change nothing"
    return msgspec.structs.replace(
        request,
        slo=msgspec.structs.replace(request.slo, itl=None),
        answer=None if request.trace is not None else "1",
        answers=False,
        notes=(*request.notes, note),
    )


def numbers_by_key(texts: Sequence[str], flag: str) -> Mapping[str, float]:
    """Read ``NAME=NUMBER`` texts of a flag.

    Raises:
        ConfigError: one of them is none.
    """
    numbers = {}
    for text in texts:
        key, equals, value = text.partition("=")
        try:
            numbers[key.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not key.strip():
            raise ConfigError(f"{flag} {text!r} is not NAME=NUMBER", hint=f"such as {flag} h200=3.5")
    return numbers


def profiles_by_key(texts: Sequence[str]) -> Mapping[str, str]:
    """Read ``[GPU[:TENSOR_PARALLEL_SIZE]=]FOLDER`` texts; a profile alone is of the first GPU."""
    profiles = {}
    for text in texts:
        key, equals, folder = text.partition("=")
        profiles[key if equals else ""] = folder if equals else key
    return profiles


def _gpu_kind(gpu: str) -> str:
    return gpu.lower() if gpu.lower() in GPUS else gpu
