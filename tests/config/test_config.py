"""Options from arguments and files, and the errors for invalid ones."""

import contextlib
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.base.errors import UsageError
from whet.config.options import CommonConfig, SessionOptions, TrainingOptions
from whet.config.resolve import read_options, resolve_config
from whet.config.sources import flatten, nest, parse_args, parse_value
from whet.machine.known import load_machine
from whet.plan.plan import make_plan
from whet.plan.rules import ALL_RULES
from whet.recipes.chat.config import ChatConfig
from whet.recipes.text.config import TextConfig, describe


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3E5", 3e5),
        ("768", 768),
        ("-1", -1),
        ("1_000", 1000),
        ("0.5", 0.5),
        ("null", None),
        ("None", None),
        ("True", True),
        ("false", False),
        ("[a,b]", ["a", "b"]),
        ("[1, 2.5, null]", [1, 2.5, None]),
        ("[]", []),
        ("[[1,2],[3]]", [[1, 2], [3]]),
        ("'null'", "null"),
        ('"1e-4"', "1e-4"),
        ("a b", "a b"),
        ("a=b", "a=b"),
        ("", ""),
        ("on", "on"),
        ("data/my-chat", "data/my-chat"),
    ],
)
def test_values(text: str, value: object) -> None:
    result = parse_value(text, "key=" + text)
    assert result == value
    assert type(result) is type(value)


def test_hydra_forms_are_understood() -> None:
    reported = parse_args(["+run=x", "++seed=3", "arch.layers=2", "~arch.layers", "lr=1", "lr=2"])
    assert reported.values == {"run": "x", "seed": 3, "lr": 2}
    assert reported.dropped == ("arch.layers",)


@pytest.mark.parametrize("word", ["lr", "=3", "1x=3", "a..b=3", "k=[a", "k=['a]", "k=[[a]", "a b=3", "~"])
def test_malformed_arguments_are_rejected(word: str) -> None:
    with pytest.raises(UsageError):
        parse_args([word])


def test_a_bare_file_name_suggests_the_data_key(tmp_path: Path) -> None:
    for word in (str(tmp_path), "epochs", "a" * 5_000, "\0"):
        with pytest.raises(UsageError, match="written key=value") as error:
            parse_args([word])
        assert error.value.try_ == (f"data={word}" if word == str(tmp_path) else f"{word}=VALUE")


@given(st.text())
def test_any_argument_is_parsed_or_rejected(word: str) -> None:
    with contextlib.suppress(UsageError):
        assert isinstance(parse_args([word]).values, dict)


_names = st.from_regex(r"[a-z]{1,4}", fullmatch=True)
_trees = st.recursive(
    st.dictionaries(_names, st.integers(), min_size=1),
    lambda children: st.dictionaries(_names, children | st.integers(), min_size=1),
    max_leaves=8,
)


@given(_trees)
def test_nest_undoes_flatten(tree: dict) -> None:
    assert nest(flatten(tree)) == tree


def test_a_value_is_not_also_a_group() -> None:
    with pytest.raises(UsageError):
        nest({"a": 1, "a.b": 2})
    with pytest.raises(UsageError):
        nest({"a.b": 2, "a": 1})


def test_precedence_of_defaults_file_and_arguments(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("lr = 0.5\nepochs = 7\n[arch]\nlayers = 3\n")
    resolved = resolve_config(TextConfig, ["epochs=9", "~arch.layers"], file=file)
    assert resolved.config.lr == 0.5
    assert resolved.config.epochs == 9
    assert resolved.config.arch.layers == TextConfig().arch.layers
    assert resolved.given == ("epochs", "lr")


def test_yaml_pitfalls(tmp_path: Path) -> None:
    # YAML 1.1 reads 1e-4 as text and a bare `on` as true.
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-4\ncompile: on\nmps_fallback: off\ndata: null\n")
    config = resolve_config(TextConfig, file=file).config
    assert config.lr == 1e-4
    assert (config.compile, config.mps_fallback, config.data) == ("on", "off", None)


def test_every_allowed_value_of_a_setting_is_accepted_as_option() -> None:
    # A rule returns "unused" where a setting does not apply. "unpadded" is for Transformers models from Python.
    words = [
        f"{rule.setting}={value}"
        for rule in ALL_RULES
        if rule.setting in TextConfig.plan_keys() and "number" not in rule.constraint.text
        for value in rule.constraint.text.split(" or ")
        if value not in ("unused", "unpadded")
    ]
    assert "compile=blocks" in words
    for word in words:
        resolve_config(TextConfig, [word])


def test_names_of_other_tools_with_the_same_meaning_are_accepted() -> None:
    words = ["arch.forward_dtype=bfloat16", "learning_rate=3e-4", "batch_size=16", "num_workers=2", "attention_heads=2"]
    resolved = resolve_config(TextConfig, [*words, "lr_warmup_steps=7", "max_grad_norm=none"])
    assert resolved.overrides == {"precision": "bf16", "workers": 2}
    config = resolved.config
    assert (config.lr, config.global_batch_size, config.arch.heads, config.warmup_steps) == (3e-4, 16, 2, 7)
    assert config.clip is None, "none stays null where it is not the name of a choice"


@pytest.mark.parametrize(
    ("words", "got", "hint"),
    [
        (["accumulation_steps=4"], "batches of 32, the default", "global_batch_size=128 micro_batch=32;"),
        (["batch_size=12", "gradient_accumulation_steps=2"], "batches of 12", "global_batch_size=24 micro_batch=12;"),
        (["global_batch_size=8", "accumulation_steps=x"], "batches of 8", "global_batch_size=N micro_batch=M"),
        (["pin_memory=True"], "pin_memory=True", "--why copies"),
        (["prefetch_factor=2"], "prefetch_factor=2", "--why prefetch"),
        (["persistent_workers=True"], "persistent_workers=True", "--why workers"),
        (["DISABLE_COMPILE=1"], "DISABLE_COMPILE=1", "compile=off"),
        (["OMP_NUM_THREADS=4"], "OMP_NUM_THREADS=4", "threads=4"),
        (["BATCH_SIZE=8"], "BATCH_SIZE=8", "'global_batch_size'"),
        (["learningrate=3e-4"], "learningrate=0.0003", "'learning_rate'"),
        (["zebra=8"], "zebra=8", "the nearest keys are "),
        (["beta1=0.9", "beta2=0.95"], "beta1=0.9; also unknown: beta2", ""),
    ],
)
def test_other_names_are_answered_with_what_to_type(words: list[str], got: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_config(TextConfig, words)
    assert got in str(caught.value.got)
    assert hint in str(caught.value.try_)
    # At most three keys, not all of them.
    assert len(str(caught.value.try_).split(", ")) <= 3


def test_a_built_in_configuration_is_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve_config(ChatConfig, ["epochs=3"], file=Path("cfg_chat")).config
    assert (config.epochs, config.global_batch_size, config.arch.hidden_size, config.arch.H_cycles) == (3, 32, 384, 1)
    for name, hint in (("cfg_chatt", "--config-name cfg_chat"), ("cfg_mine", "--config config/cfg_mine.yaml")):
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "config" / "cfg_mine.yaml").write_text("lr: 1e-4\n")
        with pytest.raises(UsageError, match="no such configuration") as caught:
            resolve_config(ChatConfig, file=Path(name))
        assert caught.value.try_ == hint


def test_a_list_of_defaults_of_hydra_is_answered_with_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "cfg_chat.yaml"
    file.write_text("defaults:\n  - arch: trm_chat\n  - _self_\nlr: 3e-4\n")
    with pytest.raises(UsageError, match="Hydra's defaults list") as caught:
        resolve_config(ChatConfig, file=file)
    assert "write the keys of arch/trm_chat.yaml under arch:" in str(caught.value.try_)
    assert "--config-name cfg_chat" in str(caught.value.try_)


def test_a_key_and_its_alias_together_are_rejected() -> None:
    with pytest.raises(UsageError, match="given twice"):
        resolve_config(TextConfig, ["batch_size=4", "global_batch_size=8"])


def test_auto_is_no_override() -> None:
    assert resolve_config(TextConfig, ["micro_batch=auto", "threads=2"]).overrides == {"threads": 2}


@pytest.mark.parametrize(
    ("word", "what", "hint"),
    [
        ("epohcs=3", "unknown key", "'epochs'"),
        ("hidden_size=3", "unknown key", "'arch.hidden_size'"),
        ("arch.hiden_size=3", "unknown key", "'arch.hidden_size'"),
        ("arch=trm", "group", "arch.NAME"),
        ("epochs=three", "epochs must be a whole number", "epochs=10"),
        ("epochs=2.5", "epochs must be a whole number", "epochs=10"),
        ("epochs=1e99", "epochs must be a smaller number", "epochs=10"),
        ("epochs=0", "epochs must be greater than 0", "epochs=10"),
        ("ema=maybe", "ema must be true or false", "ema=False"),
        ("precision=bf8", "'bf16'", "precision=auto"),
        ("keep_checkpoints=1", "keep_checkpoints must be a whole number, 2 or more", "keep_checkpoints=auto"),
        ("dropout=1", "dropout must be less than 1", "dropout=0.1"),
        ("lr=nan", "lr must be", "lr="),
        ("lr=inf", "lr must be", "lr="),
        ("arch.heads=5", "arch.heads must divide arch.hidden_size", "arch.heads=1 or 2 or 4"),
        ("data_paths=a", "data_paths must be a list", "data_paths"),
        ("~epcohs", "unknown key", "'epochs'"),
    ],
)
def test_errors_of_arguments_suggest_a_fix(word: str, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_config(TextConfig, [word])
    assert what in caught.value.what + str(caught.value.got)
    assert hint in (caught.value.try_ or "")


@pytest.mark.parametrize("key", ["micro_batch", "eval_batch", "workers", "threads", "bucket_mb", "memory_gb"])
@pytest.mark.parametrize("value", [-1, 0, 1, 1_024, 1_025, 4_096, 4_097, 10**6, 10**6 + 1])
def test_options_and_plan_allow_the_same_values(key: str, value: int) -> None:
    machine, workload = load_machine("h200"), describe(TextConfig())
    accepted = []
    for parse in (
        lambda: resolve_config(TextConfig, [f"{key}={value}"]),
        lambda: make_plan(machine, workload, overrides={key: value}),
    ):
        try:
            parse()
            accepted.append(None)
        except UsageError as error:
            accepted.append(error.what)
    assert accepted[0] == accepted[1]


def test_repeated_yaml_key_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("lr: 1e-4\narch:\n  layers: 2\n  layers: 3\n")
    with pytest.raises(UsageError) as caught:
        resolve_config(TextConfig, file=file)
    assert caught.value.got == "line 4: the key 'layers' occurs twice"


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.toml", b"lr = ", "not valid TOML"),
        ("a.yaml", b"lr: [1", "not valid YAML"),
        ("a.yaml", b"- 1\n- 2\n", "does not contain keys"),
        ("a.yaml", b"3: 4\n", "does not contain keys"),
        ("a.yaml", b"a: &x 1\nb: *x\n", "aliases"),
        ("a.yaml", b"lr: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("a.yaml", b"lr: 1e-4\nepochs: 2\nlr: 1e-3\n", "not valid YAML"),
        ("a.yaml", b"arch:\n  layers: 2\n  layers: 3\n", "not valid YAML"),
        ("a.yaml", b"\xff\xfe", "not UTF-8"),
        ("a.yaml", b"[" * 90_000, "nested too deeply"),
        ("a.toml", b"a=" + b"[" * 90_000, "nested too deeply"),
        ("a.yaml", b"lr: 2026-99-99\n", "not valid YAML"),
        ("a.json", b"{}", "TOML or YAML"),
        ("a.toml", b"#" * 100_001, "too large"),
        ("a.toml", b"epcohs = 3", "unknown key"),
    ],
)
def test_malformed_files_are_rejected(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        resolve_config(TextConfig, file=file)
    assert what in caught.value.what


def test_a_missing_file_and_a_folder_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    for path in (tmp_path / "absent.toml", tmp_path / "folder.toml"):
        with pytest.raises(UsageError) as caught:
            resolve_config(TextConfig, file=path)
        assert "cannot be read" in caught.value.what


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert resolve_config(TextConfig, file=file).config == TextConfig()


class OtherDefaults(CommonConfig):
    defaults: ClassVar = {"epochs": 7, "clip": None}
    descriptions: ClassVar = {"epochs": "passes, seven of them"}


def test_a_subclass_changes_defaults_and_descriptions_only() -> None:
    config = resolve_config(OtherDefaults, ()).config
    assert (config.epochs, config.clip, CommonConfig().epochs) == (7, None, 3)
    described = OtherDefaults.model_fields["epochs"].description, CommonConfig.model_fields["epochs"].description
    assert described == ("passes, seven of them", "passes over the training data")
    with pytest.raises(UsageError, match="epochs must be greater than 0"):
        resolve_config(OtherDefaults, ["epochs=0"])


def test_keywords_are_strict_and_unknown_ones_get_a_suggestion() -> None:
    options = read_options(SessionOptions, {"global_batch_size": 8, "clip": 1, "schedule": float})
    assert (options.clip, options.epochs, options.eval_every) == (1.0, 1, "auto")
    for keywords, what in [
        ({"global_batch_size": 8, "epochs": "3"}, "epochs must be a whole number"),
        ({"global_batch_size": 8, "epohcs": 3}, "did you mean 'epochs'"),
        ({"global_batch_size": 8, "schedule": "cosin"}, "schedule must be"),
        ({"global_batch_size": 8, "warmup_steps": "auto"}, "warmup_steps must be a whole number"),
    ]:
        with pytest.raises(UsageError, match=what):
            read_options(SessionOptions, keywords)


def test_session_and_recipes_share_their_options() -> None:
    shared = set(TrainingOptions.model_fields)
    assert shared <= set(CommonConfig.model_fields)
    assert set(SessionOptions.model_fields) - shared == {"shuffle", "schedule_interval", "collate_fn", "split_batch"}
