"""The page with the text of requests, and its pictures in the docs.

    pytest tests/serve/test_live_pictures.py --screenshots

takes them anew: docs/figures/live-light.png and live-dark.png.
"""

from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from reasoner.problems import generate
from support.browser import chromium, faint_texts, wait_for
from support.servers.servers import serving
from support.servers.small_server import flags

pytestmark = [pytest.mark.serve, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
BUDGET, NUM_REQUESTS, LINES, WIDTH = 256, 9, 70, 1280
POLICIES = ("ams-expected", "snapkv", "none")
FLAGS = flags(
    *(POLICIES[0], BUDGET, 128),
    kv_policy_config='{"allow": ["snapkv"], "live_text": true}',
    **{"max_model_len": 2048, "max_num_seqs": None},
    **{"kv_cache_memory_bytes": 18874368, "served_model_name": "reasoner"},
)
MOST_BYTES = 70_000  # of a picture


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL of a server of the packaged model."""
    folder, options = tmp_path_factory.mktemp("pictures"), [*FLAGS, "--kv-live"]
    with serving(ROOT / "reasoner" / "checkpoint", options, folder) as url:
        yield url


def ask(server, number):
    """Send one problem; return the server's answer."""
    problem = generate("sub", LINES, 200 + number)
    body = {"model": "reasoner", "max_tokens": 1200, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": problem.prompt}]}
    body |= {"vllm_xargs": {"kv_policy": POLICIES[number % len(POLICIES)]}}
    url = f"{server}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def seen(server, tmp_path_factory):
    """What a page has shown while requests ran: detail, colours' contrast, pictures."""
    folder, found = tmp_path_factory.mktemp("shots"), {}
    with chromium() as browser, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto(f"{server}/kv_policy/live")
        page.wait_for_selector("#status[data-state=live]")
        answers = [pool.submit(ask, server, number) for number in range(NUM_REQUESTS)]
        own = f"[...view.requests.values()].find((r) => r.policy === '{POLICIES[0]}')"
        wait_for(page, f"(view.own = {own}?.id)", 300)
        page.evaluate("choose(view.own, true)")
        # Two thirds into an answer.
        wait_for(page, "view.detail?.id === view.own && view.detail.last?.ordinal >= 3")
        wait_for(page, "!$('text').hidden")
        found["detail"], found["shown"] = page.evaluate(
            "[view.detail, $('text').innerText]"
        )
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.evaluate("new Promise(requestAnimationFrame)")
            found[f"faint {scheme}"] = faint_texts(page)
            found[scheme] = folder / f"live-{scheme}.png"
            page.screenshot(path=found[scheme], full_page=True)
        found["answers"] = [answer.result() for answer in answers]
    return found


def test_the_text_is_that_of_the_request_and_its_shares_are_those_of_heads(seen):
    detail, last = seen["detail"], seen["detail"]["last"]
    problems = [generate("sub", LINES, 200 + n).prompt for n in range(NUM_REQUESTS)]
    text = "".join(detail["tokens"])
    (number,) = (n for n, prompt in enumerate(problems) if prompt in text)
    assert POLICIES[number % len(POLICIES)] == last["policy"] == POLICIES[0]
    written = text.partition("<think>")[2]
    assert len(written) > 100 and seen["answers"][number].startswith(written)
    assert len(detail["tokens"]) == last["position"]
    share = np.frombuffer(b64decode(last["share"]), np.uint8) / 255
    assert share.shape == (last["position"],)
    kept = np.array(last["kept"])
    assert kept.shape == (6, 2) and last["first_known"] == 0
    # Each byte is rounded.
    assert share.sum() == pytest.approx(kept.mean(), abs=0.002 * len(share))
    assert (share[-32:] == 1).all() and share.min() < 0.5
    assert seen["shown"].endswith(text[-40:].strip())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_pictures_are_readable_and_small(seen, scheme, request):
    assert seen[f"faint {scheme}"] == []
    # These colours are enough for flat areas, rare ones too, and a third of the bytes.
    method = Image.Quantize.MAXCOVERAGE
    small = Image.open(seen[scheme]).convert("RGB").quantize(96, method, dither=0)
    place = seen[scheme].with_stem(f"small-{scheme}")
    if request.config.getoption("--screenshots"):
        place = ROOT / "docs" / "figures" / seen[scheme].name
    small.save(place, optimize=True)
    assert place.stat().st_size < MOST_BYTES
    assert small.width == WIDTH
    ground = np.asarray(Image.open(seen[scheme]).convert("L")).mean()
    assert (ground > 128) == (scheme == "light")
