"""Recipes: strict, all mistakes at once, and nothing in them can run."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freescale import registry
from freescale.errors import ConfigError, FreeScaleError, nearest
from freescale.recipe import Config, describe_keys, describe_options, describe_recipe, load_config
from freescale.recipe.reading.keys import kind_keys, own_fields, section_options
from tests.effort import examples

pytestmark = pytest.mark.usefixtures("own_kinds")  # other modules may have registered theirs

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def write(tmp_path, text) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problems(*overrides, recipe=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return str(caught.value)


def test_no_recipe_is_all_defaults():
    assert load_config() == Config()
    assert load_config().run.out == "runs/latest"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipes_that_ship_are_valid(recipe):
    assert load_config(recipe) != Config()


def test_a_recipe_changes_what_it_names_and_overrides_win(tmp_path):
    recipe = write(tmp_path, "run: {steps: 5, seed: 9}\nmodel: {dim: 32}\n")
    config = load_config(recipe, ["run.steps=7", "head.label_thresholds=[1, 2.5]", "run.eval_every=null"])
    assert (config.run.steps, config.run.seed, config.model.dim) == (7, 9, 32)
    assert config.head.label_thresholds == (1.0, 2.5)
    assert config.data == Config().data


SECTIONS = {item.name: item.default_factory for item in dataclasses.fields(Config)}
SAMPLES = {
    "run.steps": st.none() | st.integers(1, 10**6),
    "run.seed": st.integers(0, 2**63 - 1),
    "run.out": st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1),
    "run.tensorboard": st.booleans(),
    "run.check": st.sampled_from(["stop", "warn"]),
    "run.wandb": st.none() | st.just("project"),
    "run.mlflow": st.none() | st.just("experiment"),
    "run.epochs": st.floats(0.001, 1e6),
    "data.max_length": st.integers(1, 10**6),
    "model.kind": st.sampled_from(["hstu", "sasrec"]),
    "embedding.lr": st.floats(0, 1e6),
    "optim.clip_norm": st.none() | st.floats(0, 1e9),
    "head.label_thresholds": st.lists(st.floats(-1e6, 1e6), min_size=1).map(tuple),
}


@examples(17, thorough=200)
@given(st.fixed_dictionaries({}, optional=SAMPLES))
def test_a_recipe_written_as_yaml_is_read_back_equal(tmp_path_factory, chosen):
    config = Config()
    for path, value in chosen.items():
        section, key = path.split(".")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{key: value})}
        )
    recipe = tmp_path_factory.getbasetemp() / "recipe.yaml"
    recipe.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(recipe) == config


def test_all_mistakes_are_told_at_once_each_with_its_path(tmp_path):
    recipe = write(
        tmp_path,
        "run: {stepz: 5, seed: -1}\nmodell: {dim: 3}\nmodel: {kind: hstuu, dropout: 2, dim: wide}\neval: 7\n",
    )
    message = problems("optim.lr=fast", "data.global_bach=3", "nonsense", recipe=recipe)
    for part in (
        "10 problems",
        str(recipe),
        "run.stepz: unknown key; did you mean run.steps?",
        "run.seed: must be at least 0, got -1",
        "modell: unknown section; did you mean model?",
        "model.kind: allowed: hstu, llama, sasrec, stu; got 'hstuu' (did you mean hstu?)",
        "model.dropout: must be at most 0.95, got 2.0",
        "model.dim: must be a whole number, got 'wide'",
        "eval: a section is a mapping of keys, got 7",
        "optim.lr: must be a finite number, got 'fast'",
        "data.global_bach: unknown key; did you mean data.global_batch?",
        "'nonsense': an override looks like section.key=value",
        "freescale keys",
    ):
        assert part in message
    assert message.count("\n  - ") == 10


def test_a_name_like_no_other_gets_the_list():
    assert "allowed: prioritized" in problems("pipeline.zzz=1")
    assert "allowed: run, data, synthetic" in problems("zzz.zzz=1")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.steps=true", "whole number, got True"),
        ("run.steps=1.5", "whole number, got 1.5"),
        ("run.steps=10.0", "whole number, got 10.0"),
        ("run.steps='5'", "whole number, got '5'"),
        ("run.steps=0", "at least 1, got 0"),
        ("run.steps=", "whole number, got ''"),
        ("run.steps=[1]", "whole number, got [1]"),
        ("run.keep=null", "whole number, got None"),
        ("optim.lr=true", "finite number, got True"),
        ("optim.lr=.nan", "finite number, got nan"),
        ("optim.lr=.inf", "finite number, got inf"),
        ("optim.lr=nan", "finite number, got 'nan'"),
        ("optim.lr=-1", "at least 0, got -1.0"),
        ("optim.lr={a: 1}", "finite number, got {'a': 1}"),
        ("run.tensorboard=1", "true or false, got 1"),
        ("run.tensorboard=maybe", "true or false, got 'maybe'"),
        ("run.out=true", "text, got True"),
        ("run.out=[a]", "text, got ['a']"),
        ("run.out=null", "text, got None"),
        ("model.kind=1", "allowed: hstu, llama, sasrec, stu; got 1"),
        ("model.kind=null", "allowed: hstu, llama, sasrec, stu; got None"),
        ("head.label_thresholds=[1, x]", "finite number, got 'x'"),
        ("run.seed=-1", "at least 0"),
        ("run.seed=9223372036854775808", "at most 9223372036854775807"),
        ("optim.beta1=1", "at most 0.99"),
        ("optim.beta2=1", "at most 0.99"),
        ("embedding.beta2=1", "at most 0.99"),
        ("embedding.eps=0", "at least 1e-30"),
        ("synthetic.max_length=3", "at least 4"),
    ],
)
def test_values_of_a_wrong_type_or_range_are_refused(override, said):
    message = problems(override)
    assert f"{override.partition('=')[0]}: " in message
    assert said in message


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.lr=1e-3", 1e-3),
        ("optim.lr=1E-3", 1e-3),
        ("optim.lr=2", 2.0),
        ("run.steps=1_000", 1000),
        ("run.out=2024", "2024"),
        ("run.out=a b=c", "a b=c"),
        ("run.out=2024-05-06", "2024-05-06"),
        ("run.out=007", "007"),
        ("run.out=1_000", "1_000"),
        ("run.out='quoted'", "quoted"),
        ("run.tensorboard=yes", True),
        ("optim.clip_norm=null", None),
        ("head.label_thresholds=4", (4.0,)),
        ("head.label_thresholds=3.5,4", (3.5, 4.0)),
        ("eval.cutoffs=10,50", (10, 50)),
        ("eval.filter_seen=true", "true"),
        ("eval.filter_seen=auto", "auto"),
    ],
)
def test_values_are_read_as_people_write_them(override, value):
    path = override.partition("=")[0]
    section, key = path.split(".")
    got = getattr(getattr(load_config(None, [override]), section), key)
    assert got == value
    assert type(got) is type(value)


def test_the_last_override_of_a_key_wins():
    assert load_config(None, ["run.steps=1", "run.steps=2"]).run.steps == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.heads=3"], "model.heads: must divide model.dim = 64, got 3"),
        (["embedding.id_map=hash"], "embedding.rows: required when embedding.id_map=hash"),
        (["embedding.eviction=lru"], "embedding.eviction: only for map zero_collision, got direct"),
        (["embedding.guard=1"], "embedding.guard: only for map zero_collision, got direct"),
        (["moe.experts=4"], "moe.experts: only for ffn.kind=moe"),
        (["ffn.kind=dense", "moe.parallel=true"], "moe.parallel: only for ffn.kind=moe"),
        (
            ["ffn.kind=moe", "model.kind=sasrec"],
            "ffn.kind: model.kind=sasrec has a feed-forward part of its own",
        ),
        (["ffn.kind=moe", "moe.top_k=9"], "moe.top_k: at most moe.experts = 8, got 9"),
        (["ffn.kind=moe", "moe.top_k=1"], "moe.renormalize: with moe.top_k=1"),
        (["embedding.id_map=zero_collision", "embedding.eviction=ttl"], "embedding.ttl: goes with"),
        (["embedding.id_map=zero_collision", "embedding.ttl=5"], "embedding.ttl: goes with"),
        (
            ["embedding.id_map=zero_collision", "embedding.guard=2", "pipeline.prioritized=true"],
            "embedding.guard: pipeline.prioritized has 3 batches under way, got 2",
        ),
        (["run.out="], "run.out: must name a folder, got nothing"),
        (["eval.metric=auc"], "eval.metric: auc belongs to head.kind=ranking"),
        (["eval.metric=ndcg@20"], "got 'ndcg@20'; eval.cutoffs=10,20,50,200 gives it"),
        (["eval.cutoffs=5,20", "eval.metric=hr@10"], "eval.cutoffs=5,10,20 gives it"),
        (["eval.cutoffs=50,10"], "eval.cutoffs: ascending whole numbers from 1 on"),
        (["eval.cutoffs=0,10"], "eval.cutoffs: ascending whole numbers from 1 on"),
        (["eval.cutoffs=10,x"], "eval.cutoffs: must be a whole number, got 'x'"),
        (["eval.filter_seen=perhaps"], "eval.filter_seen: allowed: auto, true, false"),
        (["eval.sampled=50"], "eval.sampled: only for eval.protocol=sampled"),
        (["data.valid_from=0.5"], "data.valid_from: only for data.split=temporal"),
        (
            ["data.split=temporal", "data.test_from=1.5"],
            "data.test_from: allowed: a share of the events between 0",
        ),
        (["data.split=temporal", "data.test_from=soon"], "an ISO date such as 2024-05-06; got 'soon'"),
        (["head.kind=ranking"], "eval.metric: head.kind=ranking is judged by auc, got ndcg@10"),
        (["head.kind=ranking", "eval.metric=auc", "head.label_thresholds=[]"], "needs at least one"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(overrides, said):
    assert said in problems(*overrides)


def test_the_places_of_a_problem_are_named(tmp_path):
    recipe = write(tmp_path, "run: {epochs: 3}")
    assert f"in {recipe} and the keys given with it" in problems("model.dims=3", recipe=recipe)
    assert "in the overrides" in problems("model.dims=3")


def test_keys_that_go_together_are_taken():
    load_config(None, ["head.kind=ranking", "eval.metric=auc"])
    load_config(None, ["embedding.id_map=hash", "embedding.rows=100"])
    load_config(None, ["model.heads=3", "model.dim=66"])
    load_config(None, ["embedding.id_map=zero_collision", "embedding.eviction=ttl", "embedding.ttl=100"])
    load_config(None, ["embedding.id_map=zero_collision", "embedding.guard=0", "pipeline.prioritized=false"])


@pytest.mark.parametrize(
    "text",
    [
        "run: !!python/object/apply:os.system ['touch MARK']",
        "run:\n  out: !!python/object/apply:os.system ['touch MARK']",
        "run: {out: !!python/name:os.system }",
        "!!python/object/new:os.system ['touch MARK']",
    ],
)
def test_yaml_that_would_run_code_is_refused_and_does_not(tmp_path, text):
    mark = tmp_path / "mark"
    recipe = write(tmp_path, text.replace("MARK", str(mark)))
    assert "not valid YAML" in problems(recipe=recipe)
    assert not mark.exists()
    message = problems(
        f"run.out=!!python/object/apply:os.system ['touch {mark}']", "model.dim=!!python/name:os.system"
    )
    assert "model.dim: cannot read the value" in message
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: [unclosed", "not valid YAML"),
        ("- a\n- b", "a recipe is a mapping of sections"),
        ("just text", "a recipe is a mapping of sections"),
        (b"\xff\xfe\x00", "cannot be read"),
        ("run: {steps: 1}\nrun: {seed: 2}", "twice"),
        ("run: {steps: 1, steps: 2}", "twice"),
    ],
)
def test_files_that_are_no_recipes_are_refused(tmp_path, text, said):
    assert said in problems(recipe=write(tmp_path, text))


def test_anchors_and_merges_are_plain_yaml(tmp_path):
    recipe = write(tmp_path, "optim: &rates {lr: 0.5}\nembedding:\n  <<: *rates\n  eps: 1.0e-5\n")
    config = load_config(recipe)
    assert (config.optim.lr, config.embedding.lr, config.embedding.eps) == (0.5, 0.5, 1e-5)


@pytest.mark.parametrize("text", ["", "# only a comment", "run:\n# all keys commented out\n", "{}"])
def test_empty_recipes_and_sections_are_defaults(tmp_path, text):
    assert load_config(write(tmp_path, text)) == Config()


@examples(67, thorough=200)
@given(
    st.text(max_size=30) | st.from_regex(r"[\\[{&*!|>'\"%@:#, \-0-9a-z.]{1,15}", fullmatch=True), st.data()
)
def test_any_text_is_taken_or_refused_with_a_message(tmp_path_factory, text, data):
    recipe = tmp_path_factory.getbasetemp() / "any.yaml"
    recipe.write_text(data.draw(st.sampled_from(["", "run: ", "run: {seed: "])) + text, encoding="utf-8")
    for source, overrides in ((recipe, []), (None, [text]), (None, [f"run.out={text}", f"optim.lr={text}"])):
        with contextlib.suppress(ConfigError):
            load_config(source, overrides)


def test_a_recipe_that_is_not_there_or_a_folder_is_refused(tmp_path):
    assert "does not exist" in problems(recipe=tmp_path / "none.yaml")
    assert "cannot be read" in problems(recipe=tmp_path)


@pytest.mark.parametrize(
    "text", ["1::1193::5::978300760\n1::661::3::978302109\n", "a\t: b\n\tc", b"PAR1\xff"]
)
def test_data_given_as_a_recipe_leads_to_its_key(tmp_path, text):
    raw = tmp_path / "ml-1m.txt"
    raw.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert f"did you mean data.path={raw}?" in problems(recipe=raw)


def test_a_folder_given_as_a_recipe_leads_to_its_key_or_its_recipe(tmp_path):
    assert f"did you mean data.path={tmp_path}?" in problems(recipe=tmp_path)
    write(tmp_path, "run: [unclosed").rename(tmp_path / "config.yaml")
    assert f"did you mean {tmp_path / 'config.yaml'}?" in problems(recipe=tmp_path)
    assert "data.path" not in problems(recipe=tmp_path / "config.yaml")


def test_every_key_is_described_with_type_and_default():
    rows = [row for row in describe_keys() if ".NAME." not in row[0]]  # those are words, see test_features
    defaults = {
        f"{section}.{item.name}" for section, make in SECTIONS.items() for item in own_fields(make).values()
    }
    assert {path for path, *_ in rows} == defaults
    assert len(rows) == len(defaults)
    by_path = {path: rest for path, *rest in rows}
    assert by_path["run.steps"][:2] == ["int | null", "null"]
    assert by_path["model.kind"][:2] == ["hstu | llama | sasrec | stu", "hstu"]
    assert by_path["head.label_thresholds"][0] == "list of float"
    assert all(text for *_, text in rows)


def test_every_default_is_inside_its_own_range():
    for path, _, default, _ in describe_keys():
        if not path.startswith("head.label") and ".NAME." not in path:
            load_config(None, [f"{path}={default}"])


def test_errors_tell_what_was_got_what_is_allowed_and_what_to_do():
    error = FreeScaleError("it broke", got=0, allowed="1 to 3", next_step="mend it")
    assert str(error) == "it broke\n  got:     0\n  allowed: 1 to 3\n  next:    mend it"
    assert str(FreeScaleError("it broke")) == "it broke"
    assert issubclass(ConfigError, FreeScaleError)


def test_a_gpu_is_not_taken_for_a_cpu():
    assert "allowed: auto, cpu, cuda; got 'gpu' (did you mean cuda?)" in problems("run.device=gpu")


def test_nearest_finds_typos_and_nothing_far_away():
    assert nearest("stepz", ["seed", "steps"]) == "steps"
    assert nearest("qqq", ["seed", "steps"]) is None


def test_configuration_does_not_import_torch():
    code = "import sys, freescale.recipe.reading.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("segments.recent=50", "segments.summaries=0"), "segments.summaries: must be at least 1, got 0"),
        (("segments.recent=0",), "segments.recent: must be at least 1, got 0"),
        (("segments.recent=50", "segments.length=0"), "segments.length: must be at least 1, got 0"),
        (("segments.recent=500",), "segments.recent: must be below data.max_length = 200"),
        (("segments.recent=200",), "no history to compress; got 200"),
        (("segments.summaries=8",), "segments.summaries: does nothing without segments.recent"),
        (("segments.tokens=8",), "segments.tokens: unknown key"),
        (
            ("segments.recent=50", "model.mask=window", "model.window=5"),
            "segments.recent: does not go with model.mask=window",
        ),
    ],
)
def test_segments_that_make_no_sense_are_refused(overrides, message):
    assert message in problems(*overrides)


def test_an_option_of_another_kind_says_which():
    assert "model.window: only with model.mask=window" in problems("model.window=5")
    # Not ours to know: the kind itself is not there.
    message = problems("model.kind=gru4rec", "model.gru_layers=2")
    assert "model.gru_layers: unknown key, unless it comes with model.kind" in message


def test_a_key_of_another_section_is_no_option():
    for overrides in (
        ("data.source=synthetic", "data.users=5"),
        ("embedding.optimizer=adam", "embedding.beta1=0.5"),
    ):
        assert f"{overrides[1].partition('=')[0]}: unknown key" in problems(*overrides)


def test_an_option_without_a_default_is_asked_for_by_its_key():
    """Before anything is started: ranks would each find it out for themselves."""
    assert "model.window: mask 'window' needs it" in problems("model.mask=window")
    assert (
        section_options(load_config(None, ["model.mask=window", "model.window=3"]).model, "mask").window == 3
    )


@pytest.mark.usefixtures("own_kinds")
def test_options_of_kinds_from_outside_are_described():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        size: int = registry.option(help="how large")
        dim: int = 3
        steps: tuple[int, ...] = (1, 2)

    registry.register("mask", "mine", options=Options)(dict)
    assert [row for row in describe_options() if "mine" in row[3]] == [
        ("model.size", "int", "", "with model.mask=mine: how large"),
        ("model.steps", "list of int", "[1, 2]", "with model.mask=mine"),
    ]


@pytest.mark.usefixtures("own_kinds")
def test_options_of_every_kind_that_ships_are_described_behind_the_keys_of_their_section():
    """`head.tasks` was known to those who look for typing errors, and to no list of keys."""
    rows = list(describe_recipe())
    assert [name for name, _ in groupby(row[0].partition(".")[0] for row in rows)] == list(SECTIONS)
    assert set(describe_keys()) < set(rows)
    said = {(path, text.partition(": ")[0]): text for path, _, _, text in rows}
    for section, make in SECTIONS.items():
        own = own_fields(make)
        for key, family in kind_keys(make):
            for name in registry.names(family):
                options = registry.find(family, name).options
                for item in () if options is None else dataclasses.fields(options):
                    if item.name not in {*own, *own[key].metadata["elsewhere"]}:
                        kind = f"with {section}.{key}={name}"
                        assert len(said[f"{section}.{item.name}", kind]) > len(kind) + 10, item.name
    found = {path: rest for path, *rest in rows}
    assert found["head.towers"][:2] == ["shared | own | product", "shared"]
    assert {"head.tasks", "head.anchors", "model.scale_length", "model.window", "data.scale"} < set(found)


@pytest.mark.usefixtures("own_kinds")
def test_keys_of_ours_may_be_options_of_a_kind_from_outside():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        ffn_dim: int | None = None

    registry.register("encoder", "mine", options=Options)(dict)
    assert load_config(None, ["model.kind=mine", "model.ffn_dim=7"]).model.ffn_dim == 7
    assert "model.rope_base: only for model.kind=llama" in problems("model.kind=mine", "model.rope_base=7")


def test_segments_are_off_unless_asked_for():
    assert load_config().segments.recent is None
    config = load_config(None, ["segments.recent=50", "segments.length=100", "segments.summaries=2"])
    assert dataclasses.asdict(config.segments) == {"recent": 50, "length": 100, "summaries": 2}


def test_a_decoder_needs_heads_that_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["model.kind=llama", "model.dim=30", "model.heads=6", "model.kv_heads=4"])
    assert "model.kv_heads: must divide model.heads = 6, got 4" in str(caught.value)
    assert "even width, got 30 / 6" in str(caught.value)


def test_keys_of_the_decoder_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"model\.kv_heads: only for model\.kind=llama"):
        load_config(None, ["model.heads=2", "model.kv_heads=1"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["items.file=x.npy"], "items.file: only for items.kind=content or text"),
        (["items.kind=content", "items.dim=8"], "items.dim: only for items.kind=text"),
        (
            ["items.kind=text", "items.dim=10", "items.heads=3"],
            "items.heads: items.dim / items.heads must be",
        ),
        (["items.kind=text", "items.dim=6", "items.heads=2"], "must be an even whole number, got 2"),
        (["items.kind=text", "items.add_ids=false", "embedding.lr=1"], "there is no table to set up"),
        (["items.kind=texts"], "items.kind: allowed: ids, content, text; got 'texts' (did you mean text?)"),
    ],
)
def test_keys_of_item_encoders_must_fit(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert message in str(caught.value)


def test_truth_values_and_dates_of_a_recipe_are_words_where_words_are_meant(tmp_path):
    recipe = write(
        tmp_path,
        "eval: {filter_seen: false}\ndata: {split: temporal, valid_from: 2001-01-01, test_from: 0.9}",
    )
    config = load_config(recipe)
    assert config.eval.filter_seen == "false"
    assert (config.data.valid_from, config.data.test_from) == ("2001-01-01", "0.9")
    assert load_config(write(tmp_path, config.to_yaml())) == config
