"""What an engine prints while it starts becomes seconds by phase, and what it does not print stays unknown."""

import pytest

from penstock.adapters.engines.start_log import PHASES, start_log_of

EAGER = """\
(APIServer pid=7) INFO 11-25 21:53:01 [api_server.py:1] vLLM API server version 0.32.0
(EngineCore pid=9) INFO [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: enforce_eager=True
(EngineCore pid=9) INFO 11-25 21:53:11 [default_loader.py:500] Loading weights took 0.25 seconds
(EngineCore pid=9) INFO 11-25 21:53:11 [core.py:403] init engine (profile, create kv cache, warmup model) took 1.50 s
"""
COMPILED = """\
(EngineCore pid=9) INFO [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: enforce_eager=False
(Worker_TP0 pid=9) INFO 11-25 21:53:11 [default_loader.py:500] Loading weights took 3.25 seconds
(Worker_TP1 pid=9) INFO 11-25 21:53:11 [default_loader.py:500] Loading weights took 4.00 seconds
(EngineCore pid=9) INFO 11-25 21:53:11 [monitor.py:20] torch.compile took 20.00 s in total
(EngineCore pid=9) INFO 11-25 21:53:11 [core.py:395] init engine (profile, create kv cache, warmup model) took 30.00 s \
(compilation: 20.50 s — language_model: 20.00 s, encoder: 0.50 s)
"""


def phases(engine: str, text: str, served: float = 20.0) -> dict[str, float | None]:
    log = start_log_of(engine)
    for second, line in enumerate(text.splitlines()):
        log.read(line, 10.0 + second)
    return log.phases(4.0, served)


def test_a_vllm_that_compiles_nothing() -> None:
    assert phases("vllm", EAGER) == {"import": 7.0, "weights": 0.25, "compile": 0.0, "warm-up": 1.5, "probe": 7.0}


def test_a_vllm_of_two_ranks_that_compiles() -> None:
    found = phases("vllm", COMPILED)
    assert found == {"import": 6.0, "weights": 4.0, "compile": 20.5, "warm-up": 9.5, "probe": 6.0}


def test_a_compilation_that_is_not_counted_is_unknown_and_part_of_the_warm_up() -> None:
    lines = EAGER.replace("enforce_eager=True", "enforce_eager=False")
    found = phases("vllm", lines)
    assert found["compile"] is None and found["warm-up"] == 1.5


@pytest.mark.parametrize("engine", ["vllm", "sim", "llamacpp"])
def test_what_is_not_printed_is_unknown_and_not_0(engine: str) -> None:
    assert phases(engine, "a line\n{not JSON\n[]\n") == dict.fromkeys(PHASES)


def test_a_simulated_engine_prints_its_phases() -> None:
    text = '{"url": "http://127.0.0.1:1", "start": {"import": 0.5, "weights": 2.0, "warm-up": 0.1, "other": 9}}'
    assert phases("sim", text) == {"import": 0.5, "weights": 2.0, "compile": None, "warm-up": 0.1, "probe": 10.0}
