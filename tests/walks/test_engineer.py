"""docs/engineer.md, block by block: what a cache would save, the kernel, a generator. The server is in tests/serve."""

import re

from walk import ROOT, Walk


def test_an_engineers_half_hour(tmp_path, monkeypatch, capfd):
    walk = Walk("engineer.md", tmp_path, monkeypatch, capfd)
    walk.take("mkdir -p llama")
    counted = walk.take("gva cost llama --variants")
    assert counted == walk.next("variant"), "the page shows another table"
    more = walk.take("gva cost llama --variants gqa,gva --set")
    assert re.search(r"^gqa +2 +512 .* 75.0%", more, flags=re.M)
    assert re.search(r"^gva-drope-16 .* 1040 +528 +272 +144", more, flags=re.M)

    step = re.search(r"```python\n(.*?)```", (ROOT / "docs/kernels.md").read_text(), flags=re.S).group(1)
    exec(step, {})
    assert float(capfd.readouterr().out.removeprefix("largest difference ")) < 0.02, "a bfloat16 result of size 1 to 2"
    listed = walk.take("gva bench")
    assert {"decode", "serving"} <= {line.partition(" ")[0] for line in listed.splitlines()}

    assert "toy/model: trained" in walk.take("cat README.md docs/*.md > corpus.txt\ngva train")
    said = walk.take("from transformers").splitlines()
    assert all(eval(line).startswith(prompt) for line, prompt in zip(said, ["A cache", "The", "Two"], strict=True))
    walk.next("gva serve toy/model")
    walk.next("gva chat")
    assert not walk.blocks
