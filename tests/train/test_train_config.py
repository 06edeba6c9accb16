import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.errors import ConfigError
from tilewise.train.config import DataConfig, LossConfig, RunConfig, check_same_run, load_config, source_of
from tilewise.train.settings import apply_overrides, build, read_toml, to_dict, to_toml


def test_overrides_reach_their_section(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('[loss]\nname = "local"\n[optim]\nlr = 1\n')
    config = load_config(
        file, ["loss.name=dense", "optim.betas=[0.8, 0.9]", "output.folder=runs/x y", "loop.epochs=0.5"]
    )
    assert config.loss.name == "dense"
    assert config.optim.betas == (0.8, 0.9)
    assert config.output.folder == "runs/x y"
    assert config.optim.lr == 1.0
    assert isinstance(config.optim.lr, float)


@pytest.mark.parametrize(
    "override, words",
    [
        ("loss.nam=dense", ("loss.nam", "did you mean 'name'")),
        ("los.name=dense", ("los", "did you mean 'loss'")),
        ("loss.name=dens", ("loss.name", "'dense'", "did you mean 'dense'")),
        ("loop.batch_size=many", ("loop.batch_size", "whole number", "'many'")),
        ("loop.batch_size=2.5", ("whole number",)),
        ("loop.batch_size=true", ("whole number",)),
        ("loop.batch_size=1", ("at least 2",)),
        ("output.folder=2024-06-01", ("output.folder is text", "a date", "quotation marks")),
        ("loop.epochs=inf", ("loop.epochs must be at most",)),
        ("loop.seed=99999999999999999999", ("loop.seed must be at most",)),
        ("loss.mask_same_id=1", ("true or false",)),
        ("optim.lr=0", ("greater than 0",)),
        ("optim.lr=inf", ("optim.lr must be at most 1000000.0, got inf",)),
        ("optim.lr=1e38", ("optim.lr must be at most 1000000.0, got 1e+38",)),
        pytest.param(f"optim.lr=1{'0' * 400}", ("optim.lr must be a number below 1.8e308", "1329 bits"), id="digits"),
        ("optim.clip_norm=inf", ("optim.clip_norm must be a finite number, got inf", "Give a number such as 1.0")),
        ("loop.threads=99999999999", ("loop.threads must be at most 1024",)),
        ("data.eval_share=-0.5", ("data.eval_share must be -1 (a tenth) or from 0 to 0.5, got -0.5",)),
        ("loss.initial_scale=0.01", ("loss.initial_scale must be at least 1, got 0.01",)),
        ("output.folder=caf\udce9", ("output.folder must be valid UTF-8", "caf\\udce9")),
        ("optim.lr=nan", ("optim.lr must be greater than 0, got nan",)),
        ("loss.initial_bias=-inf", ("loss.initial_bias must be a finite number, got -inf",)),
        ("loop.batch_size=99999999999999999999", ("loop.batch_size must be below 2^63",)),
        ("output.folder=", ("output.folder must name a folder for the run, got ''", "such as runs/run")),
        ("output.folder=' '", ("output.folder must name a folder",)),
        ('output.folder="a\\u0000b"', ("output.folder must be text without zero bytes",)),
        ("model.image_size=10000000", ("model.image_size must be at most 4096, got 10000000",)),
        ("model.width=10000000", ("model.width must be at most 65536",)),
        ("optim.betas=[0.9]", ("2 entries",)),
        ("optim.betas=0.9", ("a list",)),
        ("data.crop_scale=[0.9, 0.1]", ("low <= high",)),
        ("data.source=table", ("path is needed",)),
        ("model.name=clip", ("takes the sizes of the model from model.weights",)),
        ("loss.initial_scale=200", ("max_scale",)),
        ("steps=3", ("did you mean 'loop.steps'",)),
        ("model.name=ViT-B-32", ("did you mean 'clip-vit-b-32'",)),
        ("--loop.steps=3", ("section.key=value", "without dashes")),
        ("loss=dense", ("a section",)),
        ("lossname", ("section.key=value",)),
    ],
)
def test_refusals_name_the_setting_and_what_was_wanted(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name, patch", [("clip-tiny", 8), ("clip-vit-b-32", 32), ("vit-bert", 16), ("auto", 8)])
def test_an_image_has_at_least_one_patch(name, patch):
    given = ["data.path=pictures", f"model.name={name}"]
    assert load_config(None, [*given, f"model.image_size={patch}"]).model.image_size == patch
    with pytest.raises(ConfigError, match=rf"model\.image_size must be at least {patch}, .*got {patch - 1}"):
        load_config(None, [*given, f"model.image_size={patch - 1}"])


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["data.path=~/{0..3}.tar::~/b.tar", "data.eval_path=~/c.tar", "data.image_root=~", "output.folder=~/x"]
    config = load_config(None, given)
    assert config.data.path == f"{tmp_path}/{{0..3}}.tar::{tmp_path}/b.tar"
    assert (config.data.eval_path, config.data.image_root) == (f"{tmp_path}/c.tar", str(tmp_path))
    assert config.output.folder == f"{tmp_path}/x"


def test_a_folder_is_no_shard_because_of_a_part_of_its_name(tmp_path):
    (tmp_path / "old.tar").mkdir()
    for path in ("x.target/pics", "x.tar/pics", f"{tmp_path}/old.tar"):
        assert source_of(path) == "folder", path
    for path in ("a.tar::b", "d/*.tar", "d/{a.tar,b.tar}", "a.tar.gz", f"{'a' * 300}.tar"):
        assert source_of(path) == "shards", path[-20:]
    assert source_of("pairs.target") == "table"


def test_text_with_a_delete_character_is_read_again(tmp_path):
    config = load_config(None, ['output.folder="a\\u007fb"'])
    assert config.output.folder == "a\x7fb"
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml") == config


def test_a_file_name_that_is_too_long_is_one_sentence():
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_toml("a" * 300)


def test_a_chunk_shrinks_with_the_batch():
    assert load_config(None, ["loop.batch_size=64"]).loop.chunk_size == 64
    assert load_config(None, ["loop.batch_size=64", "loop.chunk_size=9999"]).loop.chunk_size == 64
    assert load_config(None, ["loop.batch_size=64", "loop.chunk_size=16"]).loop.chunk_size == 16


@pytest.mark.parametrize(
    "overrides, source, name",
    [
        ([], "icons", "icon"),
        (["data.path=icons.zip"], "icons", "icon"),
        (["data.path=pictures"], "folder", "clip-tiny"),
        (["data.path=pairs.tsv"], "table", "clip-tiny"),
        (["data.path=data/{00..11}.tar"], "shards", "clip-tiny"),
        (["data.path=pictures", "model.weights=w"], "folder", "clip"),
        (["data.path=pictures", "model.text_weights=w"], "folder", "vit-bert"),
        (["data.path=pictures.v2", "data.source=folder", "model.name=clip-vit-b-16"], "folder", "clip-vit-b-16"),
    ],
)
def test_the_path_and_the_weights_choose_the_source_and_the_model(overrides, source, name):
    config = load_config(None, overrides)
    assert (config.data.source, config.model.name) == (source, name)
    assert config.data.eval_share == (-1.0 if source in ("folder", "table") else 0.0)
    assert build(RunConfig, to_dict(config)) == config


def test_conflicts_are_found_after_the_source_is_known():
    with pytest.raises(ConfigError, match=r"data\.eval_share holds out pairs of a folder or table"):
        load_config(None, ["data.path=x.tar", "data.eval_share=0.1"])
    with pytest.raises(ConfigError, match=r"mask_same_id=true would have no effect"):
        load_config(None, ["data.path=pictures", "loss.mask_same_id=true"])
    with pytest.raises(ConfigError, match=r"weights needs a clip-\* model"):
        load_config(None, ["model.name=icon", "model.weights=x"])


def test_a_far_choice_is_not_suggested():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["loop.precision=bfloat16"])
    assert "'bf16'" in str(caught.value)
    assert "did you mean" not in str(caught.value)  # float32 is the nearest name, but the opposite choice


def test_help_lists_all_choices():
    assert "# one of: float32, bf16, fp16\nprecision" in to_toml(RunConfig(), help=True)


def test_text_that_looks_like_a_date(tmp_path):
    assert load_config(None, ['output.folder="2024-06-01"']).output.folder == "2024-06-01"
    (tmp_path / "c.toml").write_text("[output]\nfolder = 2024-06-01\n")
    with pytest.raises(ConfigError, match=r"output\.folder is text.*quotation marks"):
        load_config(tmp_path / "c.toml")


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[loss\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "bad.toml")


@pytest.mark.parametrize("with_help", [False, True])
def test_saved_configuration_is_read_back_equal(tmp_path, with_help):
    config = load_config(None, ["loss.name=local", 'output.folder="a \\"b\\" ü"', "optim.lr=1e-4"])
    (tmp_path / "c.toml").write_text(to_toml(config, help=with_help), encoding="utf-8")
    assert build(RunConfig, read_toml(tmp_path / "c.toml")) == config


def test_every_setting_has_help():
    for section in dataclasses.fields(RunConfig):
        for field in dataclasses.fields(getattr(RunConfig(), section.name)):
            assert len(field.metadata["help"]) > 3, field.name


def test_sections_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().loss.name = "dense"  # type: ignore[misc]


def test_a_run_continues_only_with_the_same_mathematics():
    saved = to_dict(RunConfig())
    check_same_run(saved, load_config(None, ["output.log_every=7", "data.workers=5"]))
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        check_same_run(saved, load_config(None, ["optim.lr=0.5"]))


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_override_is_applied_or_refused(key, value):
    with contextlib.suppress(ConfigError):
        load_config(None, [f"{key}={value}"])
    assert apply_overrides({}, [f"a.b={value}"])["a"]["b"] is not None


def test_a_run_of_another_version_with_settings_refused_today_says_so():
    """The message must not blame the current settings, which are valid."""
    config = load_config(None, ["data.source=folder", "data.path=x", "model.name=clip-tiny", "output.folder=runs/old"])
    saved = to_dict(config)
    saved["loss"]["mask_same_id"] = True
    with pytest.raises(ConfigError, match=r"runs/old was started by another version.*mask_same_id.*another output"):
        check_same_run(saved, config)


def test_direct_construction_is_checked_too():
    with pytest.raises(ConfigError, match="name is one of"):
        LossConfig(name="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="workers"):
        DataConfig(workers=0)
