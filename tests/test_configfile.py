"""What a config file may say, and the one line that each fault ends in."""

from __future__ import annotations

from pathlib import Path

import pytest

from archsearch.config import RunConfig
from archsearch.configfile import blamed, load_config
from archsearch.errors import ConfigError

BASE = "schema: 1\nname: a\nteacher:\n  source: x\n"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_status == 2
    return message.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "0.0001", "1.0e-4", ".0001", "1_0e-5"])
def test_numbers_in_scientific_notation_are_floats(tmp_path: Path, written: str) -> None:
    config = load(tmp_path, BASE + f"supernet: {{learning_rate: {written}}}")
    assert config.supernet.learning_rate == pytest.approx(1e-4)


def test_values_of_yaml_1_2(tmp_path: Path) -> None:
    text = BASE + "supernet: {tokens: 4_000_000, gdn: {conv: true}, checkpoint_minutes: 1}\n"
    config = load(tmp_path, text + "search: {storage: ~, proxy_tokens: [0, 0x10]}")
    assert config.supernet.tokens == 4_000_000
    assert config.supernet.gdn.conv is True
    assert config.supernet.checkpoint_minutes == 1.0
    assert config.search.storage is None
    assert config.search.proxy_tokens == (0, 16)
    assert load(tmp_path, BASE.replace("name: a", "name: 'on'")).name == "on"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("serch: {trials: 3}", "run.yaml:5: serch: unknown key; did you mean search?"),
        (
            "search:\n  trails: 3",
            "run.yaml:6: search.trails: unknown key; did you mean search.trials?",
        ),
        ("sampler: tpe", "run.yaml:5: sampler: unknown key; did you mean search.sampler?"),
        (
            "search:\n  trials: 0",
            "run.yaml:6: search.trials: 0 is not allowed; allowed: 1 or more",
        ),
        (
            "search:\n  trials: '5'",
            "run.yaml:6: search.trials: text '5' is the wrong type; allowed: a whole number",
        ),
        (
            "search: {trials: true}",
            "run.yaml:5: search.trials: boolean True is the wrong type; allowed: a whole number",
        ),
        (
            "search: {trials: 4e1}",
            "run.yaml:5: search.trials: float 40.0 is the wrong type; allowed: a whole number, write 40",
        ),
        (
            "execution: {executor: rays}",
            "run.yaml:5: execution.executor: 'rays' is not allowed; allowed: 'ray' or 'serial'",
        ),
        (
            "search:\n  trials: 3\n\n  trials: 4",
            "run.yaml:8: search.trials: duplicate key, first on line 6",
        ),
        (
            "data: {niah_share: 1.5}",
            "run.yaml:5: data.niah_share: 1.5 is not allowed; allowed: 0 to 1",
        ),
        (
            "data: {niah_share: -1}",
            "run.yaml:5: data.niah_share: -1 is not allowed; allowed: 0 to 1",
        ),
        (
            "scoring: {decay: 0}",
            "run.yaml:5: scoring.decay: 0 is not allowed; allowed: more than 0 and at most 1",
        ),
        (
            "supernet: {init: {write: constant, write_strength: 1.5}}",
            "run.yaml:5: supernet.init.write_strength: 1.5 is not allowed; allowed: 0.01 to 0.99",
        ),
        (
            "supernet: {stop_gain: 1.5, stop_below: 0.1}",
            "run.yaml:5: supernet.stop_gain: 1.5 is not allowed; allowed: 0 to 1",
        ),
        (
            "search: {seeds: {fa_shares: [0.5, 1.0]}}",
            "run.yaml:5: search.seeds.fa_shares[1]: 1.0 is not allowed; allowed: more than 0 and less than 1",
        ),
        (
            "supernet: {learning_rate: -1e-3}",
            "run.yaml:5: supernet.learning_rate: -0.001 is not allowed; allowed: more than 0",
        ),
        (
            "search: {max_promoted: 0}",
            "run.yaml:5: search.max_promoted: 0 is not allowed; allowed: 1 or more",
        ),
        (
            "probes: {kinds: [single, foo]}",
            "run.yaml:5: probes.kinds[1]: 'foo' is not allowed; allowed: 'single', 'multikey', 'multivalue', "
            "'multiquery', 'tracking', 'copying', 'labels', 'arithmetic', 'lookup' or 'agreement'",
        ),
        (
            "search:\n  objectives:\n  - {metric: kl, direction: up}",
            "run.yaml:7: search.objectives[0].direction: 'up' is not allowed; allowed: 'minimize' or "
            "'maximize'",
        ),
        (
            "search: {objectives: []}",
            "run.yaml:5: search.objectives: [] is not allowed; allowed: at least 1 of them",
        ),
        (
            "search: {operators: [F]}",
            "run.yaml:5: search: operators needs at least two different operators",
        ),
        (
            "supernet: {gdn: {conv: off}}",
            "run.yaml:5: supernet.gdn.conv: text 'off' is the wrong type; allowed: true or false",
        ),
        (
            "supernet: {learning_rate: .inf}",
            "run.yaml:5: supernet.learning_rate: .inf is not allowed; be finite",
        ),
        (
            "search:",
            "run.yaml:5: search: empty value None is the wrong type; allowed: a mapping of keys",
        ),
        (
            "search:\n  objectives:\n  - metric: kl\n    direktion: minimize",
            "run.yaml:8: search.objectives[0].direktion: unknown key; "
            "did you mean search.objectives[0].direction?",
        ),
        (
            "probes: {contexts: 5}",
            "run.yaml:5: probes.contexts: int 5 is the wrong type; allowed: a list",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(
    tmp_path: Path, section: str, message: str
) -> None:
    assert refusal(tmp_path, BASE + section) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a", "run.yaml:1: schema: missing; write `schema: 1`"),
        ("schema: 1.0", "run.yaml:1: schema: 1.0 is another version of the config format"),
        ("name: a\nschema: 0", "run.yaml:2: schema: 0 is another version of the config format"),
        ("schema: 1\nname: a", "run.yaml:1: teacher: missing; it has no default"),
        ("- 1", "run.yaml:1: a config is a mapping of sections, this is list"),
        ("", "run.yaml:1: a config is a mapping of sections, this is empty value"),
        ("a: 1\nb: [", "run.yaml:2: not YAML: "),
        ("a: 1\n\tb: 2", "run.yaml:2: not YAML: "),
        ("a: 1\n---\nb: 2", "run.yaml:2: not YAML: "),
        ("a: *b", "run.yaml:1: not YAML: found undefined alias"),
        ("a: &x [*x]", "run.yaml:1: a[0]: the anchor contains itself"),
        (
            "a: !!python/name:os.system x",
            "run.yaml:1: a: tag tag:yaml.org,2002:python/name:os.system",
        ),
        ("a: !!python/object/apply:os.system [x]", "run.yaml:1: a: tag tag:yaml.org,2002:python"),
        ("a: !point {x: 1}", "run.yaml:1: a: tag !point is not allowed; only plain values are"),
        ("a: " + "[" * 3000 + "]" * 3000, "run.yaml:1: not a config: nested too deeply"),
        ("? [1, 2]\n: 3", "run.yaml:1: config: a key must be a plain word"),
        ("a: !!int x", "run.yaml:1: a: 'x' is no int"),
        ("a: \x01", "run.yaml:1: not YAML: "),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text).startswith(message)


def test_several_problems_name_the_first_and_count_the_rest(tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE + "seed: -1\nsearch:\n  trials: 0\n  samplr: tpe")
    assert message.startswith("run.yaml:5: seed: -1 is not allowed")
    assert message.endswith("(and 2 more problems)")


def test_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read the config: No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "run.yaml")


def test_overrides_replace_add_and_index(tmp_path: Path) -> None:
    text = BASE + "search: {objectives: [{metric: kl, direction: minimize}]}"
    config = load(
        tmp_path,
        text,
        "search.trials=7",
        "search.objectives.0.metric=fa_share",
        "supernet.gdn={conv: true}",
        "supernet.learning_rate=1e-4",
        "data.train.path=a=b",
        "probes.contexts=[64, 128]",
    )
    assert config.search.trials == 7
    assert config.search.objectives[0].metric == "fa_share"
    assert config.supernet.gdn.conv is True
    assert config.supernet.learning_rate == 1e-4
    assert config.data.train.path == "a=b"
    assert config.probes.contexts == (64, 128)


def test_an_override_can_repair_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, BASE + "search: {trials: 0}", "search.trials=2").search.trials == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.trals=7", "search.trals: unknown key; did you mean search.trials?"),
        ("searhc.trials=7", "searhc: unknown key; did you mean search?"),
        (
            "teacher.source.x=4",
            "teacher.source.x: unknown key; teacher.source takes a value and has no",
        ),
        ("search.trials=x", "search.trials: text 'x' is the wrong type; allowed: a whole number"),
        ("search.trials=", "search.trials: empty value None is the wrong type"),
        ("search.trials", "write it as path.to.key=value"),
        ("=3", "write it as path.to.key=value"),
        ("probes.contexts.²=1", "probes.contexts.²: "),
        ("teacher.device=gpu", "teacher.device: 'gpu' is not allowed; allowed: "),
        ("kernels.gdn=cuda", "kernels.gdn: 'cuda' is not allowed; allowed: 'auto', 'triton', "),
        ("teacher.source=''", "teacher.source: '' is not allowed; allowed: "),
        ("probes.contexts.3=1", "probes.contexts[3]: "),
        ("search.trials=[", "not YAML: "),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    assert refusal(tmp_path, BASE, override).startswith(f"--set {override}: {message}")


def test_a_fault_of_a_section_is_blamed_on_the_override_that_made_it(tmp_path: Path) -> None:
    text = BASE + "scoring:\n  general: []\n  pairs: 3\n"
    fault = "scoring: retrieval, general and pairs_file are all empty: nothing to score heads by"
    overrides = ("scoring.pairs=5", "scoring.retrieval=[]")
    assert refusal(tmp_path, text, *overrides) == f"--set scoring.retrieval=[]: {fault}"
    # What the file has wrong by itself stays the file's.
    text += "  retrieval: []\n"
    assert refusal(tmp_path, text, "scoring.pairs=5") == f"run.yaml:5: {fault}"
    assert refusal(tmp_path, text, "seed=5") == f"run.yaml:5: {fault}"


@pytest.mark.parametrize(
    ("message", "overrides", "place"),
    [
        (
            "scoring.contexts[1]: too short",
            ["scoring.contexts=[9, 1]"],
            "--set scoring.contexts=[9, 1]",
        ),
        ("scoring.contexts: too long", ["scoring.contexts_=1", "seed=1"], "a.yaml"),
        (
            "search.objectives[0].metric: x",
            ["search.objectives.0.metric=x"],
            "--set search.objectives.0.metric=x",
        ),
        (
            "scoring.min_pairs: 4, but scoring.retrieval has",
            ["scoring.retrieval=[]"],
            "--set scoring.retrieval=[]",
        ),
        (
            "scoring.min_pairs: 4, but scoring.retrieval has",
            ["scoring.min_pairs=4", "scoring.retrieval=[]"],
            "--set scoring.min_pairs=4",
        ),
        ("a/run: started with another config (seed: 3 -> 4)", ["seed=4"], "--set seed=4"),
        ("x: one of ours; allowed: another name", ["name=b"], "a.yaml"),
        ("seed: x", [], "a.yaml"),
    ],
)
def test_later_faults_are_blamed_on_overrides_too(
    message: str, overrides: list[str], place: str
) -> None:
    assert blamed("a.yaml", overrides, message) == place


def test_later_faults_name_the_line_of_their_field(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("schema: 1\nname: it\nkernels:\n  # who computes\n  gdn: triton\n")
    for message, place in (
        ("kernels.gdn: cannot serve", f"{path}:5"),
        ("kernels: cannot serve", f"{path}:3"),
        ("kernels.full: cannot serve", str(path)),
        ("the run needs memory", str(path)),
    ):
        assert blamed(path, [], message) == place
    assert blamed(path, ["kernels.gdn=fla"], "kernels.gdn: x") == "--set kernels.gdn=fla"
    path.write_text("schema: [")
    assert blamed(path, [], "kernels.gdn: cannot serve") == str(path)


def test_every_config_in_the_repository_loads() -> None:
    folder = Path(__file__).parents[1] / "search_spaces"
    for path in sorted(folder.glob("*.yaml")):
        assert load_config(path).name
