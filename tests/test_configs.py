"""Every configuration composes and loads, and what conf/ holds and config.py declares is the same."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from mtp_train.cli import describe, field_help, help_text
from mtp_train.config import CONF_DIR, Config, HeadConfig, compose, read
from mtp_train.provenance import write_provenance

EXPERIMENTS = [path.stem for path in sorted((CONF_DIR / "experiment").glob("*.yaml"))]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_loads(name):
    config = compose(f"experiment={name}", *([] if name == "demo" else ["target.path=somewhere"]))
    assert config.train.num_steps > 0


@pytest.mark.parametrize("group", ["target", "engine", "data", "head", "distributed", "node", "cluster"])
def test_every_group_option_loads(group):
    for path in sorted((CONF_DIR / group).glob("*.yaml")):
        assert isinstance(compose("target.path=somewhere", f"{group}={path.stem}", "target.path=somewhere"), Config)


def test_a_saved_configuration_is_read_back_with_single_fields_changed(tmp_path):
    odd = "a b, c=1 #2: 试 'x' \"y\""
    config = compose("experiment=tiny", "target.path=somewhere")
    shell = ["cd ${HOME}", "a=${b:-${c}}", r"\${x}", r"\\${run_dir}", r"c:\x\${y}\z", "$${PWD}$", "\\", "${", r"ends\\"]
    config = replace(config, cluster=replace(config.cluster, setup=shell, env={"A": "${B}"}, scratch="${TMPDIR}/mtp"))
    write_provenance(tmp_path, asdict(replace(config, run_dir=odd)))
    again = read(tmp_path / "config.yaml", ["precompute.part=0", "precompute.steps=[rows]", "train.num_steps=7"])
    assert (again.run_dir, again.precompute.part, again.precompute.steps, again.train.num_steps) == (odd, 0, ["rows"], 7)
    assert (again.eval, again.cluster) == (config.eval, config.cluster)
    with pytest.raises(ValueError, match="no_such"):
        read(tmp_path / "config.yaml", ["train.no_such=1"])


@pytest.mark.parametrize(("change", "field"), [(("  feature_noise: 0.0\n", ""), "train.feature_noise"), (("feature_noise", "noise"), "train.noise")])
def test_a_saved_configuration_of_another_version_is_named_with_the_field(tmp_path, change, field):
    write_provenance(tmp_path, asdict(compose("experiment=tiny", "target.path=somewhere")))
    path = tmp_path / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace(*change))
    assert path.read_text() != text
    with pytest.raises(ValueError, match=rf"{path}, as this version .*{field}"):
        read(path)


@pytest.mark.parametrize(("limit", "read_as"), [("24:00:00", "86400"), ('"24:00:00"', ""), ("2-0", ""), ("1-12:30", ""), ("unlimited", ""), ("90", "90")])
def test_a_limit_that_yaml_made_a_number_is_refused(tmp_path, limit, read_as):
    write_provenance(tmp_path, asdict(compose("experiment=tiny", "target.path=somewhere")))
    if read_as:
        with pytest.raises(ValueError, match=f"cluster.time.train={read_as} is none of"):
            read(tmp_path / "config.yaml", [f"cluster.time.train={limit}"])
    else:
        assert read(tmp_path / "config.yaml", [f"cluster.time.train={limit}"]).cluster.time["train"] == limit.strip('"')


def test_every_field_says_what_it_means():
    lines = [line for line in describe(Config) if line.strip()]
    silent = [line for line in lines if len(line.split()) < 3]
    assert not silent
    assert set(field_help(HeadConfig)) == set(HeadConfig.__dataclass_fields__)


def test_help_names_the_stage_its_groups_and_fields():
    text = help_text("mtp-train", "Train a head.")
    for part in ("mtp-train", "Train a head.", "train.optim.lr", "experiment", "demo", "eval.runs[].num_draft_tokens"):
        assert part in text


def test_config_dir_does_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compose("experiment=tiny", "target.path=somewhere").train.num_steps == 12


def test_an_experiment_overrides_the_defaults_and_the_command_line_overrides_it():
    assert compose("experiment=demo").run_dir == "runs/demo"
    assert compose("experiment=demo", "run_dir=elsewhere").data.train[0].path == "elsewhere/data/train.jsonl"
