"""`gva serve` as people use it: a real OpenAI client, good requests and bad ones, and no page lost on the way."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-serve")

import openai
from served import CONTEXT, LETTERS, check_greedy
from server import KEY, Server


@pytest.fixture(scope="module")
def server(checkpoints, tmp_path_factory):
    folder, _ = checkpoints("gva-drope-16")
    made = Server(folder, tmp_path_factory.mktemp("server") / "log.txt")
    try:
        yield made.wait()
    finally:
        made.process.terminate()
        made.process.wait(60)


@pytest.fixture
def client(server):
    yield openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    server.wait_until_empty()  # after every test: nothing was lost
    assert server.process.poll() is None


def ids_of(text):
    return [1 + LETTERS.index(letter) for letter in text]


PROMPTS = ["a", "The cache holds", "0123456789" * 20]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_the_models_own(client, checkpoints, stream):
    _, model = checkpoints("gva-drope-16")
    answers = []
    for prompt in PROMPTS:
        reply = client.completions.create(
            model="toy",
            prompt=prompt,
            max_tokens=20,
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )
        pieces = [chunk.choices[0].text for chunk in reply] if stream else [reply.choices[0].text]
        answers.append("".join(pieces))
        assert not stream or len(pieces) > 1, "a client that lags gets several tokens in a piece"
    # The toy may say what is no letter; those answers are compared up to there.
    spoken = [[1 + LETTERS.index(c) for c in re.split("<(?:pad|unk|end)>", a)[0]] for a in answers]
    assert sum(map(len, spoken)) > 20
    check_greedy(model, [ids_of(p) for p, s in zip(PROMPTS, spoken, strict=True) if s], [s for s in spoken if s])


def test_token_ids_in_and_out(client, checkpoints):
    """The same on numbers, where nothing can hide in the tokenizer."""
    _, model = checkpoints("gva-drope-16")
    prompt = ids_of(PROMPTS[2])
    reply = client.completions.create(
        model="toy",
        prompt=prompt,
        max_tokens=30,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    answer = reply.choices[0].token_ids
    assert len(answer) == 30
    check_greedy(model, [prompt], [answer])
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 30)


def test_without_the_key_nothing_is_answered(server, client):
    for key in ("wrong", ""):
        stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key or "x", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(model="toy", prompt="a", max_tokens=1)


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        ({"prompt": "a" * 600, "max_tokens": 1}, 400, "512"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
        ({"prompt": "a", "temperature": -3}, 400, "temperature"),
        ({"prompt": [10**7], "max_tokens": 1}, 400, "out of vocabulary"),
        ({"prompt": "a", "max_tokens": 1, "model": "another"}, 404, "another"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(client, request_, status, said):
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(**{"model": "toy", **request_})
    assert error.value.status_code == status
    assert said in str(error.value)
    assert client.completions.create(model="toy", prompt="a", max_tokens=1).choices  # the server lives


def test_an_answer_ends_where_the_context_does(client):
    reply = client.completions.create(model="toy", prompt="a" * 500, max_tokens=100, extra_body={"ignore_eos": True})
    assert reply.usage.total_tokens == CONTEXT
    assert reply.choices[0].finish_reason == "length"


def test_malformed_requests(server, client):
    for body in (b"{not json", json.dumps({"model": "toy", "prompt": {"no": "prompt"}}).encode()):
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            body,
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(request, timeout=30)
        assert error.value.code in (400, 422)


def test_a_client_that_hangs_up(server, client):
    """Mid-stream, several at once: their requests end and their pages come back (the fixture waits for that)."""
    streams = [
        client.completions.create(
            model="toy", prompt="0" * 100, max_tokens=390, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(4)
    ]
    for stream in streams:
        next(iter(stream))
    assert server.metric("num_requests_running") > 0
    assert server.metric("kv_cache_usage_perc") > 0
    for stream in streams:
        stream.close()


def test_chat_in_the_terminal(server, client):
    """Our command against the server: the toy has no chat template, so it continues the text."""
    done = subprocess.run(
        [sys.executable, "-m", "gva.cli", "chat", server.url, "--api-key", KEY, "--max-tokens", "8"],
        input="Hello\nand on\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "toy" in done.stdout
    assert "no chat template" in done.stdout
    assert done.stderr == ""


def test_chat_without_a_key(server, client):
    done = subprocess.run(
        [sys.executable, "-m", "gva.cli", "chat", server.url, "--api-key", "wrong"],
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "gva chat:" in done.stderr
    assert "--api-key" in done.stderr
