"""What `gva serve` chooses from model and GPU, without vLLM but for the last test: that vLLM takes the words."""

import os

import pytest
import torch

from gva import GvaConfig, cost
from gva.cli import main
from gva.serve import settings, versions
from gva.serve.flags import Flags
from models import tiny_model

H200 = settings.Gpu("NVIDIA H200", 150 * 10**9)


def chosen(preset="paper-350m", variant="gva-drope-16", words=(), gpu=H200, **fields):
    config = GvaConfig.preset(preset, variant=variant, **fields)
    found = settings.settings(config, cost.parameters(config)["total"], Flags.of(list(words)), gpu)
    return {setting.flag: setting.values for setting in found}


def test_a_small_model_gets_what_was_measured_with_one():
    """The flags of docs/serving-tables.md."""
    sizes = [1, 2, 4, *range(8, 249, 8), *range(256, 497, 16), *range(512, 16385, 512)]
    assert chosen() == {
        "--block-size": ["64"],
        "--max-num-batched-tokens": ["16384"],
        "--cudagraph-capture-sizes": [str(size) for size in sizes],
    }


def test_a_step_is_as_long_and_a_graph_as_large_as_the_gpu_is_done_before_python():
    assert chosen("llama-8b") == {"--block-size": ["64"]}, "a step of 512 tokens keeps the GPU busy for as long"
    middle = chosen(hidden_size=2048, intermediate_size=8192)
    assert "--max-num-batched-tokens" not in middle
    assert 1024 <= int(middle["--cudagraph-capture-sizes"][-1]) < 8192
    over_eight = chosen("llama-8b", words=["--tensor-parallel-size", "8"])
    assert int(over_eight["--cudagraph-capture-sizes"][-1]) == 7168, "each GPU has an eighth of the work"
    assert chosen("llama-8b", words=["-tp=8"]) == over_eight


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--block-size", "32"], ["--max-num-batched-tokens", "--cudagraph-capture-sizes"]),
        (["--block_size=32"], ["--max-num-batched-tokens", "--cudagraph-capture-sizes"]),
        (["--max-num-batched-tokens", "8k"], ["--block-size"]),
        (["--enforce-eager"], ["--block-size", "--max-num-batched-tokens"]),
        (["--cudagraph-capture-sizes", "1", "2"], ["--block-size", "--max-num-batched-tokens"]),
        (["--max-cudagraph-capture-size=64"], ["--block-size", "--max-num-batched-tokens"]),
        (["--compilation-config.mode", "3"], ["--block-size", "--max-num-batched-tokens"]),
        (["-cc.cudagraph_mode=NONE"], ["--block-size", "--max-num-batched-tokens"]),
        (["-O0"], ["--block-size", "--max-num-batched-tokens"]),
    ],
    ids=str,
)
def test_a_flag_of_the_user_wins(words, left):
    assert sorted(chosen(words=words)) == sorted(left)


def test_graphs_go_to_the_users_longest_step_and_a_file_is_the_user_too(tmp_path):
    assert chosen(words=["--max-num-batched-tokens", "2048"])["--cudagraph-capture-sizes"][-1] == "2048"
    (tmp_path / "flags.yaml").write_text("max_num_batched_tokens: 4096\nblock-size: 16\n")
    found = chosen(words=["--config", str(tmp_path / "flags.yaml")])
    assert list(found) == ["--cudagraph-capture-sizes"]
    assert found["--cudagraph-capture-sizes"][-1] == "4096"


def test_nothing_is_chosen_where_nothing_of_ours_runs_or_was_measured():
    assert chosen(gpu=None) == {}
    assert chosen(variant="gqa") == {}
    assert chosen(gpu=settings.Gpu("NVIDIA L4", 24 * 2**30)) == {"--block-size": ["64"]}


def test_it_is_printed_and_stands_before_the_users_flags(tmp_path, monkeypatch, capsys):
    tiny_model("gva-drope-16", torch.float32).save_pretrained(tmp_path)
    started = []
    monkeypatch.setattr(os, "execve", lambda program, words, environment: started.append(words))
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")
    monkeypatch.setattr(settings, "found_gpu", lambda: H200)
    main(["serve", str(tmp_path), "--port", "81", "--max-num-batched-tokens", "2048"])
    words = started[0]
    assert words[words.index("--block-size") + 1] == "64"
    sizes = words[words.index("--cudagraph-capture-sizes") + 1 : words.index("--port")]
    assert sizes[-1] == "2048"
    assert words[-4:] == ["--port", "81", "--max-num-batched-tokens", "2048"]
    told = capsys.readouterr().out
    assert "gva serve: --block-size 64: a tile of the kernel lies in one page\n" in told
    assert "gva serve: --cudagraph-capture-sizes 1 2 4 ... 2048: longer steps" in told


def test_vllm_takes_the_words():
    pytest.importorskip("vllm", reason="needs vLLM: make test-serve")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    config = GvaConfig.preset("paper-350m")
    found = settings.settings(config, cost.parameters(config)["total"], Flags([]), H200)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args([word for setting in found for word in (setting.flag, *setting.values)])
    assert parsed.block_size == 64
    assert parsed.max_num_batched_tokens == 16384
    assert parsed.cudagraph_capture_sizes == settings.capture_sizes(16384)
