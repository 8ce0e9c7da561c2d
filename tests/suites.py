"""The suites of tests: what each one runs, what it is about, and what the gate of a landing needs of it.

One table for three rings: `make test` runs the suites of ring "test"; `.ci/run` those, ring "gate", and of ring
"nightly" what a landing can break; `make nightly` everything at full depth. A nightly suite is in the gate in full
where a file of its subject has changed since its last green run, which docs/reference/nightly.json names; else only
its `gate` part is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Suite:
    """Tests that run together.

    Args:
        name: a part before a dash names its group.
        tests: files and folders.
        subject: files and folders of the repository that these tests are about, beside the tests themselves; patterns
            such as ``tests/vllm/*.py`` stand for what tests share.
        ring: the innermost ring that runs all of it, changed or not; "soak" runs in the nightly and never in the gate.
        gate: what the gate runs of a nightly suite whose subject has not changed.
        select: pytest's expression of marks.
        workers: how many tests run at a time. Tests marked ``quiet`` run alone, after the others.
        spread: xdist's way to hand tests out.
        once_more: whether a failed test runs a second time, named and counted: a busy machine alone can fail tests of
            real processes, sockets and clocks. Pure tests have one run.
        needs: `tests.environments` without which it cannot run.
        requires: what must not be skipped, beside what PENSTOCK_REQUIRE names.
        depth: share of the random examples in full; None is the default of `tests.depth`.
        gate_depth: the same of the gate's part.
        variables: of the environment.
        options: further arguments of pytest.
    """

    name: str
    tests: tuple[str, ...]
    subject: tuple[str, ...] = ()
    ring: Literal["test", "gate", "nightly", "soak"] = "nightly"
    gate: tuple[str, ...] = ()
    select: str = "not slow"
    workers: int = 2
    spread: str = "load"
    once_more: bool = True
    needs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    depth: float | None = None
    gate_depth: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    @property
    def again(self) -> tuple[str, ...]:
        return ("--reruns", "1") if self.once_more else ()

    @property
    def group(self) -> str:
        return self.name.partition("-")[0]


def below(folder: str, *names: str) -> tuple[str, ...]:
    """Return the paths of names in a folder; the name of a test module stands for its file."""
    return tuple(f"{folder}/{name}{'.py' if PurePosixPath(name).name.startswith('test_') else ''}" for name in names)


COMPANIONS = ("dynamo", "extras", "kubernetes", "kv", "lab")
"""Each has its tests in a folder of its own, the server's lie beside them: tests/kv/blocks, tests/router."""


def sources(*names: str) -> tuple[str, ...]:
    """Return the folders in src of rooms, which are named as those of their tests (``kv/blocks``, ``router``)."""
    return below("src", *(f"penstock{'_' if name.partition('/')[0] in COMPANIONS else '/'}{name}" for name in names))


def without(*paths: str) -> tuple[str, ...]:
    return tuple(f"--ignore={path}" for path in paths)


COMPILED = ("kernel", "router", "lab/engine", "lab/simulate", "lab/traffic")
"""Rooms whose sources `hatch_build.py` compiles."""
PURE = (*COMPILED, "planner", "fleet", "kv/blocks", "dynamo/forecast", "dynamo/policies")
SHELL = (
    *(
        "config",
        "cli",
        "adapters",
        "contracts",
        "dynamo",
        "extras",
        "frontend",
        "inside",
        "kubernetes",
        "page",
        "runtime",
    ),
    *("lab/config", "lab/profiler", "lab/report", "lab/sim", "kv/inside", "kv/tiers", "kv/transfer"),
    *("docs", "release", "security", "testing"),
)
SLOW_ELSEWHERE = ("cli", "kubernetes", "lab/profiler", "lab/report", "release")
"""Rooms whose slow tests are in suites of their own."""
BUILD = ("hatch_build.py", "pyproject.toml")
CLIENTS = (
    *below(
        "tests/frontend",
        *("test_agent_examples", "test_anthropic_client", "test_coding_agents", "test_openai_client"),
        *("test_other_clients", "test_overflow_clients"),
    ),
    "tests/extras/test_open_inference.py",
    "tests/live/test_vendor_snippets.py",
)
"""Tests with clients that others make."""
NIXL = below("tests/kv/transfer", "test_nixl_contract", "test_nixl_file_contract", "test_nixl_processes")
"""Tests that run by themselves: at its import, NIXL's native module has ended processes in which thousands of others
had run before. It does not do so behind gRPC, obstore or ZeroMQ alone."""
OPERATE = below(
    "tests/live",
    *("test_admin_answers", "test_chaos", "test_crash", "test_etcd", "test_handoff", "test_operate"),
    *("test_printed_commands", "test_takeover"),
)
"""Slow live tests that have found faults of landings."""
DOUBLE = below(
    "tests/kubernetes",
    *("test_api_faults", "test_api_server", "test_controllers", "test_helm", "test_kubectl", "test_kubelet"),
)
"""Tests that hold the doubles of Kubernetes to what real programs accept and print."""
SERVERS = ("tests/vllm/*.py", "tests/vllm/setup")
"""What the tests of real vLLM share."""
ENGINES = (
    *sources("adapters/engines", "frontend/exchange", "router/kv_index", "runtime/kv_events"),
    *SERVERS,
)
IMAGE = "tests/kubernetes/test_image.py"
SITE = "tests/docs/test_site.py"
PROGRAMS = ("kubectl", "helm", "envoy", "nginx", "haproxy", "xds")

SUITES = (
    Suite("pure", below("tests", *PURE), subject=sources(*PURE), ring="test", once_more=False),
    Suite("stateful", ("tests/stateful",), subject=sources("kubernetes/operator"), ring="gate", once_more=False),
    Suite(
        "shell",
        below("tests", *SHELL),
        subject=(
            *sources("__init__.py", "__main__.py", "extension.py", "py.typed", "adapters", "cli", "config"),
            *sources("frontend", "inside", "page", "runtime", "testing", *COMPANIONS),
            *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "LICENSE", "Makefile", ".ci"),
            *(".gitignore", "bench", "docs", "examples", "requirements"),
            *(
                "tests/environments.py",
                "tests/house.py",
                "tests/nightly.py",
                "tests/run.py",
                "tests/suites.py",
            ),
        ),
        ring="test",
        workers=4,  # a third of their time is waiting
        options=without(*NIXL),
    ),
    Suite("live", ("tests/live",), ring="gate", spread="loadfile"),
    Suite(
        "operate",
        OPERATE,
        ring="gate",
        select="slow",
        workers=3,  # a fourth of their time is waiting
        spread="loadfile",
    ),
    Suite(
        "storm",
        ("tests/soak",),
        ring="gate",
        select="slow",
        workers=1,
        variables={"PENSTOCK_SOAK_SECONDS": "60"},
    ),
    Suite(
        "kubernetes",
        ("tests/kubernetes",),
        subject=(
            *sources("adapters/stores", "fleet", "kubernetes", "lab/profiler/deployment_plan"),
            *("deploy", "tests/kubernetes/*.py", "tests/kubernetes/setup"),
        ),
        gate=below(
            "tests/kubernetes",
            *("operator", "test_chart", "test_leader_election", "test_planner_scales", "test_pod_runner"),
            "test_pods_under_load",
        ),
        select="",
        workers=3,
        spread="loadfile",
        needs=("kubernetes",),
        requires=PROGRAMS,
        options=without(*DOUBLE, IMAGE, "tests/kubernetes/connector", "tests/kubernetes/picker"),
    ),
    Suite(
        "pickers",
        ("tests/kubernetes/picker",),
        subject=sources("frontend/http", "frontend/prompt", "kubernetes/picker"),
        gate=below(
            "tests/kubernetes/picker",
            "test_both_gateways",
            "test_epp_command",
            "test_ext_proc_envoy",
            "test_lost_hosts",
        ),
        select="",
        workers=3,
        spread="loadfile",
        needs=("kubernetes",),
        requires=PROGRAMS,
    ),
    Suite(
        "compiled-pure",
        below("tests", *PURE, "stateful"),
        subject=(*sources(*COMPILED, "lab/runs"), *BUILD),
        gate=below("tests", *PURE, "stateful"),
        once_more=False,
        needs=("compiled",),
        requires=("compiled",),
        depth=1.0,
        gate_depth=0.4,
    ),
    Suite(
        "compiled-random",
        below("tests", *SHELL, "live"),
        subject=(*sources(*COMPILED, "lab/runs"), *BUILD),
        gate=below("tests", *SHELL, "live"),
        select="hypothesis and not slow",
        needs=("compiled",),
        requires=("compiled",),
        depth=1.0,
        gate_depth=0.4,
    ),
    Suite(
        "compiled-shell",  # what has a compiled module below it
        below(
            "tests",
            "adapters",
            "cli",
            "contracts",
            "extras",
            "frontend",
            "kv/tiers",
            "lab/profiler",
            "lab/report",
            "lab/sim",
        )
        + below("tests", "runtime", "testing")
        + below("tests/live", "test_up", "test_handoff", "test_planner"),
        subject=(*sources(*COMPILED, "lab/runs"), *BUILD),
        select="not slow and not hypothesis",
        workers=3,
        needs=("compiled",),
        requires=("compiled",),
    ),
    Suite(
        "vllm",
        below("tests/vllm", "children", "handoff", "test_environment", "test_parsers", "test_publisher", "tiers")
        + below("tests/vllm", "test_transformers"),
        subject=(*ENGINES, *sources("inside", "kv")),
        gate=below("tests/vllm", "children/test_1_serves", "children/test_3_killed", "handoff/test_1_splits")
        + below("tests/vllm", "test_environment", "tiers/test_4_one_flag"),
        needs=("vllm",),
        requires=("vllm",),
    ),
    Suite(
        "vllm-attached",
        below("tests/vllm", "attached", "test_front_door"),
        subject=ENGINES,
        gate=below("tests/vllm", "attached", "test_front_door"),
        select="",
        workers=1,  # they share a server
        needs=("vllm",),
        requires=("vllm",),
    ),
    Suite(
        "vllm-planner",
        below("tests/vllm", "planned", "profiled"),
        subject=(*sources("dynamo", "planner", "lab/profiler", "runtime/planning"), *SERVERS),
        select="not soak",
        workers=1,
        needs=("vllm",),
        requires=("vllm",),
    ),
    Suite(
        "vllm-media",
        below("tests/vllm", "seeing"),
        subject=(*sources("frontend/media", "kernel/media", "kv/inside/embeddings"), *SERVERS),
        needs=("vllm",),
        requires=("vllm",),
    ),
    Suite(
        "vllm-adapters",
        below("tests/vllm", "adapters"),
        subject=(*sources("router/workers", "frontend/prompt"), *SERVERS),
        needs=("vllm",),
        requires=("vllm",),
    ),
    Suite(
        "vllm-weights",
        below("tests/vllm", "test_weights"),
        subject=(
            *sources("kv/inside/weights", "kv/weights", "kv/transfer/weights"),
            *SERVERS,
        ),
        workers=1,
        needs=("vllm",),
        requires=("vllm",),
    ),
    Suite(
        "sglang",
        ("tests/sglang",),
        subject=(
            *sources(
                *(f"adapters/engines/dialects/{name}.py" for name in ("dialect", "kv_transfer_protocol", "sglang"))
            ),
            *sources(
                "adapters/engines/describe.py", "adapters/engines/kv_events", "frontend/exchange/prefill_stages.py"
            ),
            *sources("router/kv_index", "router/requests/handoff.py", "router/stage_graph.py"),
            *("src/penstock/runtime/kv_events", "tests/engine_venv.py", "tests/vllm/setup/checkpoint.py"),
        ),
        select="",
        workers=1,  # they share servers
        needs=("sglang",),
        requires=("sglang",),
    ),
    Suite(
        "llamacpp",
        ("tests/llamacpp",),
        subject=sources("adapters/engines/dialects/llamacpp.py", "planner"),
        select="",
        workers=1,
        needs=("llamacpp",),
        requires=("llamacpp",),
    ),
    Suite(
        "nixl",
        NIXL,
        subject=sources("kv/transfer"),
        select="",
        workers=1,
        needs=("nixl",),
        requires=("nixl",),
    ),
    Suite(
        "clients",
        CLIENTS,
        subject=(
            *sources("frontend/dialects", "frontend/exchange", "frontend/openai", "extras/open_inference"),
            *sources("frontend/parsers", "frontend/prompt"),
            *("examples", "docs/guides/vendor-clients.md"),
        ),
        select="slow",
        workers=3,
        spread="loadfile",
        needs=("clients", "nat", "agents"),
        requires=(
            *("anthropic", "langchain_nvidia_ai_endpoints", "langchain_openai", "litellm", "openai"),
            "tritonclient.grpc.aio",
        ),
    ),
    Suite(
        "simulations",
        below("tests", *PURE, "cli", "lab/profiler", "lab/report"),
        subject=sources("dynamo", "lab", "planner", "router"),
        select="slow",
        workers=3,
        spread="loadfile",
    ),
    Suite(
        "slow",
        ("tests/live", *below("tests", *(room for room in SHELL if room not in SLOW_ELSEWHERE))),
        subject=sources(
            *("adapters", "config", "fleet", "frontend", "inside", "page", "runtime"),
            *("extras", "kv"),
        ),
        select="slow",
        workers=3,
        spread="loadfile",
        needs=("clients",),
        requires=("schemathesis",),
        options=without(*CLIENTS, *OPERATE, SITE),
    ),
    Suite(
        "double",
        DOUBLE,
        subject=("tests/doubles",),
        select="",
        workers=3,
        spread="loadfile",
        needs=("kubernetes",),
        requires=PROGRAMS,
    ),
    Suite(
        "docs", (SITE,), subject=("docs", "mkdocs.yml"), select="slow", workers=1, needs=("docs",), requires=("mkdocs",)
    ),
    Suite(
        "image", (IMAGE,), subject=("Dockerfile", ".dockerignore", "deploy/release.py", *BUILD), select="", workers=1
    ),
    Suite(
        "release",
        ("tests/release",),
        subject=("deploy/release.py", *BUILD),
        select="slow",
        workers=1,
        needs=("release",),
        requires=("release",),
    ),
    Suite(
        "soak",
        ("tests/soak",),
        ring="soak",
        select="slow",
        workers=1,
        variables={"PENSTOCK_SOAK_SECONDS": "1200"},
    ),
    Suite(
        "soak-vllm",
        below("tests/vllm", "profiled/ramp_soak.py", "planned"),
        ring="soak",
        select="soak",
        workers=1,
        needs=("vllm",),
        requires=("vllm",),
    ),
)


def covers(paths: Iterable[str], file: str) -> bool:
    """Say whether a file is one of these paths, or lies below one."""
    path = PurePosixPath(file)
    return any(path.is_relative_to(each) or path.match(each) for each in paths)


def touched(suite: Suite, files: Iterable[str]) -> list[str]:
    """Return the files among these that a suite is about, or that its tests are made of."""
    return [file for file in files if covers((*suite.subject, *suite.tests), file)]


def known(file: str) -> bool:
    """Say whether a file is in the tests or the subject of any suite: else its change counts as a change of all."""
    return any(touched(suite, [file]) for suite in SUITES)
