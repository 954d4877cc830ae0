"""What models that decide with DMS say of themselves, and what is refused."""

import json
import math
from contextlib import nullcontext
from copy import copy
from types import SimpleNamespace

import pytest
from transformers import PreTrainedConfig

from support.engine_configs import Overlay, engine_args
from support.made_adapters import make_adapter
from support.made_checkpoints import DMS_KEYS
from support.made_gates import make_gates
from vllm_kvpolicy.api.engine_config import (
    _choose,
    check_files,
    config_json,
    missing_architecture,
    refuse_plain,
)
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.admissions.dms import model as dms_model
from vllm_kvpolicy.policies.admissions.dms import policy as dms_policy
from vllm_kvpolicy.policies.admissions.dms.model import (
    FLAVOURS,
    DmsRule,
    model_folder,
    rule_for,
    rule_of_config,
    rule_of_metadata,
)
from vllm_kvpolicy.policies.admissions.dms.policy import DelayedEviction
from vllm_kvpolicy.policies.names import architectures

NONE = DelayedEviction.Options()


def model_of(folder="none", kind="qwen3", **keys):
    text = SimpleNamespace(model_type=kind, **keys)
    return SimpleNamespace(hf_text_config=text, model=str(folder), revision=None)


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"dms_window_size": 512, "dms_initial_alpha_offset": 5.0}, DmsRule()),
        # Any of the keys will do; what is left out or null is as in the released model.
        ({"dms_alpha_scale": 100.0, "dms_window_size": None}, DmsRule()),
        ({"model_type": "qwen3"}, None),
        (
            {"dms_separate_alpha": True, "dms_alpha_per": "layer"},
            DmsRule(is_borrowed=False, per_layer=True),
        ),
        # Disabled eviction drops nothing.
        (
            {"dms_window_size": 9, "dms_disable_eviction": True},
            DmsRule(window=9, offset=math.inf),
        ),
    ],
)
def test_keys_of_a_checkpoint(keys, rule):
    assert rule_of_config(SimpleNamespace(**keys)) == rule


def test_metadata_beside_a_plain_model(tmp_path):
    assert rule_of_metadata(str(tmp_path)) is None
    path = tmp_path / "dms_metadata.json"
    path.write_text(json.dumps({"window_size": 256, "target_cr": 8}))
    wanted = DmsRule(window=256, shift=0, zero_after_rope=False)
    assert rule_of_metadata(str(tmp_path)) == wanted
    for text in ("[1]", "{", '{"window_size": "many"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"dms_metadata\.json: got .*, expected"):
            rule_of_metadata(str(tmp_path))


def test_an_adapter_goes_before_a_plain_model_and_options_before_all():
    given = {"dms_window": 100, "dms_shift": 0, "dms_zero_after_rope": False}
    options = DelayedEviction.Options(**given)
    rule = rule_for(model_of(dms_window_size=512), None, options)
    assert rule == DmsRule(window=100, shift=0, zero_after_rope=False)
    rule = rule_for(model_of(), make_adapter(window=33, shift=0), NONE)
    assert rule == DmsRule(False, 33, 50.0, 2.5, shift=0)


def test_refusals_say_what_to_do():
    with pytest.raises(ValueError, match="leave the adapter out"):
        rule_for(model_of(dms_window_size=512), make_adapter(), NONE)
    with pytest.raises(ValueError, match="set dms_adapter to an adapter"):
        rule_for(model_of(), None, NONE)
    with pytest.raises(ValueError, match="add --kv-policy dms --kv-recent 512"):
        refuse_plain(model_of(dms_window_size=512))
    with pytest.raises(ValueError, match="supports llama, qwen3, not qwen2"):
        refuse_plain(model_of(kind="qwen2", dms_window_size=512))
    assert refuse_plain(model_of()) is None
    assert refuse_plain(model_of(dms_window_size=9, dms_separate_alpha=True)) is None


def deciding(policy_config, window, **keys):
    """Return the tiny model's configuration with keys of a model that decides."""
    text = copy(policy_config.model_config.hf_text_config)
    vars(text).update(keys if window is None else {"dms_window_size": window, **keys})
    return Overlay(policy_config, {"model_config.hf_text_config": text})


def test_metadata_of_a_model_that_was_downloaded(tmp_path, monkeypatch):
    """By its name on the hub; nobody is asked for what is not there."""
    for name in ("some/model:Q4_K_M", "s3://some/model", "x" * 99):
        assert rule_of_metadata(name) is None and refuse_plain(model_of(name)) is None
    path = tmp_path / "dms_metadata.json"
    path.write_text('{"window_size": 99}')
    asked = []

    def cached(name, file, revision):
        asked.append((name, file, revision))
        return str(path) if name == "some/model" else None

    monkeypatch.setattr(dms_model, "try_to_load_from_cache", cached)
    assert rule_of_metadata("some/model", "main").window == 99
    assert rule_of_metadata("other/model") is None
    assert asked[0] == ("some/model", "dms_metadata.json", "main") and len(asked) == 2


def test_folder_of_a_model(tmp_path, monkeypatch):
    def downloaded(name, revision, local_files_only):
        assert local_files_only
        return f"{tmp_path}/{name}/{revision}"

    monkeypatch.setattr(dms_model, "snapshot_download", downloaded)
    assert model_folder(model_of(tmp_path)) == tmp_path
    assert model_folder(model_of("some/model")) == tmp_path / "some/model/None"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"model_type": "qwen3", **DMS_KEYS}, "Qwen3ForCausalLM"),
        ({"model_type": "llama", "dms_window_size": 16}, "LlamaForCausalLM"),
        ({"model_type": "qwen3", "dms_separate_alpha": True}, "Qwen3ForCausalLMDMS"),
        ({"model_type": "llama", "dms_separate_alpha": True}, "LlamaForCausalLMDMS"),
        ({"model_type": "qwen3", "dms_cr": 8, "architectures": ["Mine"]}, None),
        ({"model_type": "qwen3"}, None),
    ],
)
def test_an_architecture_that_a_checkpoint_leaves_out(tmp_path, config, wanted):
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = engine_args(tmp_path)
    assert missing_architecture(config_json(args)) == wanted
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    for given, kept in (
        ({}, {}),
        (None, {}),
        (yarn, yarn),
        ({"architectures": ["Mine"]}, {"architectures": ["Mine"]}),
    ):
        args.hf_overrides = given
        _choose(args)
        added = {"architectures": [wanted]} if wanted else {}
        assert (args.hf_overrides or {}) == {**added, **kept}


def test_a_type_without_support_is_named(tmp_path):
    """What cannot be read, or is in one file, is for vLLM to refuse."""
    path, args = tmp_path / "config.json", engine_args(tmp_path)
    for text in (None, "{", "[1]"):
        if text is not None:
            path.write_text(text)
        assert missing_architecture(config_json(args)) is None
    path.write_text(json.dumps({"model_type": "qwen2", "dms_window_size": 16}))
    with pytest.raises(ValueError, match="type qwen2, expected one of llama, qwen3"):
        missing_architecture(config_json(args))
    args.model = str(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert missing_architecture(config_json(args)) is None


def test_a_name_on_the_hub_is_read_as_vllm_reads_it(monkeypatch):
    asked = []

    def get_config_dict(model, **values):
        asked.append((model, values))
        return {"model_type": "qwen3", **DMS_KEYS}, {}

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", get_config_dict)
    name, values = "nvidia/Qwen3-8B-DMS-8x", {"revision": "da1535f", "token": "mine"}
    args = SimpleNamespace(
        model=name, hf_config_path=None, revision="da1535f", hf_token="mine"
    )
    assert missing_architecture(config_json(args)) == "Qwen3ForCausalLM"
    args.hf_config_path = "other/place"
    assert missing_architecture(config_json(args)) == "Qwen3ForCausalLM"
    assert asked == [(name, values), ("other/place", values)]


def test_every_class_of_checkpoints_with_adapters_is_registered():
    names = [f"{name}DMS" for name in FLAVOURS.values()]
    assert list(architectures()) == names


@pytest.mark.parametrize("kind", FLAVOURS)
def test_a_missing_tokenizer_is_refused(policy_config, tmp_path, kind):
    """Of the first type transformers makes none, of the second an empty one."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    changed = {"model_config.tokenizer": str(tmp_path)}
    model = Overlay(deciding(policy_config, 32), changed)
    config = KVPolicyConfig.from_dict({"policy": "dms", "recent": 32})
    with pytest.raises(
        ValueError, match="has no tokenizer.*; set --tokenizer .*Qwen3-8B"
    ):
        check_files(config, model)
    changed["model_config.skip_tokenizer_init"] = True
    check_files(config, Overlay(deciding(policy_config, 32), changed))


def test_a_tokenizer_that_cannot_be_read_says_why(monkeypatch, policy_config):
    def fails(*args):
        raise OSError("You are trying to access a gated repo.\nLog in.")

    monkeypatch.setattr(dms_policy, "cached_tokenizer_from_config", fails)
    config = KVPolicyConfig.from_dict({"policy": "dms", "recent": 32})
    why = r"has no tokenizer that can be read \(You are .* gated repo\. Log in\.\); set"
    with pytest.raises(ValueError, match=why):
        check_files(config, deciding(policy_config, 32))


def checked(policy_config, window=32, recent=32, options=None, keys=None, **more):
    """Check a server of the tiny model."""
    asked = {"policy": "dms", "recent": recent, "policy_config": options or {}, **more}
    model = deciding(policy_config, window, **(keys or {}))
    check_files(KVPolicyConfig.from_dict(asked), model)


DISABLED = {"dms_separate_alpha": True, "dms_disable_eviction": True}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, None),
        ({"options": {"dms_channel": 31}}, None),
        ({"options": {"dms_channel": 32}}, "got 32, expected one of 32"),
        ({"options": {"dms_channel": -33}}, "got -33, expected one of 32"),
        ({"window": 64}, "^dms: .* trained with a window of 64 tokens"),
        ({"window": None}, "^dms: .* so it makes no decisions"),
        ({"keys": DISABLED}, "dms_disable_eviction is set"),
        ({"policy": "tova", "budget": 128}, "was trained with DMS"),
    ],
)
def test_start_checks_of_a_model_that_decides(policy_config, given, told):
    with nullcontext() if told is None else pytest.raises(ValueError, match=told):
        checked(policy_config, **given)


def test_two_admissions_that_decide_are_refused(policy_config, tmp_path):
    path = tmp_path / "gates.safetensors"
    make_gates(2, 2, 32, window=32, rope_theta=1e4).save(path)
    options = {"wgkv_gates": str(path)}
    checked(policy_config, options=options, allow=["wgkv", "dms+snapkv"])
    options["exact"] = True
    told = "^allow: got dms and wgkv, expected at most one"
    with pytest.raises(ValueError, match=told):
        checked(policy_config, options=options, allow=["wgkv"])


def test_start_checks_of_an_adapter(policy_config, tmp_path):
    path = tmp_path / "adapter.safetensors"
    options = {"options": {"dms_adapter": str(path)}, "window": None}
    make_adapter(2, 2, 64, window=32).save(path)
    checked(policy_config, **options)
    with pytest.raises(ValueError, match="set --kv-recent 32"):
        checked(policy_config, recent=40, **options)
    make_adapter(3, 2, 64, window=32).save(path)
    with pytest.raises(ValueError, match="num_layers: got 3, expected 2"):
        checked(policy_config, **options)
    path.write_text("{}")
    with pytest.raises(ValueError, match="dms_adapter|dms adapter"):
        checked(policy_config, **options)


@pytest.mark.parametrize(
    ("rule", "ranks", "said"),
    [
        (DmsRule(per_layer=True), 1, None),
        (DmsRule(per_layer=True), 2, "first KV head decides.*-size 1$"),
        (DmsRule(), 2, None),
        (DmsRule(), 4, "first query head of a group.*--tensor-parallel-size 2 or less"),
        (DmsRule(is_borrowed=False), 4, None),
    ],
)
def test_ranks_without_the_deciding_head_are_refused(rule, ranks, said):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2),
    )
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        dms_policy._check_ranks(rule, config)
