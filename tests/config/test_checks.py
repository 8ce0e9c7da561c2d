"""Settings that contradict each other: each contradiction is told, at its place, with what to do."""

import pytest

from penstock.config.checks import is_loopback
from penstock.config.reading.load import load
from penstock.config.reading.problems import ConfigProblems

MODEL = "models={m: {pools: {a: %s}}}"


def load_target(**thresholds):
    knobs = {
        "kv_up": "decode_scale_up_kv_rate",
        "kv_down": "decode_scale_down_kv_rate",
        "queue_up": "prefill_scale_up_queue_tokens",
        "queue_down": "prefill_scale_down_queue_tokens",
    }
    given = [f"planner.classic.thresholds.{knobs[name]}={value}" for name, value in thresholds.items()]
    return ["planner.optimization_target=load", *given]


def problems(*overrides, files=False):
    try:
        load(None, overrides, files=files)
    except ConfigProblems as error:
        return [str(problem) for problem in error.problems]
    return []


PAIR = "models={m: {pools: {p: {role: prefill, gpus: 2}, d: {role: decode}}}}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["models={}"], "there is no model"),
        (["models={m: {}}"], "has no pool, so nothing would serve it"),
        (["models={'a b': {pools: {p: {}}}}"], "is not a valid name for a model"),
        (["models={m: {pools: {'a/b': {}}}}"], "is not a valid name for a pool"),
        (["models={a/b: {pools: {p: {}}}, a-b: {pools: {p: {}}}}"], "would be named like those of models.a/b.pools.p"),
        ([MODEL % "{role: prefill}"], "no pool of its model answers clients"),
        (
            [MODEL % "{role: prefill, handoff: push}", "models.m.pools.b={role: decode, handoff: completed}"],
            "but pool a of the same model has push",
        ),
        ([MODEL % "{engine: openai}"], "engine openai needs urls"),
        ([MODEL % "{engine: llamacpp, sleeping: 1}"], "these engines can't be put to sleep"),
        ([MODEL % "{engine: vllm, sleeping: 1, handoff: push}"], "sleep frees the KV memory"),
        (
            [MODEL % "{engine: llamacpp, share_weights: true}"],
            "only engines of kind vllm and sim that are started here share weights",
        ),
        ([MODEL % "{urls: [gpu1]}"], "is not a URL of a server"),
        ([MODEL % "{urls: ['http://h:1', 'http://h:2'], events: ['tcp://h:3']}"], "does not say whose it is"),
        ([MODEL % "{urls: ['http://h:1'], events: ['http://x:1=tcp://h:3']}"], "names a server that is not in urls"),
        ([MODEL % "{urls: ['http://h:1'], stats: ['h:3']}"], "is not a ZMQ endpoint"),
        ([MODEL % "{urls: ['http://h:99999']}"], "is not a URL"),
        ([MODEL % "{access: {api_key_file: a, api_key_env: b}}"], "api_key_env: stands beside api_key_file"),
        ([MODEL % "{access: {cert_key: a}}"], "cert_key: stands without cert"),
        ([MODEL % "{access: {headers: {host: a}}}"], "'host' is not a header that a pool may set"),
        ([MODEL % "{access: {headers: {'x y': a}}}"], "'x y' is not a header that a pool may set"),
        ([MODEL % "{access: {headers: {x-a: café}}}"], "is not one line of ASCII"),
        ([MODEL % "{access: {headers: {authorization: 'env:A'}, api_key_env: A}}"], "stands beside an API key"),
        ([MODEL % "{engine: vllm, args: [--api-key, k]}"], "access: is empty, and --api-key makes the engines ask"),
        ([MODEL % "{engine: vllm, args: [--api_key=k]}"], "access: is empty, and --api_key makes the engines ask"),
        ([MODEL % "{engine: vllm, env: {VLLM_API_KEY: k}}"], "access: is empty, and VLLM_API_KEY makes the engines"),
        ([MODEL % "{urls: ['http://h:1/v1']}"], "ends in /v1"),
        ([MODEL % "{urls: ['http://h:1', 'http://h:1/']}"], "stands in pool models.m.pools.a already"),
        ([MODEL % "{urls: ['http://127.0.0.1:8000']}"], "is the cluster's own endpoint"),
        ([MODEL % "{block_size: 16}"], "is 16, but sim.block_size is 64"),
        ([MODEL % "{sim: {max_num_seqs: 9000}}"], "max_num_batched_tokens is 8192, below max_num_seqs 9000"),
        ([MODEL % "{sim: {timing: {kind: table}}}"], "timing.profile names no file"),
        (["models={m: {pools: {a: {sim: {block_size: 32}}, b: {}}}}"], "is 64, but pool a of the same model has 32"),
        (["models={m: {pools: {a_1: {}, a: {}}}}"], "reads like replica 1 of models.m.pools.a"),
        (["frontend.host=0.0.0.0"], "there is no API key"),
        (["frontend.admin_port=8000"], "is 8000, like frontend.port"),
        (["frontend.processes=2", "frontend.port=0"], "can't share a port that the system picks"),
        (["frontend.processes=2", "frontend.admin_port=1"], "can't share one admin port"),
        (["frontend.security.tls_key=k"], "stands without tls_cert"),
        (["frontend.security.tls_cert=k"], "stands without tls_key"),
        (["frontend.security.api_keys=a,a"], "has the same key twice"),
        (['frontend.security.api_keys=["a b"]'], "a key that is empty, has spaces"),
        (["frontend.security.api_keys=a", "frontend.security.admin_keys=a"], "must not open /admin"),
        (["frontend.security.cors_origins=app.example.com"], "'app.example.com' is not an origin"),
        (["frontend.security.cors_origins=https://app.example.com/"], "'https://app.example.com/' is not an origin"),
        (["frontend.proxied_routes=/metrics"], "is not a route under /v1"),
        (["frontend.grpc_port=8000"], "is 8000, which HTTP has"),
        (["models.sim.render=gpu1:8100"], "is not a URL of a server"),
        (["router.breaker.open_for=61s"], "out of range: above 0 and 60 or less"),
        (["supervise.restart_backoff=2m"], "out of range: above 0 and 30 or less"),
        (["planner.policy=hybrid", "planner.load_interval=3m"], "not shorter than planner.throughput_interval 180 s"),
        (["planner.budget.min_gpus=9", "planner.budget.max_gpus=8"], "is 9, above planner.budget.max_gpus 8"),
        (["planner.budget.min_replicas=9", "planner.budget.max_gpus=8"], "all pools together takes 9 GPUs"),
        (
            ["planner.budget.pools={main: {min_replicas: 3, max_replicas: 2}}"],
            "main.max_replicas: is 2, below its min_",
        ),
        (["planner.budget.pools={main: {max_replicas: 0}}"], "main.max_replicas: is 0, below its min_replicas 1"),
        (["planner.budget.pools={main: {min_replicas: 9}}", "planner.budget.max_gpus=8"], "together takes 9 GPUs"),
        (
            [
                "planner.enabled=true",
                "planner.budget.max_gpus=3",
                "models={m: {pools: {a: {gpus: 2}, b: {gpus: 2}}}}",
            ],
            "is 3, and the least of all pools together takes 4 GPUs",
        ),
        (
            [
                "planner.budget.min_replicas=0",
                "planner.budget.pools={p: {min_replicas: 2}, d: {min_replicas: 1}}",
                "planner.budget.max_gpus=4",
                PAIR,
            ],
            "max_gpus: is 4, and the least of all pools together takes 5 GPUs",
        ),
        (
            ["planner.budget.pools={p: {max_replicas: 1}, d: {max_replicas: 2}}", "planner.budget.min_gpus=5", PAIR],
            "min_gpus: is 5, and the most of all pools together takes 4 GPUs",
        ),
        (["planner.budget.pools={q: {min_replicas: 1}}", PAIR], "pools.q: there is no such pool (there is p, d)"),
        (["planner.budget.watts=500", PAIR], "watts: is 500, and what a replica of p, d draws is not known"),
        (
            ["planner.budget.watts=500", "planner.budget.pools={p: {watts: 100}}", PAIR],
            "watts: is 500, and what a replica of d draws is not known (set planner.budget.pools.d.watts)",
        ),
        (
            ["planner.budget.watts=500", "planner.budget.pools={p: {watts: 300}, d: {watts: 300}}", PAIR],
            "watts: is 500, and the least of all pools together draws 600 W",
        ),
        (
            ["planner.policy=sla-classic", "models={m: {pools: {a: {}}}}"],
            "policy: is sla-classic, which sizes prefill and decode pools, and m has none of role decode",
        ),
        (
            ["planner.policy=sla-classic", "planner.mode=aggregated", PAIR],
            "mode: is aggregated, and planner.policy",
        ),
        (
            ["planner.classic.load.decode_kv_scale_up_threshold=0.4"],
            "decode_kv_scale_down_threshold: is 0.5, and decode_kv_scale_up_threshold is 0.4",
        ),
        (
            ["planner.classic.load.prefill_queue_scale_down_threshold=3"],
            "prefill_queue_scale_down_threshold: is 3, and prefill_queue_scale_up_threshold is 0.5",
        ),
        (
            load_target(kv_up=0.4, kv_down=0.6)[1:],
            "is 0.6, and decode_scale_up_kv_rate is",
        ),
        (["planner.plugins.use={mine: {}}"], "planner.plugins.use.mine: has neither a module nor an endpoint"),
        (["planner.plugins.use={mine: {module: m, endpoint: 'unix:///p'}}"], "use.mine: has a module and an endpoint"),
        (
            load_target(kv_up=0.4, kv_down=0.6, queue_up=9, queue_down=1),
            "is 0.6, and decode_scale_up_kv_rate is",
        ),
        (
            load_target(kv_up=0.4, kv_down=0.2, queue_up=9),
            "prefill_scale_down_queue_tokens: is not set",
        ),
    ],
)
def test_a_contradiction_is_told(overrides, said):
    found = problems(*overrides)
    assert any(said in problem for problem in found), found
    assert len(found) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["frontend.host=0.0.0.0", "frontend.security.api_keys=k"],
        ["frontend.host=0.0.0.0", "frontend.security.insecure=true"],
        ["frontend.host=::1"],
        ["frontend.host=localhost"],
        ["frontend.processes=2", "frontend.port=9000"],
        [MODEL % "{urls: ['http://127.0.0.1:8001'], block_size: 16}"],
        ["models={m: {pools: {a: {urls: ['http://h:1'], block_size: 64}, b: {}}}}"],
        ["planner.policy=load-fpm", "planner.load_interval=3m"],
        ["planner.budget.min_gpus=8", "planner.budget.max_gpus=8"],
        ["planner.enabled=true", "planner.budget.max_gpus=4", "models={m: {pools: {a: {gpus: 2}, b: {gpus: 2}}}}"],
        ["planner.plugins.use={mine: {module: m}, other: {endpoint: 'unix:///p'}}"],
        load_target(kv_up=0.6, kv_down=0.2, queue_up=9, queue_down=1),
    ],
)
def test_what_fits_together_is_left_alone(overrides):
    assert problems(*overrides) == []


@pytest.mark.parametrize(("host", "yes"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False)])
def test_loopback(host, yes):
    assert is_loopback(host) is yes


def test_files_that_the_settings_name_are_looked_for(tmp_path):
    cert = tmp_path / "cert.pem"
    cert.write_text("x")
    overrides = [
        f"frontend.security.tls_cert={cert}",
        "frontend.security.tls_key=/nowhere/key.pem",
        f"models.sim.tokenizer={tmp_path}",
    ]
    first, second = problems(*overrides, files=True)
    assert "frontend.security.tls_key: /nowhere/key.pem is not there" in first
    assert "models.sim.tokenizer: " in second and "has no tokenizer.json" in second
    (tmp_path / "tokenizer.json").write_text("{}")
    assert len(problems(*overrides, files=True)) == 1


def test_contradictions_and_missing_files_are_told_at_once_with_their_lines(tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "planner:\n"
        "  policy: hybrid\n"
        "  load_interval: 5m\n"
        "  budget:\n"
        "    max_gpus: 4\n"
        "    min_gpus: 8\n"
        "  classic:\n"
        "    profile: /nowhere/profile\n"
    )
    with pytest.raises(ConfigProblems) as found:
        load(config, files=True)
    told = [(problem.origin.text.removeprefix(str(config)), problem.path) for problem in found.value.problems]
    assert told == [
        (":3:18", "planner.load_interval"),
        (":6:15", "planner.budget.min_gpus"),
        (":8:14", "planner.classic.profile"),
    ]
    assert "profile folder /nowhere/profile has no profile" in str(found.value)


@pytest.mark.parametrize(
    ("name", "family", "flag"),
    [
        ("glm45", "GLM", "--tool-call-parser glm45"),
        ("penstock:glm47", "GLM", "--tool-call-parser glm45"),
        ("kimi_k2", "Kimi K2", "--tool-call-parser kimi_k2"),
        ("Kimi-K2", "Kimi K2", "--tool-call-parser kimi_k2"),
        ("openai", "gpt-oss", "--reasoning-parser openai_gptoss"),
        ("gpt_oss", "gpt-oss", "--tool-call-parser gpt-oss"),
        ("harmony", "gpt-oss", "--jinja"),
        ("deepseek_v32", "DeepSeek V3.2", "--tool-call-parser deepseek_v32"),
        ("DeepSeek-V3.2", "DeepSeek V3.2", "--tool-call-parser deepseekv32"),
        ("minimax_m2", "MiniMax", "--tool-call-parser minimax-m2"),
    ],
)
@pytest.mark.parametrize("field", ["tool_parser", "reasoning_parser"])
@pytest.mark.parametrize("engine", ["sim", "vllm"])
def test_a_family_that_belongs_to_its_engine_is_refused_by_name(name, family, flag, field, engine):
    pool = f"{{engine: {engine}, {field}: '{name}'"
    pool += "}" if engine == "sim" else ", urls: ['http://127.0.0.1:9'], max_model_len: 9}"
    (problem,) = problems(f"models={{m: {{pools: {{main: {pool}}}}}}}")
    assert f"that of {family} belongs to the engine" in problem and flag in problem
    assert f"leave {field} out" in problem


def test_an_engine_that_is_started_here_gets_the_flag_of_its_own_family():
    assert problems("models={m: {pools: {main: {engine: vllm, tool_parser: kimi_k2}}}}") == []
    (problem,) = problems("models={m: {pools: {main: {engine: vllm, tool_parser: 'penstock:kimi_k2'}}}}")
    assert "that of Kimi K2 belongs to the engine" in problem
    (problem,) = problems("models={m: {pools: {main: {engine: sim, tool_parser: herms}}}}")
    assert "it has deepseek_v3" in problem and "belongs" not in problem


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key", "cookie", "x-team-token"])
def test_a_secret_has_no_place_in_a_pools_headers_and_is_not_shown(header):
    (found,) = problems(MODEL % f"{{access: {{headers: {{{header}: sk-12345}}}}}}")
    assert "looks like a secret" in found and "sk-12345" not in found
    assert not problems(MODEL % f"{{access: {{headers: {{{header}: 'env:KEY'}}}}}}")


def test_files_that_open_engines_must_be_there():
    pool = MODEL % "{access: {api_key_file: nowhere, ca: nowhere, headers: {x-key: 'file:nowhere'}}}"
    found = problems(pool, files=True)
    assert [line.count("nowhere is not there") for line in found] == [1, 1, 1], found


def test_a_clients_fields_are_those_that_steer_engines():
    (problem,) = problems("models={m: {pools: {main: {client_fields: [temperature, vllm_xargs.top_n, lora]}}}}")
    assert "'temperature' steers no engine" in problem and "kv_transfer_params" in problem
