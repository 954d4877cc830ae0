"""Starts `vllm serve` with a KV policy and prints how to call it once it answers."""

import argparse
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from setup_env import ROOT, VENV, choose_lock

PACKAGED_MODEL = "reasoner/checkpoint"
PACKAGED_NAME = "reasoner"
CPU_KV_CACHE_BYTES = 512 * 1024**2
MAX_MODEL_TOKENS = 4096
POLL_SECONDS = 0.25

HOW_TO_CALL = """
Ready: {url}   model {name}, {policy}

  curl {url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "temperature": 0,
         "messages": [{{"role": "user", "content": "{prompt}"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}", api_key="none")
  answer = client.chat.completions.create(model="{name}", temperature=0,
      messages=[{{"role": "user", "content": "{prompt}"}}])
  print(answer.choices[0].message.content)

Counters: curl -s {root}/metrics | grep kvpolicy_       Stop: Ctrl-C
"""


def build_command(options: argparse.Namespace, device: str) -> list[str]:
    """Return the `vllm serve` command line.

    Args:
        options: the parsed command line of this script.
        device: `cpu` or `cuda`.
    """
    command = [str(VENV / "bin" / "vllm"), "serve", options.model]
    command += ["--host", options.host, "--port", str(options.port)]
    command += ["--served-model-name", served_name(options.model)]
    if has_policy(options):
        command += ["--kv-policy", options.policy]
        command += ["--kv-budget", str(options.budget)]
        command += ["--kv-interval", str(options.interval)]
    if options.model == PACKAGED_MODEL:
        command += ["--dtype", "float32"]
        command += ["--max-model-len", str(MAX_MODEL_TOKENS)]
    if device == "cpu":
        # Eager: compiling costs more seconds at start than a small model gains.
        command += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
        command += ["--enforce-eager"]
    return command + options.extra


def has_policy(options: argparse.Namespace) -> bool:
    """Return whether the server gets a policy; `POLICY=none` is stock vLLM."""
    return options.policy not in ("", "none")


def check_policy(options: argparse.Namespace, device: str) -> None:
    """Refuse bad numbers before vLLM is imported.

    Args:
        options: the parsed command line of this script.
        device: `cpu` or `cuda`.

    Raises:
        ValueError: naming the key, the value and what is valid.
    """
    from vllm_kvpolicy.api.cli import add_arguments, given_values
    from vllm_kvpolicy.compat import BLOCK_TOKENS
    from vllm_kvpolicy.config import KVPolicyConfig

    numbers = {"budget": options.budget, "interval": options.interval}
    values = {key: int(v) if v.isdigit() else v for key, v in numbers.items()}
    parser = argparse.ArgumentParser(prog="make serve", allow_abbrev=False)
    add_arguments(parser)
    extra, _ = parser.parse_known_args(options.extra)
    values |= given_values(vars(extra))
    config = KVPolicyConfig.from_dict({"policy": options.policy, **values})
    if not any(word.startswith("--block-size") for word in options.extra):
        config.validate_block_size(BLOCK_TOKENS[device])


def check_port(host: str, port: int) -> None:
    """Refuse a port on which another process listens and would answer in our place.

    Raises:
        OSError: naming the port and what to do.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: a port whose connections are only being closed is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise OSError(
                f"PORT: got {port} on {host}, which cannot be listened on "
                f"({error.strerror}): stop the server there or set PORT= to a free one"
            ) from None


def served_name(model: str) -> str:
    """Return the name of `model` in requests."""
    return PACKAGED_NAME if model == PACKAGED_MODEL else model


def wait_and_explain(options: argparse.Namespace, server_pid: int) -> None:
    """Wait until the server answers and print how to call it; stop if it ends.

    Args:
        options: the parsed command line of this script.
        server_pid: process id of the server, our parent.
    """
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    root = f"http://{host}:{options.port}"
    while os.getppid() == server_pid:
        try:
            urllib.request.urlopen(f"{root}/health", timeout=2)
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_SECONDS)
            continue
        print(
            HOW_TO_CALL.format(
                root=root,
                url=f"{root}/v1",
                name=served_name(options.model),
                policy=(
                    f"policy {options.policy}, budget {options.budget}"
                    if has_policy(options)
                    else "no policy"
                ),
                prompt=example_prompt(options.model),
            ),
            flush=True,
        )
        return


def example_prompt(model: str) -> str:
    """Return an example prompt for `model`, as JSON-safe text."""
    path = ROOT / Path(model) / "example_prompt.txt"
    if path.is_file():
        return path.read_text().strip().replace("\n", "\\n").replace('"', '\\"')
    return "Hello"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options; arguments after `--` go to `vllm serve` unchanged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=PACKAGED_MODEL, help="folder or name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--policy", default="ams-tova", help="none: stock vLLM")
    parser.add_argument("--budget", default="512", help="tokens per KV head")
    parser.add_argument("--interval", default="64", help="tokens between events")
    parser.add_argument("extra", nargs="*", help="more arguments of `vllm serve`")
    return parser.parse_args(arguments)


def main() -> int:
    """Replace this process by the server; return only if it cannot start."""
    options = parse(sys.argv[1:])
    folder = ROOT / options.model
    if options.model == PACKAGED_MODEL and not (folder / "config.json").is_file():
        print(
            f"No model in {PACKAGED_MODEL}: name one with MODEL=, or train it "
            "(see reasoner/).",
            file=sys.stderr,
        )
        return 1
    device = choose_lock()
    try:
        check_port(options.host, options.port)
        if has_policy(options):
            check_policy(options, device)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    command = build_command(options, device)
    if folder.is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"
    print("starting:", " ".join(command), flush=True)
    server_pid = os.getpid()
    if os.fork() == 0:
        wait_and_explain(options, server_pid)
        return 0
    os.chdir(ROOT)
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
