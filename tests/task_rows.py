"""A few rows of each task, with what makes the real ones awkward: markup, a context that ends in a space once the
markup is gone, three and five choices, a key of digits, a sentence that begins with its blank, text too long for a
small context."""

import json
from pathlib import Path

LONG = "Then he went on about the history of tools, from flint to steel, until nobody listened any more. " * 8

HELLASWAG = [
    {"activity_label": "Roof repair", "ctx_a": "A man sits on a roof.", "ctx_b": "he", "label": "3",
     "endings": ["wraps a pair of skis.", "rips level tiles off.", "holds a cube.", "starts to pull up roofing."]},
    {"activity_label": "Home and Garden", "ctx_a": "[header] How to prune a rose [title] Wait for spring. [step] In",
     "ctx_b": "", "label": "0",
     "endings": ["March, when buds swell. [substeps] Cut above a bud.", "a week.", "the shade.", "no time at all."]},
    {"activity_label": "Cutting wood", "ctx_a": "She picks up an axe. [title]", "ctx_b": "[step]", "label": "1",
     "endings": ["It flies.", "She splits a log.", "The log sings.", "It rains logs on everyone."]},
    {"activity_label": "Lecture", "ctx_a": LONG, "ctx_b": "the audience", "label": "2",
     "endings": ["claps.", "leaves the hall in a long line.", "sleeps.", "asks for the axe, the roses and the skis."]},
]  # fmt: skip
WINOGRANDE = [
    {"sentence": "Sarah was a better surgeon than Maria so _ got the easier cases.", "option1": "Sarah",
     "option2": "Maria", "answer": "2"},
    {"sentence": "_ was late because Ann had hidden the keys of Joan .", "option1": "Joan", "option2": "Ann",
     "answer": "1"},
    {"sentence": "The trophy did not fit in the case as the _  was too small.", "option1": "case", "option2": "trophy",
     "answer": "1"},
]  # fmt: skip
OPENBOOKQA = [
    {"id": "1", "question_stem": "There is most likely going to be fog around: ", "answerKey": "A",
     "choices": {"text": ["a marsh", "a tundra", "the plains", "a desert"], "label": ["A", "B", "C", "D"]}},
    {"id": "2", "question_stem": "Plants grow towards", "answerKey": " C",
     "choices": {"text": ["noise", "wind", "light", "the moon"], "label": ["A", "B", "C", "D"]}},
]  # fmt: skip
ARC = [
    {"id": "1", "question": "Which is the \"hottest\"?\n(Pick one.)", "answerKey": "3",
     "choices": {"text": ["ice", "water", "steam"], "label": ["1", "2", "3"]}},
    {"id": "2", "question": "What keeps mold spores out?", "answerKey": "B",
     "choices": {"text": ["goggles", "a mask's filter", "gloves", "an apron", "5"], "label": list("ABCDE")}},
    {"id": "3", "question": LONG + "What did he talk about?", "answerKey": "A",
     "choices": {"text": ["tools", "roses", "skis", "fog"], "label": list("ABCD")}},
]  # fmt: skip
SHORT = [
    {"id": "4", "question": "Which of these falls?", "choices": ["rain", "smoke", "steam"], "label": 0},
    {"id": "5", "question": "What is heavier?", "choices": ["a feather", "an anvil"], "label": 1},
]

FILES = {
    "hellaswag": HELLASWAG,
    "winogrande": WINOGRANDE,
    "openbookqa": [*OPENBOOKQA, *SHORT],
    "arc_easy": [*ARC, *SHORT],
    "arc_challenge": [*SHORT, *ARC],
}


def write_files(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
