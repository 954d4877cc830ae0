"""The wraps of vLLM: the table, the ways in, and what ends up in a VllmConfig."""

import ast
import inspect
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
from vllm import SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from support.engine_configs import Overlay, engine_args
from support.made_hybrids import make
from vllm_kvpolicy import compat, plugin
from vllm_kvpolicy.api import engine_config, patch, patch_table, request_guards
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_values import ConfigValues
from vllm_kvpolicy.kernels import preferences
from vllm_kvpolicy.observe.metrics import CounterFile

load_general_plugins()

POLICY = {"policy": "ams-tova", "budget": 128, "interval": 64}
NGRAM_GPU = {"method": "ngram_gpu", "num_speculative_tokens": 2}
FLAGS = ["--kv-policy", "ams-tova", "--kv-budget", "128", "--kv-interval", "64"]


@pytest.fixture
def parse(tiny_model):
    """Return a function that makes EngineArgs as `vllm serve` would."""

    def parse_words(*words):
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        parser.add_argument("--config")
        args = parser.parse_args(["--model", str(tiny_model), *words])
        return EngineArgs.from_cli_args(args)

    return parse_words


def policy_of(engine_args):
    return engine_args.additional_config["kv_policy"]


def test_every_row_is_used_and_explained():
    source = inspect.getsource(patch)
    wrapped = {
        ast.unparse(node.args[0]).removeprefix("table.")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_wrap"
    }
    rows = {
        name
        for name, value in vars(patch_table).items()
        if isinstance(value, patch_table.Patch)
    }
    assert wrapped == rows
    assert len(patch_table.PATCHES) == len(rows)
    assert all(row.why and row.remove_when for row in patch_table.PATCHES)


def test_installing_twice_wraps_once():
    before = dict(vars(EngineArgs))
    plugin.register()
    after = vars(EngineArgs)
    assert all(after[name] is value for name, value in before.items())
    assert not hasattr(EngineArgs.add_cli_args.__wrapped__, "__wrapped__")


def test_yaml_and_underscores_are_read_like_vllms_own(tmp_path, parse):
    assert policy_of(parse(*FLAGS)) == POLICY
    path = tmp_path / "serve.yaml"
    path.write_text("kv-policy: ams-tova\nkv-budget: 128\nkv-interval: 64\n")
    assert policy_of(parse("--config", str(path))) == POLICY
    words = ("--kv_policy=ams-tova", "--kv-policy-config", '{"preset": "code"}')
    found = {"policy": "ams-tova", "policy_config": {"preset": "code"}}
    assert policy_of(parse(*words)) == found
    assert parse().additional_config == {}


@pytest.mark.parametrize(
    "words",
    [
        ("--additional-config", '{"kv_policy": {"policy": "tova", "budget": 256}}'),
        (
            *("--additional-config.kv_policy.policy", "tova"),
            *("--additional-config.kv_policy.budget", "256"),
        ),
    ],
)
def test_additional_config_is_read_and_flags_win(parse, words):
    assert policy_of(parse(*words)) == {"policy": "tova", "budget": 256}
    found = policy_of(parse(*words, "--kv-budget", "128"))
    assert found == {"policy": "tova", "budget": 128}


def test_processes_of_one_command_line_share_an_engine_name(tiny_model):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    command = ["--model", str(tiny_model), "--kv-cache-memory-bytes", "8388608"]
    args = parser.parse_args([*command, *FLAGS])
    names = {
        EngineArgs.from_cli_args(args).create_engine_config().instance_id
        for _ in range(2)
    }
    other = EngineArgs.from_cli_args(parser.parse_args([*command, *FLAGS]))
    in_code = engine_args(tiny_model, additional_config={"kv_policy": POLICY})
    names |= {in_code.create_engine_config().instance_id for _ in range(2)}
    assert len(names) == 1 + 2  # engines made in code have names of their own
    assert other.create_engine_config().instance_id not in names


def test_a_finished_config_names_our_classes(policy_config):
    scheduler = policy_config.scheduler_config.scheduler_cls
    worker = policy_config.parallel_config.worker_cls
    assert scheduler == "vllm_kvpolicy.block_manager.scheduler.KVPolicyScheduler"
    assert worker == "vllm_kvpolicy.worker.cpu.KVPolicyCPUWorker"
    assert list(policy_config.additional_config) == ["kv_policy"]
    assert policy_config.cache_config.block_size == 32
    assert policy_config.cache_config.enable_prefix_caching is True


def finished(monkeypatch, count=1, rank=0, policy="ams-tova", may_limit=False):
    """Return a config as `finish` leaves it in one of several API processes."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls="vllm.v1.worker.gpu_worker.Worker"),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        cache_config=SimpleNamespace(block_size=16, sliding_window=None),
        attention_config=SimpleNamespace(backend=None),
        model_config=None,
        num_speculative_tokens=0,
        additional_config={"kv_policy": POLICY, "other": 1},
    )
    monkeypatch.setattr(engine_config, "refusals", lambda config: [])
    monkeypatch.setattr(engine_config, "own_block_size", lambda config: 16)
    monkeypatch.setattr(engine_config, "check_files", lambda *args: None)
    arguments = SimpleNamespace(
        additional_config={}, _api_process_count=count, _api_process_rank=rank
    )
    asked = KVPolicyConfig.from_dict({**POLICY, "policy": policy})
    engine_config.finish(arguments, config, asked, may_limit)
    return config


def test_asynchronous_scheduling_and_cuda_have_their_own_classes(monkeypatch):
    config = finished(monkeypatch)
    worker = config.parallel_config.worker_cls
    assert worker == "vllm_kvpolicy.worker.gpu.KVPolicyGPUWorker"
    scheduler = config.scheduler_config.scheduler_cls
    assert scheduler == "vllm_kvpolicy.block_manager.scheduler.KVPolicyAsyncScheduler"
    assert config.additional_config["other"] == 1


@pytest.mark.parametrize(
    ("count", "rank", "starts"), [(1, 0, True), (2, -1, True), (2, 0, False)]
)
def test_who_starts_a_server_removes_its_files(monkeypatch, count, rank, starts, stale):
    """And each process those without a lock."""
    names = []
    monkeypatch.setattr(engine_config, "remove_files_at_exit", names.append)
    config = finished(monkeypatch, count, rank)
    assert names == [config.instance_id] * starts and stale == [1]


@pytest.mark.parametrize(
    ("major", "dtype", "has_flash", "expected"),
    [
        (8, "bfloat16", True, "FLASH_ATTN"),
        (9, "float32", True, "TRITON_ATTN"),
        (9, "auto", False, "TRITON_ATTN"),
        (10, "auto", True, "TRITON_ATTN"),
        (None, "auto", True, "TRITON_ATTN"),
    ],
)
def test_cuda_gets_a_known_backend_and_blocks_of_16(
    tiny_model, monkeypatch, major, dtype, has_flash, expected
):
    from vllm.platforms import current_platform

    def load(name: str) -> None:
        assert name == "vllm.v1.attention.backends.flash_attn"
        if not has_flash:
            raise ImportError(name)

    capability = None if major is None else SimpleNamespace(major=major, minor=0)
    monkeypatch.setattr(compat, "platform_name", lambda: "cuda")
    monkeypatch.setattr(compat, "import_module", load)
    monkeypatch.setattr(
        type(current_platform), "get_device_capability", lambda *args: capability
    )
    policy = {"kv_policy": POLICY}
    args = engine_args(tiny_model, dtype=dtype, additional_config=policy)
    engine_config.prepare(args)
    assert args.block_size == 16
    assert args.attention_backend.name == expected


@pytest.mark.parametrize(
    ("name", "memory", "most"),
    [
        # 2 layers with 2 KV heads of 4,096 tokens in pages of 32: 2 KiB a request.
        ("tiny", 2**22, 64),
        ("tiny", 2**30, 200),  # as it was
        ("granite4", 2**22, 128),  # two layers of six, in pages of 96
    ],
)
def test_page_lists_of_a_step_have_room(
    tiny_model, tmp_path, monkeypatch, name, memory, most
):
    model = tiny_model if name == "tiny" else make(name, tmp_path)
    policy = {**POLICY, "policy": "adakv-snapkv", "budget": 256}
    values = {"kv_policy": policy}
    args = engine_args(model, additional_config=values, max_num_seqs=200)
    made = args.create_engine_config()
    monkeypatch.setattr(compat, "device_memory", lambda: memory)
    engine_config._limit_requests(made)
    assert made.scheduler_config.max_num_seqs == most


def test_only_what_a_user_left_open_is_limited(tiny_model, monkeypatch):
    found = []
    monkeypatch.setattr(
        engine_config, "finish", lambda *args, may_limit: found.append(may_limit)
    )
    for given in (None, 200):
        values = {"kv_policy": POLICY}
        args = engine_args(tiny_model, additional_config=values, max_num_seqs=given)
        args.create_engine_config()
    assert found == [True, False]


@pytest.mark.parametrize("policy", ["ams-tova", "adakv-snapkv"])
@pytest.mark.parametrize("may_limit", [True, False])
def test_gpus_have_room_for_lists_of_each_head(monkeypatch, policy, may_limit):
    found = []
    monkeypatch.setattr(compat, "platform_name", lambda: "cuda")
    monkeypatch.setattr(engine_config, "_limit_requests", found.append)
    monkeypatch.setattr(engine_config, "tell_untested", lambda config: None)
    config = finished(monkeypatch, policy=policy, may_limit=may_limit)
    assert found == [config] * (may_limit and policy == "adakv-snapkv")


@pytest.mark.parametrize(
    ("major", "model", "cache_dtype", "expected"),
    [
        (9, {}, "fp8", "TRITON_ATTN"),
        (9, {"model_type": "gpt_oss"}, "auto", "FLASH_ATTN"),
        (8, {"model_type": "gpt_oss"}, "auto", "TRITON_ATTN"),
        (9, {"head_dim": 256}, "auto", "FLASH_ATTN"),
        (9, {"text_config": {"global_head_dim": 512}}, "auto", "TRITON_ATTN"),
        (9, {"text_config": {"kv_lora_rank": 512}}, "auto", "TRITON_MLA"),
        (9, {"language_config": {"kv_lora_rank": 512}}, "auto", "TRITON_MLA"),
        (8, {"add_swa_attention_sink_bias": True}, "auto", "TRITON_ATTN"),
        (9, {"kv_lora_rank": 256, "model_type": "minicpm3"}, "auto", "FLASH_ATTN"),
    ],
)
def test_what_flash_attention_does_not_do_is_tritons(
    monkeypatch, major, model, cache_dtype, expected
):
    monkeypatch.setattr(compat, "gpu_capability", lambda: (major, 0))
    monkeypatch.setattr(compat, "import_module", lambda name: None)
    assert compat.cuda_attention_backend(model, "auto", cache_dtype) == expected


def test_any_program_that_starts_vllm_gets_the_policy_of_the_environment(
    tiny_model, monkeypatch
):
    """And vLLM knows our variables, but no others that begin alike."""
    for name, text in {"POLICY": "tova", "BUDGET": "96", "BUGDET": "1"}.items():
        monkeypatch.setenv(f"VLLM_KV_{name}", text)
    known = dict(envs.environment_variables)
    monkeypatch.setattr(envs, "environment_variables", known)
    patch.install()
    assert {"VLLM_KV_POLICY", "VLLM_KV_BUDGET"} <= known.keys()
    assert "VLLM_KV_BUGDET" not in known
    config = engine_args(tiny_model).create_engine_config()
    found = config.additional_config["kv_policy"]
    assert (found["policy"], found["budget"]) == ("tova", 96)
    assert config.scheduler_config.scheduler_cls is not None
    told: list[str] = []
    tell = lambda form, names: told.append(form % names)  # noqa: E731
    monkeypatch.setattr(engine_config.logger, "warning", tell)
    for text in ("none", ""):
        monkeypatch.setenv("VLLM_KV_POLICY", text)
        stock = engine_args(tiny_model).create_engine_config()
        assert "kv_policy" not in (stock.additional_config or {})
        names = [said.split(":")[0] for said in told]
        assert names == ([] if text else ["VLLM_KV_BUDGET"])
    for own in (None, object()):
        assert engine_config.prepare(SimpleNamespace(additional_config=own)) is None


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("cache_config", {"block_size": 64}),
        ("cache_config", {"enable_prefix_caching": False}),
        *[
            ("parallel_config", {"worker_cls": own})
            for own in compat.WORKER_CLASSES.values()
        ],
    ],
)
def test_what_the_user_chose_is_left_alone(tiny_model, section, changes):
    args = engine_args(tiny_model, additional_config={"kv_policy": POLICY}, **changes)
    found = getattr(args.create_engine_config(), section)
    assert {name: getattr(found, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scheduler_cls": "mine.Scheduler"}, ["scheduler class", "--scheduler-cls"]),
        ({"block_size": 16}, ["block sizes", "32 on CPU"]),
        (
            {"pipeline_parallel_size": 2, "kv_cache_dtype": "int8_per_token_head"},
            ["pipeline parallelism", "other dtypes than the model's"],
        ),
        (
            {"speculative_config": NGRAM_GPU},
            ["speculative decoding", "MTP", '"method": "ngram"'],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_real_arguments_are_refused(tiny_model, changes, words):
    args = engine_args(tiny_model, additional_config={"kv_policy": POLICY}, **changes)
    with pytest.raises(ValueError) as error:
        args.create_engine_config()
    message = str(error.value)
    assert message.startswith("--kv-policy ams-tova is not supported together with:")
    assert [word for word in words if word not in message] == []


def test_a_budget_holds_what_a_step_drafts(tiny_model):
    values = {"kv_policy": {**POLICY, "budget": 80}}
    drafts = {"method": "ngram", "num_speculative_tokens": 81, "prompt_lookup_max": 2}
    changes = {"additional_config": values, "speculative_config": drafts}
    args = engine_args(tiny_model, **changes)
    with pytest.raises(ValueError, match="budget: got 80, expected at least 81"):
        args.create_engine_config()
    drafts["num_speculative_tokens"] = 80
    engine_args(tiny_model, **changes).create_engine_config()


def test_the_start_says_which_kernels_run(tiny_model, policy_log):
    args = engine_args(tiny_model, additional_config={"kv_policy": POLICY})
    args.create_engine_config()
    assert f"KV policy kernels: {preferences.summary('cpu')}" in policy_log.messages


def request(**extra_args):
    params = SimpleNamespace(max_tokens=4, extra_args=extra_args)
    return SimpleNamespace(
        resumable=False, prompt_token_ids=[1], sampling_params=params
    )


def prepare(self, request_id, prompt, params):
    """Do as InputProcessor.process_inputs, whose requests have copies of `params`."""
    made = request(**params.extra_args)
    made.prompt_token_ids = prompt
    return made


def processor_of(config):
    """Return a function that prepares and checks parameters for an engine."""
    owner = SimpleNamespace(vllm_config=config)
    wrapped = patch._with_request_check(prepare)
    return lambda params, prompt=(1,): wrapped(owner, "id", prompt, params)


def params(**extra_args):
    return request(**extra_args).sampling_params


def test_bad_requests_are_client_errors_and_value_errors(policy_config):
    process = processor_of(policy_config)
    assert process(params(kv_budget=96)).sampling_params.max_tokens == 4
    bad = params(kv_budget="many")
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match="kv_budget: got 'many'") as error:
            process(bad)
        assert isinstance(error.value, ValueError)


def test_each_engine_parses_its_policy_once(policy_config, monkeypatch):
    parsed = []
    from_dict = KVPolicyConfig.from_dict

    def count(values):
        parsed.append(values["policy"])
        return from_dict(values)

    monkeypatch.setattr(KVPolicyConfig, "from_dict", count)
    check = patch._with_request_check(prepare)
    early = patch._with_early_check(lambda self, *args: args)
    for name in ("ams-tova", "tova"):
        values = ConfigValues({"kv_policy": {"policy": name}})
        overlay = Overlay(policy_config, {"additional_config": values})
        owner = SimpleNamespace(vllm_config=overlay)
        for _ in range(3):
            check(owner, "id", (1,), params(kv_budget=96))
            early(owner, "hi", params(kv_budget=96))
    assert parsed == ["ams-tova", "tova"]


def test_a_request_is_checked_once_and_again_when_it_has_changed(
    policy_config, monkeypatch
):
    checked = []
    monkeypatch.setattr(request_guards, "check_params", lambda *args: checked.append(1))
    early = patch._with_early_check(lambda self, *args: args)
    owner = SimpleNamespace(vllm_config=policy_config)
    process = processor_of(policy_config)
    asked = params(kv_budget=96)
    early(owner, {"prompt_token_ids": [1]}, asked)
    process(asked)
    assert len(checked) == 1, "the note of the first check is found"
    process(asked, prompt=(1, 2))
    assert len(checked) == 2, "the prompt turned out longer"
    asked.extra_args["kv_budget"] = "many"
    early(owner, {"prompt_token_ids": [1, 2]}, asked)
    assert len(checked) == 3, "the keys have changed"
    asked.max_tokens = 5
    process(asked, prompt=(1, 2))
    assert len(checked) == 4, "the length has changed"
    processor_of(Overlay(policy_config, {"instance_id": "other"}))(asked, (1, 2))
    assert len(checked) == 5, "another engine"


def test_vllms_parameters_take_the_note(policy_config):
    asked = SamplingParams(max_tokens=4, extra_args={"kv_budget": 96})
    processor_of(policy_config)(asked)
    assert asked.kv_policy_checked[1:3] == (1, 4)


def test_engines_without_a_policy_check_nothing():
    process = processor_of(SimpleNamespace(additional_config={}))
    assert process(params(kv_budget="many")).prompt_token_ids == (1,)


def test_streams_are_checked_before_they_begin(policy_config):
    """Requests, and responses of the API of that name."""
    good, bad = params(kv_budget=96), params(kv_budget=2.5)
    wrapped = patch._with_early_check(lambda self, *args, **kwargs: (args, kwargs))
    engine = SimpleNamespace(vllm_config=policy_config)
    answer = wrapped(engine, "hi", good, "id", priority=1)
    assert answer == (("hi", good, "id"), {"priority": 1})
    with pytest.raises(VLLMValidationError, match=r"kv_budget: got 2\.5"):
        wrapped(engine, "hi", sampling_params=bad, request_id="id")
    wrapped = patch._with_early_response_check(lambda self, *args, **kwargs: kwargs)
    serving = SimpleNamespace(engine_client=engine)
    words = {"request_id": "id", "engine_input": {"prompt_token_ids": [1]}}
    words["context"] = 1
    words["sampling_params"] = good
    assert wrapped(serving, **words) == words
    with pytest.raises(VLLMValidationError, match=r"kv_budget: got 2\.5"):
        wrapped(serving, **{**words, "sampling_params": bad})


def test_beam_search_refuses_keys_that_it_would_drop():
    wrapped = patch._with_beam_check(lambda self, *args: args)
    for xargs in (None, {}, {"session_id": "a"}):
        assert wrapped(SimpleNamespace(vllm_xargs=xargs), 4, {}) == (4, {})
    for xargs in ({"kv_budget": 96}, {"kv_policy": "none"}):
        message = f"^{next(iter(xargs))}: has no effect with use_beam_search"
        with pytest.raises(VLLMValidationError, match=message):
            wrapped(SimpleNamespace(vllm_xargs=xargs), 4, {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-budget", "36"], "budget: got 36, expected at least 68 tokens"),
        (
            ["--kv-policy-config", '{"windwo": 1}'],
            "kv_policy_config: got the unknown key 'windwo'",
        ),
        (["--kv-cache-dtype", "nvfp4"], "--kv-policy ams-tova is not supported togeth"),
        (["--kv-policy-config", '{"trace": "/proc/x"}'], "trace: got '/proc/x'"),
    ],
)
def test_a_wrong_command_line_ends_as_with_argparse(parse, capsys, words, message):
    args = parse("--kv-cache-memory-bytes", "8388608", *FLAGS, *words)
    with pytest.raises(SystemExit) as stopped:
        args.create_engine_config()
    assert stopped.value.code == 2
    assert f"\nerror: {message}" in "\n" + capsys.readouterr().err


@pytest.mark.parametrize("several_processes", [False, True])
def test_metrics_have_the_series_of_their_own_engine(
    several_processes, tmp_path, monkeypatch
):
    from fastapi import FastAPI
    from starlette.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator import metrics

    if several_processes:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    def scrape(instance_id, additional, scheduler=None):
        app = FastAPI()
        app.state.args = SimpleNamespace(additional_config=additional)
        app.state.vllm_config = SimpleNamespace(
            instance_id=instance_id,
            additional_config=additional,
            model_config=SimpleNamespace(served_model_name=instance_id),
            parallel_config=SimpleNamespace(
                data_parallel_index=1, data_parallel_size_local=1
            ),
            scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        )
        patch._with_counters(lambda app: None)(app)
        whole, *others = (
            TestClient(app).get(path).text
            for path in ("/metrics", "/metrics/", "/metricsx")  # all that vLLM answers
        )
        ours = [line for line in whole.splitlines() if "kvpolicy" in line]
        for other in others:
            assert [line for line in other.splitlines() if "kvpolicy" in line] == ours
        return whole

    assert metrics.PrometheusResponse.media_type.startswith("text/plain")
    files = {n: CounterFile(f"{n}-1", create=True) for n in ("first", "second")}
    try:
        for number, file in enumerate(files.values()):
            file.add("events", 3 + number)
        texts = {name: scrape(name, {"kv_policy": POLICY}) for name in files}
        stock = scrape("first", {})
        counted = scrape("second", {}, compat.COUNTING_CLASSES[False])
    finally:
        for file in files.values():
            file.remove()
    for number, name in enumerate(files):
        series = (
            f'kvpolicy_events_total{{engine="1",model_name="{name}"}} {3 + number}.0'
        )
        assert series in texts[name]
        assert texts[name].count("kvpolicy_events_total{") == 1
    assert "kvpolicy" not in stock
    assert 'kvpolicy_events_total{engine="1",model_name="second"} 4.0' in counted


def test_a_batch_is_checked_and_counted_as_a_server_is(parse, monkeypatch):
    """`vllm run-batch` has HTTP for metrics alone: those of Prometheus's registry."""
    from prometheus_client import REGISTRY, generate_latest

    wrapped = []
    monkeypatch.setattr(patch, "_wrap_server", lambda: wrapped.append(1))
    before = set(REGISTRY._collector_to_names)
    args = parse(*FLAGS, "--served-model-name", "a")
    config = args.create_engine_config(UsageContext.OPENAI_BATCH_RUNNER)
    (added,) = set(REGISTRY._collector_to_names) - before
    file = CounterFile(f"{config.instance_id}-0", create=True)
    try:
        file.add("events", 3)
        text = generate_latest(REGISTRY).decode()
    finally:
        file.remove()
        REGISTRY.unregister(added)
    assert 'kvpolicy_events_total{engine="0",model_name="a"} 3.0' in text
    assert wrapped == [1]


@pytest.mark.parametrize(
    ("values", "is_live"),
    [({"live": True}, True), ({}, False), (None, False)],
)
def test_live_routes_are_there_where_asked_for_and_streams_are_no_long_requests(
    values, is_live, tmp_path, monkeypatch
):
    """Data is answered by 401 here: what counts is which paths vLLM measures."""
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry
    from prometheus_fastapi_instrumentator import Instrumentator
    from starlette.testclient import TestClient

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    app, registry = FastAPI(), CollectorRegistry()
    instrumentator = Instrumentator(excluded_handlers=["/health"], registry=registry)
    instrumentator.add().instrument(app)
    additional = {} if values is None else {"kv_policy": {**POLICY, **values}}
    app.state.args = SimpleNamespace(additional_config=additional, api_key=["right"])
    patch._with_counters(lambda app: None)(app)
    client = TestClient(app)
    assert client.get("/kv_policy/live").status_code == (200 if is_live else 404)
    routes = ["/kv_policy", "/kv_policy/requests"]
    for path in (*routes, "/kv_policy/stream"):
        assert client.get(path).status_code == (401 if is_live else 404)
    measured = {
        sample.labels["handler"]
        for metric in registry.collect()
        for sample in metric.samples
        if "handler" in sample.labels
    }
    assert measured == ({*routes, "/kv_policy/live"} if is_live else {"none"})


@pytest.fixture
def stale(monkeypatch):
    """Has a 1 for each time that files without a lock are to be removed at the end."""
    found = []
    note = partial(found.append, 1)
    monkeypatch.setattr(engine_config, "remove_stale_files_at_exit", note)
    return found


def test_stock_that_counts_keeps_its_way_of_scheduling(tiny_model, stale):
    classes = compat.COUNTING_CLASSES
    args = engine_args(tiny_model, async_scheduling=False, scheduler_cls=classes[True])
    assert args.create_engine_config().scheduler_config.scheduler_cls == classes[False]
    assert stale == [1], "its counter file goes as the process ends"
    scheduler = SimpleNamespace(async_scheduling=True, scheduler_cls=classes[False])
    engine_config._name_scheduler(scheduler, classes)
    assert scheduler.scheduler_cls == classes[True]


def test_an_unknown_version_is_refused_before_anything_is_read(tiny_model, monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.31.0")

    def not_reached(*args):
        raise AttributeError("an attribute that only 0.32 has")

    monkeypatch.setattr(engine_config, "refusals", not_reached)
    monkeypatch.setattr(engine_config, "_choose", not_reached)
    args = engine_args(tiny_model, additional_config={"kv_policy": POLICY})
    with pytest.raises(ValueError, match=r"install vLLM 0\.32\.x"):
        args.create_engine_config()
