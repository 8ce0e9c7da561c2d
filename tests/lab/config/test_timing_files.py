"""Are the files of a timing model read as they are, and is a bad one named with its line and field?"""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.config.checks import file_problems
from penstock.config.reading.load import load
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import Woken
from penstock.kernel.values import Prompt
from penstock_lab.config.timing_files import load_timing, timing_files
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import EngineFinished, SubmitRequest
from penstock_lab.engine.settings import SimSettings, TimingSettings, checked
from penstock_lab.engine.timing.model_shape import ModelShape, shape_of
from penstock_lab.engine.timing.timing_model import timing_of
from tests.lab.engine.models import LLAMA_8B, TINY_DENSE, profile, profile_with_experts


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A profile in CSV files."""
    for name, table in profile().items():
        if name == "model":
            continue
        rows = [",".join(table), *(",".join(str(cell) for cell in row) for row in zip(*table.values(), strict=True))]
        (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_kinds_without_files_read_none(model: str) -> None:
    assert load_timing(TimingSettings(model=model)) is None
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):  # a GPU says how many KV blocks there are
        load_timing(TimingSettings(model=model, gpu="nowhere.yaml"))
    assert load_timing(TimingSettings()) is None


def test_an_array_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.npz"
    np.savez(path, prefill_isl=[1.0, 2.0])
    found = load_timing(TimingSettings(kind="table", profile=str(path)))
    assert found is not None and list(found["prefill_isl"]) == [1.0, 2.0]
    path.write_text("no zip")
    with pytest.raises(ConfigError, match=r"table\.npz"):
        load_timing(TimingSettings(kind="table", profile=str(path)))


def test_a_model_is_named_by_file_or_folder(model: str) -> None:
    for path in (model, str(Path(model).parent)):
        found = load_timing(TimingSettings(kind="roofline", model=path, gpu="H100"))
        assert found == {"model": LLAMA_8B}


def test_a_gpu_of_one_s_own_is_described_in_yaml(model: str, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text("like: h100\nmemory_tb_per_s: 6.7\n")
    settings = TimingSettings(kind="roofline", model=model, gpu=str(path))
    own = timing_of(settings, 1000, load_timing(settings)).decode(1000, 1)
    settings = TimingSettings(kind="roofline", model=model, gpu="h100")
    stock = timing_of(settings, 1000, load_timing(settings)).decode(1000, 1)
    assert stock / 2 < own < stock * 0.7


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("gpu.yaml", "- a\n- b\n", "not a mapping"),
        ("gpu.yaml", "a: [1\n", "not valid YAML"),
        ("gpu.yaml", "bf16_tflops: 3\n", r"gpu\.yaml.*memory_gib"),
        ("gpu.yaml", "like: h100\nmemory: 3\n", "'memory' is not a field"),
        ("config.json", "{", r"config\.json is not valid JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"model_type": "llama"}', r"config\.json: num_hidden_layers is absent"),
    ],
)
def test_a_bad_file_is_named(model: str, tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    files = {"model": model, "gpu": "h100", ("gpu" if name == "gpu.yaml" else "model"): str(path)}
    settings = TimingSettings(kind="roofline", **files)
    with pytest.raises(ConfigError, match=says):
        timing_of(settings, 1000, load_timing(settings))


@pytest.mark.parametrize("raw", [b"no archive", b"PK\x03\x04 and then nothing"])
def test_a_table_that_is_no_archive_is_named(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "profile.npz"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=r"timing\.profile .*profile\.npz can't be read"):
        load_timing(TimingSettings(kind="table", profile=str(path)))


def test_a_name_that_is_neither_in_the_table_nor_a_file_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"h1000.*rtxpro6000"):
        load_timing(TimingSettings(kind="roofline", model=model, gpu="h1000"))


def test_a_profile_is_read_column_by_column(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY_DENSE))
    settings = TimingSettings(kind="operators", model=str(path), profile=str(folder))
    assert load_timing(settings) == profile()


def test_the_table_of_experts_is_read_where_there_is_one(folder: Path) -> None:
    table = profile_with_experts()["moe"]
    rows = [",".join(table), *(",".join(str(cell) for cell in row) for row in zip(*table.values(), strict=True))]
    (folder / "moe.csv").write_text("\n".join(rows))
    found = load_timing(TimingSettings(kind="operators", profile=str(folder)))
    assert found is not None and found["moe"] == table


def test_a_profile_s_other_columns_are_passed_over(folder: Path) -> None:
    path = folder / "per_sequence.csv"
    path.write_text("note,layer,sequences,time_us\nx,lm_head,1,2.5\n\ny,lm_head,2,3\n")
    found = load_timing(TimingSettings(kind="operators", profile=str(folder)))
    assert found is not None
    assert found["per_sequence"] == {"layer": ["lm_head"] * 2, "sequences": [1.0, 2.0], "time_us": [2.5, 3.0]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"dense\.csv, line 1: lacks the column layer"),
        ("layer,tokens\n", "lacks the column time_us"),
        ("layer,tokens,time_us\na,1,2\nb,1\n", r"dense\.csv, line 3: has 2 cells"),
        ("layer,tokens,time_us\na,1,2\nb,many,2\n", r"dense\.csv, line 3: tokens is 'many'"),
    ],
)
def test_a_bad_row_of_a_profile_is_named(folder: Path, text: str, says: str) -> None:
    (folder / "dense.csv").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_timing(TimingSettings(kind="operators", profile=str(folder)))


def test_a_profile_without_a_table_is_refused(folder: Path) -> None:
    (folder / "attention.csv").unlink()
    with pytest.raises(ConfigError, match=r"attention\.csv"):
        load_timing(TimingSettings(kind="operators", profile=str(folder)))


@pytest.mark.parametrize(
    ("timing", "says"),
    [
        (TimingSettings(kind="table"), r"timing\.profile names no file"),
        (TimingSettings(kind="roofline", gpu="h100"), r"timing\.model names no file"),
        (TimingSettings(kind="roofline", model="x"), r"timing\.gpu names no GPU"),
        (TimingSettings(kind="operators", model="x"), r"timing\.profile names no folder"),
        (TimingSettings(kind="operators", profile="x"), r"timing\.model names no file"),
        (TimingSettings(kind="operators", model="x", profile="x", tensor_parallel_size=2), r"timing\.gpu names no GPU"),
    ],
)
def test_a_kind_without_its_files_is_refused(timing: TimingSettings, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        checked(SimSettings(timing=timing))


def test_files_that_are_named_and_not_there_are_problems_of_the_config(tmp_path: Path, model: str) -> None:
    path = tmp_path / "cluster.yaml"
    sim = f"{{timing: {{kind: roofline, model: {model}, gpu: {tmp_path}/gone.yaml}}}}"
    path.write_text(f"models: {{m: {{tokenizer: 'builtin:sim', pools: {{p: {{sim: {sim}}}}}}}}}\n")
    loaded = load(path)
    problems = file_problems(loaded.settings, loaded.root)
    assert [problem.path for problem in problems] == ["models.m.pools.p.sim.timing.gpu"]
    assert problems[0].hint is not None and "rtxpro6000" in problems[0].hint
    assert timing_files(TimingSettings(kind="roofline", model="a", gpu="B200")) == {"model": "a"}
    assert timing_files(TimingSettings(kind="table", profile="t", model="a")) == {"profile": "t"}


def test_a_well_known_model_needs_no_file() -> None:
    timing = TimingSettings(kind="roofline", model="meta-llama/Llama-3.1-8B-Instruct", gpu="rtx4090")
    found = load_timing(timing)
    assert found is not None and shape_of(found["model"]) == shape_of({**LLAMA_8B, "max_position_embeddings": 131072})
    assert timing_files(timing) == {}
    with pytest.raises(ConfigError, match=r"neither a file nor a model.*Qwen3-32B"):
        load_timing(TimingSettings(kind="roofline", model="someone/nothing-9b", gpu="rtx4090"))


def test_an_engine_runs_on_what_was_read(model: str) -> None:
    timing = TimingSettings(kind="roofline", model=model, gpu="h100")
    engine = Engine(SimSettings(timing=timing), table=load_timing(timing))
    engine.handle(0, SubmitRequest(id="a", prompt=Prompt(1000), max_tokens=1))
    engine.handle(0, Woken())
    at = engine.next_step(0)
    assert at is not None
    (done,) = [effect for effect in engine.handle(at, Woken()) if isinstance(effect, EngineFinished)]
    assert 0.01 < done.at / 1e9 < 0.1


def test_a_checkpoint_is_read_with_the_files_beside_its_config(tmp_path: Path) -> None:
    """modelopt writes the types of weights and cache into a file of its own; sentence-transformers marks embedders."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "max_position_embeddings": 8192}))
    timing = TimingSettings(kind="roofline", model=str(folder), gpu="b200")

    def shape() -> ModelShape:
        table = load_timing(timing)
        assert table is not None
        return shape_of(table["model"])

    assert (shape().linear_dtype, shape().kv_dtype, shape().generates) == ("bf16", "bf16", True)
    quantised = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*self_attn*"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": quantised}))
    assert (shape().linear_dtype, shape().kv_dtype) == ("fp4", "fp8")
    assert {each.dtype for each in shape().linear} == {"fp4", "bf16"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512}))
    assert shape().context == 8192, "of a model that makes tokens this is no limit"
    (folder / "modules.json").write_text("[]")
    assert (shape().context, shape().generates) == (512, False)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    assert shape().context == 256
    (folder / "hf_quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match="hf_quant_config"):
        shape()
