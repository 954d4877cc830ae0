"""Files and folders of a configuration are checked where it is made."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms.cpu import CpuPlatform

from support.calibration_files import make_calibration
from support.engine_configs import engine_args
from support.made_gates import make_gates
from support.made_hybrids import make
from vllm_kvpolicy import compat
from vllm_kvpolicy.api.engine_config import check_files, read_command_line
from vllm_kvpolicy.config import KVPolicyConfig

BASE = {"policy": "tova", "budget": 128, "interval": 64}
# Layers, KV heads, query heads per KV head and channels of the tiny model.
TINY = (2, 2, 2, 32)


def config(**values):
    return KVPolicyConfig.from_dict({**BASE, **values})


@pytest.fixture
def filters(tmp_path):
    """A calibration file that fits the tiny model."""
    path = tmp_path / "filters.safetensors"
    make_calibration("qfilter", *TINY).save(path)
    return path


def test_files_that_fit_pass(policy_config, filters, tmp_path):
    queries = tmp_path / "queries.safetensors"
    make_calibration("triattention", *TINY).save(queries)
    options = {
        "qfilter_calibration": str(filters),
        "triattention_calibration": str(queries),
    }
    asked = config(
        allow=["ams-qfilter", "triattention"],
        policy_config=options,
        trace_dir=str(tmp_path / "new" / "trace"),
    )
    assert check_files(asked, policy_config) is None
    assert (tmp_path / "new" / "trace").is_dir()


@pytest.mark.parametrize("policy", ["qfilter", "tova"])
def test_a_missing_file_is_named_with_its_key(policy_config, tmp_path, policy):
    path = tmp_path / "none.safetensors"
    options = {"qfilter_calibration": str(path)}
    asked = config(policy=policy, allow=["qfilter"], policy_config=options)
    with pytest.raises(ValueError) as error:
        check_files(asked, policy_config)
    message = str(error.value)
    assert message.startswith(f"qfilter_calibration: calibration {path}: got No such")
    assert message.endswith("expected a safetensors file") and "\n" not in message
    path.mkdir()
    with pytest.raises(ValueError, match="got a folder, expected a safetensors file"):
        check_files(asked, policy_config)


def test_a_file_of_another_model_is_refused(policy_config, filters):
    make_calibration("qfilter", 3, *TINY[1:]).save(filters)
    options = {"qfilter_calibration": str(filters)}
    message = "^qfilter_calibration: .*num_layers: got 3, expected 2$"
    with pytest.raises(ValueError, match=message):
        check_files(config(policy="qfilter", policy_config=options), policy_config)


def test_a_folder_that_cannot_be_written_is_refused(policy_config, tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=f"^trace: got '{file}' .*File exists"):
        check_files(config(trace_dir=str(file)), policy_config)


def test_the_first_process_of_a_server_checks_and_no_other(tiny_model, tmp_path):
    file = tmp_path / "file"
    file.touch()
    additional = {"kv_policy": {**BASE, "trace_dir": str(file)}}

    def make(count, rank):
        args = engine_args(tiny_model, additional_config=additional)
        args._api_process_count, args._api_process_rank = count, rank
        return args.create_engine_config()

    for count, rank in ((1, 0), (2, -1)):
        with pytest.raises(ValueError, match="expected a folder that can"):
            make(count, rank)
    for rank in (0, 1):
        assert make(2, rank).parallel_config._api_process_rank == rank


@pytest.fixture
def gates(tmp_path):
    """Write gates that fit the tiny model, or what is made of them."""

    def write(**fields):
        fits = {"layers": 2, "heads": 2, "channels": 32, "window": 40}
        path = tmp_path / "gates.safetensors"
        make_gates(**{**fits, "rope_theta": 1e4, **fields}).save(path)
        return path

    return write


def with_gates(path, **values):
    options = {"wgkv_gates": str(path)}
    asked = {"policy": "wgkv+tova", "recent": 40, "policy_config": options}
    return config(**{**asked, **values})


def test_gates_that_fit_pass(policy_config, gates):
    assert check_files(with_gates(gates()), policy_config) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 64}, "trained with a window of 64 tokens, got --kv-recent 40"),
        ({"sinks": 9}, "trained with 9 sinks, got --kv-sinks 4; set --kv-sinks 9"),
        ({"layers": 3}, "num_layers"),
    ],
    ids=str,
)
def test_gates_of_another_model_are_refused(policy_config, gates, fields, message):
    path = gates(**fields)
    with pytest.raises(ValueError) as error:
        check_files(with_gates(path), policy_config)
    text = str(error.value)
    assert text.startswith("wgkv_gates: wgkv gates ") and str(path) in text
    assert message in text


def test_a_model_without_rope_parameters_is_another_model(policy_config, gates):
    text = policy_config.model_config.hf_text_config
    given, text.rope_parameters = text.rope_parameters, None
    try:
        with pytest.raises(ValueError, match="rope_theta: got 10000.0, expected nan"):
            check_files(with_gates(gates()), policy_config)
    finally:
        text.rope_parameters = given


@pytest.mark.parametrize("name", [5, "", "../../etc/x", "A" * 32, "0" * 31])
def test_names_of_engines_are_made_by_servers_alone(tiny_model, capsys, name):
    given = {"kv_policy_engine": name}
    args = engine_args(tiny_model, additional_config={"kv_policy": BASE, **given})
    stock = SimpleNamespace(additional_config=given)
    for start in (
        args.create_engine_config,
        lambda: read_command_line(stock, SimpleNamespace()),
    ):
        with pytest.raises(SystemExit) as stopped:
            start()
        assert stopped.value.code == 2
        said = f"error: additional_config: got kv_policy_engine {name!r}, expected it "
        assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_superblocks_have_room_for_a_state(platform, tmp_path, monkeypatch):
    """N is known before a policy is checked; on a GPU another process finds it."""
    model = make("granite4", tmp_path)
    made = engine_args(
        model, enable_prefix_caching=False, block_size=32
    ).create_engine_config()
    assert made.cache_config.block_size == 32
    if platform == "cuda":  # in this process nobody may ask
        monkeypatch.setattr(CpuPlatform, "_align_hybrid_block_size", None)
    monkeypatch.setattr(compat, "platform_name", lambda: platform)
    compat.align_states(made)
    cache = made.cache_config
    # Keys and values of 2 heads of 32 numbers of 4 bytes: a token of a layer.
    assert cache.block_size * 512 == cache.mamba_page_size_padded
    assert cache.block_size > 64


@pytest.mark.parametrize("has_amx", [False, True])
def test_latent_vectors_are_served_in_chunks(
    has_amx, tmp_path, monkeypatch, policy_log
):
    """Stock has no chunks there, raises the tokens of a step, and may take AMX."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    model = make("deepseek_v3", tmp_path)
    values = {"kv_policy": {**BASE, "events": "always"}}
    fields = {"max_num_batched_tokens": 96, "block_size": 32}
    changes = {"additional_config": values, "max_model_len": 1024, **fields}
    args = engine_args(model, **changes)
    made = args.create_engine_config()
    scheduler, cache = made.scheduler_config, made.cache_config
    assert scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens == 96
    assert cache.block_size == compat.LATENT_TOKENS and not cache.enable_prefix_caching
    assert "-rotary_embedding" in made.compilation_config.custom_ops
    told = "KV policy tova: block size 16, attention backend CPU_MLA"
    assert told in policy_log.messages

    changes |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}
    args = engine_args(model, **changes)
    with pytest.raises(ValueError, match="chunked prefill"):
        args.create_engine_config()
