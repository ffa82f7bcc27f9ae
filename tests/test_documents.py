"""YAML documents: strict reading, `extends` and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmgrpo.documents import ConfigError, apply_override, merge, parse, read_document, ready_made

BAD_OVERRIDES = {
    "optimizer.lr": "--set optimizer.lr: must read key=value, for example --set optimizer.lr=1e-4",
    "optimizer..lr=1": "--set optimizer..lr=1: must read key=value, for example --set optimizer.lr=1e-4",
    "optimizer.lr=": "--set optimizer.lr=: no value; write optimizer.lr=null for none",
    "optimizer.lr=[1": "--set optimizer.lr=[1, line 1, column 3: not valid YAML",
    "optimizer={lr: 1, lr: 2}": "the key 'lr' is given twice",
    "rewards.1.weight=2": "rewards has no place 1; its places are 0 to 0; set the whole list to add one",
    "rewards.x.weight=2": "rewards is a list; give a place in it, such as rewards.0",
    "pipeline.name.x=3": "--set pipeline.name.x=3: pipeline.name is 'image', which holds no keys",
}


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES.items())
def test_bad_overrides(override: str, message: str) -> None:
    document = {"pipeline": {"name": "image"}, "rewards": [{"name": "digits"}]}
    with pytest.raises(ConfigError) as caught:
        apply_override(document, override)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


BAD_FILES = {
    "": "empty; the shortest config is `extends: image`",
    "# nothing\n": "empty; the shortest config is `extends: image`",
    "- 1\n": "holds a list, but a config is a mapping of sections",
    "hello\n": "holds the value 'hello', but a config is a mapping of sections",
    "pipeline: {name: image\n": "line 2, column 1: not valid YAML",
    "a: b: c\n": "line 1, column 5: not valid YAML: mapping values are not allowed here",
    "\tx: 1\n": "line 1, column 1: not valid YAML",
    "a: 1\nb: 2\na: 3\n": "line 3: the key 'a' is given twice; keep one of them",
    "a: !!python/object:os.system x\n": "not valid YAML: could not determine a constructor",
    "a: &x [*x]\n": "not valid YAML",
    "? [1]\n: 2\n": "line 1: a key must be a name",
    "extends: [image]\n": "extends: ['image'] is not a name",
    "extends: imagee\n": "unknown ready-made config 'imagee'; did you mean 'image'?",
    "extends: other.yaml\n": "other.yaml: no such file",
    "extends: bad.yaml\n": "extends itself",
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.items())
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_document(str(path))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; ready-made configs are named without .yaml: .*image"):
        read_document(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="unknown ready-made config 'imgae'; did you mean 'image'\\?"):
        read_document("imgae")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="is a folder, not a YAML file"):
        read_document(str(tmp_path / "folder.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        read_document(str(tmp_path / "bytes.yaml"))


def test_numbers_and_words_are_read_as_people_mean_them() -> None:
    text = "{a: 1e-4, b: on, c: 010, d: 12:30, e: {0: 0.2}, f: 2024-01-01, g: -.5, h: null, i: true, j: '1'}"
    assert parse(text, "x") == {
        **{"a": 1e-4, "b": "on", "c": 10, "d": "12:30", "e": {"0": 0.2}, "f": "2024-01-01"},
        **{"g": -0.5, "h": None, "i": True, "j": "1"},
    }


def test_an_alias_does_not_carry_an_override_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "alias.yaml"
    path.write_text("policy: &shared {noise: 1.0}\nmethod: *shared\n", encoding="utf-8")
    document, source = read_document(str(path))
    assert source == str(path)
    apply_override(document, "policy.noise=2.0")
    assert document == {"policy": {"noise": 2.0}, "method": {"noise": 1.0}}


def test_extends_merges_mappings_and_replaces_the_rest(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("policy: {a: 1, b: {c: 2, d: 3}}\nrewards: [one, two]\n", encoding="utf-8")
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\npolicy: {b: {c: 5}}\nrewards: [other]\n", encoding="utf-8")
    document, _ = read_document(str(child))
    assert document == {"policy": {"a": 1, "b": {"c": 5, "d": 3}}, "rewards": ["other"]}
    assert merge({"a": {"b": 1}}, {"a": 2}) == {"a": 2}


def test_extends_finds_the_base_beside_the_file_and_ready_made_ones(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text("extends: image\nrewards: [mine]\n", encoding="utf-8")
    (tmp_path / "top.yaml").write_text("extends: sub/mine.yaml\n", encoding="utf-8")
    document, _ = read_document(str(tmp_path / "top.yaml"))
    assert document["rewards"] == ["mine"]
    assert document["pipeline"] == read_document("image")[0]["pipeline"]


def test_ready_made_configs_are_found_by_name() -> None:
    assert "image" in ready_made()
    assert read_document("image")[1] == "config image"
