"""Faults in the files that a config names, found before any work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from archsearch.configfile import load_config
from archsearch.data.prompts import vocabulary
from archsearch.errors import ConfigError, EnvironmentFault
from archsearch.inputs import scored_inputs
from archsearch.models.supernet import METADATA_KEY, read_meta
from archsearch.models.teacher import TeacherInfo, inspect_teacher, resolve_path
from archsearch.preflight import check_config, check_machine

TINY_TEACHER = resolve_path("package:archsearch/assets/tiny/teacher")
TINY = resolve_path("package:archsearch/assets/tiny/supernet.safetensors")


def examine(config: Path, *overrides: str) -> TeacherInfo:
    settings = load_config(config, list(overrides))
    check_machine(settings)
    info = inspect_teacher(settings.teacher)
    check_config(settings, info)
    return info


@pytest.fixture
def copied_teacher(teacher_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(teacher_folder, tmp_path / "copy"))


def write_ids(path: Path, ids: Any) -> Path:
    np.save(path, ids)
    return path


def test_a_supernet_of_another_geometry_is_refused(run_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"supernet\.source: .*num_layers 6 \(teacher: 2\)"):
        examine(run_config, f"supernet.source={TINY}")


def test_a_supernet_with_other_options_is_refused(run_config: Path, tmp_path: Path) -> None:
    shape = examine(run_config).shape
    path = tmp_path / "supernet.safetensors"
    meta = read_meta(TINY)
    model = {**meta["model"], "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    assert model["family"] == shape.family
    tensors = {"x": next(iter(load_file(TINY).values()))}
    save_file(tensors, path, metadata={METADATA_KEY: json.dumps(meta | {"model": model})})
    examine(run_config, f"supernet.source={path}")
    with pytest.raises(ConfigError, match=r"supernet\.gdn\.rope: False, but .* with True"):
        examine(run_config, f"supernet.source={path}", "supernet.gdn.rope=false")
    broken = meta | {"model": model, "gdn": {"spin": 1}}
    save_file(tensors, path, metadata={METADATA_KEY: json.dumps(broken)})
    with pytest.raises(EnvironmentFault, match=r"supernet\.source: .*damaged supernet"):
        examine(run_config, f"supernet.source={path}")


@pytest.mark.parametrize("part", ["train", "heldout"])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((99, 96)), "type float64"),
        (np.zeros(9999, dtype=np.uint16), "1 dimensions"),
        (np.full((99, 96), 60_000, dtype=np.uint16), "60000"),
        (np.full((99, 96), -1), "token ids -1"),
        (np.zeros((1, 96), dtype=np.uint16), "holds 1 sequences of 96 tokens, [25] are needed"),
        (np.zeros((99, 95), dtype=np.uint16), "holds 0 sequences of 96"),
    ],
)
def test_arrays_that_do_not_serve_are_named_with_their_field(
    run_config: Path, tmp_path: Path, part: str, ids: Any, message: str
) -> None:
    path = write_ids(tmp_path / "ids.npy", ids)
    with pytest.raises(ConfigError, match=rf"^data\.{part}\.path: .*{message}"):
        examine(run_config, f"data.{part}.source=file", f"data.{part}.path={path}")


def test_one_array_for_both_uses_needs_the_rows_of_both(run_config: Path, tmp_path: Path) -> None:
    # 2 held-out rows, and of 11 training rows the half that is text.
    def both(rows: int) -> None:
        path = write_ids(tmp_path / "ids.npy", np.zeros((rows, 96), dtype=np.uint16))
        text = f"{{source: file, path: {path}}}"
        examine(run_config, f"data.train={text}", f"data.heldout={text}")

    both(7)
    with pytest.raises(ConfigError, match=r"data\.train\.path: .* 5 after the first 2 are needed"):
        both(6)


def test_one_array_for_training_and_extra_text_needs_the_rows_of_both(
    run_config: Path, tmp_path: Path
) -> None:
    def both(rows: int) -> None:
        path = write_ids(tmp_path / "ids.npy", np.zeros((rows, 96), dtype=np.uint16))
        text = f"source: file, path: {path}"
        extra = f"data.extra_heldout=[{{label: own, {text}, sequences: 3}}]"
        examine(run_config, f"data.train={{{text}}}", extra)

    both(8)
    with pytest.raises(ConfigError, match=r"data\.train\.path: .* 5 after the first 3 are needed"):
        both(7)


def test_text_is_opened_too(run_config: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    overrides = ("data.heldout.source=file", f"data.heldout.path={path}")
    with pytest.raises(ConfigError, match=r"data\.heldout\.path: .*no such file"):
        examine(run_config, *overrides)
    for content, message in (("", "holds 0 sequences"), ('{"body": "x"}\n', "no column 'text'")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=rf"data\.heldout\.path: .*{message}"):
            examine(run_config, *overrides)


def words(count: int, seed: int) -> str:
    """Text of so many tokens of teacher_folder's tokenizer."""
    known = sorted(word for word in vocabulary() if word.isalpha())
    return " ".join(Random(seed).choices(known, k=count))


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("field", ["train", "heldout", "extra_heldout[0]"])
def test_text_is_read_as_far_as_the_run_reads_it(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, counted: bool
) -> None:
    if not counted:
        monkeypatch.setattr("archsearch.inputs.COUNTED_TOKENS", 0)
    # 1024 tokens of training, half of them prompts; two sequences held out.
    num_rows = 5 if field == "train" else 2
    line = json.dumps({"text": words(95, 0)})  # and an end of text
    texts = {
        "good.txt": words(96 * num_rows + 60, 1),
        "short.txt": words(60 * num_rows, 2),
        "good.jsonl": f"{line}\n" * (num_rows + 1),
        "bad.jsonl": f'{line}\n{{"text": \n{line}\n',
        "short.jsonl": f"{line}\n",
    }
    found = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        given = f"source: file, path: {tmp_path / name}"
        override = f"data.{field}={{{given}}}"
        if field.startswith("extra"):
            override = f"data.extra_heldout=[{{label: own, {given}}}]"
        try:
            examine(run_config, override)
        except ConfigError as error:
            found[name] = str(error)
    assert found.keys() == {"short.txt", "bad.jsonl", "short.jsonl"}
    assert all(said.startswith(f"data.{field}.path: text path ") for said in found.values())
    assert "bad.jsonl:2: not JSON" in found["bad.jsonl"]
    about = "" if counted else "about "
    assert f"short.jsonl: holds {about}1 sequences of 96 tokens" in found["short.jsonl"]
    assert f"{num_rows} are needed" in found["short.txt"]


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_gguf(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")


def lose_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("model.safetensors"), "holds no weights; it needs model.safetensors"),
        (only_gguf, "to use model.gguf, name that file itself"),
        (cut_weights, "model.safetensors: damaged"),
        (lose_shard, "00001.safetensors: no such file"),
        (remove("tokenizer.json"), "cannot read the tokenizer"),
    ],
)
def test_a_teacher_without_its_files_is_found(
    run_config: Path, copied_teacher: Path, change: Callable[[Path], None], message: str
) -> None:
    source = f"teacher.source={copied_teacher}"
    examine(run_config, source)
    change(copied_teacher)
    with pytest.raises(EnvironmentFault, match=message):
        examine(run_config, source)


def test_random_weights_need_the_config_alone(run_config: Path, copied_teacher: Path) -> None:
    for path in copied_teacher.iterdir():
        if path.name != "config.json":
            path.unlink()
    config = json.loads((copied_teacher / "config.json").read_text())
    (copied_teacher / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    sizes = ("data.sequence_length=256", "probes.contexts=[256]")
    keys = ("probes.multi_keys=2", "scoring.pairs_file=null", "scoring.retrieval=[single]")
    more = ("scoring.contexts=[256]", "scoring.min_pairs=1")
    source = f"teacher.source={copied_teacher}"
    with pytest.raises(ConfigError, match=r"probes\.contexts\[0\]: .*are too short"):
        examine(run_config, source, "teacher.random_weights=true", *keys, *more)
    examine(run_config, source, "teacher.random_weights=true", *sizes, *keys, *more)
    with pytest.raises(EnvironmentFault, match="no weights"):
        examine(run_config, source, *sizes, *keys, *more)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_key_value_heads", 0), ("head_dim", 0), ("head_dim", -16), ("vocab_size", 0)],
)
def test_impossible_sizes_are_refused(
    run_config: Path, copied_teacher: Path, name: str, value: int
) -> None:
    path = copied_teacher / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ConfigError, match=f"teacher: {name} = {value} is not possible"):
        examine(run_config, f"teacher.source={copied_teacher}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["probes.contexts=[96, 20]"], r"^probes\.contexts\[1\]: .*20 tokens are too short"),
        (
            ["scoring.retrieval=[single]", "scoring.contexts=[96, 16]"],
            r"^scoring\.contexts\[1\]: .*16 tokens are too short",
        ),
        (["data.sequence_length=32"], r"^data\.sequence_length: .*32 tokens are too short"),
        (["probes.multi_keys=95"], r"^probes\.multi_keys: 95; allowed"),
    ],
)
def test_prompts_that_cannot_fit_are_named(
    run_config: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        examine(run_config, *overrides, "scoring.replacement_length=16")


@pytest.mark.parametrize(
    ("kinds", "field"),
    [
        ("probes.kinds=[single, copying]", "probes.kinds"),
        ("scoring.general=[copying]", "scoring.general"),
    ],
)
def test_general_prompts_that_a_tokenizer_cannot_say_are_named(
    run_config: Path, kinds: str, field: str
) -> None:
    # The words of general prompts are none of the teacher's vocabulary.
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        examine(run_config, kinds)


def test_general_prompts_longer_than_the_teacher_are_named(tmp_path: Path) -> None:
    # Without a tokenizer, random weights read bytes.
    folder, path = tmp_path / "teacher", tmp_path / "short.yaml"
    folder.mkdir()
    config = json.loads((TINY_TEACHER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    path.write_text(
        f"schema: 1\nname: short\nteacher: {{source: {folder}, random_weights: true, device: cpu}}\n"
        "data: {sequence_length: 40, niah_share: 0}\nprobes: {kinds: [copying]}\n"
        "scoring: {retrieval: [], general: [copying], replacement_length: 32}\n"
    )
    with pytest.raises(ConfigError, match=r"^probes\.kinds: copying: .* beyond the teacher's 40"):
        examine(path)


def test_prompts_of_a_file_that_do_not_serve_are_named(run_config: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    files = f"probes.files=[{{name: own, path: {path}}}]"
    row = {"prompt": "the number is", "answer": " old"}
    path.write_text(json.dumps(row) + "\n")
    examine(run_config, files)
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"prompt": "the number is " * 100}))
    with pytest.raises(
        ConfigError, match=r"^probes\.files\[0\]: .*own\.jsonl:2: .* beyond .* 256; "
    ):
        examine(run_config, files)
    examine(run_config, files, "probes.beyond_window=true")
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"^probes\.files\[0\]: .*own\.jsonl:1: a list"):
        examine(run_config, files)


def test_groups_of_files_that_would_share_a_metric_are_refused(
    run_config: Path, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    row = {"prompt": "the number is", "answer": " old"}
    path.write_text("".join(json.dumps(row | {"kind": kind}) + "\n" for kind in ("x", "y")))
    files = f"{{name: own, path: {path}}}, {{name: own_%s, path: {path}}}"
    examine(run_config, f"probes.files=[{files % 'z'}]")
    with pytest.raises(
        ConfigError, match=r"^probes\.files: own_x_match would be the metric of two"
    ):
        examine(run_config, f"probes.files=[{files % 'x'}]")


def test_prompts_of_a_file_are_remembered(run_config: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("{}")
    config = load_config(run_config, [f"probes.files=[{{name: own, path: {path}}}]"])
    first = scored_inputs(config)
    assert set(first) == {"probes.files[0].path", "scoring.pairs_file"}
    path.write_text("{ }")
    changed = {field for field, digest in scored_inputs(config).items() if digest != first[field]}
    assert changed == {"probes.files[0].path"}
    path.unlink()
    with pytest.raises(ConfigError, match=r"^probes\.files\[0\]\.path: .*no such file"):
        scored_inputs(config)


def test_an_extra_text_that_does_not_serve_is_named(run_config: Path, tmp_path: Path) -> None:
    path = write_ids(tmp_path / "own.npy", np.zeros((2, 96), dtype=np.uint16))
    extra = f"label: own, source: file, path: {path}"
    examine(run_config, f"data.extra_heldout=[{{{extra}}}]")
    with pytest.raises(ConfigError, match=r"^data\.extra_heldout\[0\]\.path: .* 3 are needed"):
        examine(run_config, f"data.extra_heldout=[{{{extra}, sequences: 3}}]")


PAIR = {"clean": "the number is", "corrupt": "the city is", "answer": "old", "distractor": "new"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], r"^scoring\.pairs_file: .*pairs\.jsonl:1: "),
        ([json.dumps(PAIR), json.dumps({"clean": "a"})], r"pairs\.jsonl:2: .*corrupt"),
        ([json.dumps(PAIR | {"clean": "the number is " * 100})], r"pairs\.jsonl:1: "),
        (
            [json.dumps(PAIR | {key: PAIR[key] + " is" * 300 for key in ("clean", "corrupt")})],
            r"pairs\.jsonl:1: prompt and answer of \d+ tokens are beyond the teacher's 256; allowed: 1 to 256 ",
        ),
    ],
)
def test_own_pairs_that_do_not_serve_are_named(
    run_config: Path, tmp_path: Path, lines: list[str], message: str
) -> None:
    path = tmp_path / "pairs.jsonl"
    with pytest.raises(ConfigError, match=r"^scoring\.pairs_file: .*no such file"):
        examine(run_config, f"scoring.pairs_file={path}")
    path.write_text(json.dumps(PAIR) + "\n")
    examine(run_config, f"scoring.pairs_file={path}", "scoring.min_pairs=1")
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=message):
        examine(run_config, f"scoring.pairs_file={path}", "scoring.min_pairs=1")


ONE_KIND = ("scoring.retrieval=[single]", "scoring.contexts=[96]", "scoring.pairs=2")


@pytest.mark.parametrize(
    ("counts", "overrides", "message"),
    [
        ({"user": 4}, (), ""),
        (
            {"user": 4, "mine": 3},
            (),
            r"^scoring\.pairs_file: .*pairs\.jsonl: too few pairs of mine \(3\); allowed: 4 or more ",
        ),
        ({"mine": 3}, ("scoring.min_pairs=3",), ""),
        # Those of the file count beside ours.
        ({"retrieval": 2}, ONE_KIND, ""),
        (
            {"retrieval": 1},
            ONE_KIND,
            r"^scoring\.min_pairs: 4, but scoring\.retrieval has 1 .* and .* 1 pairs of it; allowed: 1 to 3$",
        ),
    ],
)
def test_too_few_pairs_are_found_early(
    run_config: Path,
    tmp_path: Path,
    counts: dict[str, int],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [PAIR | {"capability": name} for name, count in counts.items() for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = pytest.raises(ConfigError, match=message) if message else nullcontext()
    with refused:
        examine(run_config, f"scoring.pairs_file={path}", *overrides)


def test_own_pairs_do_not_take_the_name_of_a_kind(run_config: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    row = json.dumps(PAIR | {"capability": "retrieval", "probe": "single"}) + "\n"
    path.write_text(row * 4)
    examine(run_config, f"scoring.pairs_file={path}")
    with pytest.raises(ConfigError) as caught:
        examine(run_config, f"scoring.pairs_file={path}", *ONE_KIND)
    assert str(caught.value) == (
        f"scoring.pairs_file: {path}: probe single is one of ours; allowed: another name"
    )


def test_retrieval_kinds_that_a_tokenizer_cannot_say_are_named() -> None:
    tiny = Path("search_spaces/tiny.yaml")
    with pytest.raises(
        ConfigError,
        match=r"^scoring\.retrieval: .*tracking probes: .* no token .*; allowed: single, multikey, multiquery$",
    ):
        examine(tiny, "scoring.retrieval=[single,tracking]")
    with pytest.raises(
        ConfigError, match=r"^scoring\.general: .*copying probes: .*; allowed: \[\] only$"
    ):
        examine(tiny, "scoring.general=[copying]")
