"""Does an operator's module become a plugin, and does what is wrong with it name the setting?"""

from pathlib import Path

import pytest

from penstock.config.files.plugin_modules import load_plugins
from penstock.config.reading.load import load
from penstock.kernel.errors import ConfigError
from penstock.planner.observation import Observation
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.proposals import Override
from penstock.planner.settings_plugins import PluginEntry, PluginSettings

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "planner-plugin"

BROKEN = """
from penstock.planner.plugins.plugin_registry import StatelessPlugin

class NoPlugin:
    def __init__(self, spec): self.spec = spec

class OwnSpec(StatelessPlugin):
    spec = None
    def __init__(self, spec): pass
    def evaluate(self, context): pass

def fails(spec, number=1):
    raise ValueError(f"number is {number}")
"""


def loaded(**plugin: object) -> list[object]:
    return list(load_plugins(PluginSettings(use={"mine": PluginEntry(**plugin)})))  # type: ignore[arg-type]


def test_the_example_runs_in_the_planners_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    options = {"table": "decode=0-12:4,12-24:2", "begins": "11.5"}
    (plugin,) = loaded(module="price_of_day", name="Cap", stage="constrain", priority=7, options=options)
    assert (plugin.spec.id, plugin.spec.priority, plugin.spec.outside) == ("mine", 7, False)
    for at, most in ((0.0, 4), (1801.0, 2)):
        look = Observation(at=at, window=5.0, models={})
        answer = plugin.evaluate(PluginContext(1, at, [look], {"decode": 9}))
        assert isinstance(answer, Override) and answer.targets[0].replicas == most


def broken(name: str, **options: str) -> dict[str, object]:
    return {"module": "broken_plugins", "name": name, "options": options}


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ({"module": "no_such_module_here"}, "mine.module: no_such_module_here can't be imported"),
        ({"module": "syntax_is_wrong"}, "SyntaxError"),
        (broken("NoPlugins"), "did you mean NoPlugin?"),
        (broken("NoPlugin"), "has no evaluate, snapshot, restore"),
        (broken("OwnSpec"), "does not keep the spec"),
        (broken("fails", number="3"), "fails failed on its options: ValueError: number is 3"),
        (broken("fails", size="3"), "fails(spec, number=1) does not take them"),
        (broken("fails", number="[3"), "options.number: '[3' is not valid YAML"),
    ],
)
def test_what_is_wrong_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: dict[str, object], words: str
) -> None:
    (tmp_path / "broken_plugins.py").write_text(BROKEN)
    (tmp_path / "syntax_is_wrong.py").write_text("def")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        loaded(**plugin)
    assert words in str(caught.value)


def test_the_plugin_of_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "planner-plugins.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_scaling_of_the_document.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    (section,) = (block for block in page.split("```yaml\n")[1:] if "my_scaling" in block)
    file = tmp_path / "cluster.yaml"
    file.write_text(section.split("```")[0].replace("my_scaling", "my_scaling_of_the_document"))
    (plugin,) = load_plugins(load(file).settings.planner.plugins)
    answer = plugin.evaluate(PluginContext(1, 5.0, [Observation(at=5.0, window=5.0, models={})], {"decode": 9}))
    assert isinstance(answer, Override) and answer.targets[0].replicas == 3
