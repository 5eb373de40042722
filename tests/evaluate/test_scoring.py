"""Packs and loglikelihoods: what is shared changes no number, for any attention, batch or rank."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gva import VARIANTS
from gva.cli.evaluate import _told
from gva.data.batches import IGNORED
from gva.data.documents import DataError
from gva.evaluate.encoding import Pack, collate, encode_items, pack_items
from gva.evaluate.results import Scored, average, differences, summarise, table
from gva.evaluate.scoring import evaluate, loglikelihoods, make_batches, model_losses
from gva.evaluate.tasks import TASKS, Item, chosen_tasks, items_of, load_rows
from models import tiny_model


class Words:
    """A tokenizer whose tokens are the words of a text, each with the space before it."""

    bos_token_id, eos_token_id = None, 0

    def __init__(self):
        self.known = ["<end>"]

    def encode(self, text, add_special_tokens=True):
        words = [" " + word if n else word for n, word in enumerate(text.split(" ")) if word or n]
        self.known += [word for word in dict.fromkeys(words) if word not in self.known]
        return [self.known.index(word) for word in words]

    def __call__(self, texts, **options):
        return {"input_ids": [self.encode(text) for text in texts]}

    def decode(self, token):
        return self.known[token]

    def text(self, ids):
        return "".join("-" if i == IGNORED else self.known[i] for i in ids)


def pack(words, *pairs, context=64, share=True):
    items = [Item(list(pairs), [1] * len(pairs), 0)]
    return pack_items(TASKS["arc_easy"], items, words, context, share)


def test_a_pack_is_the_shared_context_and_a_branch_for_each_choice():
    words = Words()
    (found,) = pack(words, ("a b c d", " e f"), ("a b c d", " g"))
    assert words.text(found.tokens) == "a b c d e d"
    assert words.text(found.targets) == "--- e f g"
    assert found.positions == [0, 1, 2, 3, 4, 3]
    assert found.branch == [0, 0, 0, 1, 1, 2]
    sees = collate([found])["attention_mask"][0, 0]
    assert sees[5].tolist() == [True, True, True, False, False, True]
    assert sees[4].tolist() == [True, True, True, True, True, False]


def test_contexts_that_differ_share_what_they_begin_with():
    words = Words()
    (found,) = pack(words, ("so then Ann", " was late ."), ("so then Joan Smith", " was late ."))
    assert words.text(found.tokens) == "so then Ann was late Joan Smith was late"
    assert words.text(found.targets) == "-- was late .- was late ."
    assert found.positions == [0, 1, 2, 3, 4, 2, 3, 4, 5]


def test_what_exceeds_the_context_is_cut_on_the_left_of_each_choice():
    words = Words()
    (found,) = pack(words, ("a b c d", " e f"), ("a b c d", " g"), context=4)
    assert words.text(found.tokens) == " b c d ea b c d"
    assert found.positions == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(DataError, match="item 1 has a continuation of 2 tokens, the model can score 1 to 1"):
        pack(words, ("a b c d", " e f"), context=1)


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation():
    words = Words()
    ((context, continuation),) = encode_items([Item([("a b ", " c")], [1], 0)], words)[0]
    assert words.text(context) == "a b"
    assert words.text(continuation) == "  c"
    ((context, continuation),) = encode_items([Item([("", "c d")], [1], 0)], words)[0]
    assert (words.text(context), words.text(continuation)) == ("<end>", "c d")


def random_packs(share, count=9):
    torch.manual_seed(1)
    words, items = Words(), []
    words.known += [f" {i}" for i in range(90)]
    for n in range(count):
        draw = lambda length: "".join(f" {int(i)}" for i in torch.randint(90, (length,)))  # noqa: E731
        context = "0" + draw(3 + 5 * n % 13)
        items.append(Item([(context, draw(1 + (n + i) % 4)) for i in range(2 + n % 3)], [1] * (2 + n % 3), 0))
    return pack_items(TASKS["arc_easy"], items, words, 64, share)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loglikelihoods_are_those_of_each_choice_alone(variant):
    model = tiny_model(variant)
    alone = []
    for choice in random_packs(share=False):
        tokens, targets = torch.tensor([choice.tokens]), torch.tensor(choice.targets)
        with torch.no_grad():
            logs = model(tokens, use_cache=False).logits[0].log_softmax(-1)
        scored = targets != IGNORED
        alone.append(logs[scored].gather(1, targets[scored][:, None]).sum().item())
    packs = random_packs(share=True)
    for budget in (1, 60, 10_000):
        found = loglikelihoods(packs, model_losses(model), torch.device("cpu"), budget)
        assert found.tolist() == pytest.approx(alone, abs=2e-5)  # logits are scored in float32
    assert sum(map(len, packs)) < 0.7 * sum(map(len, random_packs(share=False)))


def test_ranks_together_score_what_one_does_in_as_many_passes_each():
    model, packs, calls = tiny_model("gva-drope-16"), random_packs(share=True), []
    inner = model_losses(model)

    def counted(**inputs):
        calls.append(inputs["input_ids"].shape)
        return inner(**inputs)

    whole = loglikelihoods(packs, counted, torch.device("cpu"), 40)
    assert len(calls) % 4, "or no rank would be without a batch at the end"
    once, parts = len(calls), []
    for rank in range(4):
        calls.clear()
        parts.append(loglikelihoods(packs, counted, torch.device("cpu"), 40, rank, 4))
        assert len(calls) == -(-once // 4)
    assert torch.equal(sum(parts), whole)


def test_batches_keep_to_their_budget_and_take_each_pack_once():
    lengths = [7, 3, 30, 3, 9, 1]
    packs = [Pack([0] * n, [0] * n, [1] * n, [0] * n, 1) for n in lengths]
    batches = make_batches(packs, 20)
    assert batches == [[2], [4, 0], [1, 3, 5]]
    with pytest.raises(ValueError, match="batch_tokens=0: must be positive"):
        make_batches(packs, 0)


def test_half_precision_scores_close_to_full(files, tokenizer):
    model = tiny_model("gva-drope-16", torch.float32, vocab_size=2048, std=0.02)
    tasks = chosen_tasks("arc_easy,winogrande")
    full = evaluate(model, tokenizer, tasks, files, progress=False)
    half = evaluate(model.bfloat16(), tokenizer, tasks, files, progress=False)
    for found in differences(full, half).values():
        assert 0 < found["largest_difference"] < 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gpu_scores_what_the_cpu_does(variant, files, tokenizer):
    model, tasks = tiny_model(variant, torch.float32, vocab_size=2048, std=0.02), chosen_tasks("paper")
    here = evaluate(model, tokenizer, tasks, files, progress=False)
    there = evaluate(model.cuda(), tokenizer, tasks, files, progress=False)
    half = evaluate(model.bfloat16(), tokenizer, tasks, files, progress=False)
    assert all(found["largest_difference"] < 1e-4 for found in differences(here, there).values())
    assert all(0 < found["largest_difference"] < 0.5 for found in differences(here, half).values())


def test_a_llama_is_scored_too(files, tokenizer):
    config = LlamaConfig(vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)  # fmt: skip
    model, tasks = LlamaForCausalLM(config).eval(), chosen_tasks("paper")
    packed, single = (evaluate(model, tokenizer, tasks, files, share=share, progress=False) for share in (True, False))
    assert all(found["largest_difference"] < 1e-4 for found in differences(packed, single).values())


def test_accuracies_their_errors_and_chance():
    items = [Item([("", "")] * 4, [1, 4, 4, 1], 1), Item([("", "")] * 2, [3, 1], 0), Item([("", "")] * 4, [1] * 4, 0)]
    found = summarise(TASKS["arc_easy"], items, [[-1.0, -2.0, -5.0, -9.0], [-2.0, -3.0], [-3.0, -1.0, -1.0, -2.0]])
    assert found["acc"] == pytest.approx(1 / 3)
    assert found["acc_norm"] == pytest.approx(2 / 3), "of the first, the right choice is the likeliest per character"
    assert found["acc_stderr"] == pytest.approx((1 / 3 * 2 / 3 / 2) ** 0.5)
    assert found["chance"] == pytest.approx((1 / 4 + 1 / 2 + 1 / 4) / 3)
    assert found["items"] == 3
    assert summarise(TASKS["arc_easy"], items[:1], [[0.0, 1.0, 2.0, 3.0]])["acc_stderr"] is None
    pair = [Item([("a", ""), ("b", "")], [1, 1], 0)] * 2
    none = summarise(TASKS["winogrande"], pair, [[-1.0, -2.0], [-2.0, -1.0]])
    assert (none["acc"], none["acc_norm"], none["acc_norm_stderr"]) == (0.5, None, None)
    results = {"arc_easy": {**found, "acc": 0.25, "acc_norm": 0.5}, "winogrande": none}
    assert average(results) == {"acc": 0.375, "acc_norm": 0.5, "chance": pytest.approx((1 / 3 + 1 / 2) / 2)}
    lines = table(results).splitlines()
    assert lines[2].split() == ["winogrande", "50.00", "50.00", "-", "-", "50.00", "2"]
    assert lines[3].split() == ["average", "37.50", "50.00", "41.67"]


def test_differences_see_another_number_and_another_text():
    one = {"arc_easy": Scored({"acc": 0.5, "acc_norm": None}, [[-1.0, -2.0]], [[("a", "b"), ("a", "c")]])}
    two = {"arc_easy": Scored({"acc": 0.0, "acc_norm": None}, [[-1.0, -2.5]], [[("a", "b"), ("a", "d")]])}
    found = differences(one, two)["arc_easy"]
    assert found == {
        "largest_difference": 0.5, "loglikelihoods": 2, "same_text": False, "same_acc": False, "same_acc_norm": True,
    }  # fmt: skip
    assert _told(differences(one, two)).endswith("acc NOT the same, acc_norm the same, the text NOT the same")
    assert "NOT" not in _told(differences(one, one))


def test_a_real_item_is_shorter_when_shared(bench, tokenizer):
    saved = {}
    for task in TASKS.values():
        items = items_of(task, load_rows(task, bench, 50))
        sizes = [sum(map(len, pack_items(task, items, tokenizer, 1024, share))) for share in (True, False)]
        saved[task.name] = sizes[0] / sizes[1]
    assert all(ratio < 0.75 for ratio in saved.values()), saved
