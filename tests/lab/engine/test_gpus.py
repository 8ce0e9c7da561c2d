"""Is the table of GPUs what the data sheets say, and is a user's own description checked field by field?"""

import pytest

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.timing.gpus import GIB, GPUS, gpu_of, named

OWN = {
    "name": "own",
    "bf16_tflops": 100,
    "memory_gib": 48,
    "memory_tb_per_s": 1.5,
    "link_gb_per_s": 60,
    "network_gb_per_s": 25,
}


def test_the_table_has_the_gpus_of_the_field() -> None:
    assert list(GPUS) == [
        *("a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "l40s", "rtx4090", "rtxpro6000"),
    ]
    h100 = named("H100")
    assert (h100.bandwidth, h100.memory, h100.flops("bf16")) == (3.35e12, 80 * GIB, 989e12)


def test_a_type_that_the_gpu_does_not_compute_in_runs_at_the_next_wider_rate() -> None:
    assert named("a100").flops("fp8") == named("a100").flops("bf16") == 312e12
    assert named("h100").flops("fp4") == named("h100").flops("bf16"), "weights of four bits are widened there"
    assert named("h100").flops("fp8") == 1978e12
    assert named("b200").flops("fp4") == 9000e12
    assert named("b200").flops("mxfp4") == named("b200").flops("fp8"), "beside activations in fp8"
    assert named("b200").flops("int4") == named("b200").flops("bf16")
    widened = {name: [dtype for dtype in ("fp8", "fp4", "int4") if named(name).widens(dtype)] for name in GPUS}
    assert widened["a100"] == ["fp8", "fp4", "int4"]
    assert widened["h100"] == ["fp4", "int4"]
    assert widened["b200"] == ["int4"]


def test_groups_beyond_the_link_talk_over_the_network() -> None:
    assert named("h100").link(8) == 450e9
    assert named("h100").link(16) == 50e9
    assert named("gb200").link(72) == 900e9


def test_a_description_of_one_s_own_is_taken() -> None:
    gpu = gpu_of(OWN)
    assert (gpu.name, gpu.flops("fp8"), gpu.link_gpus) == ("own", 100e12, 8)
    near = gpu_of({"like": "h200", "name": "h200-capped", "memory_tb_per_s": 4.0})
    assert (near.name, near.bandwidth, near.flops("fp8")) == ("h200-capped", 4.0e12, 1978e12)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bf16_tflops": 0}, r"gpu.yaml: bf16_tflops is 0"),
        ({"bf16_tflops": "fast"}, "bf16_tflops is 'fast'"),
        ({"memory_gib": float("nan")}, "memory_gib is nan"),
        ({"memory_tb_per_s": True}, "memory_tb_per_s is True"),
        ({"link_gpus": 2.5}, "link_gpus"),
        ({"name": 7}, "name"),
        ({"tflops": 3}, "'tflops' is not a field"),
        ({"like": "h900"}, "h900"),
    ],
)
def test_a_bad_field_is_named(change: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gpu_of({**OWN, **change}, "gpu.yaml")


def test_absent_fields_are_listed() -> None:
    with pytest.raises(ConfigError, match="memory_gib, memory_tb_per_s"):
        gpu_of({key: value for key, value in OWN.items() if not key.startswith("memory")})


def test_an_unknown_name_lists_the_table() -> None:
    with pytest.raises(ConfigError, match="rtxpro6000"):
        named("tpu")
